"""Which credit predicts what retraining on half of the data does?

    python -m benchmarks.lds [PROBLEM ...] [--device cuda] [--data DIR] [--out FILE.json]

LDS of a credit: mean over queries of Spearman's correlation between the sum of the credits of a
random half of the training data and the query's real loss (with the sign turned) after retraining
on that half from fresh weights in a fresh order, mean over several seeds. Every credit is computed
for two runs: LDS is their mean, and their agreement is reported beside it. Outcomes of retrainings
are kept in --cache, so that methods can be scored again without training again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.lds import clock, gradients, inside, measures, ours, rivals
from benchmarks.lds.credit import Credit, Method
from benchmarks.lds.problems import NAMES, Problem, problem
from benchmarks.lds.retrain import halves, outcomes
from inrun.bench.machine import commit, hardware, versions

INSIDE: tuple[Method, ...] = (
    inside.secant, inside.carry, inside.influence, inside.ask,
)  # fmt: skip
# where a run takes long: what the comparison is about first, what nothing else needs last
ON_GPU: tuple[Method, ...] = (
    inside.beside, ours.ekfac_at_end, inside.ask, ours.trak, ours.tracin, ours.graddot, inside.carry
)  # fmt: skip
OURS: tuple[Method, ...] = (ours.ekfac_at_end, ours.trak, ours.graddot, ours.tracin)
ADDED = ("methods", "failed")  # what single methods add to


def chosen(given: Problem, args: argparse.Namespace) -> list[Method]:
    """All methods for the problem, or those that are named."""
    methods = [*ON_GPU] if given.device.type == "cuda" else [*INSIDE, *OURS]
    if not args.no_rivals:
        methods += rivals.of(given)
    if args.methods:
        methods = [m for m in methods if m.__name__ in args.methods.split(",")]
    return methods


def credits_of(
    given: Problem, seed: int, training: gradients.Training, methods: list[Method],
    until: float | None,
) -> Iterator[tuple[dict[str, Credit], dict[str, str]]]:  # fmt: skip
    """Credits of one run by the name of the method, or why a method has none: one by one."""
    for method in methods:
        if until is not None and time.monotonic() > until:
            yield {}, {method.__name__: "no time left"}
            continue
        try:
            new = method(given, seed, training)
        except Exception as error:  # another library, or one that is not installed
            text = str(error).splitlines()
            why = f"{type(error).__name__}: {text[0] if text else ''}"
            print(f"  run {seed}: {method.__name__} failed: {why}", flush=True)
            yield {}, {method.__name__: why}
            continue
        for name, credit in new.items():
            print(f"  run {seed}: {name}, {credit.seconds:.1f} s", flush=True)
        yield new, {}


def measured(
    given: Problem, args: argparse.Namespace, seconds: float | None = None
) -> Iterator[dict[str, Any]]:
    """Everything about one problem; again after each method, so that little is lost. After
    ``seconds`` nothing new is begun, after two fifths of them no more retrainings."""
    begun = time.monotonic()
    until = None if seconds is None else begun + seconds
    result, losses, masks = retrained(
        given, args, None if seconds is None else begun + 0.4 * seconds
    )
    truth, plain = losses.mean(0), result["plain_seconds"]
    every: dict[str, list[Credit]] = {}
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    yield result | {"methods": rows, "failed": failed}
    for seed in range(args.runs):
        if seed and until is not None and time.monotonic() > until:
            break
        training = gradients.train(given, seed, ours.CHECKPOINTS)
        for found, missing in credits_of(given, seed, training, chosen(given, args), until):
            for name, credit in found.items():
                every.setdefault(name, []).append(credit)
                rows[name] = row(given, every[name], masks, truth, plain, args.draws)
            if seed == 0:  # later runs repeat what one has
                failed |= missing
            yield result | {"methods": rows, "failed": failed}


def retrained(
    given: Problem, args: argparse.Namespace, until: float | None
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What is known of the problem before any credit, the outcomes [repeats, M, Q] and halves."""
    masks = halves(given.examples, args.subsets)
    losses, seconds = outcomes(given, masks, args.repeats, args.cache, args.together, until=until)
    gradients.plain_seconds(given, 0)  # what is slow only once
    result = {
        "examples": given.examples, "queries": losses.shape[2], "subsets": len(masks),
        "repeats": len(losses), "steps": len(given.order(torch.arange(given.examples), 0)),
        "plain_seconds": gradients.plain_seconds(given, 0), "retraining_seconds": seconds,
        "ceiling": measures.ceiling(losses),
        "parameters": sum(w.numel() for w in given.make(0).parameters()),
    }  # fmt: skip
    print(
        f"{given.name}: {len(losses)} × {len(masks)} retrainings of {seconds:.2g} s, "
        f"{result['ceiling']}", flush=True,
    )  # fmt: skip
    return result, losses, masks


def row(
    given: Problem, credits: list[Credit], masks: Tensor, truth: Tensor, plain: float, draws: int
) -> dict[str, Any]:
    values = [c.values for c in credits]
    return {
        "lds": measures.lds(values, masks, truth, draws),
        "agreement": measures.agreement(values),
        "auroc": measures.auroc(values[0], given.spoilt),
        "trainings": min(c.trainings(plain) for c in credits),
        "runs": len(credits),
        "commit": commit(),  # methods may be added to a result later
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", default=list(NAMES), metavar="PROBLEM[:DRAW]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="folder with wikitext-2, sst2 and weights")
    parser.add_argument("--cache", type=Path, help="folder for the outcomes of retrainings")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--subsets", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=6, help="seeds of each retraining")
    parser.add_argument("--together", type=int, default=100, help="retrainings side by side")
    parser.add_argument("--runs", type=int, default=2, help="trainings that credits come from")
    parser.add_argument("--draws", type=int, default=200, help="of the bootstrap")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: a try at small size")
    parser.add_argument("--methods", help="only these functions, comma-separated; added to --out")
    parser.add_argument("--cpu-seconds", action="store_true", help="costs in seconds of CPU time")
    parser.add_argument("--no-rivals", action="store_true", help="leave other libraries out")
    parser.add_argument("--seconds", type=float, help="of all problems, then begin nothing new")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.cpu_seconds:
        clock.now = time.process_time
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    place = "h200" if device.type == "cuda" else "cpu"
    out = args.out or ROOT / "benchmarks/results" / f"lds-{place}.json"
    begun = time.monotonic()
    for number, name in enumerate(args.problems):
        given = problem(name, device, args.data, args.scale)
        left = None
        if args.seconds is not None:  # an equal share of the time that is left
            spent = time.monotonic() - begun
            left = (args.seconds - spent) / (len(args.problems) - number)
        for result in measured(given, args, left):
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            result |= {"date": now, "commit": commit(), "hardware": hardware(device),
                       "versions": versions() | rivals.versions(),
                       "cpu_seconds": args.cpu_seconds}  # fmt: skip
            save(out, name, result, bool(args.methods))
        for method, found in result["methods"].items():
            print(f"{name}: {method}: {found['lds']['mean']:.3f}", flush=True)


def save(out: Path, name: str, result: dict[str, Any], added: bool) -> None:
    """``added``: single methods beside those that are there already."""
    whole = json.loads(out.read_text()) if out.exists() else {"problems": {}}
    known = whole["problems"].get(name)
    if added and known:
        same = all(known[k] == result[k] for k in ("examples", "subsets", "repeats", "queries"))
        if not same:
            raise ValueError(f"{out} holds {name} in another size: choose another --out")
        result = known | {k: known.get(k, {}) | result.get(k, {}) for k in ADDED}
    whole["problems"][name] = result
    out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()

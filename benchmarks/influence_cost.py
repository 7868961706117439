"""What ``estimator="influence"`` costs beside the secant: GPT-2 small on a GPU, compiled and eager.

    python benchmarks/influence_cost.py [--seconds 200] [--model gpt-6x256] [--out FILE.json]

Three trainings of the same model and batch, one after the other: plain, with the secant, with both.
Steps that the curvature observes and the others are timed apart, without renewals of eigenbases,
and put together for a run of ``--run`` steps by its schedule of observations and renewals. Every
part has a limit of time, and the file is written after each, so that a slow machine still gives a
part of the result.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from costs import GPT2, short_name

from inrun.bench import Options, machine
from inrun.bench.models import Problem, make_problem
from inrun.bench.trainers import Trainer, Watched, make_optimizer
from inrun.curvature.curvature import Curvature, Sampling
from inrun.curvature.layer import FIRST, GROWTH, Layer

BOTH = ["secant", "influence"]
TINY = {"model": "gpt-2x64", "batch": 4, "length": 32}


class Renewals:
    """Counts and times the renewals of eigenbases, waiting for the GPU before and after each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.count = device, 0.0, 0
        self._own = Layer.renew

    @contextmanager
    def counted(self) -> Iterator[Renewals]:
        own = self._own

        def renew(layer: Layer) -> None:
            wait(self.device)
            begun = time.perf_counter()
            own(layer)
            wait(self.device)
            self.seconds += time.perf_counter() - begun
            self.count += 1

        Layer.renew = renew  # type: ignore[method-assign]
        try:
            yield self
        finally:
            Layer.renew = own  # type: ignore[method-assign]


class OutOfTimeError(Exception):
    """A part has used up its time."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def trainer(problem: Problem, kind: str, mode: str) -> Trainer:
    model = copy.deepcopy(problem.model).to(problem.device)
    optimizer = make_optimizer("adamw", list(model.parameters()))
    compiled = mode == "compile"
    if kind == "plain":
        return Trainer(problem, model, optimizer, compiled)
    estimator: Any = "secant" if kind == "secant" else BOTH
    return Watched(problem, model, optimizer, compiled, estimator=estimator, training="fast")


def timed(own: Trainer, n: int, renewals: Renewals) -> dict[str, list[float]]:
    """Milliseconds of n steps, each waited for, less the renewals in them: those that the curvature
    observed, and the others."""
    device = own.problem.device
    found: dict[str, list[float]] = {"observed": [], "others": []}
    for _ in range(n):
        seen, spent = observations(own), renewals.seconds
        wait(device)
        begun = time.perf_counter()
        own.step()
        wait(device)
        ms = 1e3 * (time.perf_counter() - begun - (renewals.seconds - spent))
        found["others" if observations(own) == seen else "observed"].append(ms)
    return found


def observations(own: Trainer) -> int:
    curvature = own.run.curvature if isinstance(own, Watched) else None
    return 0 if curvature is None else curvature.seen


def measured(problem: Problem, kind: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """One training: the first steps, then the timed ones."""
    device, begun = problem.device, time.perf_counter()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, Any] = {"first_steps": args.warmup, "done": False}
    own = trainer(problem, kind, mode)
    try:
        with Renewals(device).counted() as renewals:
            for _ in range(args.warmup):
                own.step()
            wait(device)
            result["first_seconds"] = time.perf_counter() - begun
            result["renewals_seconds"] = renewals.seconds
            result["renewed_sides"] = renewals.count
            found = timed(own, args.steps, renewals)
        each = found["others"] or found["observed"]
        result |= {"ms": statistics.median(each), "least_ms": min(each), "most_ms": max(each),
                   "timed": len(each), "timed_observed": len(found["observed"])}  # fmt: skip
        if found["observed"]:
            result["observed_ms"] = statistics.median(found["observed"])
        if device.type == "cuda":
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
        if isinstance(own, Watched):
            result["remark"] = own.remark()
        if kind == "both" and isinstance(own, Watched):
            result |= curvature_of(own, args.run)
            result["run_ms"] = run_ms(result)
        result["done"] = True
    finally:
        own.close()
    return result


def curvature_of(own: Watched, steps: int) -> dict[str, Any]:
    """Bytes of the curvature, the time of one renewal of all layers, and how many a run has."""
    curvature: Curvature = own.run.curvature
    layers = list(curvature.layers.values())
    tensors = [x for layer in layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    device = tensors[0].device
    wait(device)
    begun = time.perf_counter()
    for layer in layers:
        if layer.matrix is not None:
            layer.renew()
    wait(device)
    one = time.perf_counter() - begun
    seen = observed_in(steps, sum(p.numel() for p in own.run.params.values()), device.type)
    return {
        "curvature_bytes": sum(x.nbytes for x in tensors), "renewal_seconds": one,
        "run_steps": steps, "observed_in_run": seen, "renewals_in_run": renewals_in(seen),
    }  # fmt: skip


def observed_in(steps: int, numbers: int, kind: str) -> int:
    how = Sampling.of(numbers, kind)
    return steps if steps < how.first else how.first + (steps - how.first) // how.every


def renewals_in(seen: int) -> int:
    """How often the bases of a large layer are renewed in so many observations."""
    count, at = 0, FIRST
    while at <= seen:
        count, at = count + 1, max(at + 1, int(at * GROWTH[True]))
    return count


def run_ms(both: dict[str, Any]) -> float:
    """Milliseconds of a step of the whole run, on average."""
    steps, seen = both["run_steps"], both["observed_in_run"]
    plain, observed = both["ms"], both.get("observed_ms", both["ms"])
    renewals = 1e3 * both["renewal_seconds"] * both["renewals_in_run"]
    return (plain * (steps - seen) + observed * seen + renewals) / steps


def summary(parts: dict[str, Any]) -> dict[str, float]:
    """Shares of plain training's speed, over the whole run."""
    plain, found = parts.get("plain", {}).get("ms"), {}
    for kind in ("secant", "both"):
        own = parts.get(kind, {})
        if plain and own.get("ms"):
            found[f"{kind}_of_plain"] = plain / own.get("run_ms", own["ms"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="of all parts together")
    parser.add_argument("--modes", default="compile,eager")
    parser.add_argument("--warmup", type=int, default=40, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=24, help="timed steps")
    parser.add_argument("--run", type=int, default=10_000, help="steps that renewals are spread on")
    parser.add_argument("--tiny", action="store_true", help="a try on a CPU")
    parser.add_argument("--model", help="another size, as inrun bench names it: gpt-6x256")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = f"influence-cost-{short_name(device)}.json"
    out = args.out or ROOT / "benchmarks" / "results" / name
    size: dict[str, Any] = TINY if args.tiny else GPT2
    if args.model:
        size = {"model": args.model, "batch": args.batch, "length": args.length}
    problem = make_problem(Options.of(device=device, **size))
    data: dict[str, Any] = {
        "hardware": machine.hardware(torch.device(device)), "versions": machine.versions(),
        "commit": machine.commit(), "size": size,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "modes": {},
    }  # fmt: skip
    end = time.monotonic() + args.seconds
    kinds = [(m, k) for m in args.modes.split(",") for k in ("plain", "secant", "both")]
    for i, (mode, kind) in enumerate(kinds):
        parts = data["modes"].setdefault(mode, {})
        weights = [3.0 if k == "both" else 1.0 for _, k in kinds[i:]]
        allowed = (end - time.monotonic()) * weights[0] / sum(weights) + 10.0
        begun = time.perf_counter()
        print(f"{mode} {kind}: at most {allowed:.0f} s", flush=True)
        try:
            with limit(min(allowed, end - time.monotonic())):
                parts[kind] = measured(problem, kind, mode, args)
        except OutOfTimeError:
            parts[kind] = {"done": False, "message": "its time was used up"}
        except Exception as error:
            parts[kind] = {"done": False, "message": f"{type(error).__name__}: {error}"[:300]}
        parts["summary"] = summary(parts)
        print(f"  {time.perf_counter() - begun:.0f} s: {json.dumps(parts[kind])}", flush=True)
        out.write_text(json.dumps(data, indent=1) + "\n")
    for mode, parts in data["modes"].items():
        print(mode, {k: round(x, 3) for k, x in parts["summary"].items()}, flush=True)


if __name__ == "__main__":
    main()

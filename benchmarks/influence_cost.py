"""What does ``estimator="influence"`` cost, alone and beside the secant?

    python benchmarks/influence_cost.py [SHAPE ...] [--validation 4] [--out FILE.json]

A shape is MODEL:BATCHxLENGTH, the model as ``inrun bench`` names it. The same training plain, with
the secant, with influence, with both, in one process and in turns: seconds of CPU time, on a GPU
on the clock. Steps that the curvature observes, the others and the renewals of
eigenbases are timed apart, and put together for runs of some lengths by the schedule of
observations and renewals.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from costs import GPT2, short_name

from inrun.bench import Options, machine
from inrun.bench.models import Problem, make_problem
from inrun.bench.trainers import Trainer, Watched, make_optimizer
from inrun.curvature.curvature import Curvature, Sampling
from inrun.curvature.layer import FIRST, GROWTH, Layer

KINDS: dict[str, Any] = {
    "plain": None, "secant": "secant", "influence": "influence", "both": ["secant", "influence"]
}  # fmt: skip
SHAPES = {"cpu": ["gpt-6x256:16x128", "gpt-6x384:32x64"], "cuda": ["gpt2:16x1024"]}
RUNS = (300, 1000, 10_000)  # steps
NEVER = 10**9


class Timer:
    """Seconds of CPU time, on a GPU on the clock; those of renewals apart."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.renewals = 0.0

    def now(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def seconds(self, work: Callable[[], None]) -> float:
        """Of the work without the renewals in it."""
        begun, before = self.now(), self.renewals
        work()
        return self.now() - begun - (self.renewals - before)

    @contextmanager
    def apart(self) -> Iterator[None]:
        own = Layer.renew

        def renew(layer: Layer) -> None:
            begun = self.now()
            own(layer)
            self.renewals += self.now() - begun

        with mock.patch.object(Layer, "renew", renew):
            yield


def trainer(problem: Problem, kind: str, compiled: bool) -> Trainer:
    model = copy.deepcopy(problem.model).to(problem.device)
    optimizer = make_optimizer("adamw", list(model.parameters()))
    if kind == "plain":
        return Trainer(problem, model, optimizer, compiled)
    return Watched(problem, model, optimizer, compiled, estimator=KINDS[kind], training="fast")


def seen(own: Trainer) -> int:
    """Observations of the curvature."""
    curvature = own.run.curvature if isinstance(own, Watched) else None
    return 0 if curvature is None else curvature.seen


def measured(problem: Problem, compiled: bool, warmup: int, steps: int) -> dict[str, Any]:
    """Median seconds of a step of each kind of training: "observed" and "others"; and of the first
    and a later renewal of all eigenbases, of large layers apart."""
    timer = Timer(problem.device)
    usual = Sampling.of(sum(p.numel() for p in problem.model.parameters()), problem.device.type)
    every = 3  # for the timed steps: what a step costs does not depend on it
    own = {kind: trainer(problem, kind, compiled) for kind in KINDS}
    found: dict[str, dict[str, list[float]]] = {k: {"observed": [], "others": []} for k in KINDS}

    def sampled(first: int) -> Any:
        how = replace(usual, first=first, every=every)
        return mock.patch.object(Sampling, "of", staticmethod(lambda *_: how))

    with timer.apart():
        with sampled(NEVER):  # every step is observed, until all layers have eigenbases
            for _ in range(warmup):
                for x in own.values():
                    x.step()
        curvatures = [x.run.curvature for k, x in own.items() if k in ("influence", "both")]  # type: ignore[attr-defined]
        first = [sum(renewed(c, large, timer) for large in GROWTH) for c in curvatures]
        with sampled(1):
            for _ in range(steps):
                for kind, x in own.items():
                    before = seen(x)
                    spent = timer.seconds(x.step)
                    found[kind]["others" if seen(x) == before else "observed"].append(spent)
        later = {large: renewed(curvatures[0], large, timer) for large in GROWTH}
    remarks = {k: x.remark() for k, x in own.items() if isinstance(x, Watched)}
    for x in own.values():
        x.close()
    return {
        "seconds": {k: {h: statistics.median(x) for h, x in f.items() if x}
                    for k, f in found.items()},
        "first_renewal": first[0], "renewal": later[False], "renewal_of_large": later[True],
        "timed": steps, "sampling": vars(usual),
        "curvature_numbers": sum(x.numbers for x in curvatures[0].layers.values()),
        "remarks": {k: x for k, x in remarks.items() if x},
    }  # fmt: skip


def renewed(curvature: Curvature, large: bool, timer: Timer) -> float:
    """Seconds of a renewal of all these layers."""
    before = timer.renewals
    for layer in curvature.layers.values():
        if layer.matrix is not None and layer.large == large:
            layer.renew()
    return timer.renewals - before


def of_run(result: dict[str, Any], kind: str, steps: int) -> float:
    """A run of so many steps, in plain trainings."""
    each, plain = result["seconds"][kind], result["seconds"]["plain"]["others"]
    if kind in ("plain", "secant"):
        return each["others"] / plain
    observed = observations(Sampling(**result["sampling"]), steps)
    spent = observed * each["observed"] + (steps - observed) * each["others"]
    if observed >= FIRST:
        spent += result["first_renewal"]
        for key, large in (("renewal", False), ("renewal_of_large", True)):
            spent += result[key] * (renewals(observed, large) - 1)
    return spent / (steps * plain)


def observations(how: Sampling, steps: int) -> int:
    """In a run of so many steps (``Curvature.due``)."""
    last, count = -1, 0
    for step in range(steps):
        if step - last >= how.gap(last):
            last, count = step, count + 1
    return count


def renewals(observed: int, large: bool) -> int:
    """How often the bases of a layer are renewed in so many observations."""
    count, at = 0, FIRST
    while at <= observed:
        count, at = count + 1, max(at + 1, int(at * GROWTH[large]))
    return count


def problem_of(shape: str, validation: int, device: str) -> Problem:
    model, _, size = shape.rpartition(":")
    batch, length = map(int, size.split("x"))
    given = {"model": model, "batch": batch, "length": length, "validation": validation}
    return make_problem(Options.of(device=device, **(GPT2 if device == "cuda" else {}) | given))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE")
    parser.add_argument("--validation", type=int, default=4, help="rows of the only target")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the eigenbases")
    parser.add_argument("--steps", type=int, default=16, help="timed steps of each kind")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = f"influence-cost-{short_name(device)}.json"
    out = args.out or ROOT / "benchmarks" / "results" / name
    for shape in args.shapes or SHAPES[device]:
        problem = problem_of(shape, args.validation, device)
        result = measured(problem, args.compile, args.warmup, args.steps)
        result |= {
            "parameters": sum(p.numel() for p in problem.model.parameters()),
            "validation": args.validation, "compiled": args.compile,
            "trainings": {k: {str(n): of_run(result, k, n) for n in RUNS} for k in KINDS},
            "hardware": machine.hardware(torch.device(device)), "versions": machine.versions(),
            "commit": machine.commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }  # fmt: skip
        whole = json.loads(out.read_text()) if out.exists() else {"shapes": {}}
        whole["shapes"][shape] = result
        out.write_text(json.dumps(whole, indent=1) + "\n")
        print(shape, json.dumps(result["seconds"]), json.dumps(result["trainings"]), flush=True)


if __name__ == "__main__":
    main()

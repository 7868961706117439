"""What ``estimator="influence"`` costs beside the secant: GPT-2 small on a GPU, compiled and eager.

    python benchmarks/influence_cost.py [--seconds 200] [--out FILE.json]

Three trainings of the same model and batch take turns: plain, with the secant, with both. Steps in
which eigenbases are renewed are timed apart, and their cost is spread over a run of ``--run`` steps
by counting the renewals that the schedule has in so many. Every part has a limit of time, and the
file is written after each, so that a slow machine still gives a part of the result.
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
from inrun.curvature.curvature import EVERY, FIRST, Curvature
from inrun.curvature.layer import FIRST as BEFORE
from inrun.curvature.layer import GROWTH, Layer

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


def timed(step: Any, n: int, device: torch.device, renewals: Renewals) -> dict[str, list[float]]:
    """Milliseconds of n steps, each waited for: those without a renewal, and those with one less
    the renewal."""
    found: dict[str, list[float]] = {"steps": [], "with_renewal": []}
    for _ in range(n):
        count, spent = renewals.count, renewals.seconds
        wait(device)
        begun = time.perf_counter()
        step()
        wait(device)
        ms = 1e3 * (time.perf_counter() - begun - (renewals.seconds - spent))
        found["steps" if renewals.count == count else "with_renewal"].append(ms)
    return found


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
            found = timed(own.step, args.steps, device, renewals)
        each = [*found["steps"], *found["with_renewal"]]
        result |= {"ms": statistics.mean(each), "median_ms": statistics.median(each),
                   "least_ms": min(each), "most_ms": max(each), "timed": len(each)}  # fmt: skip
        if device.type == "cuda":
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
        if isinstance(own, Watched):
            result["remark"] = own.remark()
        if kind == "both" and isinstance(own, Watched):
            result |= curvature_of(own, args.run)
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
    times = renewals_in(steps, device.type)
    return {
        "curvature_bytes": sum(x.nbytes for x in tensors), "renewal_seconds": one,
        "run_steps": steps, "renewals_in_run": times,
        "renewal_ms_per_step": 1e3 * one * times / steps,
    }  # fmt: skip


def renewals_in(steps: int, kind: str) -> int:
    """How often the bases of a large layer are renewed in so many steps."""
    seen = steps if steps < FIRST else FIRST + (steps - FIRST) // EVERY[kind]
    count, at = 0, BEFORE
    while at <= seen:
        count, at = count + 1, max(at + 1, int(at * GROWTH[True]))
    return count


def summary(parts: dict[str, Any]) -> dict[str, float]:
    """Shares of plain training's speed; renewals spread over the run."""
    plain, found = parts.get("plain", {}).get("ms"), {}
    for kind in ("secant", "both"):
        own = parts.get(kind, {})
        if plain and own.get("ms"):
            whole = own["ms"] + own.get("renewal_ms_per_step", 0.0)
            found[f"{kind}_of_plain"] = plain / whole
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="of all parts together")
    parser.add_argument("--modes", default="compile,eager")
    parser.add_argument("--warmup", type=int, default=40, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=24, help="timed steps")
    parser.add_argument("--run", type=int, default=10_000, help="steps that renewals are spread on")
    parser.add_argument("--tiny", action="store_true", help="a try on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = f"influence-cost-{short_name(device)}.json"
    out = args.out or ROOT / "benchmarks" / "results" / name
    problem = make_problem(Options.of(device=device, **(TINY if args.tiny else GPT2)))
    data: dict[str, Any] = {
        "hardware": machine.hardware(torch.device(device)), "versions": machine.versions(),
        "commit": machine.commit(), "tiny": args.tiny,
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

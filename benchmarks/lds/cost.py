"""What does watching cost where the queries are known before?

    python -m benchmarks.lds.cost byte-gpt [--data DIR]

A training alone, and watched for all queries as one target, for each query as a target of its own,
and for a few queries only, in seconds of CPU time: the shortest of several trainings of each, which
take turns. Added to the problem's entry in benchmarks/results/lds-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.lds import clock, gradients, inside
from benchmarks.lds.problems import Problem, problem
from inrun.bench.machine import commit

FEW = 5  # one in so many queries


def measured(given: Problem, repeats: int) -> dict[str, float]:
    """Seconds by what was watched for."""
    few = {"validation": tuple(x[::FEW] for x in given.queries)}
    n, k = len(given.queries[0]), len(few["validation"][0])

    def watched(estimator: str, targets: dict[str, tuple[torch.Tensor, ...]]) -> float:
        return inside.watched(given, 0, [estimator], targets)[2]

    ways: dict[str, Callable[[], float]] = {"plain": lambda: gradients.plain_seconds(given, 0)}
    for e in ("secant", "influence"):
        ways |= {
            f"{e}, one target of {k} rows": lambda e=e: watched(e, few),  # type: ignore[misc]
            f"{e}, one target of {n} rows": lambda e=e: watched(  # type: ignore[misc]
                e, {"validation": given.queries}
            ),
            f"{e}, {n} targets": lambda e=e: watched(e, inside.queries(given)),  # type: ignore[misc]
        }
    found = [{name: run() for name, run in ways.items()} for _ in range(repeats)]
    return {name: min(x[name] for x in found) for name in ways}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="+", metavar="PROBLEM")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/lds-cpu.json")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args(given)
    clock.now = time.process_time
    for name in args.problems:
        seconds = measured(problem(name, torch.device("cpu"), args.data, args.scale), args.repeats)
        whole = json.loads(args.out.read_text())
        cost = {"seconds": seconds, "repeats": args.repeats, "commit": commit()}
        whole["problems"][name]["watching"] = cost
        args.out.write_text(json.dumps(whole, indent=1) + "\n")
        print(name, {k: round(x / seconds["plain"], 2) for k, x in seconds.items()}, flush=True)


if __name__ == "__main__":
    main()

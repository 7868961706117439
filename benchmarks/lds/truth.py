"""Only the retrainings, of several problems in turn: ``python -m benchmarks.lds.truth``.

What retraining does is the same for every method, so it is measured once, and methods are scored
with ``python -m benchmarks.lds --cache`` afterwards, on another machine if need be. One seed of
each problem after the other, until ``--seconds`` are over.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.lds.measures import ceiling
from benchmarks.lds.problems import NAMES, Problem, problem
from benchmarks.lds.retrain import halves, outcomes


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", default=list(NAMES), metavar="PROBLEM[:DRAW]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--subsets", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--together", type=int, default=100)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, help="then begin nothing new")
    return parser.parse_args(given)


def asked(name: str, args: argparse.Namespace) -> Problem:
    return problem(name, torch.device(args.device), args.data, args.scale)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    if args.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    begun = time.monotonic()
    until = None if args.seconds is None else begun + args.seconds
    problems: list[Problem] = []
    longest: dict[str, float] = {}
    for name in args.problems:
        try:
            problems.append(asked(name, args))
        except Exception as error:  # weights that are not here: the others go on
            print(f"{name} left out: {error}", flush=True)
    for repeats in range(1, args.repeats + 1):
        for each in problems:
            spent = time.monotonic()
            expected = longest.get(each.name, 0.0)
            if until is not None and spent + expected > until:
                continue
            masks = halves(each.examples, args.subsets)
            try:
                found, _ = outcomes(each, masks, repeats, args.cache, args.together)
            except Exception as error:
                print(f"{each.name} failed: {type(error).__name__}: {error}", flush=True)
                longest[each.name] = float("inf") if until is not None else 0.0
                continue
            if args.device.startswith("cuda"):
                torch.cuda.empty_cache()
            took = time.monotonic() - spent
            longest[each.name] = max(expected, took)
            done = time.monotonic() - begun
            print(
                f"{done:6.0f} s  {each.name}: {len(found)} seeds, +{took:.1f} s, {ceiling(found)}"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""What does it cost in LDS to observe the curvature less often?

    python -m benchmarks.lds.schedule [PROBLEM:DRAW] [--cache DIR]

Influence with several schedules of observations, on rows that no table is made of, to choose the
usual one. A schedule is EXAMPLES,FIRST,EVERY (``inrun.curvature.curvature.Sampling``); "new" behind
it makes directions anew at every step. Written to benchmarks/results/schedule-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.lds import inside, measures
from benchmarks.lds.problems import problem
from benchmarks.lds.retrain import halves, outcomes
from inrun.bench.machine import commit
from inrun.curvature.curvature import Sampling
from inrun.scoring import maps

SCHEDULES = ("16,1,1", "16,16,4,new", "16,16,4", "4,16,4", "4,16,8", "2,16,8", "4,8,16", "4,16,16")


@contextmanager
def used(schedule: str) -> Iterator[None]:
    """Every model has this schedule."""
    examples, first, every, *new = schedule.split(",")
    how = Sampling(int(examples), int(first), int(every))
    largest = 0 if new else maps.LARGEST
    with (
        mock.patch.object(Sampling, "of", staticmethod(lambda *_: how)),
        mock.patch.object(maps, "LARGEST", largest),
    ):
        yield


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problem", nargs="?", default="digits-mlp-noisy:1", metavar="PROBLEM:DRAW")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--subsets", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, help="added to --out")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/schedule-cpu.json")
    args = parser.parse_args(given)
    own = problem(args.problem, torch.device("cpu"), args.data, args.scale)
    masks = halves(own.examples, args.subsets)
    losses, _ = outcomes(own, masks, args.repeats, args.cache, together=10)
    result = {"problem": own.name, "subsets": args.subsets, "repeats": args.repeats}
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    same = all(known.get(k) == x for k, x in result.items())
    result |= {"commit": commit(), "lds": known["lds"] if same else {}}
    for schedule in args.schedules:
        with used(schedule):
            runs = [inside.in_run(own, seed, "influence") for seed in range(args.runs)]
        values = [run["inrun influence"].values for run in runs]
        result["lds"][schedule] = measures.lds(values, masks, losses.mean(0), draws=50)["mean"]
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(schedule, round(result["lds"][schedule], 3), flush=True)


if __name__ == "__main__":
    main()

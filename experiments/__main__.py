"""``python -m experiments NAME ...``: the same as ``inrun reproduce``, with no need of the command
line's dependencies."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from experiments import EXPERIMENTS, load
from experiments.common.parts import CPU, SIZES, reproduce, select


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--size", default="smoke", choices=(*SIZES, CPU))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, help="with one NAME")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--device")
    parser.add_argument("--jobs", type=int, default=1, help="parts at a time")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    for name in options.names or EXPERIMENTS:
        experiment = load(name)
        if options.list:
            print(name, *select(experiment, options.size, options.only), sep="\n  ")
            continue
        if options.out is not None and len(options.names) != 1:
            parser.error("--out goes with one NAME")
        try:
            reproduce(
                experiment, options.size, options.out, options.data, options.only, options.device,
                jobs=options.jobs,
            )  # fmt: skip
        except ValueError as error:
            parser.exit(2, f"{name}: {error}\n")


if __name__ == "__main__":
    main()

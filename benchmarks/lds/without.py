"""What becomes of a query without the rows that a credit names?

    python -m benchmarks.lds.without PROBLEM ... [--queries N]

For each problem the credits of one run (those of ``python -m benchmarks.lds``), then retrainings
without the top rows of each query (does its loss rise, does it get another label?), and one more
step on them (tail patch). Results are added to after each problem.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.lds import gradients, inside, ours, removal, rivals
from benchmarks.lds.__main__ import credits_of
from benchmarks.lds.problems import Problem, problem
from inrun.bench.machine import commit, hardware, versions

SHARES = (0.02, 0.05, 0.2)  # of the rows, removed for a query, unless --shares says otherwise
PATCHED = 10  # rows of the tail patch
LEFT_OUT = ("captum_tracin", "dattri_tracin")  # as our TracInCP
METHODS = (
    inside.secant, inside.carry, inside.influence, inside.ask,
    ours.ekfac_at_end, ours.trak, ours.graddot, ours.tracin,
)  # fmt: skip


def further(given: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Brittleness and tail patch of the credits of one run."""
    training = gradients.train(given, 0, ours.CHECKPOINTS)
    every = [*METHODS]
    if not args.no_rivals:
        every += rivals.of(given)
    chosen = [m for m in every if not args.methods or m.__name__ in args.methods.split(",")]
    chosen = [m for m in chosen if m.__name__ not in LEFT_OUT]
    credits, failed = {}, {}
    for found, missing in credits_of(given, 0, training, chosen, None):
        credits |= {name: c.values for name, c in found.items()}
        failed |= missing
    queries = min(args.queries, len(given.queries[0]))
    sizes = [max(1, round(given.examples * x)) for x in args.shares]
    return {
        "examples": given.examples,
        "failed": failed,
        "brittleness": removal.brittleness(given, credits, sizes, queries, args.seeds),
        "tail_patch": removal.tail_patch(given, training, credits, PATCHED),
    }


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="+", metavar="PROBLEM")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--queries", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2, help="retrainings of each")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of rows, removed")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--methods", help="only these functions, comma-separated; added to --out")
    parser.add_argument("--no-rivals", action="store_true")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    device = torch.device(args.device)
    place = "h200" if device.type == "cuda" else "cpu"
    out = args.out or ROOT / "benchmarks/results" / f"removal-{place}.json"
    for name in args.problems:
        result = further(problem(name, device, args.data, args.scale), args)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        result |= {"date": now, "commit": commit(), "hardware": hardware(device),
                   "versions": versions() | rivals.versions()}  # fmt: skip
        whole = json.loads(out.read_text()) if out.exists() else {"problems": {}}
        known = whole["problems"].get(name, {}) if args.methods else {}
        whole["problems"][name] = merged(known, result)
        out.write_text(json.dumps(whole, indent=1) + "\n")
        print(f"{name}: written to {out}", flush=True)


def merged(known: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Two results, the new one's entries above the others', at all depths; None, of what is not
    known (a library that was not installed), takes nothing's place."""
    new = {k: x for k, x in new.items() if x is not None or k not in known}
    both = {
        k: merged(known[k], x)
        for k, x in new.items()
        if isinstance(x, dict) and isinstance(known.get(k), dict)
    }
    return known | new | both


if __name__ == "__main__":
    main()

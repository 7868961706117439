"""How far are values in bfloat16 from those of float64? Several seeds, in one file.

    python benchmarks/precision.py [--seeds N] [--length T] [--out FILE.json]

Each run takes a few steps and compares one more with its float64 twin (``inrun bench --verify``):
GPT-2 small on a GPU, a small GPT on a CPU, random tokens; the tangent also by a plain loop of one
backward pass per example.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.costs import short_name
from inrun.bench import Options, run_bench

VARIANTS = ("fast", "tangent", "direct-loop")
MODELS: dict[str, dict[str, Any]] = {
    "cuda": {"model": "gpt2", "length": 256},
    "cpu": {"model": "gpt-4x128", "length": 64, "vocab": 5000},
}
ONCE = {"mode": "eager", "warmup": 2, "steps": 1, "rounds": 1, "verify": True, "dtype": "bf16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--length", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or ROOT / "benchmarks/results" / f"precision-{short_name(args.device)}.json"
    given = MODELS[args.device] | ({"length": args.length} if args.length else {})
    found: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        options = Options.of(
            device=args.device, variants=",".join(VARIANTS), seed=seed, **ONCE, **given
        )
        result = run_bench(options, console=Console(quiet=True))
        found.append({"seed": seed} | {r["variant"]: r["verify"] for r in result["rows"]})
        print(seed, *(f"{v} {found[-1][v]['R']:.5f}" for v in VARIANTS), flush=True)
        kept = {k: result[k] for k in ("hardware", "versions", "commit", "parameters")}
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        data = {**given, "batch": options.batch, "seeds": found, "date": now, **kept}
        out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()

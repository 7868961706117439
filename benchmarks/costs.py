"""Measures what docs/costs.md shows: several runs of ``inrun bench`` in one process, in one file.

    python benchmarks/costs.py [--budget SECONDS] [--only NAME,NAME] [--out FILE.json]

The configurations stand in the order of their importance. Once the budget is used up the rest are
skipped, with a note. The file is rewritten after each configuration; ``--only`` measures some of
them again and keeps the rest of the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from inrun.bench import Options, machine, run_bench

ALL = "plain,fast,bitwise,tangent,ghost,materialise,direct-vmap,direct-loop"
PAIR = "plain,fast"
GPT2 = {"model": "gpt2", "batch": 16, "length": 1024}
SMALL = {"model": "gpt-4x128", "batch": 16, "length": 128}
QUICK = {"warmup": 8, "steps": 36, "rounds": 3}

GPU: dict[str, dict[str, Any]] = {
    "gpt2-compile": GPT2
    | {"mode": "compile", "variants": "plain,fast,bitwise,tangent,direct-vmap"},
    "gpt2": GPT2 | {"mode": "eager", "variants": ALL},
    "hf-gpt2-compile": GPT2 | {"model": "hf:gpt2", "mode": "compile", "variants": PAIR},
    "targets-16": GPT2 | {"mode": "eager", "variants": PAIR, "targets": 16},
    "hf-gpt2": GPT2 | {"model": "hf:gpt2", "mode": "eager", "variants": "plain,fast,bitwise"},
    "targets-16-compile": GPT2 | {"mode": "compile", "variants": PAIR, "targets": 16},
    "batch-4": GPT2 | {"mode": "eager", "variants": PAIR, "batch": 4},
    "batch-64": GPT2 | {"mode": "eager", "variants": PAIR, "batch": 64},
    "length-256": GPT2 | {"mode": "eager", "variants": PAIR, "length": 256},
    "width-512": GPT2 | {"mode": "eager", "variants": PAIR, "model": "gpt-12x512", "vocab": 50257},
    "width-1280": GPT2
    | {"mode": "eager", "variants": PAIR, "model": "gpt-12x1280", "vocab": 50257},
    "targets-4": GPT2 | {"mode": "eager", "variants": PAIR, "targets": 4},
    "validation-4": GPT2 | {"mode": "eager", "variants": PAIR, "validation": 4},
    "convnet": {"model": "convnet", "mode": "eager", "batch": 256, "variants": ALL},
}
CPU: dict[str, dict[str, Any]] = {
    "gpt-4x128": SMALL | {"variants": ALL, "steps": 120, "rounds": 12},
    "batch-4": SMALL | {"variants": PAIR, "batch": 4},
    "batch-64": SMALL | {"variants": PAIR, "batch": 64},
    "length-32": SMALL | {"variants": PAIR, "length": 32},
    "length-512": SMALL | {"variants": PAIR, "length": 512},
    "width-64": SMALL | {"variants": PAIR, "model": "gpt-4x64"},
    "width-256": SMALL | {"variants": PAIR, "model": "gpt-4x256"},
    "targets-4": SMALL | {"variants": PAIR, "targets": 4},
    "targets-16": SMALL | {"variants": PAIR, "targets": 16},
    "convnet": {"model": "convnet", "batch": 32, "variants": ALL},
}
LISTS = {
    "cuda": {k: QUICK | x for k, x in GPU.items()},
    # a CPU is seldom alone: many short turns
    "cpu": {
        k: {"mode": "eager", "warmup": 4, "steps": 40, "rounds": 8} | x for k, x in CPU.items()
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", help="names of configurations")
    parser.add_argument("--steps", type=int, help="timed steps, instead of each one's own")
    parser.add_argument("--variants", help="instead of each one's own")
    parser.add_argument("--note", help="about the machine, for the file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or ROOT / "benchmarks" / "results" / f"costs-{short_name(args.device)}.json"
    chosen = args.only.split(",") if args.only else list(LISTS[args.device])
    data: dict[str, Any] = {"runs": {}}
    if args.only and out.exists():
        data = json.loads(out.read_text())
    data |= {
        "hardware": machine.hardware(torch.device(args.device)),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "note": args.note,
        "budget": args.budget,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    for name in chosen:
        left = args.budget - (time.perf_counter() - begun)
        if left <= 0:
            data["runs"].setdefault(name, {"skipped": "the time was used up"})
            print(f"{name}: skipped", flush=True)
        else:
            data["runs"][name] = measured(name, args)
        data["versions"] = machine.versions()  # with those of what was imported meanwhile
        _write(out, data)
    print(f"wrote {out} after {time.perf_counter() - begun:.0f} s")


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    asked = {"steps": args.steps, "variants": args.variants}
    given = LISTS[args.device][name] | {k: x for k, x in asked.items() if x}
    given["rounds"] = min(given["rounds"], given["steps"])
    print(f"\n== {name}", flush=True)
    begun = time.perf_counter()
    try:
        options = Options.of(device=args.device, **given)
        result = run_bench(options, console=Console(highlight=False, width=120))
    except Exception as error:  # the others are still of use
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begun:.0f} s", flush=True)
    return result | {"seconds": round(time.perf_counter() - begun, 1)}


def _write(out: Path, data: dict[str, Any]) -> None:
    """All or nothing: a kill leaves the file as it was."""
    new = out.with_suffix(".part")
    new.write_text(json.dumps(data, indent=1) + "\n")
    new.replace(out)


def short_name(device: str) -> str:
    """cpu, h200, a100."""
    if device != "cuda":
        return "cpu"
    words = torch.cuda.get_device_name().lower().replace("-", " ").split()
    return next((w for w in words if any(c.isdigit() for c in w)), words[-1])


if __name__ == "__main__":
    main()

"""Where the time of one watched step goes on a GPU: steps, the host's part, kernels.

    python benchmarks/step_profile.py [--variant fast] [--eager] [--out FILE.json]

GPT-2 small as in costs.py. The host's part is how long Python takes to launch a step on an idle
GPU: as long as it is less than the step itself, the GPU does not wait for it.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from costs import GPT2, QUICK, short_name

from inrun.bench import Options, machine
from inrun.bench.measure import time_steps
from inrun.bench.models import make_problem
from inrun.bench.trainers import VARIANTS, make_optimizer

PROFILED = 3  # steps
SHOWN = 28  # kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="fast", choices=list(VARIANTS))
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here")
    device = torch.device("cuda")
    mode = "eager" if args.eager else "compile"
    options = Options.of(device="cuda", mode=mode, variants=args.variant, **(QUICK | GPT2))
    problem = make_problem(options)
    model = copy.deepcopy(problem.model).to(device)
    optimizer = make_optimizer(options.optimizer, list(model.parameters()))
    trainer = VARIANTS[args.variant](problem, model, optimizer, not args.eager)
    for _ in range(5):
        trainer.step()
    found: dict[str, Any] = {
        "variant": args.variant,
        "mode": mode,
        "step_ms": [round(ms, 1) for ms in time_steps(trainer.step, 12, device)],
        "host_ms": [round(launched(trainer.step), 1) for _ in range(6)],
        "hardware": machine.hardware(device),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            trainer.step()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels) / 1e3 / PROFILED
    found["gpu_busy_ms"] = round(busy, 1)
    found["kernels"] = [
        {
            "ms": round(e.self_device_time_total / 1e3 / PROFILED, 3),
            "launches": round(e.count / PROFILED, 1),
            "name": e.key[:100],
        }
        for e in kernels[:SHOWN]
    ]
    print(json.dumps({k: v for k, v in found.items() if k != "kernels"}, indent=1))
    for k in found["kernels"]:
        print(f"{k['ms']:7.3f} ms {k['launches']:6.1f} × {k['name']}")
    name = f"step-profile-{args.variant}-{mode}-{short_name('cuda')}.json"
    out = args.out or ROOT / "benchmarks" / "results" / name
    out.write_text(json.dumps(found, indent=1) + "\n")


def launched(step: Any) -> float:
    """Milliseconds until the host is done with a step that begins on an idle GPU."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - begun)


if __name__ == "__main__":
    main()

"""Where the time of one watched step goes on a GPU: steps, the host's part, kernels.

    python benchmarks/step_profile.py [--variant fast] [--eager] [--out FILE.json]
                                      [--model hf:gpt2 --batch 4 --length 512]

GPT-2 small as in costs.py, or what ``--model``, ``--batch`` and ``--length`` say. The host's part
is how long Python takes to launch a step on an idle GPU: as long as it is less than the step
itself, the GPU does not wait for it. ``parts``: the same for forward pass, backward pass and the
optimizer's step one by one, each on an idle GPU, beside those of plain training. ``functions``:
where Python spends the time of a step, by ``cProfile``, which makes Python slower.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import pstats
import statistics
import sys
import time
from functools import partial
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
from inrun.bench.trainers import VARIANTS, Trainer, Watched, make_optimizer

PROFILED = 3  # steps
SHOWN = 28  # kernels
FUNCTIONS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="fast", choices=list(VARIANTS))
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--model", default=GPT2["model"])
    parser.add_argument("--batch", type=int, default=GPT2["batch"])
    parser.add_argument("--length", type=int, default=GPT2["length"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here")
    device = torch.device("cuda")
    mode = "eager" if args.eager else "compile"
    size = {"model": args.model, "batch": args.batch, "length": args.length}
    options = Options.of(device="cuda", mode=mode, variants=args.variant, **(QUICK | size))
    problem = make_problem(options)

    def make(variant: str) -> Trainer:
        model = copy.deepcopy(problem.model).to(device)
        optimizer = make_optimizer(options.optimizer, list(model.parameters()))
        own = VARIANTS[variant](problem, model, optimizer, not args.eager)
        for _ in range(10):
            own.step()
        return own

    plain = make("plain")
    beside = {"step_ms": list(time_steps(plain.step, 12, device)), "parts": parts(plain)}
    del plain
    trainer = make(args.variant)
    found: dict[str, Any] = size | {
        "variant": args.variant,
        "mode": mode,
        "plain_step_ms": [round(ms, 1) for ms in beside["step_ms"]],
        "step_ms": [round(ms, 1) for ms in time_steps(trainer.step, 12, device)],
        "plain_parts": beside["parts"],
        "parts": parts(trainer),
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
    found["functions"] = functions(trainer)
    lists = ("kernels", "functions")
    print(json.dumps({k: v for k, v in found.items() if k not in lists}, indent=1))
    for f in found["functions"]:
        print(f"{f['ms']:7.2f} ms, own {f['own_ms']:6.2f} {f['calls']:7.1f} × {f['name']}")
    for k in found["kernels"]:
        print(f"{k['ms']:7.3f} ms {k['launches']:6.1f} × {k['name']}")
    name = f"step-profile-{args.variant}-{mode}-{short_name('cuda')}.json"
    out = args.out or ROOT / "benchmarks" / "results" / name
    out.write_text(json.dumps(found, indent=1) + "\n")


def parts(trainer: Trainer) -> dict[str, float]:
    """Milliseconds that the host needs to launch each part of a step: median of 8."""
    found: dict[str, list[float]] = {}

    def timed(name: str, part: Any) -> Any:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        result = part()
        found.setdefault(name, []).append(1e3 * (time.perf_counter() - begun))
        return result

    for _ in range(8):
        batch = trainer.problem.batch
        opened = None
        if isinstance(trainer, Watched):
            opened = trainer.run.batch(range(trainer.problem.examples))
            timed("open", opened.__enter__)
        loss = timed("forward", partial(trainer.loss, batch))
        timed("backward", loss.backward)
        if opened is not None:
            timed("close", partial(opened.__exit__, None, None, None))
        timed("step", trainer.optimizer.step)
        timed("zero_grad", trainer.optimizer.zero_grad)
        del loss
    return {k: round(statistics.median(x), 2) for k, x in found.items()}


def functions(trainer: Trainer) -> list[dict[str, Any]]:
    """The Python functions of a step that take longest, with what they call, by cProfile."""
    profiler = cProfile.Profile()
    torch.cuda.synchronize()
    profiler.enable()
    for _ in range(PROFILED):
        trainer.step()
    profiler.disable()
    torch.cuda.synchronize()
    seen = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = [
        {
            "ms": round(1e3 * whole / PROFILED, 2),
            "own_ms": round(1e3 * own / PROFILED, 2),
            "calls": round(calls / PROFILED, 1),
            "name": f"{Path(file).parent.name}/{Path(file).name}:{line} {name}"[-90:],
        }
        for (file, line, name), (_, calls, own, whole, _) in seen.items()
    ]
    most = sorted(rows, key=lambda r: -r["ms"])[:FUNCTIONS]
    own = sorted((r for r in rows if r not in most), key=lambda r: -r["own_ms"])
    return most + own[: FUNCTIONS // 2]


def launched(step: Any) -> float:
    """Milliseconds until the host is done with a step that begins on an idle GPU."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - begun)


if __name__ == "__main__":
    main()

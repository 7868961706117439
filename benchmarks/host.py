"""What watching costs the host: tiny models of transformers on one CPU thread, nothing but Python and
dispatch.

    python benchmarks/host.py [--only gpt2] [--steps 300] [--functions fast] [--out FILE.json]

``watched / plain`` is the ratio of the medians of whole steps. The variants take turns, step by
step, in one process, after the first steps: the mode stands aside, and no orders are sampled. Of a
watched step one plain step is the training itself, and most of another one the validation pass
(``validation_pass``, forward and backward on one row by themselves, beside a plain step).
``calls`` are calls of Python functions and of built-in ones in a step, which do not depend on the
machine's load: counted by ``sys.setprofile``, without what autograd's own thread does.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import gc
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

from inrun.bench import Options, machine
from inrun.bench.models import Problem, make_problem
from inrun.bench.stopwatch import measured
from inrun.bench.trainers import VARIANTS, Trainer, Watched, make_optimizer

LLAMA = (
    "hf:llama,hidden_size=32,intermediate_size=64,num_hidden_layers=12,num_attention_heads=2,"
    "num_key_value_heads=2,vocab_size=256"
)
MODELS = {
    "gpt2": "hf:gpt2,n_layer=12,n_embd=32,n_head=2,vocab_size=256",
    "llama": LLAMA,
    "llama-lora": f"{LLAMA},lora=4",
}
SIZE = {"batch": 4, "length": 16, "validation": 1}
WARMUP = 24  # steps: plans are followed by then, and gradients are no longer copied
COUNTED = 8  # steps
PARTS = ("forward", "backward", "step", "all else")
FUNCTIONS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of models", default=",".join(MODELS))
    parser.add_argument("--variants", default="plain,fast,bitwise")
    parser.add_argument("--steps", type=int, default=300, help="timed ones of each variant")
    parser.add_argument("--functions", help="show where Python spends the time of a variant")
    parser.add_argument("--note", help="about the machine, for the file")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/host-cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "hardware": machine.hardware(torch.device("cpu")), "note": args.note,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": machine.commit(), "size": SIZE, "steps": args.steps, "models": {},
    }  # fmt: skip
    for name in args.only.split(","):
        options = Options.of(device="cpu", model=MODELS[name], **SIZE)
        problem = make_problem(options)
        if args.functions:
            show_functions(warm(problem, args.functions))
            continue
        found["models"][name] = one = measure(problem, args.variants.split(","), args.steps)
        print(name, json.dumps(one, indent=1), flush=True)
    found["versions"] = machine.versions()  # with those of what was imported meanwhile
    if not args.functions:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def warm(problem: Problem, variant: str) -> Trainer:
    """A trainer of a variant whose first steps are over."""
    model = copy.deepcopy(problem.model)
    trainer = VARIANTS[variant](problem, model, make_optimizer("adamw", list(model.parameters())))
    for _ in range(WARMUP):
        trainer.step()
    return trainer


def measure(problem: Problem, variants: list[str], steps: int) -> dict[str, Any]:
    trainers = {v: warm(problem, v) for v in variants}
    row = Trainer(problem, copy.deepcopy(problem.model).eval(), trainers["plain"].optimizer)
    whole: dict[str, list[float]] = {v: [] for v in variants}
    parts: dict[str, list[dict[str, float]]] = {v: [] for v in variants}
    passes: list[float] = []
    gc.collect()
    gc.disable()  # it would fall on some steps
    try:
        for _ in range(steps):
            for v, trainer in trainers.items():
                parts[v].append(one_step(trainer))
                whole[v].append(sum(parts[v][-1].values()))
            passes.append(validation_pass(row))
            gc.collect(0)
    finally:
        gc.enable()
    plain = median(whole["plain"])
    found: dict[str, Any] = {
        "parameters": len([p for p in problem.model.parameters() if p.requires_grad]),
        "validation_pass_ms": round(median(passes), 3),
        "variants": {},
    }
    for v, trainer in trainers.items():
        found["variants"][v] = {
            "ms": round(median(whole[v]), 3),
            "of_plain": round(median(whole[v]) / plain, 3),
            "parts_ms": {k: round(median(p[k] for p in parts[v]), 3) for k in PARTS},
            "stages_ms": stages(trainer) if isinstance(trainer, Watched) else {},
            "calls": calls(trainer),
            "remark": trainer.remark(),
        }
    return found


def one_step(trainer: Trainer) -> dict[str, float]:
    """Milliseconds of the parts of a step. ``all else``: entering and leaving ``run.batch``, and
    ``zero_grad``."""
    found = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        found[part] += 1e3 * (time.perf_counter() - begun)

    opened = trainer.run.batch(ids(trainer)) if isinstance(trainer, Watched) else None
    if opened is not None:
        with timed("all else"):
            opened.__enter__()
    with timed("forward"):
        loss = trainer.loss(trainer.problem.batch)
    with timed("backward"):
        loss.backward()
    if opened is not None:
        with timed("all else"):
            opened.__exit__(None, None, None)
    with timed("step"):
        trainer.optimizer.step()
    with timed("all else"):
        trainer.optimizer.zero_grad()
    return found


def ids(trainer: Trainer) -> torch.Tensor:
    return torch.arange(trainer.problem.examples)


def validation_pass(row: Trainer) -> float:
    """Milliseconds of a forward and backward pass on the validation row."""
    params = [p for p in row.params if p.requires_grad]
    begun = time.perf_counter()
    for batch in row.problem.targets.values():
        torch.autograd.grad(row.loss(batch), params)
    return 1e3 * (time.perf_counter() - begun)


def stages(trainer: Trainer) -> dict[str, float]:
    """Milliseconds of the stages inside ``optimizer.step()``."""
    with measured() as watch:
        for _ in range(COUNTED):
            trainer.step()
    return {k: round(ms / COUNTED, 3) for k, ms in watch.milliseconds().items()}


def calls(trainer: Trainer) -> dict[str, int]:
    """Calls of Python and of built-in functions in a step: median over some."""
    counts: list[tuple[int, int]] = []
    for _ in range(COUNTED):
        counts.append(counted(partial(one_step, trainer)))
    python, built_in = (int(median(x)) for x in zip(*counts, strict=True))
    return {"python": python, "built_in": built_in}


def counted(work: Callable[[], Any]) -> tuple[int, int]:
    found = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, arg: Any) -> None:
        if event in found:
            found[event] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found["call"], found["c_call"]


def show_functions(trainer: Trainer) -> None:
    """The functions that take longest, with what they call and by themselves, by cProfile, which
    makes Python slower."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(COUNTED):
        one_step(trainer)
    profiler.disable()
    rows = [
        (1e3 * whole / COUNTED, 1e3 * own / COUNTED, n / COUNTED, f"{file}:{line} {name}")
        for (file, line, name), (_, n, own, whole, _) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    ]
    for column in (0, 1):
        print()
        for whole, own, n, name in sorted(rows, key=lambda r: -r[column])[:FUNCTIONS]:
            print(f"{whole:8.3f} ms, own {own:7.3f} {n:7.1f} × {name[-90:]}")


if __name__ == "__main__":
    main()

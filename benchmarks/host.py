"""What watching costs the host: tiny models of transformers on one CPU thread, nothing but Python
and dispatch.

    python benchmarks/host.py [--only gpt2] [--steps 300] [--functions fast] [--out FILE.json]

Milliseconds are processor time of the thread that trains, which also runs the backward pass: what
other programs do hardly changes it. ``of_plain`` is the ratio of the medians of whole steps,
``mean_of_plain`` that of the means, which count the passes that the mode looks at again and the
steps in which values by halves are measured; nothing is audited. The variants take turns, a few
steps each, in one process, after the first steps: the mode stands aside, and no orders are sampled.
Of a watched step one plain step is the training itself, and a large part of another one the
validation pass (``validation_pass_ms``: forward and backward on the row by themselves). ``calls``
are calls of Python functions and of built-in ones in a step, which depend on the code alone,
counted by ``sys.setprofile``.
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
from statistics import fmean, median
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

from inrun.bench import Options, machine
from inrun.bench.models import Problem, make_problem
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
TURN = 10  # steps of a variant before the next one's
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
    parts: dict[str, list[dict[str, float]]] = {v: [] for v in variants}
    passes: list[float] = []
    gc.collect()
    gc.disable()  # it would fall on some steps
    try:
        for _ in range(0, steps, TURN):
            for v, trainer in trainers.items():
                parts[v] += [one_step(trainer) for _ in range(TURN)]
                gc.collect()
            passes += [validation_pass(row) for _ in range(TURN)]
    finally:
        gc.enable()
    whole = {v: [sum(p.values()) for p in own] for v, own in parts.items()}
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
            "mean_of_plain": round(fmean(whole[v]) / fmean(whole["plain"]), 3),
            "parts_ms": {k: round(median(p[k] for p in parts[v]), 3) for k in PARTS},
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
        begun = time.thread_time()
        yield
        found[part] += 1e3 * (time.thread_time() - begun)

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
    begun = time.thread_time()
    for batch in row.problem.targets.values():
        torch.autograd.grad(row.loss(batch), params)
    return 1e3 * (time.thread_time() - begun)


def calls(trainer: Trainer) -> dict[str, int]:
    """Calls of Python and of built-in functions in a step: median over some."""
    counts = [counted(partial(one_step, trainer)) for _ in range(COUNTED)]
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

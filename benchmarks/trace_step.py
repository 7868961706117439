"""How far a reader has to follow one watched training step: the files of inrun that it passes.

    python benchmarks/trace_step.py [--model gpt-2x64] [--optimizer adamw] [--training bitwise]
                                    [--pairs] [--json]

Trains a small GPT of ``inrun bench`` (or ``--model mlp``, two linear layers) on the CPU, eagerly.
After WARMUP steps, when everything that inrun caches is cached, one step is traced with
``sys.setprofile``: the forward and backward pass inside ``run.batch(ids)`` and
``optimizer.step()``, without an audit. Three things are counted, each over Python functions that
are defined in a file of ``src/inrun`` (comprehensions and lambdas too), except ``inrun/bench``
and ``inrun/gpt.py``, which are the training loop and the model:

    calls     how many times such a function is entered.
    files     how many different files these functions are defined in.
    switches  how many calls go to another file than the call before: the calls of a step are
              written down in order, as the names of their files, and a switch is a place where two
              neighbours differ. Returning to a file counts only when a function of it is called.

Code of torch and of the model between two calls is not counted and does not end a row of calls in
one file. A generator (a ``contextmanager``) is entered again each time it goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

import inrun
from inrun.bench import Options
from inrun.bench.models import Problem, make_problem
from inrun.bench.trainers import Watched, make_optimizer

PACKAGE = Path(inrun.__file__).parent
WARMUP = 5  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-2x64", help="mlp, or a model of inrun bench")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"])
    parser.add_argument("--training", default="bitwise", choices=["bitwise", "fast"])
    parser.add_argument("--pairs", action="store_true", help="show which files switch to which")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    visits = traced_step(args.model, args.optimizer, args.training)
    found = vars(args) | counted(visits)
    del found["json"], found["pairs"]
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['files']} files, {found['switches']} switches, {found['calls']} calls")
    for name, n in found["calls by file"].items():
        print(f"{n:6} calls  {name}")
    if args.pairs:
        for (a, b), n in Counter(switches(visits)).most_common():
            print(f"{n:6} ×  {a} → {b}")


def traced_step(model: str, optimizer: str, training: str) -> list[str]:
    """The file of each call of inrun in one step, in order; names are relative to the package."""
    torch.manual_seed(0)
    if model == "mlp":
        problem = mlp_problem()
    else:
        options = Options.of(model=model, batch=4, length=16, device="cpu", mode="eager")
        problem = make_problem(options)
    watched = copy.deepcopy(problem.model)
    trainer = Watched(
        problem, watched, make_optimizer(optimizer, list(watched.parameters())), training=training
    )
    for _ in range(WARMUP):
        trainer.step()
    with tracing() as files:
        trainer.step()
    trainer.close()
    names = [Path(f).relative_to(PACKAGE).as_posix() for f in files]
    return [name for name in names if not name.startswith(("bench/", "gpt.py"))]


class MLP(nn.Sequential):
    """Two linear layers; returns the loss of a batch."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(inputs), labels)


def mlp_problem() -> Problem:
    def rows(n: int) -> dict[str, Tensor]:
        return {"inputs": torch.randn(n, 10), "labels": torch.randint(3, (n,))}

    return Problem(MLP(), rows(8), {"target0": rows(2)}, torch.device("cpu"), autocast=False)


@contextmanager
def tracing() -> Iterator[list[str]]:
    """Collects the file of each Python function of inrun that is called inside."""
    files: list[str] = []
    prefix = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            files.append(frame.f_code.co_filename)

    before: Callable[..., Any] | None = sys.getprofile()
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)


def counted(visits: list[str]) -> dict[str, Any]:
    """The numbers that the module's docstring defines."""
    calls = Counter(visits)
    return {
        "files": len(calls),
        "switches": len(switches(visits)),
        "calls": len(visits),
        "calls by file": dict(calls.most_common()),
    }


def switches(visits: list[str]) -> list[tuple[str, str]]:
    """Neighbouring calls in different files."""
    return [(a, b) for a, b in pairwise(visits) if a != b]


if __name__ == "__main__":
    main()

"""What do the free signals (loss, EL2N, margin) cost, and where does their time go?

    python benchmarks/signals.py [--steps N] [--repeat N] [--cases MLP,ConvNet,GPT] [--out FILE]

In one run half of the steps, drawn anew for each pair, read no signals. The share is what the
others take more, in processor time: the mean over ``repeat`` blocks of ``steps`` steps of each
kind, ± its standard error. In each block the mean of the middle 90 % counts, of steps that differ
in nothing else; signals of small classifiers, which are computed for many steps together, are asked
for before the block ends and counted as a whole. Beside it the arithmetic alone, again and again on
the same numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import inrun
from benchmarks.steadiness import convnet, network, next_token
from benchmarks.steady import loss_of
from inrun.bench.machine import commit, hardware, versions
from inrun.capture import capture, later, signals
from inrun.demo.digits import load
from inrun.gpt import GPT

FIRST = 30  # steps until the plans of the passes are known
Loss = Callable[[nn.Module, Any], Tensor]


class Switch:
    """Reading signals, on or off; and the time in which those of many steps are computed."""

    def __init__(self) -> None:
        self.on, self.together = True, 0.0
        self.own = capture.watch_loss, capture.read_node, later.Together._work

    def __enter__(self) -> Switch:
        watch, read, work = self.own
        capture.watch_loss = lambda *a: watch(*a) if self.on else None
        capture.read_node = lambda *a: read(*a) if self.on else None
        later.Together._work = lambda some: self.timed(work, some)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        capture.watch_loss, capture.read_node, later.Together._work = self.own  # type: ignore[method-assign]

    def timed(self, work: Callable[[Any], None], some: Any) -> None:
        begun = time.process_time()
        work(some)
        self.together += time.process_time() - begun


def measure(
    model: nn.Module, batch: Any, rows: int, validation: Any, loss: Loss, steps: int, repeat: int
) -> dict[str, Any]:
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=1e-3), np.random.default_rng(0)
    with Switch() as switch, inrun.watch(
        model, optimizer, loss=loss, validation=[validation], estimator="secant",
        audit_every=0, halves_every=0,
    ) as run:  # fmt: skip

        def step(on: bool) -> float:
            switch.on, together = on, switch.together
            begun = time.process_time()
            with run.batch(range(rows)):
                loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            return time.process_time() - begun - (switch.together - together)

        for _ in range(FIRST):
            step(True)
        blocks = []
        for _ in range(repeat):
            run.history()  # nothing waits any more
            switch.together = 0.0
            order = [bool(x) for _ in range(steps) for x in rng.permutation(2)]
            times: tuple[list[float], list[float]] = ([], [])
            for on in order:
                times[on].append(1e3 * step(on))
            run.history()
            blocks.append([*map(middle, times), 1e3 * switch.together / steps])
    without, reading, together = np.array(blocks).T
    share = (reading + together) / without - 1
    error = share.std(ddof=1) / len(share) ** 0.5
    return {
        "without": without.mean(), "with": (reading + together).mean(), "together": together.mean(),
        "share": share.mean(), "error": error, "blocks": share.round(5).tolist(),
    }  # fmt: skip


def middle(x: list[float]) -> float:
    """The mean without the lowest and highest twentieth."""
    cut = len(x) // 20
    return float(np.mean(np.sort(x)[cut : len(x) - cut]))


def alone(rows: int, classes: int) -> float:
    """Milliseconds of the arithmetic of one call."""
    z, y = torch.randn(rows, classes).log_softmax(1), torch.randint(classes, (rows,))
    given = signals.Labelled(z, y, 1, logarithms=True, normalised=True)
    begun, n = time.process_time(), 300
    for _ in range(n):
        later.means(signals.computed(given).double().numpy())
    return 1e3 * (time.process_time() - begun) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--cases", default="MLP,ConvNet,GPT", help="by how names begin")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/signals-cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = load(0)
    x, y, (vx, vy) = data.x.view(-1, 1, 8, 8), data.y, data.validation
    images = (x[:64], y[:64]), 64, (vx.view(-1, 1, 8, 8)[:32], vy[:32]), loss_of
    tokens = torch.randint(0, 256, (24, 64))
    wide = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 10),
    )  # fmt: skip
    cases: dict[str, Any] = {  # the problem, the shape of its logits, how much fewer steps
        "MLP, 64 rows": ((network(), *images), (64, 10), 1),
        "MLP of 1.1 million, 64 rows": ((wide, *images), (64, 10), 10),
        "ConvNet, 64 images of 8 × 8": ((convnet(), *images), (64, 10), 1),
        "GPT, 2 layers of 64, 16 × 64 tokens": (
            (GPT(256, 64, 2, 4, 64), tokens[:16], 16, tokens[16:], next_token), (1008, 256), 1
        ),
        "GPT, 6 layers of 256, 16 × 64 tokens": (
            (GPT(256, 256, 6, 4, 64), tokens[:16], 16, tokens[16:], next_token), (1008, 256), 10
        ),
    }  # fmt: skip
    found = {}
    for name, (case, logits, fewer) in cases.items():
        if name.startswith(tuple(args.cases.split(","))):
            steps = max(1, args.steps // fewer)
            found[name] = measure(*case, steps, args.repeat) | {"alone": alone(*logits)}
            print(name, found[name], flush=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    result = {"cases": found, "steps": args.steps, "repeat": args.repeat, "date": now,
              "commit": commit(), "hardware": hardware(torch.device("cpu")),
              "versions": versions()}  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

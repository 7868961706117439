"""What do the free signals (loss, EL2N, margin) cost, and where does their time go?

    python benchmarks/signals.py [--steps N] [--out FILE.json]

In one run every second step reads no signals; processor time of both kinds of step (medians), and
of their arithmetic alone, called again and again on the same numbers.
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
from inrun.capture import capture, signals
from inrun.demo.digits import load
from inrun.gpt import GPT

FIRST = 30  # steps until the plans of the passes are known


def measure(
    model: nn.Module, batch: Any, rows: int, validation: Any,
    loss: Callable[[nn.Module, Any], Tensor], steps: int,
) -> dict[str, float]:  # fmt: skip
    on, own = True, (capture.watch_loss, capture.read_node)
    capture.watch_loss, capture.read_node = (
        lambda *a, f=f: f(*a) if on else None for f in own
    )  # fmt: skip
    times: tuple[list[float], list[float]] = ([], [])
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with inrun.watch(
            model, optimizer, loss=loss, validation=[validation], estimator="secant",
            audit_every=0, halves_every=0,
        ) as run:  # fmt: skip
            for step in range(FIRST + steps):
                on = step < FIRST or step % 2 == 0
                begun = time.process_time()
                with run.batch(range(rows)):
                    loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step >= FIRST:
                    times[on].append(1e3 * (time.process_time() - begun))
    finally:
        capture.watch_loss, capture.read_node = own
    without, with_signals = (float(np.median(t)) for t in times)
    return {"without": without, "with": with_signals, "share": with_signals / without - 1}


def alone(rows: int, classes: int) -> float:
    """Milliseconds of the arithmetic of one call."""
    z, y = torch.randn(rows, classes).log_softmax(1), torch.randint(classes, (rows,))
    given = signals.Labelled(z, y, 1, logarithms=True, normalised=True)
    begun, n = time.process_time(), 300
    for _ in range(n):
        signals.means(signals._computed(given).double().numpy())
    return 1e3 * (time.process_time() - begun) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/signals-cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = load(0)
    x, y, (vx, vy) = data.x.view(-1, 1, 8, 8), data.y, data.validation
    images = (x[:64], y[:64]), 64, (vx.view(-1, 1, 8, 8)[:32], vy[:32]), loss_of
    tokens = torch.randint(0, 256, (24, 64))
    cases: dict[str, Any] = {
        "MLP, 64 rows": ((network(), *images), (64, 10)),
        "ConvNet, 64 images of 8 × 8": ((convnet(), *images), (64, 10)),
        "GPT, 2 layers of 64, 16 × 64 tokens": (
            (GPT(256, 64, 2, 4, 64), tokens[:16], 16, tokens[16:], next_token), (1008, 256)
        ),
    }  # fmt: skip
    found = {}
    for name, (case, logits) in cases.items():
        found[name] = measure(*case, args.steps) | {"alone": alone(*logits)}
        print(name, found[name], flush=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    result = {"cases": found, "steps": args.steps, "date": now, "commit": commit(),
              "hardware": hardware(torch.device("cpu")), "versions": versions()}  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

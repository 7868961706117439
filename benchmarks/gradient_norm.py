"""What would it cost to record ‖g_i‖, the norm of each example's whole gradient?

    python benchmarks/gradient_norm.py [--steps N] [--out FILE.json]

Small models on a CPU, watched as by default after the first steps. In every step the norms are
computed from what the capture holds anyway: of products of one token ‖a‖‖δ‖, of several tokens
Σ_st (a_s·a_t)(δ_s·δ_t), of others the gradient, formed if it is not there. Parameters with several
uses would need more. Processor time of that beside the rest of the step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import inrun
from inrun.bench.machine import commit, hardware, versions
from inrun.capture.micro_batch import MicroBatch
from inrun.gpt import GPT
from inrun.gradients.embedding import Lookup
from inrun.gradients.records import Pair, Record
from inrun.scoring.scorer import Scorer

BATCH, VALIDATION, WARM = 64, 8, 10


def squares(record: Record) -> Tensor:
    """‖g_i‖² of one record: [B]."""
    if isinstance(record, Pair):
        a, delta = record.a, record.delta
        if a.shape[1] == 1:
            return a.flatten(1).square().sum(1) * delta.flatten(1).square().sum(1)
        return ((a @ a.mT) * (delta @ delta.mT)).sum((1, 2))
    if isinstance(record, Lookup):
        same = (record.ids[:, :, None] == record.ids[:, None]).to(record.delta.dtype)
        return ((record.delta @ record.delta.mT) * same).sum((1, 2))
    return record.rows().flatten(1).square().sum(1)


def norms(micros: list[MicroBatch]) -> list[Tensor]:
    return [
        torch.stack([squares(r) for _, records in m.by_example() for r in records]).sum(0).sqrt()
        for m in micros
    ]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 8, 8), torch.randint(10, (n,))


def texts(n: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(64, (n, 65))
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], int]] = {
    "MLP, 2 hidden layers of 128, 64 rows": (lambda: mlp(128), images, BATCH),
    "MLP, 2 hidden layers of 2,048, 64 rows": (lambda: mlp(2048), images, BATCH),
    "ConvNet, 64 images of 8 × 8": (convnet, images, BATCH),
    "GPT, 2 layers of 64, 16 × 64 tokens": (lambda: GPT(64, 64, 4, 2, 64), texts, 16),
}


def measure(build: Callable[[], nn.Module], data: Callable[[int], Any], B: int, n: int) -> Any:
    """Medians over steps, milliseconds of processor time: the step, and the norms in it."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(
        model, optimizer, validation=[data(VALIDATION)], loss=loss_of, estimator="secant",
        audit_every=0,
    )  # fmt: skip
    within: list[float] = []
    begin = Scorer.begin

    def timed(self: Scorer, number: int, micros: list[MicroBatch], *rest: Any) -> Any:
        start = time.process_time()
        norms(micros)
        within.append(time.process_time() - start)
        return begin(self, number, micros, *rest)

    steps = []
    Scorer.begin = timed  # type: ignore[method-assign]
    try:
        for step in range(WARM + n):
            batch, start = data(B), time.process_time()
            with run.batch(range(step * B, step * B + B)):
                loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.process_time() - start - within[-1])
    finally:
        Scorer.begin = begin  # type: ignore[method-assign]
        run.close()
    whole, norm = (1e3 * median(x[WARM:]) for x in (steps, within))
    return {"step ms": round(whole, 3), "norms ms": round(norm, 3),
            "share": round(norm / whole, 4)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES.items():
        found[name] = measure(*case, a.steps)
        print(name, found[name], flush=True)
    if a.out:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        about = {"date": now, "hardware": hardware(torch.device("cpu")), "versions": versions(),
                 "commit": commit(), "steps": a.steps}  # fmt: skip
        a.out.write_text(json.dumps(about | {"cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

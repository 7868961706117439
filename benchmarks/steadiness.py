"""Is the sampled estimate of a ranking's steadiness right, and what does it cost?

    python benchmarks/steadiness.py [--seeds N] [--out FILE.json]

scikit-learn's digits as in benchmarks/steady.py, values of the secant. *True*: from a run with real
halves as targets in every step (``inrun.halves``): the mean rank correlation of a step's values by
both halves, and 1 − Var D/Var X of the sums. *Sampled*: what ``run.steadiness()`` says in the same
training from one step of every 5, 10 or 20. *Cost*: processor time of a measured step over one that
is not, in one run that measures every second step.
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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import inrun
from benchmarks.steady import EPOCHS, batches, loss_of, network, train
from inrun.bench.machine import commit, hardware, versions
from inrun.demo.digits import Data, load
from inrun.gpt import GPT
from inrun.report.metrics import spearman

EVERY = (5, 10, 20)
STEPS = 60  # of a measurement of cost


def ways(data: Data) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name: options of the run with real halves, and of the one that is sampled."""
    labels = inrun.by_label(TensorDataset(*data.validation))
    cycled = batches(data, 8, 0)
    cycled = [b for b in cycled if len(b[1]) == 8]
    halved = {f"half {h + 1}": [tuple(t[h::2] for t in b) for b in cycled] for h in range(2)}
    return {
        "the whole set": (
            {"targets": inrun.halves([data.validation])}, {"validation": [data.validation]}
        ),
        "one target per digit": ({"targets": inrun.halves(labels)}, {"targets": labels}),
        "8 rows per step": (
            {"targets": halved, "per_step": 1}, {"validation": cycled, "per_step": 1}
        ),
    }  # fmt: skip


def truth(run: Any) -> tuple[float, float]:
    """Of a run with halves as targets: of one step, and of the sums."""
    history = run.history()
    for h, name in enumerate("ab"):
        own = [t for t in run.targets if t.endswith(f"half {h + 1}")]
        history[name] = history[own].mean(axis=1)
    steps = [spearman(s["a"], s["b"]) for _, s in history.groupby("step")]
    sums = history.groupby("id")[["a", "b"]].sum()
    x, d = (sums["a"] + sums["b"]) / 2, (sums["a"] - sums["b"]) / 2
    return float(np.mean(steps)), float(1 - d.var() / x.var())


def agreement(data: Data, seeds: int) -> list[dict[str, Any]]:
    found = []
    for name, (real, sampled) in ways(data).items():
        for seed in range(seeds):
            step, sums = truth(train(data, seed, estimator="secant", **real)[0])
            row: dict[str, Any] = {"way": name, "seed": seed, "step": step, "sums": sums}
            for every in EVERY:
                options = {"halves_every": every, "estimator": "secant"} | sampled
                said = train(data, seed, **options)[0].steadiness()
                own = ("agree", "of_sums", "error", "measured")
                row[f"every {every}"] = {k: getattr(said, k) for k in own}
            found.append(row)
            print(row, flush=True)
    return found


Loss = Callable[[nn.Module, Any], Tensor]


def cost(model: nn.Module, batch: Any, rows: int, validation: Any, loss: Loss) -> dict[str, float]:
    """Milliseconds of processor time of a step, and of one that measures halves (medians)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(
        model, optimizer, loss=loss, validation=[validation], estimator="secant", audit_every=0,
        halves_every=2,
    )  # fmt: skip
    halving, times = run._steppers[0].scorer.halving, ([], [])
    for step in range(STEPS):
        begun = time.process_time()
        with run.batch(range(rows)):
            loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= STEPS // 4:
            times[halving.due(step)].append(1e3 * (time.process_time() - begun))
    run.close()
    plain, halved = (float(np.median(t)) for t in times)
    return {"ms": plain, "ms_measured": halved, "share_of_run": (halved / plain - 1) / 50}


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def next_token(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))


def costs(data: Data) -> list[dict[str, Any]]:
    (x, y), (vx, vy) = (data.x.view(-1, 1, 8, 8), data.y), data.validation
    vx = vx.view(-1, 1, 8, 8)
    tokens = torch.randint(0, 256, (24, 64), generator=torch.Generator().manual_seed(0))
    found = []
    for name, make, batch, rows, validation, loss in (
        ("MLP, 64 rows, validation 300", network, (x[:64], y[:64]), 64, (vx, vy), loss_of),
        ("ConvNet, 64 rows, validation 300", convnet, (x[:64], y[:64]), 64, (vx, vy), loss_of),
        ("ConvNet, 64 rows, validation 32", convnet, (x[:64], y[:64]), 64, (vx[:32], vy[:32]),
         loss_of),
        ("GPT, 2 layers of 64, 16 × 64 tokens, validation 8",
         lambda: GPT(256, 64, 2, 4, 64), tokens[:16], 16, tokens[16:], next_token),
    ):  # fmt: skip
        torch.manual_seed(0)
        found.append({"model": name} | cost(make(), batch, rows, validation, loss))
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/steadiness.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = load(0)
    found = {"costs": costs(data), "agreement": agreement(data, args.seeds), "epochs": EPOCHS}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found |= {"date": now, "hardware": hardware(torch.device("cpu")), "versions": versions(),
              "commit": commit()}  # fmt: skip
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

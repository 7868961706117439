"""How far do the rankings of two seeds agree, by how much of the validation set each step sees?

    python benchmarks/steady.py [--seeds N] [--out FILE.json]

scikit-learn's digits with 10 % flipped labels, a small MLP, AdamW, ten epochs. The same examples
are ranked by several runs with other seeds (weights, order of the batches, order of the validation
rows); agreement is the mean Spearman correlation over pairs of runs. Beside it: processor time of a
step, and what the halves of the validation set within one run say (``inrun.halves``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
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
from inrun.bench.machine import commit, hardware, versions
from inrun.demo.digits import Data, load
from inrun.report.metrics import spearman
from inrun.report.noise import noise

EPOCHS, BATCH, LR = 10, 64, 1e-3
MEANS = ("halves_agree", "steadiness")
SKIPPED = 0.1  # of the steps: the first are another matter (benchmarks/first_steps.py)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(data: Data, rows: int, seed: int) -> list[Any]:
    """The validation set in batches, in an order of its own."""
    x, y = data.validation
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return [(x[i], y[i]) for i in order.split(rows)]


WAYS: dict[str, tuple[int, dict[str, Any]]] = {  # rows of a batch, options
    "8 rows per step": (8, {"per_step": 1}),
    "8 rows per step, smooth=0.9": (8, {"per_step": 1, "smooth": 0.9}),
    "8 rows per step, smooth=0.97": (8, {"per_step": 1, "smooth": 0.97}),
    "the whole set (300 rows)": (100, {}),
    "the whole set, carry": (100, {"estimator": "carry"}),
}


def train(data: Data, seed: int, **options: Any) -> tuple[Any, float]:
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    run = inrun.watch(model, optimizer, loss=loss_of, audit_every=0, **options)
    begun, n = time.process_time(), len(data.y)
    for _ in range(EPOCHS):
        for rows in torch.randperm(n).split(BATCH):
            with run.batch(rows):
                loss_of(model, (data.x[rows], data.y[rows])).backward()
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return run, 1e3 * (time.process_time() - begun) / run.step


def values(run: Any) -> tuple[np.ndarray, np.ndarray]:
    """Sums of values by example: of all steps, and without the first ones."""
    history = run.history()
    late = history[history["step"] >= SKIPPED * run.step]
    return tuple(h.groupby("id")["value"].sum().sort_index().to_numpy() for h in (history, late))


def measure(data: Data, seeds: int) -> list[dict[str, Any]]:
    found = []
    for name, (rows, options) in WAYS.items():
        runs = [train(data, s, validation=batches(data, rows, s), **options) for s in range(seeds)]
        ranked = [values(run) for run, _ in runs]
        pairs = list(itertools.combinations(ranked, 2))
        agree = [float(np.mean([spearman(a[i], b[i]) for a, b in pairs])) for i in range(2)]
        row = {"way": name, "agreement": agree[0], "agreement_late": agree[1],
               "ms_per_step": float(np.median([ms for _, ms in runs]))}  # fmt: skip
        found.append(row)
        print(row, flush=True)
    labels = inrun.by_label(TensorDataset(*data.validation))
    for name, targets, options in (
        ("halves of the whole set", inrun.halves([data.validation]), {}),
        ("halves of each digit", inrun.halves(labels), {}),
        ("halves of each digit, carry", inrun.halves(labels), {"estimator": "carry"}),
    ):
        runs = [train(data, s, targets=targets, **options)[0] for s in range(2)]
        seen = [noise(run.targets, run.values(), None) for run in runs]
        row = {"way": name, "agreement": spearman(*(values(run)[0] for run in runs))}
        found.append(row | {k: float(np.mean([x[k] for x in seen])) for k in MEANS})
        print(found[-1], flush=True)
    other = train(data, 0, targets={"a": [data.validation], "b": [data.test]})[0].values()
    found.append({"way": "300 rows against 497 others, one run",
                  "agreement": spearman(other["a"], other["b"])})  # fmt: skip
    print(found[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/steady.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ways = measure(load(0), args.seeds)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    data = {"ways": ways, "seeds": args.seeds, "epochs": EPOCHS, "batch": BATCH, "lr": LR,
            "date": now, "hardware": hardware(torch.device("cpu")), "versions": versions(),
            "commit": commit()}  # fmt: skip
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

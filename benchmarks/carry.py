"""``estimator="carry"``: how much of the loss drop is credited, does it predict retraining, what
does it cost?

    python benchmarks/carry.py [--seeds N] [--subsets M] [--out FILE.json]

scikit-learn's digits with 10 % flipped labels, a small MLP, several optimizers, one target per
digit over the whole validation set. For AdamW with single images as targets: the Spearman
correlation between the sum of values of a random half of the data and what comes of training on
that half (mean over targets, two trainings each), and the AUROC of finding the flips by low values.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import inrun
from inrun.bench.machine import commit, hardware, versions
from inrun.demo.digits import Data, load
from inrun.ledger.audits import carry_summary
from inrun.report.metrics import auroc

EPOCHS, BATCH, REPEATED, QUERIES = 10, 64, 2, 50
ESTIMATORS = ("sgd", "secant", "carry")
OPTIMIZERS = {
    "AdamW 1e-3": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW 5e-3": lambda p: torch.optim.AdamW(p, lr=5e-3),
    "NAdam 2e-3": lambda p: torch.optim.NAdam(p, lr=2e-3),
    "SGD 0.05, momentum 0.9": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(data: Data, make: Any, seed: int, keep: np.ndarray, **options: Any) -> Any:
    """The model, the run if it was watched (``estimator=``), and milliseconds of a step."""
    torch.manual_seed(seed)
    model = network()
    optimizer = make(model.parameters())
    run = None
    if options:
        options = {"targets": inrun.by_label(TensorDataset(*data.validation))} | options
        run = inrun.watch(model, optimizer, loss=loss_of, **options)
    begun, steps = time.process_time(), 0
    for _ in range(EPOCHS):
        for rows in torch.from_numpy(keep)[torch.randperm(len(keep))].split(BATCH):
            if run is None:
                loss_of(model, (data.x[rows], data.y[rows])).backward()
            else:
                with run.batch(rows):
                    loss_of(model, (data.x[rows], data.y[rows])).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return model, run, 1e3 * (time.process_time() - begun) / steps


def images(data: Data) -> dict[str, Any]:
    """Single validation images as targets."""
    x, y = data.validation
    return {str(i): [(x[i : i + 1], y[i : i + 1])] for i in range(QUERIES)}


@torch.no_grad()
def losses(model: nn.Module, data: Data) -> np.ndarray:
    """Of each validation image."""
    x, y = data.validation
    return F.cross_entropy(model(x), y, reduction="none").numpy()


def outcome(model: nn.Module, data: Data) -> float:
    """The mean over digits of their validation loss."""
    y, own = data.validation[1].numpy(), losses(model, data)
    return float(np.mean([own[y == k].mean() for k in range(10)]))


def credited(data: Data, name: str, seed: int) -> dict[str, Any]:
    """How much of the loss drop of a run the estimators credit."""
    everything = np.arange(len(data.y))
    torch.manual_seed(seed)
    start = outcome(network(), data)
    model, run, _ = train(
        data, OPTIMIZERS[name], seed, everything, estimator=list(ESTIMATORS), audit_every=20
    )
    run.close()
    drop = start - outcome(model, data)
    found = {e: float(run.values(e)["value"].sum() / drop) for e in ESTIMATORS}
    whole = carry_summary(run.steps("carry"))
    parts = {k: x / drop for k, x in whole.items()}
    return {"optimizer": name, "seed": seed, "drop": drop, "credited": found, "parts": parts}


def agreement(data: Data, seed: int, subsets: int) -> dict[str, Any]:
    """Sums of values over random halves, against training on these halves."""
    make, n = OPTIMIZERS["AdamW 1e-3"], len(data.y)
    options = {"estimator": list(ESTIMATORS), "audit_every": 0, "targets": images(data)}
    _, run, _ = train(data, make, seed, np.arange(n), **options)
    run.close()
    rng = np.random.default_rng(seed)
    halves = [np.sort(rng.permutation(n)[: n // 2]) for _ in range(subsets)]
    real = np.array([
        np.mean([losses(train(data, make, 100 + r, half)[0], data) for r in range(REPEATED)], 0)
        for half in halves
    ])  # fmt: skip
    found: dict[str, Any] = {"seed": seed, "subsets": subsets}
    for e in ESTIMATORS:
        values = run.values(e).sort_values("id")
        by_image = values[[str(k) for k in range(QUERIES)]].to_numpy()
        sums = np.array([by_image[half].sum(0) for half in halves])
        lds = [spearmanr(sums[:, k], -real[:, k]).statistic for k in range(QUERIES)]
        score = -values["value"].to_numpy()
        found[e] = {"lds": float(np.mean(lds)), "auroc": float(auroc(score, data.flipped))}
    return found


def costs(data: Data, seed: int) -> dict[str, Any]:
    """Milliseconds of processor time of a step, the median of five trainings, with one target, and
    what the window keeps."""
    make, everything = OPTIMIZERS["AdamW 1e-3"], np.arange(len(data.y))
    one: dict[str, Any] = {"targets": {"validation": [data.validation]}, "audit_every": 0}
    ways: dict[str, dict[str, Any]] = {"bare": {}}
    ways |= {e: {**one, "estimator": e} for e in ("secant", "carry")}
    ways["secant and carry"] = {**one, "estimator": ["secant", "carry"]}
    found, times = dict[str, Any](), dict[str, list[float]]()
    for _ in range(5):
        for name, options in ways.items():
            _, run, ms = train(data, make, seed, everything, **options)
            times.setdefault(name, []).append(ms)
            if name == "carry":
                window = run._entries._carry
                found["window_bytes"] = window.bytes
                found["window_steps"] = window.steps + window.together
            if run is not None:
                run.close()
    found |= {name: float(np.median(x)) for name, x in times.items()}
    found["parameters"] = sum(p.numel() for p in network().parameters())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--subsets", type=int, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/carry.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shares, lds = [], []
    for seed in range(args.seeds):
        data = load(seed)
        for name in OPTIMIZERS:
            shares.append(credited(data, name, seed))
            print(shares[-1], flush=True)
        lds.append(agreement(data, seed, args.subsets))
        print(lds[-1], flush=True)
    cost = costs(load(0), 0)
    print(cost)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    data = {"credited": shares, "agreement": lds, "ms_per_step": cost, "epochs": EPOCHS,
            "batch": BATCH, "date": now, "hardware": hardware(torch.device("cpu")),
            "versions": versions(), "commit": commit()}  # fmt: skip
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

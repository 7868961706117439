"""How near are the values of single steps to exact Shapley values?

A byte-level GPT with 2 layers learns CPython's documentation text with AdamW, batch 10, float64.
At some steps every one of the 2^10 coalitions of the batch takes the real optimizer's step, and
the exact Shapley values of the validation loss are compared with the three estimators'. Writes
benchmarks/results/fidelity.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import inrun
from zoo import GPT

ESTIMATORS = ["secant", "tangent", "sgd", "secant+gauss2"]
LENGTH = 32


def loss(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def text() -> torch.Tensor:
    data = np.frombuffer("".join(topics.values()).encode("ascii", "replace"), dtype=np.uint8)
    rows = torch.from_numpy(data[: len(data) // LENGTH * LENGTH].copy()).long().view(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def measure(lr: float, probes: list[int]) -> list[dict[str, object]]:
    torch.manual_seed(0)
    rows = text()
    validation, train = rows[:16], rows[16:]
    model = GPT(128, 32, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    run = inrun.watch(
        model, optimizer, validation=[validation], loss=loss, estimator=ESTIMATORS, audit_every=0
    )
    found = []
    for step in range(max(probes) + 1):
        ids = torch.randint(0, len(train), (10,))
        check = run.check() if step in probes else None
        with run.batch(ids), contextlib.redirect_stdout(io.StringIO()):
            loss(model, train[ids]).backward()
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer.step()
        optimizer.zero_grad()
        if check is None or check.table is None:
            continue
        exact = check.table["exact"].to_numpy()
        for name in ESTIMATORS:
            history = run.history(name)
            value = history.loc[history["step"] == step, "value"].to_numpy()
            found.append({
                "lr": lr, "step": step, "estimator": name,
                "R": float(np.corrcoef(value, exact)[0, 1]),
                "relative_error": float(np.linalg.norm(value - exact) / np.linalg.norm(exact)),
                "sum_error": float(abs(value.sum() - exact.sum()) / np.abs(exact).sum()),
            })  # fmt: skip
            R, error = found[-1]["R"], found[-1]["relative_error"]
            print(f"lr {lr:.0e} step {step:3d} {name:14} R {R:.4f} error {error:.3f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="*", default=[2, 5, 20, 100])
    parser.add_argument("--lr", type=float, nargs="*", default=[1e-5, 1e-4, 1e-3])
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/fidelity.json"))
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    results = [r for lr in options.lr for r in measure(lr, options.steps)]
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    environment = {
        "processor": platform.machine(), "torch": torch.__version__, "inrun": inrun.__version__,
        "python": platform.python_version(), "commit": commit,
    }  # fmt: skip
    Path(options.out).write_text(
        json.dumps({"environment": environment, "results": results}, indent=1)
    )


if __name__ == "__main__":
    main()

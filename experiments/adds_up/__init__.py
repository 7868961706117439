"""Do the values add up? Ours, not the paper's: batch share, momentum share and residual of a whole
run on a fixed validation set, for several optimizers.

At each step the validation loss before it, without its batch and with it are measured. Their
differences are the momentum share and the batch share U(∅) − U(B); the values of the step should
add up to the second. explained = Σ values / Σ batch shares, over the run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import inrun
from experiments.common import tasks
from experiments.common.figures import drawn_by
from experiments.common.game import ESTIMATORS, numbers
from experiments.common.markdown import heading, row
from experiments.common.parts import Context, Experiment, Results, Settings

RUNS = {  # optimizer and learning rate
    "adamw-1e-3": ("adamw", 1e-3),
    "adamw-3e-4": ("adamw", 3e-4),
    "nadam-1e-3": ("nadam", 1e-3),
    "rmsprop-1e-3": ("rmsprop", 1e-3),
    "sgd-1e-1": ("sgd", 1e-1),
    "sgd-momentum-5e-2": ("sgd-momentum", 5e-2),
}
POINTS = 100  # of a curve in the committed results
WORST = 5  # steps


def parts(size: str) -> dict[str, Settings]:
    common: Settings = {"model": "gpt", "seed": 0, "examples": 2000, "validation": 16, "batch": 10}
    runs = dict(RUNS)
    if size == "tiny":
        common |= {"length": 12, "width": 8, "layers": 1, "validation": 4, "steps": 40}
        runs = {k: v for k, v in RUNS.items() if k in ("adamw-1e-3", "rmsprop-1e-3")}
    elif size == "smoke":
        common |= {"steps": 200, "validation": 8}
    else:
        common |= {"length": 48, "width": 96, "layers": 3, "heads": 4, "validation": 32}
        common |= {"steps": 120, "batch": 16}
        del runs["sgd-momentum-5e-2"]
    return {k: common | {"optimizer": name, "lr": lr} for k, (name, lr) in runs.items()}


def measure(settings: Settings, context: Context) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    task = tasks.make(settings, context, torch.float64)
    optimizer = tasks.optimizer(settings["optimizer"], task.model, settings["lr"])
    order = torch.Generator().manual_seed(settings["seed"] + 1)
    with inrun.watch(
        task.model, optimizer, validation=[task.validation], loss=task.loss,
        estimator=list(ESTIMATORS), audit_every=1,
    ) as run:  # fmt: skip
        for _ in context.track(settings["steps"]):
            ids = torch.randperm(task.examples, generator=order)[: settings["batch"]]
            with run.batch(ids):
                task.loss(task.model, task.batch(ids.to(context.device))).backward()
            optimizer.step()
            optimizer.zero_grad()
        table = run.steps()
        found: dict[str, Any] = {
            "optimizer": settings["optimizer"],
            "lr": settings["lr"],
            "loss": numbers(table["loss"].to_numpy()),
            "batch_share": numbers(table["batch_share"].to_numpy()),
            "momentum_share": numbers(table["momentum_share"].to_numpy()),
            "sum": {e: numbers(run.steps(e)["sum"].to_numpy()) for e in ESTIMATORS},
            "size": {},
        }
        for e in ESTIMATORS:
            size = run.history(e).assign(size=lambda h: h["value"].abs()).groupby("step")["size"]
            found["size"][e] = numbers(size.sum().to_numpy())
    return found


def summarise(results: Results) -> dict[str, Any]:
    return {name: one(r) for name, r in results.items()}


def one(r: dict[str, Any]) -> dict[str, Any]:
    """Totals, the residual per step, and thinned cumulative curves."""
    batch, momentum = np.array(r["batch_share"]), np.array(r["momentum_share"])
    sums = {e: np.array(v) for e, v in r["sum"].items()}
    residual = {e: np.abs(batch - v) / np.array(r["size"][e]) for e, v in sums.items()}
    thin = slice(None, None, max(1, len(batch) // POINTS))
    return {
        "optimizer": r["optimizer"],
        "lr": r["lr"],
        "steps": len(batch),
        "loss": [r["loss"][0], r["loss"][-1] - momentum[-1] - batch[-1]],
        "batch_share": float(batch.sum()),
        "momentum_share": float(momentum.sum()),
        "explained": {e: float(v.sum() / batch.sum()) for e, v in sums.items()},
        "without_worst": {e: without_worst(batch, v) for e, v in sums.items()},
        "largest": largest(batch, momentum, np.array(r["loss"])),
        "residual": {  # |batch share − Σ values| / Σ|value| of single steps
            e: {
                "median": float(np.median(x)),
                "p95": float(np.quantile(x, 0.95)),
                "max": float(x[5:].max()),  # from step 5 on
                "within_1_percent": float((x[5:] <= 0.01).mean()),
            }
            for e, x in residual.items()
        },
        "curves": {
            "step": np.arange(len(batch))[thin].tolist(),
            "batch_share": numbers(batch.cumsum()[thin], 4),
            "momentum_share": numbers(momentum.cumsum()[thin], 4),
            "sum": {e: numbers(v.cumsum()[thin], 4) for e, v in sums.items()},
        },
    }


def without_worst(batch: np.ndarray, values: np.ndarray) -> float:
    """Explained, leaving out the few steps where most is missing."""
    rest = np.argsort(np.abs(batch - values))[:-WORST]
    return float(values[rest].sum() / batch[rest].sum())


def largest(batch: np.ndarray, momentum: np.ndarray, loss: np.ndarray) -> dict[str, float]:
    """The step whose batch did most, in either direction, and the loss before it."""
    i = int(np.abs(batch).argmax())
    return {
        "step": i, "loss": float(loss[i]), "batch_share": float(batch[i]),
        "momentum_share": float(momentum[i]),
    }  # fmt: skip


def headline(summary: dict[str, Any]) -> str:
    return "\n".join(
        f"{name:18} batch share {c['batch_share']:.3f} + momentum share "
        f"{c['momentum_share']:.3f}; explained: "
        + ", ".join(f"{e} {x:.1%}" for e, x in c["explained"].items())
        for name, c in summary.items()
    )


def table(committed: dict[str, Any]) -> str:
    about = ("size", "optimizer, learning rate", "loss", "batch share", "momentum share")
    lines = heading(*about, *ESTIMATORS.values())
    for size, data in committed.items():
        for c in data["summary"].values():
            cells = (
                size, f"{c['optimizer']}, {c['lr']:.0e}",
                f"{c['loss'][0]:.2f} → {c['loss'][1]:.2f}", f"{c['batch_share']:.3f}",
                f"{c['momentum_share']:.3f}",
            )  # fmt: skip
            explained = (
                f"{c['explained'][e]:.1%}<br>±{c['residual'][e]['p95']:.1%}" for e in ESTIMATORS
            )
            lines.append(row(*cells, *explained))
    return "\n".join(lines)


def steps(committed: dict[str, Any]) -> str:
    """Single steps from step 5 on: how many add up to within 1 %, and the worst; then what is
    explained of all steps but the worst few."""
    names = ("tangent", "secant", "secant+gauss2")
    lines = heading(
        "size", "optimizer, learning rate", *(ESTIMATORS[e] for e in names),
        "largest batch share: step, loss before it",
    )  # fmt: skip
    for size, data in committed.items():
        for c in data["summary"].values():
            cells = (
                f"{c['residual'][e]['within_1_percent']:.0%}, worst "
                f"{c['residual'][e]['max']:.1%}; {c['without_worst'][e]:.1%}"
                for e in names
            )
            top = c["largest"]
            most = f"{top['batch_share']:+.2f}: {top['step']}, {top['loss']:.2f}"
            lines.append(row(size, f"{c['optimizer']}, {c['lr']:.0e}", *cells, most))
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="adds-up",
    claim="ours: values add up to what the batches did to the loss (explained = 100 %)",
    parts=parts,
    measure=measure,
    summarise=summarise,
    headline=headline,
    tables={"reproduce-adds-up": table, "reproduce-adds-up-steps": steps},
    figures={"reproduce-adds-up.png": drawn_by("experiments.adds_up.figure")},
)

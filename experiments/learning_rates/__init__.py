"""Figure 3: the same at learning rates from 1e-7 to 1e-3, and on to 1e-2, where things break."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from experiments.common import local
from experiments.common.figures import drawn_by
from experiments.common.game import ESTIMATORS
from experiments.common.markdown import heading, row
from experiments.common.parts import Experiment, Results, Settings
from experiments.fidelity import GPT2, LARGE, MODELS, SMALL

RATES = [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2]


def parts(size: str) -> dict[str, Settings]:
    common: Settings = {"batch": 10, "probes": [0, 5, 20, 100]}
    rates, models = RATES, dict(MODELS)
    if size == "tiny":
        rates, models = [1e-5, 1e-3], {"convnet": MODELS["convnet"]}
        common = SMALL | {"batch": 6, "probes": [20, 100, 101]}
    elif size == "paper":
        common["probes"] = [5, 20, 100]
        models = {k: m if k == "convnet" else m | LARGE for k, m in MODELS.items()}
    found = {
        f"{name}-lr{lr:.0e}-seed0": model | {"seed": 0, "lr": lr} | common
        for name, model in models.items()
        for lr in rates
    }
    if size == "paper":
        large = GPT2 | {"seed": 0, "batch": 10, "probes": [20, 100]}
        some = [1e-7, 1e-5, 1e-3, 1e-2]
        found = {f"gpt2-small-lr{lr:.0e}-seed0": large | {"lr": lr} for lr in some} | found
    return found


def summarise(results: Results) -> dict[str, Any]:
    probes = local.rows(results)
    return {"probes": probes, "cells": cells(probes), "goals": local.goals(probes)}


def cells(probes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model and learning rate: the lowest R and the largest error from step 20 on."""
    found = []
    for model, lr in dict.fromkeys((r["model"], r["lr"]) for r in probes):
        late = [r for r in probes if (r["model"], r["lr"]) == (model, lr) and r["step"] >= 20]
        if not late:  # the training diverged before
            continue
        found.append(
            {"model": model, "lr": lr}
            | {
                e: {
                    "R": min(r[e]["R"] for r in late),
                    "error": max(r[e]["error"] for r in late),
                    "sum_error": max(r[e]["sum_error"] for r in late),
                }
                for e in ESTIMATORS
            }
        )
    return found


def headline(summary: dict[str, Any]) -> str:
    lines = [
        f"{c['model']:10} lr {c['lr']:.0e} lowest R from step 20 on: "
        + ", ".join(f"{e} {c[e]['R']:.4f}" for e in ESTIMATORS)
        for c in summary["cells"]
    ]
    return "\n".join([*lines, local.goals_table(summary)])


def table(committed: dict[str, Any]) -> str:
    """Lowest R and largest relative error of each estimator by model and learning rate."""
    lines = heading("size", "model", "learning rate", *ESTIMATORS.values())
    for size, data in committed.items():
        for c in data["summary"]["cells"]:
            lines.append(row(size, c["model"], f"{c['lr']:.0e}", *pairs(c, ESTIMATORS)))
    return "\n".join(lines)


def by_step(committed: dict[str, Any]) -> str:
    """For docs/accuracy.md: the byte-level GPT, three learning rates, every probed step."""
    names = {"secant": "inrun (secant)", "tangent": "the paper (tangent)", "sgd": "SGD proxy"}
    lines = heading("learning rate", "step", *names.values())
    for r in committed["smoke"]["summary"]["probes"]:
        if r["model"] == "gpt" and 1e-5 <= r["lr"] <= 1e-3:
            lines.append(row(f"{r['lr']:.0e}", str(r["step"]), *pairs(r, names)))
    return "\n".join(lines)


def pairs(found: dict[str, Any], estimators: Iterable[str]) -> Iterator[str]:
    return (f"{found[e]['R']:.4f} / {found[e]['error']:.1%}" for e in estimators)


EXPERIMENT = Experiment(
    name="learning-rates",
    claim="Figure 3: Adam-aware R > 0.96 for learning rates from 1e-7 to 1e-3",
    parts=parts,
    measure=local.measure,
    summarise=summarise,
    headline=headline,
    tables={
        "fidelity": by_step, "reproduce-learning-rates": table,
        "reproduce-learning-rates-goals": local.goals_tables,
    },
    figures={"reproduce-learning-rates.png": drawn_by("experiments.learning_rates.figure")},
)  # fmt: skip

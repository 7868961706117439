"""Estimators against exact local Shapley values along a training: shared by ``fidelity`` (seeds and
stages) and ``learning-rates``."""

from __future__ import annotations

from typing import Any

import torch

from experiments.common import tasks
from experiments.common.game import ESTIMATORS, trajectory
from experiments.common.markdown import heading, row
from experiments.common.parts import Context, Results, Settings
from experiments.common.statistics import interval

STAGES = {"0–4": (0, 5), "5–19": (5, 20), "20–99": (20, 100), "100+": (100, 10**9)}
GOALS = {  # for secant + midpoint: smallest R, largest relative error
    "5–19": (0.998, None), "20–99": (None, 0.03), "100+": (0.999, 0.01),
}  # fmt: skip
SUM_GOAL = 0.01
MEASURES = ("R", "spearman", "error", "sum_error")


def measure(settings: Settings, context: Context) -> list[dict[str, Any]]:
    """One training run with probes: settings ``model``, ``seed``, ``lr``, ``probes``, ``batch``."""
    torch.set_default_dtype(torch.float64)
    task = tasks.make(settings, context, torch.float64)
    optimizer = tasks.optimizer("adamw", task.model, settings["lr"])
    found = trajectory(
        task, optimizer, settings["probes"], settings["batch"], settings["seed"], context
    )
    about = {k: settings[k] for k in ("model", "seed", "lr")}
    return [about | {"step": step} | result for step, result in found]


def rows(results: Results) -> list[dict[str, Any]]:
    """All probes without the values of single examples."""
    return [
        {k: r[k] for k in ("model", "seed", "lr", "step")}
        | {e: {m: round(r["estimators"][e][m], 7) for m in MEASURES} for e in ESTIMATORS}
        for part in results.values()
        for r in part
    ]


def stage_of(step: int) -> str:
    return next(name for name, (low, high) in STAGES.items() if low <= step < high)


def cells(probes: list[dict[str, Any]], by: tuple[str, ...]) -> list[dict[str, Any]]:
    """Means over probes of the same stage (and ``by``), with intervals over seeds."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in probes:
        key = (*(r[k] for k in by), stage_of(r["step"]))
        grouped.setdefault(key, []).append(r)
    return [
        dict(zip((*by, "stage"), key, strict=True))
        | {
            e: {m: interval([r[e][m] for r in group], [r["seed"] for r in group]) for m in MEASURES}
            for e in ESTIMATORS
        }
        for key, group in grouped.items()
    ]


def goals(probes: list[dict[str, Any]], largest_lr: float = 1e-3) -> dict[str, Any]:
    """How many probes reach what was promised for secant + midpoint, and which do not."""
    missed, counted = [], 0
    for r in probes:
        stage = stage_of(r["step"])
        if r["lr"] > largest_lr or stage not in GOALS:
            continue
        counted += 1
        (R, error), found = GOALS[stage], r["secant"]
        if (
            (R is not None and found["R"] < R)
            or (error is not None and found["error"] > error)
            or found["sum_error"] > SUM_GOAL
        ):
            missed.append(r)
    return {"probes": counted, "missed": missed}


def goals_table(summary: dict[str, Any]) -> str:
    """The probes that fall short, with gauss2 beside them."""
    found = summary["goals"]
    reached = found["probes"] - len(found["missed"])
    lines = [f"{reached} of {found['probes']} probes reach the goals."]
    if found["missed"]:
        shown = {"secant": "secant + midpoint", "secant+gauss2": "secant + gauss2"}
        columns = (f"{name}: R / error / sum" for name in shown.values())
        lines += ["", *heading("short of them", "learning rate", "step", *columns)]
        for r in found["missed"]:
            cells = (
                f"{r[e]['R']:.4f} / {r[e]['error']:.1%} / {r[e]['sum_error']:.2%}" for e in shown
            )
            who = f"{r['model']}, seed {r['seed']}"
            lines.append(row(who, f"{r['lr']:.0e}", str(r["step"]), *cells))
    return "\n".join(lines)


def goals_tables(committed: dict[str, Any]) -> str:
    """The same for all sizes."""
    return "\n\n".join(f"{s}: {goals_table(d['summary'])}" for s, d in committed.items())

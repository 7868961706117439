"""Figure 2a: scores accumulated along one and the same AdamW training, by the SGD formula and by
the Adam-aware ones."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch

import inrun
from experiments.common import tasks
from experiments.common.figures import drawn_by
from experiments.common.game import ESTIMATORS, finite, numbers
from experiments.common.markdown import heading, row
from experiments.common.parts import Context, Experiment, Results, Settings
from inrun.report.metrics import bottom_overlap, pearson, spearman

NAMES = ("tangent", "sgd", "secant")
EARLY = 20  # steps; before them the estimators differ most
POINTS = 400  # of the scatter in the committed results


def parts(size: str) -> dict[str, Settings]:
    common: Settings = {"lr": 1e-3, "batch": 16, "epochs": 4, "validation": 16}
    gpt = common | {"model": "gpt", "examples": 640}
    digits = common | {"model": "convnet", "examples": 1024, "validation": 64}
    if size == "tiny":
        return {"convnet-seed0": digits | {"examples": 128, "epochs": 6, "seed": 0}}
    if size == "smoke":
        return {
            f"{m['model']}-seed{seed}": m | {"seed": seed} for m in (gpt, digits) for seed in (0, 1)
        }
    gpt2 = common | {"model": "gpt2-small", "length": 64, "examples": 2000, "epochs": 2, "lr": 3e-4}
    return {"gpt2-small-seed0": gpt2 | {"seed": 0}}


def measure(settings: Settings, context: Context) -> dict[str, Any]:
    task = tasks.make(settings, context, torch.float32)
    optimizer = tasks.optimizer("adamw", task.model, settings["lr"])
    generator = torch.Generator().manual_seed(settings["seed"] + 1)
    order = torch.cat(
        [torch.randperm(task.examples, generator=generator) for _ in range(settings["epochs"])]
    ).split(settings["batch"])
    with inrun.watch(
        task.model, optimizer, validation=[task.validation], loss=task.loss,
        estimator=list(NAMES), audit_every=0,
    ) as run:  # fmt: skip
        for step in context.track(len(order)):
            ids = order[step]
            with run.batch(ids):
                task.loss(task.model, task.batch(ids.to(context.device))).backward()
            optimizer.step()
            optimizer.zero_grad()
        values = {e: run.values(e)["value"].to_numpy() for e in NAMES}
        history = {e: run.history(e).query(f"step >= {EARLY}") for e in NAMES}
        late = {e: h.groupby("id")["value"].sum().to_numpy() for e, h in history.items()}
    with torch.no_grad():
        loss = float(task.loss(task.model, task.validation))
    return {"model": settings["model"], "seed": settings["seed"], "steps": len(order), "loss": loss,
            "values": {e: numbers(v, 5) for e, v in values.items()},
            "late": {e: numbers(v, 5) for e, v in late.items()}}  # fmt: skip


def summarise(results: Results) -> dict[str, Any]:
    return {name: one(r) for name, r in results.items()}


def one(r: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": r["model"], "seed": r["seed"], "steps": r["steps"],
        "examples": len(r["values"]["sgd"]),
        "pairs": agreement(r["values"]),
        "late": agreement(r["late"]),
        "scatter": {e: numbers(v[:POINTS], 4) for e, v in r["values"].items()},
    }  # fmt: skip


def agreement(values: dict[str, list[float]]) -> dict[str, Any]:
    """Every pair of estimators: do they agree about the examples?"""
    return {
        f"{a} / {b}": {
            "pearson": finite(pearson(values[a], values[b])),
            "spearman": finite(spearman(values[a], values[b])),
            "bottom_tenth": bottom_overlap(values[a], values[b], max(1, len(values[a]) // 10)),
        }
        for a, b in combinations(NAMES, 2)
    }


def headline(summary: dict[str, Any]) -> str:
    return "\n".join(
        f"{name:18} {pair:18} Pearson {c['pearson']:.3f} Spearman {c['spearman']:.3f}"
        for name, s in summary.items()
        for pair, c in s["pairs"].items()
    )


def table(committed: dict[str, Any]) -> str:
    lines = heading(
        "size", "run", "examples, steps", "pair", "Pearson", "Spearman", "lowest tenth in common",
        f"Pearson, Spearman from step {EARLY} on",
    )  # fmt: skip
    for size, data in committed.items():
        for name, s in data["summary"].items():
            for pair, c in s["pairs"].items():
                late = s["late"][pair]
                cells = (
                    size, name, f"{s['examples']:,}, {s['steps']:,}", pair, f"{c['pearson']:.3f}",
                    f"{c['spearman']:.3f}", f"{c['bottom_tenth']:.0%}",
                    f"{late['pearson']:.3f}, {late['spearman']:.3f}",
                )  # fmt: skip
                lines.append(row(*cells))
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="accumulated",
    claim="Figure 2a: accumulated SGD-proxy and Adam-aware scores of one Adam run agree weakly",
    parts=parts,
    measure=measure,
    summarise=summarise,
    headline=headline,
    tables={"reproduce-accumulated": table},
    figures={"reproduce-accumulated.png": drawn_by("experiments.accumulated.figure")},
)
assert set(NAMES) <= set(ESTIMATORS)

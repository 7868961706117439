"""Figure 2b: are the values of a step its exact local Shapley values?

Three kinds of models, several seeds, training stages from the very first step on; AdamW, batch 10,
float64, all 2^10 coalitions.
"""

from __future__ import annotations

from typing import Any

from experiments.common import local
from experiments.common.figures import drawn_by
from experiments.common.game import ESTIMATORS
from experiments.common.markdown import heading, row
from experiments.common.parts import Experiment, Results, Settings
from experiments.common.statistics import shown

LR = 3e-4
MODELS: dict[str, Settings] = {
    "gpt": {"model": "gpt", "examples": 2000, "validation": 8},
    "encoder": {"model": "encoder", "examples": 1000, "validation": 8, "length": 24},
    "convnet": {"model": "convnet", "examples": 1000, "validation": 32},
}
SMALL = {"length": 12, "width": 8, "layers": 1, "heads": 2, "validation": 4}
LARGE = {"length": 48, "width": 96, "layers": 3, "heads": 4, "validation": 16}
GPT2 = {"model": "gpt2-small", "examples": 2000, "validation": 4, "length": 64}


def parts(size: str) -> dict[str, Settings]:
    common: Settings = {"lr": LR, "batch": 10}
    if size == "tiny":
        common |= SMALL | {"batch": 6, "probes": [0, 5, 20, 100, 101, 102], "lr": 1e-3}
        seeds = 1
    elif size == "smoke":
        common |= {"probes": [0, 2, 5, 10, 20, 50, 100, 200]}
        seeds = 3
    else:
        common |= {"probes": [0, 5, 20, 100, 200]}
        seeds = 3
    found = {
        f"{name}-seed{seed}": model | {"seed": seed} | common
        for name, model in MODELS.items()
        for seed in range(seeds)
    }
    if size == "paper":
        for name in list(found):
            if not name.startswith("convnet"):
                found[name] = found[name] | LARGE
        gpt2 = GPT2 | {"seed": 0, "lr": LR, "batch": 10, "probes": [0, 5, 20, 100]}
        found = {"gpt2-small-seed0": gpt2} | found
    return found


def summarise(results: Results) -> dict[str, Any]:
    probes = local.rows(results)
    return {
        "cells": local.cells(probes, ("model",)),
        "goals": local.goals(probes),
        "scatter": scatter(results),
    }


def scatter(results: Results) -> list[dict[str, Any]]:
    """The values of the last probe of each part of the first model: what Figure 2b shows."""
    first = next(iter(results.values()), [{}])[0].get("model")
    return [
        {"step": part[-1]["step"], "exact": part[-1]["exact"]}
        | {e: part[-1]["estimators"][e]["values"] for e in ESTIMATORS}
        for part in results.values()
        if part[-1]["model"] == first
    ]


def headline(summary: dict[str, Any]) -> str:
    lines = [
        f"{c['model']:10} steps {c['stage']:6} R: "
        + ", ".join(f"{e} {c[e]['R']['mean']:.4f}" for e in ESTIMATORS)
        for c in summary["cells"]
    ]
    return "\n".join([*lines, local.goals_table(summary)])


def table(committed: dict[str, Any]) -> str:
    """Every size, model and stage: R with its interval, relative error."""
    lines = heading("size", "model", "steps", *ESTIMATORS.values())
    for size, data in committed.items():
        for c in data["summary"]["cells"]:
            cells = (f"{shown(c[e]['R'])}<br>error {c[e]['error']['mean']:.1%}" for e in ESTIMATORS)
            lines.append(row(size, c["model"], c["stage"], *cells))
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="fidelity",
    claim="Figure 2b: against exact local Shapley values Adam-aware R = 0.9992, SGD 0.8434",
    parts=parts,
    measure=local.measure,
    summarise=summarise,
    headline=headline,
    tables={"reproduce-fidelity": table, "reproduce-fidelity-goals": local.goals_tables},
    figures={"reproduce-fidelity.png": drawn_by("experiments.fidelity.figure")},
)

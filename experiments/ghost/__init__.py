"""Figure 2c: do the two cheap forms give the scores of fully materialised gradients?

At some steps of a training every example's whole gradient is formed by autograd, one row at a
time, and multiplied by J_t∇ℓ, the paper's formula of J_t (Appendix A) written out. inrun's tangent
estimator gives the same scores from activations and errors ("ghost") or from the gradients of one
layer at a time ("materialise").
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

import inrun
from experiments.common import tasks
from experiments.common.figures import drawn_by
from experiments.common.game import numbers
from experiments.common.markdown import heading, row
from experiments.common.parts import Context, Experiment, Results, Settings
from experiments.common.tasks import Task
from inrun.report.metrics import pearson

FORMS = ("ghost", "materialise")
PRECISIONS = ("float32", "bfloat16")


def parts(size: str) -> dict[str, Settings]:
    common: Settings = {"model": "gpt", "seed": 0, "lr": 1e-3, "examples": 500, "validation": 8,
                        "batch": 16, "probes": [5, 10, 20, 40, 60, 80, 100]}  # fmt: skip
    encoder = common | {"model": "encoder", "length": 24}
    if size == "tiny":
        common |= {"length": 12, "width": 8, "layers": 1, "probes": [5, 20]}
        models = {"gpt": common}
    elif size == "smoke":
        models = {"gpt": common, "encoder": encoder}
    else:
        large = {"model": "gpt2-small", "length": 64, "lr": 3e-4, "probes": [5, 20, 50, 100]}
        models = {"gpt2-small": common | large}
    return {
        f"{name}-{precision}": model | {"precision": precision}
        for name, model in models.items()
        for precision in PRECISIONS
    }


def measure(settings: Settings, context: Context) -> dict[str, Any]:
    """Training and scores in this precision (bfloat16: autocast); the truth also in float32."""
    task = tasks.make(settings, context, torch.float32)
    optimizer = tasks.optimizer("adamw", task.model, settings["lr"])
    order = torch.Generator().manual_seed(settings["seed"] + 1)
    low = settings["precision"] == "bfloat16"
    found: dict[str, list[float]] = {k: [] for k in (*FORMS, "same", "float32")}
    for step in context.track(max(settings["probes"]) + 1):
        ids = torch.randperm(task.examples, generator=order)[: settings["batch"]]
        ids = ids.to(context.device)
        if step in settings["probes"]:
            for form in FORMS:
                found[form] += scores(task, optimizer, ids, form, low)
            found["same"] += materialised(task, optimizer, ids, low)
            if low:
                found["float32"] += materialised(task, optimizer, ids, False)
        with precision(ids.device, low):
            loss = task.loss(task.model, task.batch(ids))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not low:
        found["float32"] = found["same"]
    return {"model": settings["model"], "precision": settings["precision"],
            "scores": {k: numbers(np.array(v), 10) for k, v in found.items()}}  # fmt: skip


def precision(device: torch.device, low: bool) -> Any:
    return torch.autocast(device.type, torch.bfloat16) if low else nullcontext()


def scores(task: Task, optimizer: Optimizer, ids: Tensor, form: Any, low: bool) -> list[float]:
    """inrun's tangent scores of the step that a copy of model and optimizer takes."""
    model, twin = copy.deepcopy((task.model, optimizer))
    with inrun.watch(
        model, twin, validation=[task.validation], loss=task.loss, estimator="tangent",
        form=form, audit_every=0,
    ) as run:  # fmt: skip
        with run.batch(np.arange(len(ids))), precision(ids.device, low):
            loss = task.loss(model, task.batch(ids))
            loss.backward()
        twin.step()
        return run.history()["value"].tolist()


def materialised(task: Task, optimizer: Optimizer, ids: Tensor, low: bool) -> list[float]:
    """η⟨J_t∇ℓ, g_i⟩ from whole gradients, as one would write it down."""
    params = list(task.model.parameters())

    def gradient(batch: Any) -> Sequence[Tensor]:
        with precision(ids.device, low):
            loss = task.loss(task.model, batch)
        return torch.autograd.grad(loss, params)

    G, val = gradient(task.batch(ids)), gradient(task.validation)
    u = [
        jacobian(g, optimizer.state[p], optimizer.param_groups[0]) * v
        for p, g, v in zip(params, G, val, strict=True)
    ]
    found = []
    for i in range(len(ids)):
        g_i = gradient(task.batch(ids[i : i + 1]))
        total = sum((a.double() * b.double()).sum() for a, b in zip(u, g_i, strict=True))
        found.append(float(total) / len(ids))
    return found


def jacobian(g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """ηJ_t, the derivative of Adam's update at g, bias correction included; 0 where v = g = 0."""
    (beta1, beta2), eps, t = group["betas"], group["eps"], float(state["step"]) + 1
    c1, c2 = 1 - beta1**t, 1 - beta2**t
    m = beta1 * state["exp_avg"] + (1 - beta1) * g
    root = ((beta2 * state["exp_avg_sq"] + (1 - beta2) * g * g) / c2).sqrt()
    J = (1 - beta1) / (root + eps) - m * (1 - beta2) * g / (c2 * root * (root + eps) ** 2)
    return group["lr"] / c1 * torch.where(root == 0, 0.0, J)


def summarise(results: Results) -> dict[str, Any]:
    found = {}
    for name, r in results.items():
        values = {k: np.array(v) for k, v in r["scores"].items()}
        found[name] = {
            "model": r["model"],
            "precision": r["precision"],
            "scores": len(values["same"]),
            "against": {
                f"{form}, {truth}": {
                    "R": pearson(values[form], values[truth]),
                    "error": float(
                        np.linalg.norm(values[form] - values[truth]) / np.linalg.norm(values[truth])
                    ),
                }
                for form in FORMS
                for truth in ("same", "float32")
            },
            "scatter": {k: numbers(v[:200], 5) for k, v in values.items()},
        }
    return found


def headline(summary: dict[str, Any]) -> str:
    return "\n".join(
        f"{name:20} {key:22} 1 − R = {1 - c['R']:.1e}, relative error {c['error']:.1e}"
        for name, s in summary.items()
        for key, c in s["against"].items()
    )


def table(committed: dict[str, Any]) -> str:
    lines = heading(
        "size", "model", "precision", "form", "R against fully materialised, same precision",
        "R against float32",
    )  # fmt: skip
    for size, data in committed.items():
        for s in data["summary"].values():
            for form in FORMS:
                cells = (
                    f"{c['R']:.8f} (error {c['error']:.1e})"
                    for c in (s["against"][f"{form}, {truth}"] for truth in ("same", "float32"))
                )
                lines.append(row(size, s["model"], s["precision"], form, *cells))
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="ghost",
    claim="Figure 2c: ghost scores against fully materialised ones, R ≈ 0.999984",
    parts=parts,
    measure=measure,
    summarise=summarise,
    headline=headline,
    tables={"reproduce-ghost": table},
    figures={"reproduce-ghost.png": drawn_by("experiments.ghost.figure")},
)

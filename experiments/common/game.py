"""The local game of one step: exact Shapley values, and the estimators beside them.

U(S) is the validation loss after the step that the coalition S of the batch would have caused, with
the optimizer's state held fixed. Nothing here uses the library's fast path: per-example gradients
are ``autograd.grad`` row by row, steps are steps of the real optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

import inrun
from experiments.common.parts import Context
from experiments.common.stacked import losses, stacked
from experiments.common.tasks import Task
from inrun.report.metrics import pearson, spearman

ESTIMATORS = {  # as inrun calls them: as the docs do
    "tangent": "tangent + current (the paper)",
    "secant": "secant + midpoint (inrun)",
    "secant+gauss2": "secant + gauss2",
    "sgd": "SGD proxy",
}


def row_gradients(task: Task, ids: Tensor) -> list[Tensor]:
    """g_i of every row of the batch by plain autograd, in the parameters' order: [B, *W] each."""
    params = list(task.model.parameters())
    found = [
        torch.autograd.grad(task.loss(task.model, task.batch(ids[i : i + 1])) / len(ids), params)
        for i in range(len(ids))
    ]
    return [torch.stack(g) for g in zip(*found, strict=True)]


def coalition_losses(task: Task, optimizer: Optimizer, rows: Sequence[Tensor]) -> np.ndarray:
    """U(S) for all 2^B coalitions; bit i of the index says whether i is in S."""
    B, like = len(rows[0]), rows[0]
    masks = torch.arange(2**B, device=like.device)[:, None] >> torch.arange(B, device=like.device)
    masks = (masks & 1).to(like.dtype)
    size = sum(r[0].numel() for r in rows) * like.element_size()
    budget = 2**32 if like.is_cuda else 2**24
    chunk = max(1, min(len(masks), budget // size))
    found = []
    for part in masks.split(chunk):
        stack, twin = stacked(task.model, optimizer, len(part))
        for p, r in zip(stack.values(), rows, strict=True):
            p.grad = (part @ r.flatten(1)).view(p.shape)
        twin.step()
        found.append(losses(task.model, task.loss, stack, task.validation).double().cpu())
    return torch.cat(found).numpy()


def shapley(U: np.ndarray) -> np.ndarray:
    """Shapley values of a game given by its 2^n utilities."""
    n = int(math.log2(len(U)))
    S = np.arange(len(U))
    size = np.array([bin(s).count("1") for s in S])
    weight = np.array(
        [math.factorial(k) * math.factorial(n - k - 1) / math.factorial(n) for k in range(n)]
    )
    phi = np.zeros(n)
    for i in range(n):
        without = S[(S >> i) & 1 == 0]
        phi[i] = (weight[size[without]] * (U[without | 1 << i] - U[without])).sum()
    return phi


def probe(task: Task, optimizer: Optimizer, ids: Tensor) -> dict[str, Any] | None:
    """Take one step; return exact values and every estimator's, and how far apart they are.

    None where the training has diverged.
    """
    rows = row_gradients(task, ids)
    U = coalition_losses(task, optimizer, rows)
    if not np.isfinite(U).all():
        return None
    exact, share = -shapley(U), float(U[0] - U[-1])
    with inrun.watch(
        task.model, optimizer, validation=[task.validation], loss=task.loss,
        estimator=list(ESTIMATORS), audit_every=0,
    ) as run:  # fmt: skip
        with run.batch(np.arange(len(ids))):
            task.loss(task.model, task.batch(ids)).backward()
        off = max(
            float((p.grad - r.sum(0)).abs().max() / (r.abs().sum(0).max() + 1e-300))
            for p, r in zip(task.model.parameters(), rows, strict=True)
        )
        if off > 1e-9:
            raise RuntimeError(f"row gradients do not add up to .grad (off by {off:.1e})")
        optimizer.step()
        optimizer.zero_grad()
        values = {e: run.history(e)["value"].to_numpy() for e in ESTIMATORS}
    return {
        "exact": numbers(exact),
        "share": share,
        "estimators": {
            e: {"values": numbers(v), **compared(v, exact, share)} for e, v in values.items()
        },
    }


def compared(value: np.ndarray, exact: np.ndarray, share: float) -> dict[str, float]:
    """R, Spearman, ‖value − exact‖/‖exact‖, and |Σ value − share| / Σ|value|."""
    return {
        "R": finite(pearson(value, exact)),
        "spearman": finite(spearman(value, exact)),
        "error": float(np.linalg.norm(value - exact) / np.linalg.norm(exact)),
        "sum_error": float(abs(value.sum() - share) / np.abs(value).sum()),
    }


def trajectory(
    task: Task, optimizer: Optimizer, probes: Sequence[int], batch: int, seed: int, context: Context
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Train with random batches up to the last probe; yields (step, what the probe found)."""
    order = torch.Generator().manual_seed(seed + 1)
    for step in context.track(max(probes) + 1):
        ids = torch.randperm(task.examples, generator=order)[:batch].to(context.device)
        if step in probes:
            found = probe(task, optimizer, ids)
            if found is None:
                return
            yield step, found
            continue
        task.loss(task.model, task.batch(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()


def finite(x: float) -> float:
    """JSON has no NaN: a correlation with a constant is 0."""
    return x if math.isfinite(x) else 0.0


def numbers(x: np.ndarray, digits: int = 6) -> list[float]:
    """Plain numbers with so many significant digits."""
    return [float(f"{v:.{digits}g}") for v in np.asarray(x, np.float64).reshape(-1)]

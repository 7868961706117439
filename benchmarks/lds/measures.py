"""What a credit is worth: LDS with its interval, ceilings, and how far two runs agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def ranks(x: Tensor) -> Tensor:
    """Ranks along the first dimension, ties share the mean of theirs: [M, ...] in float64."""
    x = x.detach().cpu().double()
    flat = x.reshape(len(x), -1)
    found = torch.empty_like(flat)
    for k in range(flat.shape[1]):
        _, place, counts = torch.unique(flat[:, k], return_inverse=True, return_counts=True)
        last = counts.cumsum(0).double()
        found[:, k] = (last - (counts.double() - 1) / 2)[place]
    return found.reshape(x.shape)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's along the first dimension; NaN where one of them is constant."""
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0))


def spearman(a: Tensor, b: Tensor) -> Tensor:
    return correlation(ranks(a), ranks(b))


def predicted(credit: Tensor, masks: Tensor) -> Tensor:
    """Sum of the credits of each half: [M, Q]."""
    return masks.cpu().double() @ credit.detach().cpu().double()


def lds(credits: list[Tensor], masks: Tensor, losses: Tensor, draws: int = 300) -> dict[str, Any]:
    """Mean over queries, and over the runs that ``credits`` come from, of Spearman's correlation of
    predicted and real outcome; its interval by drawing halves and queries again."""
    guesses = [predicted(c, masks) for c in credits]
    each = [spearman(g, -losses) for g in guesses]
    rng, M, Q = np.random.default_rng(0), len(masks), losses.shape[1]
    drawn = []
    for _ in range(draws):
        rows = torch.from_numpy(rng.integers(M, size=M))
        which = torch.from_numpy(rng.integers(Q, size=Q))
        again = [correlation(ranks(g[rows]), ranks(-losses[rows])) for g in guesses]
        drawn.append(float(np.mean([x[which].nanmean() for x in again])))
    low, high = np.quantile(drawn, [0.025, 0.975])
    runs = [float(x.nanmean()) for x in each]
    return {"mean": float(np.mean(runs)), "low": float(low), "high": float(high), "runs": runs}


def ceiling(losses: Tensor) -> dict[str, Any]:
    """Agreement of two sets of retrainings of the same halves ([repeats, M, Q]), half of the seeds
    each; None with one seed."""
    half = len(losses) // 2
    if half == 0:
        return {"mean": None, "each": 0}
    found = spearman(losses[:half].mean(0), losses[half : 2 * half].mean(0))
    return {"mean": float(found.nanmean()), "each": half}


def agreement(credits: list[Tensor]) -> float | None:
    """Mean over queries of Spearman's correlation of the credits of two runs."""
    if len(credits) < 2:
        return None
    return float(spearman(credits[0], credits[1]).nanmean())


def auroc(credit: Tensor, spoilt: Tensor | None) -> float | None:
    """How well the lowest mean credit finds the spoilt rows."""
    if spoilt is None or not spoilt.any():
        return None
    score, bad = -credit.detach().cpu().double().mean(1), spoilt.cpu()
    place = ranks(score)
    n, m = int(bad.sum()), int((~bad).sum())
    return float((place[bad].sum() - n * (n + 1) / 2) / (n * m))

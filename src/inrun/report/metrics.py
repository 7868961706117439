"""How good is a ranking: AUROC, precision at k, correlations, overlap of the worst. Only numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def auroc(scores: ArrayLike, positive: ArrayLike) -> float:
    """Chance that a positive example scores higher than a negative one; ties count half."""
    s, y = _pair(scores, positive)
    flags = y.astype(bool)
    n, m = int(flags.sum()), int((~flags).sum())
    if n == 0 or m == 0:
        raise ValueError("AUROC needs at least one positive and one negative example")
    return float((ranks(s)[flags].sum() - n * (n + 1) / 2) / (n * m))


def precision_at_k(scores: ArrayLike, positive: ArrayLike, k: int) -> float:
    """Share of positives among the k highest scores; ties keep the order given."""
    s, y = _pair(scores, positive)
    _check_k(k, len(s))
    return float(y.astype(bool)[np.argsort(-s, kind="stable")[:k]].mean())


def pearson(a: ArrayLike, b: ArrayLike) -> float:
    """Linear correlation; NaN where one side is constant."""
    x, y = _pair(a, b)
    if len(x) < 2:
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    scale = np.linalg.norm(x) * np.linalg.norm(y)
    return float(np.clip(x @ y / scale, -1, 1)) if scale else float("nan")


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Rank correlation; tied values share their mean rank."""
    x, y = _pair(a, b)
    return pearson(ranks(x), ranks(y))


def bottom_overlap(a: ArrayLike, b: ArrayLike, k: int) -> float:
    """Share of examples that are among the k lowest of both; by chance it is k/n."""
    x, y = _pair(a, b)
    _check_k(k, len(x))
    low = (set(np.argsort(z, kind="stable")[:k].tolist()) for z in (x, y))
    return len(set.intersection(*low)) / k


def ranks(x: ArrayLike) -> np.ndarray:
    """Ranks from 1; tied values share their mean rank."""
    _, inverse, count = np.unique(np.asarray(x), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[inverse.reshape(-1)]


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(a, np.float64).reshape(-1), np.asarray(b, np.float64).reshape(-1)
    if len(x) != len(y):
        raise ValueError(f"{len(x)} and {len(y)} numbers: one per example on both sides is needed")
    if np.isnan(x).any() or np.isnan(y).any():
        raise ValueError("NaN in the numbers to compare: leave out examples that were not scored")
    return x, y


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of examples ({n}), not {k}")

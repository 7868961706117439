"""Means with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def interval(
    values: Sequence[float], groups: Sequence[Any] | None = None, draws: int = 2000
) -> dict[str, Any]:
    """Mean and its 95 % bootstrap interval; whole groups (seeds) are drawn where given.

    No interval (None) where there is only one group.
    """
    x = np.asarray(values, np.float64)
    keys = list(range(len(x))) if groups is None else list(groups)
    members = [x[[k == g for k in keys]] for g in dict.fromkeys(keys)]
    result = {
        "mean": float(x.mean()), "low": None, "high": None, "min": float(x.min()),
        "max": float(x.max()), "n": len(x),
    }  # fmt: skip
    if len(members) > 1:
        rng = np.random.default_rng(0)
        picks = rng.integers(len(members), size=(draws, len(members)))
        totals, counts = np.array([m.sum() for m in members]), np.array([len(m) for m in members])
        means = totals[picks].sum(1) / counts[picks].sum(1)
        low, high = np.quantile(means, [0.025, 0.975])
        result |= {"low": float(low), "high": float(high)}
    return result


def students(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Mean and its 95 % interval by Student's t: for paired differences of a few seeds, where a
    bootstrap is too narrow. None where there is only one."""
    x = np.asarray(values, np.float64)
    result: dict[str, Any] = {"mean": float(x.mean()), "low": None, "high": None, "n": len(x)}
    if len(x) > 1:
        from scipy.stats import t

        half = float(t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x)))
        result |= {"low": result["mean"] - half, "high": result["mean"] + half}
    return result


def shown(cell: dict[str, Any], digits: int = 4) -> str:
    """``0.9991 [0.9987, 0.9995]``."""
    text = f"{cell['mean']:.{digits}f}"
    if cell["low"] is not None:
        text += f" [{cell['low']:.{digits}f}, {cell['high']:.{digits}f}]"
    return text

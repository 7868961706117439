"""Ranks of the true sources."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ranks(scores: np.ndarray, sources: Sequence[int]) -> list[float]:
    """Of each query (a column) the place of its source, 1 for the highest score; candidates with
    the same score share the mean of their places."""
    own = scores[np.asarray(sources), np.arange(scores.shape[1])]
    above, same = (scores > own).sum(0), (scores == own).sum(0)
    return [float(x) for x in above + (same + 1) / 2]

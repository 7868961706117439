"""A few fixed positions of every tensor in a list, read with one launch for all of them.

Used to see whether gradients and weights are what they are thought to be, in every step and
without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

POSITIONS = 8  # of each tensor, or all of a smaller one


@lru_cache(maxsize=4096)
def _places(size: int, order: int) -> tuple[int, int, int]:
    """Count, stride and start of the positions: spread over the whole tensor, the start random.
    ``order`` is the tensor's place in its list, so that tensors of one size differ."""
    count = min(POSITIONS, size)
    stride = max(1, size // POSITIONS)
    if stride > 2 and stride % 2 == 0:
        stride -= 1  # an odd stride does not stay in one column of a matrix
    last = size - 1 - (count - 1) * stride
    start = int(np.random.default_rng((size, order)).integers(last + 1)) if size else 0
    return count, stride, start


def views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The positions of each, as views where its numbers lie together."""
    found = []
    for order, t in enumerate(tensors):
        count, stride, start = _places(t.numel(), order)
        if not t.is_contiguous():
            t = t.flatten()
        found.append(t.as_strided((count,), (stride,), t.storage_offset() + start))
    return found


def counts(tensors: Sequence[Tensor]) -> list[int]:
    """How many positions each has."""
    return [min(POSITIONS, t.numel()) for t in tensors]


def gather(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The positions of all, in one tensor for each type and device."""
    kinds: dict[object, list[Tensor]] = {}
    for t in views([t.detach() for t in tensors]):
        kinds.setdefault((t.dtype, t.device), []).append(t)
    return [torch.cat(some) for some in kinds.values()]


def differ(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Is any number of one list another than in the other? A flag on the device of the first."""
    if [(x.shape, x.dtype, x.device) for x in a] != [(x.shape, x.dtype, x.device) for x in b]:
        return torch.ones((), dtype=torch.bool)
    if not a:
        return torch.zeros((), dtype=torch.bool)
    flags = [(x != y).any() for x, y in zip(a, b, strict=True)]
    return (
        flags[0] if len(flags) == 1 else torch.stack([f.to(flags[0].device) for f in flags]).any()
    )

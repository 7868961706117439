"""A few fixed positions of tensors, read from all of them with one launch.

Used to see whether gradients and weights are what they are thought to be, in every step and
without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

POSITIONS = 8  # of each tensor, or all of a smaller one


@lru_cache(maxsize=4096)
def _places(size: int) -> tuple[tuple[int], tuple[int], int]:
    """Count, stride and start of the positions: spread over the whole tensor, the start random."""
    count = min(POSITIONS, size)
    stride = max(1, size // POSITIONS)
    if stride > 2 and stride % 2 == 0:
        stride -= 1  # an odd stride does not stay in one column of a matrix
    last = size - 1 - (count - 1) * stride
    start = int(np.random.default_rng(size).integers(last + 1)) if size else 0
    return (count,), (stride,), start


class Views:
    """Cache of views of the sampled positions, for tensors that are read in every step."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, int, Tensor]] = {}

    def of(self, t: Tensor) -> Tensor:
        """The sampled entries of a tensor: a view if it is contiguous, else a copy."""
        kept = self._kept.get(id(t))
        if kept is not None and kept[0] is t and kept[1] == t.data_ptr():
            return kept[2]
        count, stride, start = _places(t.numel())
        own = t.detach() if t.requires_grad else t
        if not own.is_contiguous():
            return own.flatten().as_strided(count, stride, start)
        found = own.as_strided(count, stride, own.storage_offset() + start)
        self._kept[id(t)] = t, t.data_ptr(), found
        return found

    def joined(self, tensors: Iterable[Tensor]) -> Tensor:
        """The sampled entries of tensors of one type and device, concatenated."""
        return torch.cat([self.of(t) for t in tensors])

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sampled entries of all tensors, one tensor for each type and device."""
        kinds: dict[object, list[Tensor]] = {}
        for t in tensors:
            kinds.setdefault((t.dtype, t.device), []).append(self.of(t))
        return [torch.cat(some) for some in kinds.values()]

    def forget(self) -> None:
        self._kept = {}

    def shrink(self, most: int) -> None:
        """Empty the cache when it holds more than ``most`` tensors."""
        if len(self._kept) > most:
            self._kept = {}


def counts(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """The number of sampled entries of each tensor."""
    return tuple(min(POSITIONS, t.numel()) for t in tensors)


def differ(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Whether any entry differs between the lists, as a tensor on the first one's device."""
    if [(x.shape, x.dtype, x.device) for x in a] != [(x.shape, x.dtype, x.device) for x in b]:
        return torch.ones((), dtype=torch.bool)
    if not a:
        return torch.zeros((), dtype=torch.bool)
    flags = [(x != y).any() for x, y in zip(a, b, strict=True)]
    return (
        flags[0] if len(flags) == 1 else torch.stack([f.to(flags[0].device) for f in flags]).any()
    )

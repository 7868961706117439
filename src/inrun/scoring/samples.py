"""A few fixed entries of many tensors, read together.

received.py compares gradients by them, taken.py weights. On a GPU one kernel reads the entries of
all tensors by their addresses. On a CPU small tensors are concatenated, which is cheaper than a
view of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inrun import kernels
from inrun.torch_compat import flatten_dense_tensors

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

    from inrun.kernels import entry

SAMPLED = 8  # entries of each tensor; of a smaller one the last is repeated
_SMALL = 2**12  # numbers of a tensor that is sooner copied than looked at


@lru_cache(maxsize=4096)
def _places(size: int) -> tuple[int, int, int]:
    """Count, stride and start of the entries: spread over the whole tensor, the start random."""
    count = min(SAMPLED, size)
    stride = max(1, size // SAMPLED)
    if stride > 2 and stride % 2 == 0:
        stride -= 1  # an odd stride does not stay in one column of a matrix
    last = size - 1 - (count - 1) * stride
    start = int(np.random.default_rng(size).integers(last + 1))
    return count, stride, start


def entries_of(size: int) -> np.ndarray:
    """The indices of the entries of a tensor of this size, flat."""
    count, stride, start = _places(size)
    return start + stride * np.minimum(np.arange(SAMPLED, dtype=np.int64), count - 1)


class Sample:
    """The sampled entries of tensors of one type and device, of those that are not empty. They can
    be read again, also after a tensor was given other memory. ``often``: in every step, so that
    flat views of them are worth making."""

    def __init__(self, tensors: Sequence[Tensor], often: bool = False) -> None:
        self._given, self._often = list(tensors), often
        self._look(list(map(Tensor.data_ptr, tensors)))

    def _look(self, addresses: list[int]) -> None:
        """Find out how to read the tensors where they are now."""
        self._known, sizes = addresses, list(map(Tensor.numel, self._given))
        self.tensors = self._given if all(sizes) else [t for t in self._given if t.numel()]
        self._sizes = tuple([n for n in sizes if n])
        self._by_kernel = bool(self.tensors) and kernels.readable(self.tensors)
        self._addresses: Tensor | None = None  # for the kernel
        self._views: list[Tensor] | None = None  # what is concatenated, if all are dense
        worth = self._often and bool(self.tensors) and not self._by_kernel
        if worth and all(map(Tensor.is_contiguous, self.tensors)):
            plan = _plan(self._sizes, self.tensors[0].device)
            self._views = [self.tensors[i].detach().view(-1) for i in plan.small]
            self._views += [_view(self.tensors[i], self._sizes[i]) for i in plan.large]

    @torch.no_grad()
    def read(self) -> Tensor:
        """The entries as they are now [tensors, SAMPLED]."""
        addresses = list(map(Tensor.data_ptr, self._given))
        if addresses != self._known:
            self._look(addresses)
        if self._by_kernel:
            return self._launch()
        if not self.tensors:
            return torch.empty(0, SAMPLED)
        if self._views is not None and all(map(Tensor.is_contiguous, self.tensors)):
            entries = _plan(self._sizes, self.tensors[0].device).entries
            return torch.cat(self._views).index_select(0, entries).view(-1, SAMPLED)
        return _copied(self.tensors, self._sizes).view(-1, SAMPLED)

    def _launch(self) -> Tensor:
        first = self.tensors[0]
        if self._addresses is None:
            self._addresses = kernels.pointers(self.tensors)
        found = torch.empty((len(self.tensors), SAMPLED), dtype=first.dtype, device=first.device)
        _read[(len(self.tensors),)](
            self._addresses, table(self._sizes, first.device), found,
            kernels.READABLE[first.dtype], SAMPLED=SAMPLED,
        )  # fmt: skip
        return found


class Pieces:
    """The sampled entries of tensors that lie one after the other in flat ones.

    ``where``: of each tensor, which flat one it is in, where it begins there, and its size.
    """

    def __init__(self, where: Sequence[tuple[int, int, int]]) -> None:
        entries: dict[int, list[np.ndarray]] = {}
        rows: dict[int, list[int]] = {}
        for row, (flat, start, size) in enumerate(where):
            entries.setdefault(flat, []).append(start + entries_of(size))
            rows.setdefault(flat, []).append(row)
        self._entries = [(i, torch.from_numpy(np.concatenate(x))) for i, x in entries.items()]
        given = [row for own in rows.values() for row in own]
        self._order = None if given == sorted(given) else torch.from_numpy(np.argsort(given))

    @property
    def flats(self) -> list[int]:
        """The flat ones that are read."""
        return [i for i, _ in self._entries]

    def read(self, flats: Mapping[int, Tensor]) -> Tensor:
        """The entries [tensors, SAMPLED]."""
        found = [flats[i].flatten().index_select(0, which) for i, which in self._entries]
        rows = (found[0] if len(found) == 1 else torch.cat(found)).view(-1, SAMPLED)
        return rows if self._order is None else rows.index_select(0, self._order)


def sampled(tensors: Sequence[Tensor]) -> Tensor:
    """The sampled entries of tensors of one type and device [tensors, SAMPLED]."""
    return Sample(tensors).read()


def by_kind(tensors: Sequence[Tensor]) -> list[Sample]:
    """One sample for each type and device among the tensors."""
    if len({(t.dtype, t.device) for t in tensors}) == 1:
        return [Sample(tensors)]
    kinds: dict[object, list[Tensor]] = {}
    for t in tensors:
        kinds.setdefault((t.dtype, t.device), []).append(t)
    return [Sample(some) for some in kinds.values()]


def _view(t: Tensor, size: int) -> Tensor:
    """The entries of one large tensor: a view, or a copy if it is not contiguous."""
    (count, stride, start), own = _places(size), t.detach()
    own = own if own.is_contiguous() else own.flatten()
    return own.as_strided((count,), (stride,), own.storage_offset() + start)


def _copied(tensors: Sequence[Tensor], sizes: tuple[int, ...]) -> Tensor:
    plan = _plan(sizes, tensors[0].device)
    if not plan.large:
        return flatten_dense_tensors(tensors).index_select(0, plan.entries)
    parts = [flatten_dense_tensors([tensors[i] for i in plan.small])] if plan.small else []
    parts += [_view(tensors[i], sizes[i]) for i in plan.large]
    return torch.cat(parts).index_select(0, plan.entries)


class _Plan(NamedTuple):
    small: list[int]  # tensors that are concatenated
    large: list[int]  # tensors of which a view is taken
    entries: Tensor  # their indices in all this, in the order of the tensors


@lru_cache(maxsize=64)
def _plan(sizes: tuple[int, ...], device: torch.device) -> _Plan:
    small = [i for i, n in enumerate(sizes) if n <= _SMALL]
    large = [i for i, n in enumerate(sizes) if n > _SMALL]
    entries: dict[int, np.ndarray] = {}
    at = 0
    for i in small:
        entries[i], at = at + entries_of(sizes[i]), at + sizes[i]
    for i in large:
        entries[i], at = at + np.arange(SAMPLED), at + SAMPLED
    index = np.concatenate([entries[i] for i in range(len(sizes))])
    return _Plan(small, large, torch.from_numpy(index.astype(np.int64)).to(device))


@lru_cache(maxsize=64)
def table(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Count, stride and start of each tensor's entries, for a kernel."""
    return torch.tensor([_places(n) for n in sizes], dtype=torch.int64, device="cpu").to(device)


if kernels.AVAILABLE:

    @triton.jit  # type: ignore[untyped-decorator]
    def _read(  # type: ignore[no-untyped-def]
        addresses, table, found, T: tl.constexpr, SAMPLED: tl.constexpr
    ):
        t, i = tl.program_id(0), tl.arange(0, SAMPLED)
        of_t = tl.load(addresses + t).to(tl.pointer_type(T))
        tl.store(found + t * SAMPLED + i, tl.load(of_t + entry(table, t, i)))

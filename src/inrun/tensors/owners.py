"""Which example each number of a tensor belongs to, where rows have moved.

In the usual case the examples lie in their order along one dimension and a ``Layout`` says so.
Where rows move (a flip, a sort, tokens sent to experts) or several dimensions tell the examples
apart (packed rows [R, T]), an ``Owners`` map says it instead: an integer for every slice of the
tensor, moved by the same operation that moves the slices (moving.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.tensors.layout import Layout

NOBODY = -1


class UnknownOwnerError(Exception):
    """Whose the numbers of an output are cannot be told."""


@dataclass(frozen=True, eq=False)
class Owners:
    """``map`` has as many dimensions as the tensor, and in each its size or 1 (the owner does not
    change along it). Its entries are examples, or ``NOBODY``.

    ``map`` is in host memory unless it depends on what a tensor of another device holds: what is
    in host memory can be looked at without waiting. ``static``: it follows from operations and
    shapes alone, so it is the same each time. ``data`` and ``claims`` mean what they mean in a
    ``Layout``.
    """

    map: Tensor
    static: bool = True
    data: bool = False
    claims: frozenset[str] = frozenset()

    @property
    def known(self) -> bool:
        """Can its entries be read without waiting for a device?"""
        return self.map.is_cpu

    def varying(self) -> list[int]:
        """The dimensions along which the owner changes."""
        return [d for d, n in enumerate(self.map.shape) if n != 1]


def of_layout(layout: Layout, ndim: int, B: int) -> Tensor:
    """The map of a tensor that has this layout: [1, …, outer · B · inner, …, 1]."""
    examples = torch.arange(B, device="cpu").repeat_interleave(layout.inner).repeat(layout.outer)
    return examples.view([-1 if d == layout.dim else 1 for d in range(ndim)])


def settled(owners: Owners, B: int) -> Layout | Owners:
    """The simplest description: dimensions along which the owner does not change have size 1, and
    examples in their order along one dimension are a ``Layout``."""
    if not owners.known:
        return owners
    m = owners.map
    for d, n in enumerate(m.shape):
        if (n > 1 and m.stride(d) == 0) or (n > 1 and bool((m == m.narrow(d, 0, 1)).all())):
            m = m.narrow(d, 0, 1)
    found = Owners(m, owners.static, owners.data, owners.claims)
    if len(dims := found.varying()) == 1:
        in_order = _in_order(m.flatten(), B)
        if in_order is not None:
            return Layout(dims[0], *in_order, data=owners.data, claims=owners.claims)
    return found


def _in_order(entries: Tensor, B: int) -> tuple[int, int] | None:
    """(outer, inner) if the entries are all examples in their order, each ``inner`` times, and
    all that ``outer`` times."""
    n = len(entries)
    if not n or B < 2 or n % B or entries[0] != 0:
        return None
    inner = int((entries != 0).long().argmax())  # the first that is not example 0
    if n % (inner * B):
        return None
    outer = n // (inner * B)
    expected = torch.arange(B, device="cpu").repeat_interleave(inner).repeat(outer)
    return (outer, inner) if torch.equal(entries, expected) else None


Agree = Callable[[Tensor, Tensor], Tensor]  # two maps as one, or raises UnknownOwnerError


def together(maps: Sequence[Tensor], agree: Agree) -> Tensor:
    """The one map of operands whose numbers lie beside each other in an output (all have its
    number of dimensions)."""
    first, *rest = maps
    for other in rest:
        if other is not first:
            first = agree(first, other)
    return first


def on_one_device(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both where one of them has to be: a map in host memory goes to the device of the other."""
    if a.device == b.device:
        return a, b
    if a.is_cpu:
        return a.to(b.device, non_blocking=True), b
    return a, b.to(a.device, non_blocking=True)


def expanded(m: Tensor, shape: Sequence[int], dims: Sequence[int] | None = None) -> Tensor:
    """The map with the tensor's own size in these dimensions (None: in all)."""
    chosen = range(m.ndim) if dims is None else dims
    return m.expand([shape[d] if d in chosen else n for d, n in enumerate(m.shape)])


def reshaped(m: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """The map of a tensor of shape ``old`` that takes the shape ``new``, its numbers in the same
    order. Dimensions are matched in the smallest groups of equal size."""
    if math.prod(old) == 0:
        raise UnknownOwnerError
    i = j = 0
    sizes: list[int] = []
    wanted: list[int] = []
    while i < len(old) or j < len(new):
        before, after = old[i : i + 1], new[j : j + 1]
        i, j = i + len(before), j + len(after)
        while math.prod(before) != math.prod(after):
            if math.prod(before) < math.prod(after):
                before, i = (*before, old[i]), i + 1
            else:
                after, j = (*after, new[j]), j + 1
        part = m.shape[i - len(before) : i]
        if all(n == 1 for n in part):
            sizes += part
            wanted += [1] * len(after)
        elif len(before) == len(after) == 1:
            sizes += part
            wanted += part
        else:
            sizes += before
            wanted += after
    return m.expand(sizes).reshape(wanted)

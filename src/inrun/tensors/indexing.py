"""Where the examples are after indexing: ``x[...]``, ``gather`` and friends, ``x[...] = y``.

An index can move rows. It is followed only where its form alone, or its content, shows that every
example stays in its place.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inrun.tensors.layout import Find, Layout, agree, batched, name_of

# A size no real dimension has: an operation run on shapes alone, with this in the place of the
# examples, shows where they went.
MARK = 100003


def index(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``x[...]``: positions by their form; of index tensors only those that leave the examples."""
    x, given = args[0], _as_tuple(args[1])
    layout = find(x)
    tensors = [k for k, i in enumerate(given) if isinstance(i, (Tensor, list))]
    if layout is None or layout.data:
        if any(isinstance(i, Tensor) and find(i) for i in given):
            return _picked(given, find)  # data[rows]: the index says which examples these are
        if layout is None:
            return None
    if not tensors:
        dim = _kept_dim(x, given, layout.dim)
        return None if dim is None else replace(layout, dim=dim)
    adjacent = tensors == list(range(tensors[0], tensors[0] + len(tensors)))
    if layout.dim == 0 and adjacent and _everything(given[0]):
        return layout
    return _one_per_example(x, given, layout)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _everything(i: Any) -> bool:
    return isinstance(i, slice) and i == slice(None)


def _kept_dim(x: Tensor, given: tuple[Any, ...], dim: int) -> int | None:
    """Slices, whole numbers, None and an ellipsis: the examples' dimension after them, if all of
    it is taken."""
    shape = (*x.shape[:dim], MARK, *x.shape[dim + 1 :])
    part = torch.empty(shape, device="meta")[given].shape
    return part.index(MARK) if part.count(MARK) == 1 else None


def _one_per_example(x: Tensor, given: tuple[Any, ...], layout: Layout) -> Layout | None:
    """``x[arange(B), position]``: one entry per example, in their order."""
    tensors = list(itertools.takewhile(lambda i: isinstance(i, Tensor), given))
    rest = given[len(tensors) :]
    if layout != Layout(0) or not tensors or any(isinstance(i, (Tensor, list)) for i in rest):
        return None
    rows = tensors[0]
    if rows.dtype != torch.long or rows.numel() != x.shape[0]:
        return None
    if not bool((rows.flatten() == torch.arange(rows.numel(), device=rows.device)).all()):
        return None
    dim = max(range(rows.ndim), key=lambda d: rows.shape[d])
    return replace(layout, dim=max(t.ndim for t in tensors) - rows.ndim + dim)


def _picked(given: tuple[Any, ...], find: Find) -> Layout | None:
    """``table[rows]`` with a table that holds no examples: these are where the index has them."""
    places = [k for k, i in enumerate(given) if isinstance(i, Tensor)]
    first = places[0]
    if places != list(range(first, first + len(places))) or Ellipsis in given[:first]:
        return None
    tensors = [given[k] for k in places]
    if any(t.dtype == torch.bool for t in tensors):
        return None  # how many entries a mask takes of each example is not known
    width = max(t.ndim for t in tensors)
    before = sum(not isinstance(i, int) for i in given[:first])
    found = [(t, x) for t in tensors if (x := find(t)) is not None]
    return agree([replace(x, dim=before + width - t.ndim + x.dim) for t, x in found])


def along(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``index_select``, ``scatter`` and friends along a dimension that is not the examples'."""
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    layout = find(x)
    if not isinstance(dim, int):
        return None
    if layout is None and name_of(func) == "index_select":
        return _picked((slice(None),) * (dim % x.ndim) + (kwargs.get("index", args[-1]),), find)
    if layout is None or dim % x.ndim == layout.dim:
        return None
    others = [y for t, y in batched(args[1:], kwargs, find) if t.ndim == x.ndim]
    return agree([layout, *others])


def gather(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``gather(x, dim, index)`` and ``take_along_dim(x, index, dim)``: the output has the index's
    places. What is gathered from a constant belongs to whom the index belongs to."""
    names = ("indices", "dim") if name_of(func) == "take_along_dim" else ("dim", "index")
    given = {**dict(zip(("input", *names), args, strict=False)), **kwargs}
    x, dim, index = given["input"], given.get("dim"), given.get("index", given.get("indices"))
    if not isinstance(dim, int) or not isinstance(index, Tensor):
        return None
    own, chosen = find(x), find(index)
    if own is None:
        return chosen
    together = own if chosen is None else agree([own, chosen])
    return together if dim % x.ndim != own.dim else None


def _written_dim(target: Tensor, given: Any, value: Tensor, layout: Layout, B: int) -> int | None:
    """``target[index] = value``: the dimension of the target that takes the value's examples."""
    size = layout.outer * B * layout.inner
    places = []
    for dim in (d for d, n in enumerate(target.shape) if n == size):
        shape = (*target.shape[:dim], MARK, *target.shape[dim + 1 :])
        part = torch.empty(shape, device="meta")[given].shape
        if MARK in part and len(part) - part.index(MARK) == value.ndim - layout.dim:
            places.append(dim)
    return places[0] if len(places) == 1 else None


def _beside(target: Tensor, given: Any, value: Tensor) -> bool:
    """``target[:, indices] = value``: do the rows of the value go to those of the target? A value
    with fewer dimensions is repeated along the first, indices apart from each other come first."""
    parts: list[Any] = []
    for i in _as_tuple(given):
        if not isinstance(i, (Tensor, list)):
            parts.append(0 if isinstance(i, int) and not isinstance(i, bool) else i)
            continue
        t = torch.as_tensor(i)
        zeros = torch.zeros([1] * t.ndim, dtype=torch.long)
        parts += [torch.zeros(1, dtype=torch.long)] * t.ndim if t.dtype == torch.bool else [zeros]
    places = [k for k, i in enumerate(parts) if isinstance(i, Tensor)]
    apart = places != list(range(places[0], places[0] + len(places)))
    if apart or not _everything(parts[0]):
        return False
    return torch.empty([1] * target.ndim)[tuple(parts)].ndim == value.ndim


def written(
    target: Tensor, given: Any, value: Tensor, layout: Layout, own: Layout | None, B: int
) -> Layout | None:
    """The layout of a target after ``target[index] = value``; ``own`` is what it had before."""
    if any(isinstance(i, (Tensor, list)) for i in _as_tuple(given)):
        return own if own == layout == Layout(0) and _beside(target, given, value) else None
    dim = _written_dim(target, given, value, layout, B)
    found = None if dim is None else replace(layout, dim=dim)
    return found if own is None or found is None else agree([own, found])

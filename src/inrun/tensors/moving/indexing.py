"""Owner maps through indexing: ``x[...]``, ``gather``, ``index_add``, ``x[...] = y``, …"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inrun.tensors.layout import MIXED, Kind, name_of
from inrun.tensors.moving.move import Move, bool_or, right, slim
from inrun.tensors.owners import UnknownOwnerError, expanded, on_one_device, together

# Indexing


def getitem(move: Move) -> Tensor:
    x, given = move.args[0], move.args[1]
    items = list(given) if isinstance(given, tuple) else [given]
    m = move.find(x)
    if m is None:
        return _picked(move, items)
    items = _without_ellipsis([torch.as_tensor(i) if isinstance(i, list) else i for i in items], x)
    chosen: list[Any] = []
    dims: list[int] = []
    d = 0
    for i in items:
        if i is None:
            chosen.append(None)
            continue
        width = i.ndim if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) else 1
        here = list(range(d, d + width))
        if isinstance(i, slice) and m.shape[d] == 1 and not _empties(i, x.shape[d]):
            chosen.append(slice(None))
        else:
            chosen.append(i)
            dims += here
        d += width
    m = expanded(m, x.shape, dims)
    if len(tensors := [i for i in chosen if isinstance(i, Tensor)]):
        device = next((t.device for t in (*tensors, m) if not t.is_cpu), m.device)
        m = m.to(device, non_blocking=True)
        chosen = [i.to(device, non_blocking=True) if isinstance(i, Tensor) else i for i in chosen]
        move.content = move.content or any(isinstance(i, Tensor) for i in _flat(given))
    return slim(m[tuple(chosen)])


def _flat(given: Any) -> list[Any]:
    return list(given) if isinstance(given, tuple) else [given]


def _empties(i: slice, size: int) -> bool:
    return len(range(*i.indices(size))) == 0


def _without_ellipsis(items: Sequence[Any], x: Tensor) -> list[Any]:
    used = sum(
        i.ndim if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) else 1
        for i in items
        if i is not None and i is not Ellipsis
    )
    missing = [slice(None)] * (x.ndim - used)
    at = next((k for k, i in enumerate(items) if i is Ellipsis), None)
    if at is None:
        return [*items, *missing]
    return [*items[:at], *missing, *items[at + 1 :]]


def _picked(move: Move, items: Sequence[Any]) -> Tensor:
    """``table[rows]`` with a table that holds no examples: a row belongs to whom its index does."""
    places = [k for k, i in enumerate(items) if isinstance(i, Tensor)]
    if not places or Ellipsis in items[: places[0]]:
        raise UnknownOwnerError
    if places != list(range(places[0], places[0] + len(places))):
        raise UnknownOwnerError
    tensors = [items[k] for k in places]
    if any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        raise UnknownOwnerError
    width = max(t.ndim for t in tensors)
    maps = [right(m, width) for _, m in move.maps(tensors)]
    before = sum(not isinstance(i, int) for i in items[: places[0]])
    m = together(maps, move.agree)
    return m.view([1] * before + list(m.shape) + [1] * (move.out.ndim - before - width))


def index_select(move: Move) -> Tensor:
    x, dim, chosen = move.first, move.given(1, "dim"), move.given(2, "index")
    m = move.find(x)
    if m is None:
        return _picked(move, [*[slice(None)] * (dim % x.ndim), chosen])
    if m.shape[dim] == 1:
        return m
    i, m = move.index(chosen, m)
    return m.index_select(dim, i)


def gather(move: Move) -> Tensor:
    if name_of(move.func) == "take_along_dim":
        i, dim = move.given(1, "indices"), move.given(2, "dim")
    else:
        dim, i = move.given(1, "dim"), move.given(2, "index")
    x = move.first
    m = move.find(x)
    if not isinstance(dim, int) or not isinstance(i, Tensor):
        raise UnknownOwnerError
    if m is None:
        return move.map_of(i)
    if name_of(move.func) == "take_along_dim":  # which repeats the index along other dimensions
        i = i.expand(move.out.shape)
    return gathered(move, m, x.shape, dim % x.ndim, i)


def gathered(move: Move, m: Tensor, shape: Sequence[int], dim: int, i: Tensor) -> Tensor:
    """out[…, j, …] = x[…, i[…, j, …], …] along ``dim``."""
    if m.shape[dim] == 1:
        kept = [d for d in range(m.ndim) if d != dim and m.shape[d] > 1]
        return m if all(i.shape[d] == m.shape[d] for d in kept) else _cut(m, i, dim)
    i, m = move.index(i, m)
    for d in range(i.ndim):  # an index that was expanded says the same along a dimension
        if d != dim and m.shape[d] == 1 and i.stride(d) == 0:
            i = i.narrow(d, 0, 1)
    sizes = [m.shape[d] if d == dim or m.shape[d] > 1 else i.shape[d] for d in range(m.ndim)]
    return m.expand(sizes).gather(dim, i)


def _cut(m: Tensor, i: Tensor, dim: int) -> Tensor:
    for d in range(m.ndim):
        if d != dim and m.shape[d] > 1:
            m = m.narrow(d, 0, i.shape[d])
    return m


def positions(move: Move) -> Tensor:
    """``nonzero`` and ``where(mask)``: a position belongs to whom the number there does."""
    x = move.first
    m = move.find(x)
    if m is None:
        raise UnknownOwnerError
    result, move.content = move.result, True
    places = result.detach().unbind(1) if isinstance(result, Tensor) else tuple(result)
    m = expanded(m.to(places[0].device, non_blocking=True), x.shape)[places]
    return m if move.out.ndim == 1 else m[:, None]


def masked_select(move: Move) -> Tensor:
    """What is selected from a constant belongs to whom the mask does."""
    x, mask = move.first, move.given(1, "mask")
    m, move.content = move.find(x), True
    m, mask = on_one_device(move.map_of(mask) if m is None else m, mask)
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return right(m, len(shape)).expand(shape)[mask.expand(shape)]


# Writing


def index_write(move: Move) -> Tensor | Kind:
    """``index_add``, ``index_copy`` along a dimension."""
    x, dim, i = move.first, move.given(1, "dim"), move.given(2, "index")
    source = move.given(3, "source", "tensor")
    known, m, s = move.find(x), move.map_of(x), move.find(source)
    if s is None:  # a constant: how often an index occurs in the whole batch
        return MIXED if known is None else m
    dim = dim % x.ndim
    i, s = move.index(i, s)
    m = m.to(s.device, non_blocking=True)
    sizes = [max(a, b) for a, b in zip(m.shape, s.shape, strict=True)]
    sizes[dim] = x.shape[dim]
    m = m.expand(sizes)
    sizes[dim] = source.shape[dim]
    s = s.expand(sizes)
    if name_of(move.func) == "index_add":
        s = move.agree(m.index_select(dim, i), s)
        if known is not None and known.is_cpu and not bool_or(known < 0):
            return known
    new = m.index_copy(dim, i, s)
    move.agree(new.index_select(dim, i), s)  # several may be written to one place
    return new


def scatter(move: Move) -> Tensor:
    """``scatter``, ``scatter_add``, ``scatter_reduce`` along a dimension."""
    x, dim, i, source = (
        move.first,
        move.given(1, "dim"),
        move.given(2, "index"),
        move.given(3, "src"),
    )
    m, dim = move.map_of(x), dim % x.ndim
    s = move.find(source) if isinstance(source, Tensor) else None
    if s is None:
        if move.find(x) is not None:
            return m
        s = move.map_of(i)  # constants written where the index says
        if all(n == 1 or (d != dim and n == x.shape[d]) for d, n in enumerate(s.shape)):
            return s  # whole slices, each by the index of one example
    i, s = move.index(i, s)
    m = m.to(s.device, non_blocking=True)
    for d in range(i.ndim):
        if d != dim and m.shape[d] == 1 and s.shape[d] == 1 and i.stride(d) == 0:
            i = i.narrow(d, 0, 1)
    sizes = [x.shape[d] if i.shape[d] > 1 or d == dim else m.shape[d] for d in range(x.ndim)]
    m = m.expand(sizes)
    s = s.expand([i.shape[d] if s.shape[d] == 1 else n for d, n in enumerate(s.shape)])
    s = s[tuple(slice(0, n) for n in i.shape)]
    if name_of(move.func) != "scatter":
        s = move.agree(m.gather(dim, i), s)
    new = m.scatter(dim, i, s)
    move.agree(new.gather(dim, i), s)
    return new


def index_put(move: Move) -> Tensor:
    x, indices, values = move.first, move.given(1, "indices"), move.given(2, "values")
    return written(
        move, x, tuple(indices), values, bool(move.given(3, "accumulate", default=False))
    )


def written(move: Move, x: Tensor, index: Any, value: Any, add: bool = False) -> Tensor:
    """The map of ``x`` after ``x[index] = value`` (``add``: ``+=``)."""
    m = move.map_of(x)
    s = move.find(value) if isinstance(value, Tensor) else None
    if s is None:
        if move.find(x) is None:  # constants, written where an index made of examples says
            raise UnknownOwnerError
        return m
    items = list(index) if isinstance(index, tuple) else [index]
    tensors = [i for i in items if isinstance(i, Tensor)]
    move.content = move.content or bool(tensors)
    device = next((t.device for t in (m, s, *tensors) if not t.is_cpu), m.device)
    items = [i.to(device, non_blocking=True) if isinstance(i, Tensor) else i for i in items]
    new = expanded(m.to(device, non_blocking=True), x.shape).clone()
    place = tuple(items)
    part = new[place]
    s = right(expanded(s, value.shape).to(device, non_blocking=True), part.ndim).expand(part.shape)
    if add:
        s = move.agree(part, s)
    new[place] = s
    move.agree(new[place], s)
    return new

"""Owner maps through sums, products, attention and look-ups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inrun.tensors.layout import MIXED, Kind, name_of, tensors_in
from inrun.tensors.moving.move import Move, bool_or, varying
from inrun.tensors.moving.places import aligned
from inrun.tensors.owners import NOBODY, UnknownOwnerError, expanded, together
from inrun.tensors.recurrent import options


def reduced(move: Move) -> Tensor | Kind:
    """``sum``, ``mean``, ``max`` over dimensions."""
    if len(tensors_in(move.args, move.kwargs)) > 1:
        return aligned(move)
    x, name = move.first, name_of(move.func)
    place = {"norm": 2, "quantile": 2, "nanquantile": 2, "kthvalue": 2, "linalg_norm": 2,
             "vector_norm": 2, "linalg_vector_norm": 2}.get(name, 1)  # fmt: skip
    dims = move.given(place, "dim", "axis")
    if dims is None or isinstance(dims, (float, bool)):
        raise UnknownOwnerError
    m = move.map_of(x)
    over = [d % x.ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    changing = [d for d in over if m.shape[d] > 1]
    if changing:
        whole = set(varying(m)) <= set(changing)
        top, e = m.amax(changing, keepdim=True), move.examples(m)
        high, low = e.amax(changing, keepdim=True), e.masked_fill(e < 0, 2**62)
        same = (low.amin(changing, keepdim=True) == high) | (high < 0)
        if whole and (not same.is_cpu or not bool(same.all())):
            return MIXED
        if move.owner is not None:
            move.content = True
        if not same.is_cpu:
            move.doubt(~same.all())
        elif not bool(same.all()):
            raise UnknownOwnerError
        m = top
    if move.out.ndim == x.ndim:
        return m
    for d in sorted(over, reverse=True):
        m = m.squeeze(d)
    return m


def contracted(move: Move) -> Tensor:
    """Products that sum over dimensions: see ``_letters``."""
    operands, letters, result = _letters(move)
    first: list[Tensor] = []
    weights: list[Any] = []  # the dimensions of those operands
    summed: set[Any] = set()
    for t, names in zip(operands, letters, strict=True):
        m = move.find(t)
        if m is None:
            continue
        changing = [names[d] for d in varying(m)]
        if not set(changing) <= set(result):
            summed |= set(changing) - set(result)
            continue
        weights += names
        where = {n: d for d, n in enumerate(names)}
        order = [where[n] for n in result if n in where and m.shape[where[n]] > 1]
        rest = [d for d in range(m.ndim) if d not in order]
        sizes = [m.shape[where[n]] if n in where else 1 for n in result]
        first.append(m.permute(*order, *rest).reshape(sizes))
    if not first or (summed and len(first) > 1) or not summed <= set(weights):
        raise UnknownOwnerError  # a sum over examples that is nobody's choice of them
    mixing = bool(summed) or len({varying(m) for m in first}) > 1
    if mixing and bool_or(first[0] < 0):  # rows of nobody's, made of others' numbers
        raise UnknownOwnerError
    if len(first) > 1 and len({varying(m) for m in first}) > 1:
        return first[0]  # scores of queries and keys: a row is the query's
    return together(first, move.agree)


def _letters(move: Move) -> tuple[list[Tensor], list[list[Any]], list[Any]]:
    """The operands of a product and a name for each of their dimensions, as in an einsum."""
    name, ndim = name_of(move.func), move.out.ndim
    if name == "einsum":
        equation, operands = move.args[0], tensors_in(move.args[1:])
        if not isinstance(equation, str) or "->" not in equation:
            raise UnknownOwnerError
        inputs, result = equation.replace(" ", "").split("->")
        names = [_names(x, t.ndim) for x, t in zip(inputs.split(","), operands, strict=True)]
        return operands, names, _names(result, ndim)
    *added, x, y = tensors_in(move.args, move.kwargs)
    if name == "linear":
        x, y, *added = tensors_in(move.args, move.kwargs)
        if move.find(y) is not None:
            raise UnknownOwnerError
        out = [*range(ndim - 1), "o"]
        return [x, y], [[*range(ndim - 1), "k"], ["o", "k"][-y.ndim :]], out
    if name == "rmatmul":
        x, y = y, x
    if move.maps(added):
        raise UnknownOwnerError
    rows = [] if x.ndim == 1 else ["i"]
    columns = [] if y.ndim == 1 else ["j"]
    batch = list(range(ndim - len(rows) - len(columns)))
    left = [*batch[len(batch) - max(0, x.ndim - 2) :], *rows, "k"]
    right = [*batch[len(batch) - max(0, y.ndim - 2) :], "k", *columns]
    return [x, y], [left, right], [*batch, *rows, *columns]


def _names(letters: str, ndim: int) -> list[Any]:
    """A name for every dimension; those of an ellipsis are counted from its right end."""
    if "..." not in letters:
        return list(letters)
    before, after = letters.split("...")
    return [*before, *reversed(range(ndim - len(before) - len(after))), *after]


def grouped(move: Move) -> Tensor:
    """Rows [N, I] times one matrix of several each: rows stay where they are."""
    x = move.first
    m = move.find(x)
    if m is None or x.ndim != 2 or move.out.ndim != 2 or m.shape[1] != 1:
        raise UnknownOwnerError
    if move.maps(move.given(1, "mat2", "mat_b", "weight")):
        raise UnknownOwnerError
    return m


def attention(move: Move) -> Tensor:
    """A row of the output belongs to the query."""
    m = move.find(move.given(0, "query"))
    if m is None or m.shape[-1] != 1 or bool_or(m < 0):  # a query of nobody's takes others' values
        raise UnknownOwnerError
    return m


def embedding(move: Move) -> Tensor:
    found = move.maps(move.args, move.kwargs)
    if len(found) != 1 or found[0][0].is_floating_point():
        raise UnknownOwnerError
    return found[0][1][..., None]


def cross_entropy(move: Move) -> Tensor:
    """Losses without a reduction: classes are dimension 1 of several, or the only one."""
    m = move.map_of(move.first)
    if m.ndim < 2 or m.shape[1] != 1:
        raise UnknownOwnerError
    return m.squeeze(1)


def recurrent(move: Move) -> Tensor:
    """``lstm`` and relatives: the output has the places of the input, a state [layers, N, H] those
    of the sequences. Rows of packed data [R, I] begin with the first step of every sequence."""
    x = move.first
    m = move.find(x)
    if m is None or m.shape[-1] != 1:
        raise UnknownOwnerError
    asked = options(lambda position, keyword: move.given(position, keyword))
    output = tensors_in(move.result)[0] is move.out
    if asked.packed:
        _one_owner_each(move, expanded(m, x.shape, [0]))
        return m if output else m[: move.out.shape[1], 0].view(1, -1, 1)
    if x.ndim != 3 or m.shape[1 - asked.columns] != 1:
        raise UnknownOwnerError
    return m if output else m.flatten().view(1, -1, 1)


def _one_owner_each(move: Move, m: Tensor) -> None:
    """All rows of a packed sequence must be one example's: a state is made of all of them."""
    sizes = move.given(1, "batch_sizes").tolist()  # always in host memory
    first = torch.cat([torch.arange(n, device="cpu") for n in sizes])
    whose = move.examples(m[:, 0])
    alike = (whose == whose[first.to(whose.device, non_blocking=True)]).all()
    if not whose.is_cpu:
        move.doubt(~alike)
    elif not bool(alike):
        raise UnknownOwnerError


def cell(move: Move) -> Tensor:
    """One step of [N, I]: rows stay where they are."""
    return together([m for _, m in move.maps(move.args[:2])], move.agree)


def packed(move: Move) -> Tensor | Kind:
    """``pack_padded_sequence`` and back: the same on the map. Sizes of the steps (lengths of the
    sequences) are no example's."""
    x = move.first
    m = move.find(x)
    if m is None:
        raise UnknownOwnerError
    if move.out is not tensors_in(move.result)[0]:
        return MIXED
    lead = 2 if name_of(move.func) == "pack_padded_sequence" else 1
    whole = expanded(m, x.shape, range(lead)).double()
    move.content = True
    args = [whole if a is x else a for a in move.args]
    if name_of(move.func) == "pad_packed_sequence":
        args[3] = float(NOBODY)
    return tensors_in(move.func(*args, **move.kwargs))[0].long()

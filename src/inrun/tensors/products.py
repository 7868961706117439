"""Layout rules of products of matrices, in which one dimension is summed over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from inrun.tensors.layout import Find, Layout, agree, batched, name_of, tensors_in


def linear(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    x, weight = args[0], kwargs.get("weight", args[1] if len(args) > 1 else None)
    layout = find(x)
    if layout is None or layout.dim == x.ndim - 1 or find(weight) is not None:
        return None
    return layout


def matmul(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    *added, x, y = tensors_in(args, kwargs)
    if name_of(func) == "rmatmul":
        x, y = y, x
    found = [replace(z, dim=z.dim + out.ndim - t.ndim) for t, z in batched(added, {}, find)]
    if (layout := find(x)) is not None:
        r = x.ndim - layout.dim  # from the right: the last dimension, 1, is summed over
        if r == 1:
            return None
        found.append(replace(layout, dim=layout.dim if y.ndim == 1 else out.ndim - r))
    if (layout := find(y)) is not None:
        r = y.ndim - layout.dim
        if r == 2 or y.ndim == 1:
            return None
        found.append(replace(layout, dim=out.ndim - r + (x.ndim == 1 and r > 2)))
    return agree(found)


def einsum(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    equation, operands = args[0], tensors_in(args[1:])
    if not isinstance(equation, str) or "->" not in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    places = _names(result, out.ndim)
    found: list[Layout | None] = []
    for t, letters in zip(operands, inputs.split(","), strict=True):
        layout = find(t)
        if layout is not None:
            letter = _names(letters, t.ndim)[layout.dim]
            found.append(replace(layout, dim=places.index(letter)))
    return agree(found)


def _names(letters: str, ndim: int) -> list[Any]:
    """A name for every dimension; those of an ellipsis are counted from its right end."""
    if "..." not in letters:
        return list(letters)
    before, after = letters.split("...")
    return [*before, *reversed(range(ndim - len(before) - len(after))), *after]

"""Where the examples go in operations whose arguments name dimensions or entries: einsum, gather.

Rules of follow.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from inrun.layout import Layout, name_of, tensors_in

Find = Callable[[Any], "Layout | None"]


def agree(layouts: Sequence[Layout | None]) -> Layout | None:
    return layouts[0] if layouts and all(x == layouts[0] for x in layouts) else None


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
    same = chosen is None or chosen == own
    return own if same and dim % x.ndim != own.dim else None

"""Where the examples are in a tensor.

A batched tensor has one dimension that holds the examples, perhaps merged with others by a
reshape: its size is ``outer · B · inner``. Which dimension that is follows from what the model
receives (provenance.py) and from how a tensor was made of it (follow.py), never from a size that
happens to equal B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The examples are in dimension ``dim``, of size outer · B · inner, in their order.

    ``data``: the loop's own tensor, not yet received by the model. Operations on such tensors are
    the user's business: row k of what the model receives is example k.

    ``claims``: names of the model's inputs that this layout rests on, if nothing but their size
    has shown so far that they hold one row per example. Empty: certain.

    ``proves``: claims that the operation behind this tensor has shown to be true.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    data: bool = field(default=False, compare=False)
    claims: frozenset[str] = field(default=frozenset(), compare=False)
    proves: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class Spread:
    """The positions of an owner map (owners.py) are spread over these dimensions of a tensor, in
    this order. Stands in the place of a ``Layout`` where they are more than one."""

    dims: tuple[int, ...]


class Kind:
    """What a tensor without a layout is made of."""

    def __init__(self, name: str) -> None:
        self.name = name


class Lost(Kind):
    """Made of the batch, and where the examples are in it is not known since the operation ``by``
    (rows that moved)."""

    def __init__(self, by: str) -> None:
        super().__init__("lost")
        self.by = by


@cache
def lost(by: str) -> Lost:
    """One object for each operation."""
    return Lost(by)


MIXED = Kind("mixed")  # made of the batch, and the same for all examples (a mean, a loss)


Find = Callable[[Any], "Layout | None"]  # the layout of a batched tensor


def batched(args: Any, kwargs: Any, find: Find) -> list[tuple[Tensor, Layout]]:
    """The tensors among the arguments that have a layout, with it."""
    pairs = [(t, find(t)) for t in tensors_in(args, kwargs)]
    return [(t, layout) for t, layout in pairs if layout is not None]


def agree(layouts: Sequence[Layout | None]) -> Layout | None:
    """The one layout of operands whose examples lie beside each other in an operation's output.

    Operands of which all is certain must have the same. One that rests on a claim and has the same
    proves the claim: the operation would not fit otherwise. One that has another is taken for a
    tensor without examples; if a parameter has met it as one with examples, the claim stays
    unproven and the batch is refused in the end.
    """
    if not layouts or None in layouts:
        return None
    found = [x for x in layouts if x is not None]
    first = next((x for x in found if not x.claims), found[0])
    claimed = [x for x in found if x.claims]
    if any(x != first for x in found if not x.claims):
        return None
    if first.claims and any(x != first for x in found):
        return None
    claims = frozenset[str]().union(*(x.claims for x in claimed if x == first))
    if not first.claims:
        return replace(first, proves=claims)
    return replace(first, claims=claims)


def to_rows(x: Tensor, layout: Layout | Spread, B: int) -> Tensor:
    """The tensor with the examples in front: [B, …], the other dimensions in their order."""
    if isinstance(layout, Spread):
        n = len(layout.dims)
        return x.movedim(layout.dims, tuple(range(n))).flatten(0, n - 1)
    if (layout.dim, layout.outer, layout.inner) == (0, 1, 1):
        return x if x.ndim else x[None]
    split = [*x.shape[: layout.dim], layout.outer, B, layout.inner, *x.shape[layout.dim + 1 :]]
    return x.reshape(split).movedim(layout.dim + 1, 0)


_NAMES: dict[Any, str] = {}
_REFLECTED = {"radd": "add", "iadd": "add", "rmul": "mul", "imul": "mul", "rsub": "rsub",
              "isub": "sub", "truediv": "div", "rtruediv": "rdiv", "itruediv": "div",
              "rpow": "rpow", "ipow": "pow"}  # fmt: skip


def name_of(func: Callable[..., Any]) -> str:
    """One name for all spellings: ``torch.add``, ``Tensor.add_``, ``Tensor.__iadd__`` are add."""
    name = _NAMES.get(func)
    if name is None:
        name = getattr(func, "__name__", type(func).__name__)
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
        if name not in ("t", "T", "H", "mT", "mH"):
            name = name.strip("_")
        name = _NAMES[func] = _REFLECTED.get(name, name)
    return name


def in_place(func: Callable[..., Any]) -> bool:
    """Does the operation write into its first argument?"""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_") and not name.endswith("__")


def tensors_in(*trees: Any) -> list[Tensor]:
    """The tensors of nested arguments, in order."""
    found: list[Tensor] = []
    for x in trees:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += tensors_in(*x)
        elif isinstance(x, dict):
            found += tensors_in(*x.values())
    return found

"""Where the examples are in a tensor.

A batched tensor has one dimension that holds the examples, perhaps merged with others by a
reshape: its size is ``outer · B · inner``. Which dimension that is follows from how the tensor was
made (follow.py), never from a size that happens to equal B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The examples are in dimension ``dim``, of size outer · B · inner.

    ``guessed``: a tensor from outside the model that has B entries there, not yet one that is
    computed from such.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    guessed: bool = field(default=False, compare=False)


def to_rows(x: Tensor, layout: Layout, B: int) -> Tensor:
    """The tensor with the examples in front: [B, …], the other dimensions in their order."""
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

"""One operation that moves owner maps, and what is known of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inrun.tensors.layout import tensors_in
from inrun.tensors.owners import NOBODY, UnknownOwnerError, on_one_device


@dataclass
class Move:
    """One operation and what is known of its tensors.

    ``ask`` gives the map of a tensor, None for one without examples, and raises
    ``UnknownOwnerError`` for one whose owners are not known. ``content`` is set by a rule that has
    looked at what a tensor holds: the map may then be another in the next step.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any
    out: Tensor
    ask: Callable[[Tensor], Tensor | None]
    constant: Callable[[Tensor], bool]  # is a tensor made of neither examples nor parameters?
    doubt: Callable[[Tensor], None]  # is given a flag on a device: owners do not agree
    owner: Tensor | None = None  # the example of each row, where rows are not the examples
    content: bool = field(default=False)
    asked: list[Tensor] = field(default_factory=list)  # tensors whose maps the rule has used
    beside: bool = field(default=False)  # did it lay the rows of its operands beside each other?

    def given(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or keyword."""
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[n] for n in names if n in self.kwargs), default)

    @property
    def first(self) -> Tensor:
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    def find(self, t: Tensor) -> Tensor | None:
        """The map of a tensor; None for one without examples."""
        found = self.ask(t)
        if found is not None:
            self.asked.append(t)
        return found

    def map_of(self, t: Any) -> Tensor:
        """The map of a tensor; all nobody's if it is a constant."""
        found = self.find(t)
        if found is None and not self.constant(t):
            raise UnknownOwnerError
        return torch.full([1] * t.ndim, NOBODY, device="cpu") if found is None else found

    def agree(self, a: Tensor, b: Tensor) -> Tensor:
        """The one map of two, whose entries must belong to the same example or one of them to
        nobody. One in host memory is preferred: what it says can be looked at."""
        given, (a, b) = (a, b), on_one_device(a, b)
        same = (a == b) | (a < 0) | (b < 0)
        if self.owner is not None and not (same.is_cpu and bool(same.all())):
            self.content = True
            same = same | (self.examples(a) == self.examples(b))
        if not same.is_cpu:
            self.doubt(~same.all())
        elif not bool(same.all()):
            raise UnknownOwnerError
        complete = [m for m in given if not bool_or(m < 0)]  # says it all: the other agrees
        return min(complete, key=Tensor.numel) if complete else torch.maximum(a, b)

    def examples(self, m: Tensor) -> Tensor:
        """The map with examples in the place of rows."""
        if self.owner is None:
            return m
        owner, m = on_one_device(self.owner, m)
        return torch.where(m < 0, m, owner[m.clamp(min=0)])

    def maps(self, *trees: Any) -> list[tuple[Tensor, Tensor]]:
        """The tensors that have a map, with it."""
        pairs = [(t, self.find(t)) for t in tensors_in(*trees)]
        return [(t, m) for t, m in pairs if m is not None]

    def index(self, i: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """An index and the map to be indexed, on one device."""
        self.content = True
        i = i.detach()
        if i.device != m.device:
            return (i, m.to(i.device, non_blocking=True)) if m.is_cpu else (i.to(m.device), m)
        return i, m


def bool_or(condition: Tensor) -> bool:
    """Does it hold somewhere? True where that is not known on the host."""
    return not condition.is_cpu or bool(condition.any())


def varying(m: Tensor) -> tuple[int, ...]:
    """The dimensions along which the owner changes."""
    return tuple(d for d, n in enumerate(m.shape) if n != 1)


def right(m: Tensor, ndim: int) -> Tensor:
    """The map with leading dimensions of size 1 up to so many."""
    return m.view([1] * (ndim - m.ndim) + list(m.shape))


def slim(m: Tensor) -> Tensor:
    """Size 1 in dimensions that an expanded map has no memory for."""
    for d in range(m.ndim):
        if m.stride(d) == 0 and m.shape[d] > 1:
            m = m.narrow(d, 0, 1)
    return m

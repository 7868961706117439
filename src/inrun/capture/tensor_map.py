"""Dictionaries with tensors as keys, and the one that holds the origins of a batch's tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from inrun.tensors.layout import tensors_in
from inrun.torch_compat import MODULE_ATTRIBUTES, FakeTensor, buffers_of, parameters_of

T = TypeVar("T")
_CONTAINERS, _SHORT = (dict, list, tuple), 64
_STANDARD = list(vars(nn.Module()))
_PLAIN = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size])


class TensorMap(Generic[T]):
    """Weak dictionary with tensors as keys. (torch's own WeakTensorKeyDictionary is slower.)"""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def get(self, t: Tensor) -> T | None:
        entry = self.entries.get(id(t))
        return entry[1] if entry is not None and entry[0]() is t else None

    def __setitem__(self, t: Tensor, value: T) -> None:
        self.entries[id(t)] = weakref.ref(t), value

    def alive(self) -> Iterator[tuple[Tensor, T]]:
        """The tensors that still exist, with their values."""
        for tensor, value in self.entries.values():
            if (t := tensor()) is not None:
                yield t, value


class Mark:
    """What tensors have in common that the memo takes for alike: origin, shape and type.

    There is one object for each combination, so the key of a call holds one for each tensor. No
    type: of a tensor on which no call can be cached.
    """

    __slots__ = ("dtype", "origin", "shape")

    def __init__(self, origin: Any, shape: torch.Size, dtype: torch.dtype | None) -> None:
        self.origin, self.shape, self.dtype = origin, shape, dtype


class Origins(Generic[T]):
    """The origins of tensors (at first those of ``others``), with the mark of those that the memo
    has been asked about."""

    def __init__(self, others: Origins[T] | None = None) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], T, Mark | None]] = (
            {} if others is None else others.entries.copy()
        )

    def get(self, t: Tensor) -> T | None:
        entry = self.entries.get(id(t))
        return entry[1] if entry is not None and entry[0]() is t else None

    def __setitem__(self, t: Tensor, origin: T) -> None:
        self.entries[id(t)] = weakref.ref(t), origin, None

    def put(self, t: Tensor, mark: Mark) -> None:
        """The same for a tensor whose mark is known."""
        self.entries[id(t)] = weakref.ref(t), mark.origin, mark

    def alive(self) -> Iterator[tuple[Tensor, T]]:
        """The tensors that still exist, with their origins."""
        for tensor, origin, _ in self.entries.values():
            if (t := tensor()) is not None:
                yield t, origin


def memory_of(t: Tensor) -> Any:
    """Where a tensor is and how it is laid out; None if it has no memory of its own."""
    if isinstance(t, FakeTensor):
        return None
    try:
        return t.data_ptr(), tuple(t.shape), t.stride(), t.device
    except RuntimeError:  # a tensor without storage: inside vmap and the like
        return None


def own_tensors(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of all attributes of the modules that may be tensors: parameters, buffers and plain
    attributes. Tensors in short lists and dictionaries are included (peft keeps the tokens of its
    prompts in one)."""
    own: set[int] = set()
    for module in modules:
        held = vars(module)
        if params := parameters_of(module):
            own.update(map(id, params.values()))
        if buffers := buffers_of(module):
            own.update(map(id, buffers.values()))
        for x in _attributes(held):
            kind = type(x)
            if kind not in _PLAIN:
                own.add(id(x))
                if kind in _CONTAINERS and 0 < len(x) <= _SHORT:
                    entries = x.values() if kind is dict else x
                    if not _PLAIN.issuperset(map(type, entries)):
                        own.update(map(id, tensors_in(x)))
    return own


def _attributes(held: dict[str, Any]) -> list[Any]:
    """The values of a module's own attributes. Those of ``nn.Module`` come first, unless there
    were others before its constructor ran."""
    n = len(_STANDARD)
    if list(islice(held, n)) == _STANDARD:
        return list(islice(held.values(), n, None))
    return [held[name] for name in held.keys() - MODULE_ATTRIBUTES]

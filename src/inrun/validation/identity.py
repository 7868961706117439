"""Are these still the same objects? Compared by identity, without a loop in Python.

``Trail`` notes the containers that a walk (reach.py) went through and what each held. As long as
all of them hold the same objects under the same names, the walk would find the same again. A number
that is replaced by an equal one counts as changed: that costs another walk and nothing else.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from inrun.torch_compat import MODULE_ATTRIBUTES, MODULE_HOOKS, MODULE_STORES

_MISSING = object()
_NESTED = (tuple, list, set, dict)
_DEPTH, _LARGEST = 4, 64  # more than a fingerprint (cuda_graph.py) looks at
_requires_grad = attrgetter("requires_grad")


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Do both hold the same objects, in the same order?"""
    return len(a) == len(b) and all(map(is_, a, b))


class Trail:
    """Containers and what they held when they were noted."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._dicts: list[dict[Any, Any]] = []
        self._noted: tuple[list[int], list[Any], list[Any]] = [], [], []  # see ``_read``
        self._plain = False  # all keys are strings
        self._empty: list[Any] = []  # containers without entries
        self._others: list[tuple[Any, Any]] = []  # of other kinds with entries, and copies of these
        self._functions: list[tuple[types.FunctionType, tuple[Any, ...]]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []  # looked up in a namespace
        self.slots: list[tuple[Any, dict[str, Any]]] = []
        self.tensors: list[tuple[Tensor, bool]] = []  # does it require a gradient?

    def module(self, space: dict[str, Any]) -> None:
        """A module, by its namespace: attributes, containers among them, parameters and hooks."""
        self._dicts.append(space)
        self._dicts += map(space.__getitem__, MODULE_STORES)
        for hooks in map(space.get, MODULE_HOOKS):
            if hooks is not None:
                self.container(hooks)
        for name, x in space.items():
            if name not in MODULE_ATTRIBUTES and type(x) in _NESTED:
                self._nested(x, 0)

    def _nested(self, x: Any, depth: int) -> None:
        """A container among the attributes of a module, and containers in it."""
        if type(x) is not tuple:
            self.container(x)
        if depth < _DEPTH and len(x) <= _LARGEST:
            for entry in x.values() if type(x) is dict else x:
                if type(entry) in _NESTED:
                    self._nested(entry, depth + 1)

    def container(self, x: Any) -> None:
        if id(x) in self._seen:
            return
        self._seen.add(id(x))
        if type(x) is dict:
            self._dicts.append(x)
        elif not x:
            self._empty.append(x)
        else:
            self._others.append((x, _entries(x)))

    def function(self, f: types.FunctionType, names: Iterable[str]) -> None:
        """A function: what its closure, its defaults and the globals that it names hold."""
        self._functions.append((f, _parts(f)))
        if f.__kwdefaults__:
            self._dicts.append(f.__kwdefaults__)
        self._cells += [(cell, _content(cell)) for cell in f.__closure__ or ()]
        space = f.__globals__
        self._names += [(space, name, space.get(name, _MISSING)) for name in names]

    def unchanged(self) -> bool:
        """Do all containers hold what they held?"""
        sizes, keys, values = self._noted
        return (
            list(map(len, self._dicts)) == sizes
            and self._same_keys(keys)
            and all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), values))
            and not any(self._empty)
            and all(space.get(name, _MISSING) is x for space, name, x in self._names)
            and all(_content(cell) is x for cell, x in self._cells)
            and all(same(_parts(f), parts) for f, parts in self._functions)
            and all(_unchanged(x, entries) for x, entries in self._others)
            and all(
                getattr(x, name, _MISSING) is held
                for x, slots in self.slots
                for name, held in slots.items()
            )
            and all(_requires_grad(t) is flag for t, flag in self.tensors)
        )

    def note(self) -> None:
        """The walk is over: note what all dictionaries hold."""
        self._empty += [space for space in self._dicts if not space]
        self._dicts = [space for space in self._dicts if space]
        self._noted = self._read()
        self._plain = all(type(k) is str for k in self._noted[1])

    def _same_keys(self, keys: list[Any]) -> bool:
        now = list(chain.from_iterable(map(dict.__iter__, self._dicts)))
        return now == keys if self._plain else same(now, keys)

    def _read(self) -> tuple[list[int], list[Any], list[Any]]:
        """Sizes, keys and values of all dictionaries."""
        keys = list(chain.from_iterable(map(dict.__iter__, self._dicts)))
        values = list(chain.from_iterable(map(dict.values, self._dicts)))
        return list(map(len, self._dicts)), keys, values


def _parts(f: types.FunctionType) -> tuple[Any, ...]:
    return f.__code__, f.__closure__, f.__defaults__, f.__kwdefaults__


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _MISSING


def _entries(x: Any) -> Any:
    if isinstance(x, dict):
        return list(x), list(x.values())
    return set(x) if isinstance(x, set) else list(x)


def _unchanged(x: Any, entries: Any) -> bool:
    if isinstance(x, dict):
        return list(x) == entries[0] and same(list(x.values()), entries[1])
    if isinstance(x, set):
        return bool(set(x) == entries)
    return same(list(x), entries)

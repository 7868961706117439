"""The tensors in what a model takes and returns."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 8  # of containers and objects


class CannotRecordError(Exception):
    """Why a pass is not recorded."""


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of arguments or results in order, each once: of lists, dictionaries, dataclasses
    and objects with attributes. Raises CannotRecordError where they are nested too deeply."""
    return list({id(t): t for t in places_of(tree)}.values())


def order_of(tree: Any) -> list[int]:
    """Which of its tensors stands at each place."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(t), len(numbers)) for t in places_of(tree)]


def places_of(tree: Any) -> list[Tensor]:
    """The tensor at each place; one may stand at several."""
    found: list[Tensor] = []

    def look(x: Any, depth: int) -> None:
        if isinstance(x, Tensor):
            found.append(x)
        elif (members := _members(x)) and depth:
            for y in members.values():
                look(y, depth - 1)
        elif members:
            raise CannotRecordError("what it takes or returns is nested too deeply")

    look(tree, _DEPTH)
    return found


def swapped(tree: Any, before: Sequence[Tensor], after: Sequence[Tensor]) -> Any:
    """The same with other tensors: objects that hold them, and all lists and dictionaries, are
    copied."""
    new = dict(zip(map(id, before), after, strict=True))

    def swap(x: Any, depth: int) -> Any:
        if isinstance(x, Tensor):
            return new.get(id(x), x)
        members = _members(x) if depth else {}
        changed = {k: y for k, own in members.items() if (y := swap(own, depth - 1)) is not own}
        if not changed:
            return copy.copy(x) if type(x) in (list, dict, set) else x
        if isinstance(x, (list, tuple)):
            items = [changed.get(i, y) for i, y in enumerate(x)]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        made = copy.copy(x)
        for k, y in changed.items():
            if isinstance(x, Mapping):
                made[k] = y
            else:
                object.__setattr__(made, k, y)
        return made

    return swap(tree, _DEPTH)


def _members(x: Any) -> dict[Any, Any]:
    """What a container or an object holds that may be or hold tensors, by key."""
    if x is None or isinstance(x, (str, bytes, int, float, type, nn.Module, torch.dtype)):
        return {}
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, (list, tuple)):
        return dict(enumerate(x))
    if is_dataclass(x) or hasattr(x, "__dict__"):
        return dict(vars(x))
    return {}

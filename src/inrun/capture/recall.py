"""Cache of call analysis: training repeats the same calls, so each is analysed once.

The key of a call is its function, what its tensors are made of, their shapes and types, and its
other arguments. On a hit only the operation itself runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.capture.tap import shape_of
from inrun.capture.whole import Operation
from inrun.gradients import Call
from inrun.gradients.nodes import Node
from inrun.tensors.layout import Layout, tensors_in

_MOST = 10_000
_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_BY_CONTENT = {Tensor.__getitem__, Tensor.__setitem__}  # what an index tensor holds matters


@dataclass(frozen=True)
class Followed:
    """An operation on examples: what its outputs are made of, and their shapes."""

    infos: list[Any]
    shapes: list[Any]

    @staticmethod
    def of(out: Any, find: Callable[[Tensor], Any]) -> Followed | None:
        outs = tensors_of(out)
        if outs is None or any(t.is_nested for t in outs):  # these have no shape
            return None
        return Followed([find(t) for t in outs], [t.shape for t in outs])


@dataclass(frozen=True)
class Met:
    """An operation in which a parameter meets examples.

    ``call`` holds everything but its leaves; of these only the shapes are kept (``shapes``) where
    the derivative needs no more.
    """

    call: Call
    rule: Any
    parametric: tuple[int, ...]
    batched: tuple[int, ...]
    detached: tuple[int, ...]
    summed: tuple[int, ...]
    shapes: bool
    kept: tuple[str, ...] = ()
    whole: Operation | None = None

    def parted(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The arguments to run the operation with, and those to save for its rule."""
        given, saved = list(leaves), list(leaves)
        for i in self.parametric:
            saved[i] = leaves[i].detach()
            if i in self.detached:
                given[i] = saved[i]
        if self.shapes:
            saved = [shape_of(x) if isinstance(x, Tensor) else x for x in saved]
        return given, saved


def tensors_of(out: Any) -> Sequence[Tensor] | None:
    """The tensors of an operation's result; None where they are hidden deeper in it."""
    if isinstance(out, Tensor):
        return (out,)
    if isinstance(out, (tuple, list)) and all(isinstance(t, Tensor) for t in out):
        return out
    return None if tensors_in(out) else ()


class Recall:
    """The cache: key of a call → what is known of it.

    ``find`` says what a tensor is made of. Keys hold the id of its result, which must stay alive.
    """

    def __init__(self, find: Callable[[Tensor], Any]) -> None:
        self._find = find
        self._known: dict[Any, Followed | Met] = {}

    def recognise(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], *state: Any
    ) -> tuple[Any, Followed | Met | None]:
        """The key of a call (None if it cannot be cached), and the entry found for it."""
        if func in _BY_CONTENT and tensors_in(args[1:]):
            return None, None
        key: list[Any] = [func, *state]
        try:
            if not self._extend(key, args):
                return None, None
            if kwargs:
                key.append(tuple(kwargs))
                if not self._extend(key, kwargs.values()):
                    return None, None
            found = tuple(key)
            return found, self._known.get(found)
        except TypeError:  # something that has no hash: an array, a symbolic size
            return None, None
        except RuntimeError:  # a nested tensor, which has no shape
            return None, None

    def learn(self, key: Any, found: Followed | Met) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = found

    def _extend(self, key: list[Any], values: Iterable[Any]) -> bool:
        for x in values:
            if isinstance(x, Tensor):
                info = self._find(x)
                if type(info) is Node and info.param is None:
                    return False  # made anew in each step
                if type(info) is Layout and info.data:
                    return False  # the call may show that it is the batch
                key += (id(info), x.shape, x.dtype)
            elif isinstance(x, _PLAIN) or x is None or x is Ellipsis:
                key.append(x)
            elif isinstance(x, (list, tuple)):
                key += (type(x), len(x))
                if not self._extend(key, x):
                    return False
            elif type(x) is slice and not tensors_in((x.start, x.stop, x.step)):
                key += (slice, x.start, x.stop, x.step)
            else:
                return False  # the key would keep it alive, or it may change
        return True

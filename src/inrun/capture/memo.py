"""Cache of call analysis: training repeats the same calls, so each is analysed once.

The key of a call is its function, the shapes, types and origins of its tensors, and its other
arguments. On a hit only the operation itself runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from inrun.capture.provenance import Origin, Provenance, has_rows, lasts
from inrun.capture.site import Site
from inrun.gradients.nodes import Node
from inrun.tensors.layout import Layout, tensors_in
from inrun.tensors.owners import Owners

Key: TypeAlias = tuple[Any, ...]

_MOST = 10_000  # entries; then the cache is emptied
_BY_VALUE = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_BY_CONTENT = {Tensor.__getitem__, Tensor.__setitem__}  # what an index tensor holds matters


@dataclass(frozen=True)
class Outcome:
    """What an operation without parameters makes: origins and shapes of its outputs."""

    origins: list[Origin]
    shapes: list[torch.Size]

    @staticmethod
    def of(out: Any, provenance: Provenance) -> Outcome | None:
        """None if the outputs are hidden in an object or have no shape."""
        outs = tensors_of(out)
        if outs is None or any(t.is_nested for t in outs):  # these have no shape
            return None
        origins = provenance.find_all(outs)
        if any(has_rows(x) and not lasts(x) for x in origins):
            return None
        return Outcome(origins, [t.shape for t in outs])

    def note(self, out: Any, provenance: Provenance) -> bool:
        """Note the outputs of a cached call; False if their shapes differ from the cached ones."""
        outs = tensors_of(out)
        if outs is None or [t.shape for t in outs] != self.shapes:
            return False
        provenance.note_all(outs, self.origins)
        return True


def tensors_of(out: Any) -> Sequence[Tensor] | None:
    """The tensors of an operation's result; None where they are hidden deeper in it."""
    if isinstance(out, Tensor):
        return (out,)
    if isinstance(out, (tuple, list)) and all(isinstance(t, Tensor) for t in out):
        return out
    return None if tensors_in(out) else ()


class Memo:
    """The cache: key of a call → its site, or the outcome of an operation without parameters.

    Keys hold the ids of origins. These stay alive: the provenance keeps layouts, static owner maps
    and parameters, and a call on others is not cached.
    """

    def __init__(self, provenance: Provenance) -> None:
        self._provenance = provenance
        self._known: dict[Key, Outcome | Site] = {}

    def look_up(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *state: Any
    ) -> tuple[Key | None, Outcome | Site | None]:
        """The key of a call (None if it cannot be cached), and the entry found for it."""
        if func in _BY_CONTENT and tensors_in(args[1:]):
            return None, None
        key: list[Any] = [func, *state]
        tensors: list[Tensor] = []
        try:
            if not _extend(key, tensors, args):
                return None, None
            if kwargs:
                key.append(tuple(kwargs))
                if not _extend(key, tensors, kwargs.values()):
                    return None, None
            for origin in self._provenance.find_all(tensors):
                if type(origin) is Node and origin.param is None:
                    return None, None  # made anew in each step
                if type(origin) is Layout and origin.data:
                    return None, None  # the call may show that it is the batch
                if type(origin) is Owners and (origin.data or not lasts(origin)):
                    return None, None
                key.append(id(origin))
            found = tuple(key)
            return found, self._known.get(found)
        except TypeError:  # something that has no hash: an array, a symbolic size
            return None, None
        except RuntimeError:  # a nested tensor, which has no shape
            return None, None

    def store(self, key: Key, found: Outcome | Site) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = found

    def clear(self) -> None:
        self._known.clear()


def _extend(key: list[Any], tensors: list[Tensor], values: Iterable[Any]) -> bool:
    """Add arguments to a key and their tensors to ``tensors``; False if they cannot be cached."""
    for x in values:
        if isinstance(x, Tensor):
            if not x.is_floating_point() and x.numel() == 1:
                return False  # may stand for a number: ``x.narrow(0, start, 2)``
            key += (x.shape, x.dtype)
            tensors.append(x)
        elif isinstance(x, _BY_VALUE) or x is None or x is Ellipsis:
            key.append(x)
        elif isinstance(x, (list, tuple)):
            key += (type(x), len(x))
            if not _extend(key, tensors, x):
                return False
        elif type(x) is slice and not tensors_in((x.start, x.stop, x.step)):
            key += (slice, x.start, x.stop, x.step)
        else:
            return False  # the key would keep it alive, or it may change
    return True

"""Cache of call analysis: training repeats the same calls, so each is analysed once.

The key of a call is its function, the *marks* of its tensors (origin, shape and type), and its
other arguments. On a hit only the operation itself runs, and its outputs get the marks they had.
Every call is looked up by all that its analysis depends on, so whatever a model does differently
from one step to the next is another key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from inrun.capture.provenance import CONSTANT, Provenance, has_rows, lasts
from inrun.capture.site import Site
from inrun.capture.tensor_map import Mark
from inrun.gradients.nodes import Node
from inrun.tensors.layout import tensors_in

Key: TypeAlias = tuple[Any, ...]

_MOST = 10_000  # entries; then the cache is emptied
_LONGEST = 64  # key of a call on constants: ``torch.tensor`` of a long list is not cached
_BY_VALUE = (
    int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(None), type(Ellipsis),
)  # fmt: skip
_VALUE_TYPES = frozenset((*_BY_VALUE, bool))
_TENSORS = frozenset((Tensor, nn.Parameter))
_BY_CONTENT = {Tensor.__getitem__, Tensor.__setitem__}  # what an index tensor holds matters


@dataclass(frozen=True)
class Outcome:
    """What an operation without parameters makes: the marks of its outputs."""

    marks: Sequence[Mark]
    constant: bool  # of constants

    def note(self, out: Any, provenance: Provenance) -> bool:
        """Note the outputs of a cached call; False if their shapes differ from the cached ones."""
        if type(out) is Tensor and len(self.marks) == 1:
            return provenance.note_known(out, self.marks[0])
        outs = tensors_of(out)
        if outs is None or len(outs) != len(self.marks):
            return False
        return all(map(provenance.note_known, outs, self.marks))


def tensors_of(out: Any) -> Sequence[Tensor] | None:
    """The tensors of an operation's result; None where they are hidden deeper in it."""
    if isinstance(out, Tensor):
        return (out,)
    if isinstance(out, (tuple, list)) and all(isinstance(t, Tensor) for t in out):
        return out
    return None if tensors_in(out) else ()


class Memo:
    """The cache: key of a call → its site, or the outcome of an operation without parameters."""

    def __init__(self, provenance: Provenance) -> None:
        self._provenance = provenance
        self._known: dict[Key, Outcome | Site] = {}
        self._marks: dict[tuple[Any, ...], Mark] = {}

    def look_up(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Key | None, Outcome | Site | None]:
        """The key of a call (None if it cannot be cached), and the entry found for it."""
        if func in _BY_CONTENT and tensors_in(args[1:]):
            return None, None
        provenance = self._provenance
        key: list[Any] = [func, provenance.B, provenance.slots, torch.is_grad_enabled()]
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

    def store(self, key: Key, found: Outcome | Site) -> None:
        if len(self._known) >= _MOST:
            self.clear()
        self._known[key] = found

    def store_outcome(self, key: Key, out: Any, constant: bool) -> None:
        """Cache a call by what the provenance knows of its outputs, unless these are hidden in an
        object, have no shape, or are made anew in each step."""
        outs = tensors_of(out)
        if outs is None or any(t.is_nested for t in outs) or (constant and len(key) > _LONGEST):
            return
        origins = self._provenance.find_all(outs)
        if not any(has_rows(x) and not lasts(x) for x in origins):
            marks = [
                self.mark(t) or Mark(origin, t.shape, None)
                for t, origin in zip(outs, origins, strict=True)
            ]
            self.store(key, Outcome(marks, constant))

    def mark(self, t: Tensor) -> Mark | None:
        """The mark of a tensor; None if a call on it cannot be cached."""
        origin = self._provenance.find(t)
        if not t.is_floating_point() and t.numel() == 1:
            return None  # may stand for a number: ``x.narrow(0, start, 2)``
        if type(origin) is Node and origin.param is None:
            return None  # made anew in each step
        if has_rows(origin) and (origin.data or not lasts(origin)):
            return None  # the call may show that it is the batch
        drawn = origin is CONSTANT and bool(self._provenance.drawn.get(t))
        key = id(origin), t.shape, t.dtype, drawn
        mark = self._marks.get(key)
        if mark is None:  # it keeps the origin alive, whose id stays its own
            mark = self._marks[key] = Mark(origin, t.shape, t.dtype)
        self._provenance.note_mark(t, mark)
        return mark

    def clear(self) -> None:
        self._known.clear()
        self._marks.clear()

    def _extend(self, key: list[Any], values: Iterable[Any]) -> bool:
        """Add arguments to a key; False if they cannot be cached."""
        entries = self._provenance.origins.entries
        for x in values:
            kind = type(x)
            if kind in _VALUE_TYPES:
                key.append(x)
            elif kind in _TENSORS or isinstance(x, Tensor):
                entry = entries.get(id(x))
                mark = entry[2] if entry is not None and entry[0]() is x else None
                if mark is None or mark.shape != x.shape or mark.dtype is not x.dtype:
                    mark = self.mark(x)
                    if mark is None:
                        return False
                key.append(mark)
            elif isinstance(x, (list, tuple)):
                key += (kind, len(x))
                if not self._extend(key, x):
                    return False
            elif kind is slice and not tensors_in((x.start, x.stop, x.step)):
                key += (slice, x.start, x.stop, x.step)
            elif isinstance(x, _BY_VALUE):
                key.append(x)
            else:
                return False  # the key would keep it alive, or it may change
        return True

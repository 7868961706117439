"""Puts back what validation passes change, so that the training never sees it.

``State`` looks after the model and the loss function. Before the passes of a step it notes
everything that a pass can write to (reach.py): containers and attributes by identity, tensors by a
copy, generators of their own by their state. Afterwards, and before each further pass of the step,
it sets all this back. So each pass of a step starts from the training's state.

* Copies are kept from step to step and refreshed where the training wrote to a tensor: seen by its
  version, and at every step for small tensors, which may have been written through ``.data`` or
  numpy. Larger ones that a pass writes to in that way are found by comparing numbers in the first
  steps.
* Tensors above ``_LARGEST`` bytes are not copied; if a pass writes to one, a warning says so.
* A pass that writes to a parameter in place is refused.
* Not put back: state outside Python and torch (files, C extensions), global variables and class
  attributes that the code of modules sets, iterators, sparse tensors, and plain numbers and lists
  of functions and objects that are no modules: a counter in the closure of the loss counts
  validation passes, too.

``Generators`` looks after the global random generators of torch, Python and numpy, which the
training uses as well. While a batch is drawn or a pass runs they are seeded, and set back
afterwards. But all threads share them: to set one back while another thread draws from it (a
prefetching thread that augments images) would let that thread draw the same numbers again. So
where there are other threads, it matters which thread has drawn:

* If a generator has not moved, no thread drew from it. The work inside does not use it, so it is
  not touched again while there are other threads.
* If it has moved and the other threads took no processor time meanwhile, our work drew from it.
* If they did take time and it is not known from an earlier time who draws, torch's generators are
  set back (losses draw noise from them, threads hardly ever do), Python's and numpy's are not, and
  a warning says so once.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from inrun.errors import ValidationError
from inrun.torch_compat import foreach_copy_, parameters_of, version_of
from inrun.validation.reach import Reached

_LARGEST = 2**27  # bytes; a larger tensor is not copied
_SMALL = 2**14  # numbers; a tensor up to this size is copied in every step
_ARRAY = 2**20  # bytes; a larger numpy array is not copied
_MISSES = 3  # steps in a row for which a walk did not hold: later ones are not kept
_LEARNING = 2  # steps in which numbers are compared after each pass


@dataclass(eq=False)
class _Copy:
    of: weakref.ref[Tensor]
    copy: Tensor
    version: int  # of the tensor when it was copied
    small: bool
    written: bool = False  # has a pass ever written to it?


class State:
    """What the passes of a step may write to, and how it was before them."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self._copies: dict[int, _Copy] = {}
        self._reached: Reached | None = None  # kept from step to step as long as it holds
        self._facts: dict[Any, Any] = {}  # see ``once``
        self._misses = 0  # steps in a row for which an earlier walk did not hold
        self._inside, self._ran = False, False  # a step; has code of the model run in it?
        self._generators: list[Any] = []
        self._data: list[tuple[Tensor, Tensor, _Copy]] = []
        self._large: list[tuple[Tensor, int]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._params: list[Tensor] = []
        self._steps, self._clean, self._told = 0, True, False

    @contextmanager
    def kept(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Put everything back at the end, whatever was written inside."""
        self._note(modules)
        self._inside, self._clean, self._ran = True, True, False
        try:
            yield
        finally:
            self.rewind(last=True)
            self._inside = False
            self._steps += 1
            self._generators, self._arrays, self._data, self._large = [], [], [], []
            self._let_go()

    @contextmanager
    def one_pass(self, model: nn.Module) -> Iterator[None]:
        """Around a forward pass: refuse one that writes to a parameter in place. The weights are
        those of the training, or of a point of the path that other passes use as well."""
        before, self._clean, self._ran = list(map(version_of, self._params)), False, True
        yield
        after = list(map(version_of, self._params))
        if after != before:
            pairs = zip(self._params, before, after, strict=True)
            written = next(p for p, a, b in pairs if a != b)
            name = next((k for k, p in model.named_parameters() if p is written), "unknown")
            raise ValidationError(
                f"the validation pass writes to parameter '{name}' in place, which would change "
                "the training. Let the forward pass write to it only if self.training, or project "
                "the weights after optimizer.step() instead."
            )

    def replayed(self) -> None:
        """Tell that a pass ran without ``one_pass``: the replay of a CUDA graph."""
        self._clean = False

    def fingerprint(self) -> tuple[Any, ...]:
        """Returns a key of the state other than parameters: see ``Reached.fingerprint``."""
        assert self._reached is not None
        return self._reached.fingerprint()

    def once(self, fact: Callable[[Sequence[nn.Module]], Any], modules: Sequence[nn.Module]) -> Any:
        """``fact(modules)``, computed again when attributes of the modules have changed."""
        if fact not in self._facts:
            self._facts[fact] = fact(modules)
        return self._facts[fact]

    def addresses(self) -> tuple[int, ...]:
        """Where the parameters and the tensors that were reached are in memory."""
        assert self._reached is not None
        return tuple(map(_address, (*self._params, *self._reached.tensors.values())))

    def close(self) -> None:
        self._copies, self._reached, self._params, self._facts = {}, None, [], {}

    def _walk(self, modules: Sequence[nn.Module]) -> Reached:
        """What can be reached: as in the step before, if nothing was replaced since."""
        reached = self._reached
        if reached is not None and reached.unchanged(modules, bool(self._facts)):
            self._misses = 0
            return reached
        self._misses += reached is not None
        reached, self._facts = Reached(modules, self._loss), {}
        params = (p for own in map(parameters_of, modules) for p in own.values() if p is not None)
        self._params = [p for p in params if id(p) not in reached.tensors]
        return reached

    def _let_go(self) -> None:
        """Keep the walk for the next step, unless it would keep memory alive or never holds."""
        reached = self._reached
        holds = self._misses < _MISSES or self._steps % 64 == 0
        if reached is None or not reached.lasting or not holds:
            self._reached, self._params, self._facts = None, [], {}

    def _note(self, modules: Sequence[nn.Module]) -> None:
        reached = self._reached = self._walk(modules)
        self._generators = [(g, _state_of(g)) for g in reached.generators]
        self._arrays = [(a, a.copy()) for a in reached.arrays if a.nbytes <= _ARRAY]
        copies: dict[int, _Copy] = {}
        stale: list[tuple[Tensor, Tensor]] = []
        for key, t in reached.tensors.items():
            if t.numel() * t.element_size() > _LARGEST:
                self._large.append((t, version_of(t)))
                continue
            known = self._copies.get(key)
            if known is None or known.of() is not t or not _alike(known.copy, t):
                copy, small = t.detach().clone(), t.numel() <= _SMALL
                known = _Copy(weakref.ref(t), copy, version_of(t), small)
            elif known.small or known.written or known.version != version_of(t):
                stale.append((known.copy, t.detach()))
                known.version = version_of(t)
            copies[key] = known
            self._data.append((t, t.data, known))
        self._copies = copies
        if stale:
            foreach_copy_([c for c, _ in stale], [t for _, t in stale])

    def rewind(self, last: bool = False) -> None:
        """Before each pass: set everything back to how it was before the first one."""
        reached = self._reached
        if reached is None or not self._inside or (self._clean and not last):
            return
        self._clean = True
        if self._ran and not reached.untouched():
            self._put_back(reached)
        self._ran = False
        for generator, state in self._generators:
            _set_state(generator, state)
        for array, numbers in self._arrays:
            array[...] = numbers
        self._rewind_tensors(last)

    @staticmethod
    def _put_back(reached: Reached) -> None:
        """Give containers, slots, cells and names what they held before the passes."""
        for space, before in reached.spaces:
            _put_back(space, before)
        for x, slots in reached.slots:
            for name, held in slots.items():
                if getattr(x, name, None) is not held:
                    object.__setattr__(x, name, held)
        for own in reached.empty:
            if own:
                own.clear()
        for cell, held in reached.cells:
            if cell.cell_contents is not held:
                cell.cell_contents = held
        for namespace, name, x in reached.names:
            if namespace.get(name) is not x:
                namespace[name] = x

    def _rewind_tensors(self, last: bool) -> None:
        changed: list[tuple[Tensor, Tensor]] = []
        learning = self._steps < _LEARNING
        for t, data, known in self._data:
            if t.data_ptr() != data.data_ptr() or t.shape != data.shape:
                t.data = data
            if version_of(t) != known.version or (learning and not torch.equal(data, known.copy)):
                known.written, known.version = True, version_of(t)
            if known.written or (last and known.small):
                changed.append((data, known.copy))
        if changed:
            foreach_copy_([t for t, _ in changed], [c for _, c in changed])
        written = [t for t, version in self._large if version_of(t) != version]
        if written and not self._told:
            self._told = True
            warnings.warn(
                f"the validation pass writes to a tensor of shape {tuple(written[0].shape)} that "
                "the model or the loss holds; it is too large to be put back, so the training is "
                "not what it is without inrun. Write to it only if self.training.",
                stacklevel=2,
            )


def _address(t: Tensor) -> int:
    try:
        return t.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return id(t)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _put_back(space: Any, before: Any) -> None:
    """Give a container its earlier entries again if they have changed.

    Uses the methods of the built-in type: a subclass (``collections.Counter``) may override them.
    """
    kind: Any = next(k for k in (OrderedDict, dict, list, deque, set) if isinstance(space, k))
    if kind is set:
        same = space == before
    else:
        same = len(space) == len(before) and all(map(is_, space, before))
    if issubclass(kind, dict):
        same = same and all(map(is_, kind.values(space), before.values()))
    if not same:
        kind.clear(space)
        (kind.extend if kind in (list, deque) else kind.update)(space, before)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        if not torch.equal(generator.get_state(), state):
            generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


# -- global random generators -----------------------------------------------------------------


def _others() -> dict[int, int | None]:
    """Returns the other threads that run Python and the processor time that each has used."""
    me = threading.get_ident()
    return {i: _clock(i) for i in sys._current_frames() if i != me}


def _clock(thread: int) -> int | None:
    """Returns processor time in nanoseconds; None if the system does not provide it."""
    try:  # no thread can end before this, as we hold the interpreter's lock
        return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):
        return None


class _Source(NamedTuple):
    """A global generator; its state can be compared with ``==`` after ``comparable``."""

    name: str
    state: Callable[[], Any]
    put: Callable[[Any], None]
    seed: Callable[[int], Any]
    comparable: Callable[[Any], Any] = lambda state: state


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)  # in half the time of the tuple


def _array(state: Any) -> Any:
    own = state["state"]
    return own["key"].tobytes(), own["pos"], state["has_gauss"], state["gauss"]


_TORCH = ("torch", "torch.cuda")
_HOST = (
    _Source("Python's", random.getstate, random.setstate, random.seed),
    _Source("numpy's", _numpy_state, np.random.set_state, np.random.seed, _array),
    _Source(
        "torch", torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed,
        _bytes,
    ),
)  # fmt: skip
_CUDA = _Source(
    "torch.cuda", torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed, _bytes
)


class Generators:
    """The global generators, around one kind of work (a target's batches, the validation pass)."""

    def __init__(self, work: str) -> None:
        self._work = work
        self._used: dict[str, bool] = {}  # does it draw from them?
        self._begun: dict[str, tuple[int, Any]] = {}  # the last seed, and the state that it gives
        self._told = False

    @contextmanager
    def seeded(self, *key: int) -> Iterator[None]:
        """Seed the generators by ``key``, restore them afterwards if that harms no other thread."""
        seed, others = hash(key) % 2**32, _others()
        sources = (*_HOST, _CUDA) if torch.cuda.is_initialized() else _HOST
        held = []
        for source in sources:
            used = self._used.get(source.name)
            if others and used is False:
                continue
            state = source.state()
            seeds = not others or used or source.name in _TORCH
            begun = self._seed(source, seed) if seeds else source.comparable(state)
            held.append((source, state, begun))
        try:
            yield
        finally:
            ours = others == _others() and None not in others.values()
            for source, state, begun in held:
                drew = source.comparable(source.state()) != begun
                self._leave(source, state, drew, ours)

    def _seed(self, source: _Source, seed: int) -> Any:
        """Seed a generator; returns the state that it has then, which is the same each time."""
        source.seed(seed)
        known = self._begun.get(source.name)
        if known is None or known[0] != seed:
            known = self._begun[source.name] = seed, source.comparable(source.state())
        return known[1]

    def _leave(self, source: _Source, state: Any, drew: bool, ours: bool) -> None:
        """Restore a generator or not. ``drew``: it has moved; ``ours``: no other thread ran."""
        name, used = source.name, self._used.get(source.name)
        if not drew or ours:
            self._used[name] = drew or bool(used)
        if ours or used or name in _TORCH:
            source.put(state)
        elif drew and not self._told:
            self._told = True
            warnings.warn(
                f"{name} global random generator was drawn from while inrun {self._work} and "
                "other threads ran. If they did it, all is well. If the validation loss or its "
                "data draw from it, the training's random numbers are not those without inrun: "
                "give them a generator of their own.",
                stacklevel=2,
            )

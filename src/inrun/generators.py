"""Random numbers of validation batches and passes, and the training's own.

Torch, Python and numpy each have a global generator that the training uses as well. While a batch
is drawn or a pass runs they are seeded, and set back afterwards. But all threads share them: to set
one back while another thread draws from it (a prefetching thread that augments images) would let
that thread draw the same numbers again. So while other threads run, a generator is touched only if
what runs inside is known to draw from it:

* Whether it does is learned whenever no other thread runs, and at any time from a generator that
  is found as it was: then nothing inside drew from it.
* As long as it is not known, torch's generators are set back (losses draw noise from them, threads
  hardly do), Python's and numpy's are not; if these have moved, that is said once.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


def alone() -> bool:
    """Is this the only thread that runs Python?"""
    return len(sys._current_frames()) == 1


class _Source(NamedTuple):
    """A global generator; its state can be compared with ``==`` after ``comparable``."""

    name: str
    state: Callable[[], Any]
    put: Callable[[Any], None]
    seed: Callable[[int], Any]
    comparable: Callable[[Any], Any] = lambda state: state


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _array(state: Any) -> Any:
    return state[1].tobytes(), *state[2:]


_TORCH = ("torch", "torch.cuda")
_HOST = (
    _Source("Python's", random.getstate, random.setstate, random.seed),
    _Source("numpy's", np.random.get_state, np.random.set_state, np.random.seed, _array),
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
        self._told = False

    @contextmanager
    def seeded(self, *key: int) -> Iterator[None]:
        """Set by ``key`` inside and as before outside, as far as that harms no other thread."""
        seed, by_myself = hash(key) % 2**32, alone()
        sources = (*_HOST, _CUDA) if torch.cuda.is_initialized() else _HOST
        held = []
        for source in sources:
            used = self._used.get(source.name)
            if by_myself or used is not False:
                state = source.state()
                if by_myself or used:
                    source.seed(seed)
                held.append((source, state, source.state()))
        try:
            yield
        finally:
            for source, state, begun in held:
                now = source.state()
                drew = source.comparable(now) != source.comparable(begun)
                self._leave(source, state, drew, by_myself)

    def _leave(self, source: _Source, state: Any, drew: bool, by_myself: bool) -> None:
        name, used = source.name, self._used.get(source.name)
        if by_myself:
            self._used[name] = drew or bool(used)
            source.put(state)
        elif used or (drew and name in _TORCH):
            source.put(state)
        elif not drew:
            self._used[name] = False
        elif not self._told:
            self._told = True
            warnings.warn(
                f"{name} global random generator was drawn from while inrun {self._work}, and "
                "other threads run. If that was done by them, all is well. If the validation loss "
                "or its data draw from it, the training's random numbers are not those without "
                "inrun: give them a generator of their own.",
                stacklevel=2,
            )

"""Random numbers of validation batches and passes, and the training's own.

Torch, Python and numpy each have a global generator that the training uses as well. While a batch
is drawn or a pass runs they are seeded, and set back afterwards. But all threads share them: to set
one back while another thread draws from it (a prefetching thread that augments images) would let
that thread draw the same numbers again. So where other threads are, it matters who has drawn:

* A generator that has not moved was drawn from by nobody. What runs inside does not use it, so it
  is not touched again while other threads are there.
* If one has moved and the other threads took no processor time meanwhile, it was ours.
* If they did and it is not known from another time, torch's generators are set back (losses draw
  noise from them, threads hardly do), Python's and numpy's are not, and that is said once.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


def _others() -> dict[int, int | None]:
    """The other threads that run Python, and the processor time that each has taken."""
    me = threading.get_ident()
    return {i: _clock(i) for i in sys._current_frames() if i != me}


def _clock(thread: int) -> int | None:
    """In nanoseconds; None where the system does not tell."""
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
        seed, others = hash(key) % 2**32, _others()
        sources = (*_HOST, _CUDA) if torch.cuda.is_initialized() else _HOST
        held = []
        for source in sources:
            used = self._used.get(source.name)
            if others and used is False:
                continue
            state = source.state()
            if not others or used or source.name in _TORCH:
                source.seed(seed)
            held.append((source, state, source.comparable(source.state())))
        try:
            yield
        finally:
            ours = others == _others() and None not in others.values()
            for source, state, begun in held:
                drew = source.comparable(source.state()) != begun
                self._leave(source, state, drew, ours)

    def _leave(self, source: _Source, state: Any, drew: bool, ours: bool) -> None:
        """``ours``: no other thread ran."""
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

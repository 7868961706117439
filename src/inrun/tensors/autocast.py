"""torch.autocast: what it was when something ran, and the same again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch

Autocast: TypeAlias = tuple[str, bool, torch.dtype]  # device, on or off, type


def current(device: str) -> Autocast:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def as_it_was(state: Autocast | None) -> torch.autocast:
    """None: off."""
    device, on, dtype = state or ("cpu", False, torch.bfloat16)
    return torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=False)


def no_autocast(device: str) -> Any:
    """Off, if it is on."""
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def uncached() -> Iterator[None]:
    """Autocast neither reads nor writes its cache of weights inside, in this thread.

    Autocast keeps the half precision copy of each weight until the outermost context is left, and
    looks it up by the parameter, whose numbers change from point to point while we evaluate. Asking
    for ``cache_enabled=False`` around a pass is not enough: a context that the user made beforehand
    (``ctx = torch.autocast(...)``, used in every pass) turns the cache on again when it is entered.
    So turning it on has no effect inside. Clearing the cache instead would also drop the copies of
    a context that the user has open around ``optimizer.step()``, and change what comes after it.
    """
    me, before = threading.get_ident(), torch.is_autocast_cache_enabled()
    with _LOCK:
        _UNCACHED[me] = _UNCACHED.get(me, 0) + 1
        if len(_UNCACHED) == 1:
            torch.set_autocast_cache_enabled = _set_unless_uncached
    _SET(False)
    try:
        yield
    finally:
        with _LOCK:
            _UNCACHED[me] -= 1
            if not _UNCACHED[me]:
                del _UNCACHED[me]
            if not _UNCACHED:
                torch.set_autocast_cache_enabled = _SET
        _SET(before)


def _set_unless_uncached(enabled: bool) -> None:
    """``torch.set_autocast_cache_enabled`` while a thread is inside ``uncached``: off there, as
    asked for in all others."""
    _SET(enabled and threading.get_ident() not in _UNCACHED)


_SET = torch.set_autocast_cache_enabled
_UNCACHED: dict[int, int] = {}  # threads inside ``uncached``, how often each
_LOCK = threading.Lock()

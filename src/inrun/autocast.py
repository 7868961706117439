"""torch.autocast: what it was when something ran, and the same again."""

from __future__ import annotations

from contextlib import nullcontext
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

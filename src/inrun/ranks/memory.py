"""How much memory is free, of a device or of the host, and whether all ranks that share it fit."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from inrun.ranks.world import World

_PLENTY = 2**62  # where the system does not say


def free_bytes(device: torch.device, offload: bool = False) -> int:
    """Bytes that can still be allocated on a device; with ``offload`` on the host."""
    if device.type == "cuda" and not offload:
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:  # what the system can give, caches of files included
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return _PLENTY


def short_of(world: World, device: torch.device, need: int) -> str | None:
    """Where ranks need more than is free, in words; None if all of them fit. Ranks on one device
    or host share its memory. Every rank calls it and all get the same answer."""
    where = str(device) if device.type == "cuda" else "the host"
    place = platform.node(), where
    by_place: dict[tuple[str, str], tuple[int, int, int]] = {}
    for at, own, free in world.gather((place, need, free_bytes(device))):
        ranks, total, least = by_place.get(at, (0, 0, _PLENTY))
        by_place[at] = ranks + 1, total + own, min(least, free)
    for (host, on), (ranks, total, free) in by_place.items():
        if total > free:
            n = "1 rank needs" if ranks == 1 else f"{ranks} ranks need"
            return f"{n} {gib(total)} on {on} ({host}), where {gib(free)} are free"
    return None


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"

"""How much memory the records of a step may take."""

from __future__ import annotations

import os

import torch


class MemoryLimit:
    """Counts the bytes that are kept until ``optimizer.step()``.

    ``limit``: in bytes; None means the memory that is free when the first record is kept.
    """

    def __init__(self, limit: int | None, offload: bool) -> None:
        self.limit, self.offload, self.held = limit, offload, 0

    def add(self, new: int, device: torch.device, batches: int) -> None:
        """Count ``new`` bytes; ``batches`` earlier batches of this step are in the message."""
        if self.limit is None:
            self.limit = _free(device, self.offload)
        self.held += new
        if self.held > self.limit:
            raise MemoryError(
                "what inrun must keep until optimizer.step() takes more than "
                f"{self.limit / 2**30:.2f} GiB already (after {batches} earlier "
                "batches of this step). Use smaller or fewer micro-batches per step, "
                "watch(..., offload=True) to keep it in host memory, ignore=[...] for the largest "
                "layers, or raise memory_limit."
            )


def _free(device: torch.device, offload: bool) -> int:
    """Bytes that can still be allocated where captures are kept."""
    if device.type == "cuda" and not offload:
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**62

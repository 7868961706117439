"""Where per-example gradients are written on a host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

_MOST = 1_000  # views


class Blocks:
    """Host memory for the per-example gradients of a step, the same in every step.

    Fresh from the system it costs a page fault for every 4 KB, together nearly as long as the
    products that fill it, and between the training's own tensors it cuts their memory into pieces.
    A GPU's allocator needs no help.
    """

    _memory: Tensor
    _used: int  # bytes, those that did not fit too
    _scratch: Tensor
    _views: dict[Any, Tensor]  # of both: the same are asked for in every step

    def __init__(self) -> None:
        self.free()

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """Memory to write to, until ``over``; None where there is none (the first time)."""
        size = math.prod(shape) * like.element_size()
        start, self._used = self._used, self._used + -(-size // 64) * 64
        if self._used > self._memory.nbytes:
            _keep_freed_memory()
            return None
        return self._view(self._memory, start, shape, like)

    def scratch(self, like: Tensor) -> Tensor:
        """Memory for an intermediate result, until the next one."""
        size = like.nbytes
        if self._scratch.nbytes < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._views = {}
        return self._view(self._scratch, 0, like.shape, like)

    def _view(self, memory: Tensor, start: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        key = id(memory), start, shape, like.dtype
        if key not in self._views:
            if len(self._views) >= _MOST:  # of batches that are never alike
                self._views = {}
            end = start + math.prod(shape) * like.element_size()
            self._views[key] = memory[start:end].view(like.dtype).view(shape)
        return self._views[key]

    def over(self) -> None:
        """The step is over: what was taken is free, and as much will be wanted again."""
        used = self._used
        if used and not used <= self._memory.nbytes <= 2 * used:
            self.free()
            with suppress(RuntimeError):  # not so much at once: without, then
                self._memory = torch.empty(used, dtype=torch.uint8, device="cpu")
        self._used = 0

    def free(self) -> None:
        """Let go of the memory, whoever keeps this."""
        self._memory, self._used = torch.empty(0, dtype=torch.uint8, device="cpu"), 0
        self._scratch, self._views = self._memory, {}

    @contextmanager
    def undone_if_it_fails(self) -> Iterator[None]:
        """What a batch took is free again if it raises."""
        before = self._used
        try:
            yield
        except BaseException:
            self._used = min(before, self._used)
            raise


def _keep_freed_memory() -> None:
    """Have glibc keep what is freed in a step for the next one.

    It gives memory back to the system unless it has seen larger pieces come and go (mallopt(3),
    M_MMAP_THRESHOLD), and what it gives back costs a page fault for every 4 KB when it is wanted
    again: thousands in a step. Here it sees a piece of nearly the largest size that it learns from,
    which nobody writes to. Other allocators take no notice.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")

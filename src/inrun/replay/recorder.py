"""What records a pass so that it can be replayed: CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from inrun.torch_compat import pretend_capture
from inrun.validation.cuda_graph import settle

T = TypeVar("T")


class Recorder(Protocol):
    """Records the kernels that a function launches, in the order in which they run."""

    @property
    def device(self) -> torch.device:
        """On which it records."""

    @property
    def exact(self) -> bool:
        """Is a replay the same to the bit as the function?"""

    def tried(self) -> Any:
        """Context that raises where a function inside could not be recorded."""

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What ``run`` returns, and a function that repeats its kernels on the same memory."""

    def settle(self) -> None:
        """Clean up after a recording that failed."""


class CudaRecorder:
    """CUDA graphs. Those of one pass share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def exact(self) -> bool:
        return False  # there are kernels that add in any order

    @contextmanager
    def tried(self) -> Iterator[None]:
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(), pretend_capture():
            warnings.simplefilter("ignore")  # torch says that this debug mode is a prototype
            try:
                torch.cuda.set_sync_debug_mode("error")
                yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        found: list[T] = []
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                found.append(run())
        finally:
            torch.cuda.set_stream(before)  # after a failure torch leaves the graph's current
        self._pool = graph.pool()
        return found[0], graph.replay

    def settle(self) -> None:
        settle(self._device)


def recorder_for(device: torch.device) -> Recorder | None:
    """None if nothing can be recorded there."""
    return CudaRecorder(device) if device.type == "cuda" else None

"""Where the time of a watched step goes: a stopwatch for the stages of scoring/scorer.py."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from inrun.scoring import scorer


class Stopwatch:
    """Sums the time of each stage; on a GPU with CUDA events, which do not synchronise."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if torch.cuda.is_initialized():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._spans[name].append((start, end))
        else:
            begun = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - begun

    def milliseconds(self) -> dict[str, float]:
        """By stage, in the order in which they were first seen."""
        if self._spans:
            torch.cuda.synchronize()
        spans = {k: sum(a.elapsed_time(b) for a, b in x) for k, x in self._spans.items()}
        return spans or {k: 1e3 * s for k, s in self._seconds.items()}


@contextmanager
def measured() -> Iterator[Stopwatch]:
    """Time the stages of all steps inside."""
    before, watch = scorer.stage, Stopwatch()
    scorer.stage = watch.span
    try:
        yield watch
    finally:
        scorer.stage = before

"""A credit: what a method says each training row did for each query, and what it cost."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.lds import clock
from benchmarks.lds.gradients import Training
from benchmarks.lds.problems import Problem


@dataclass(frozen=True)
class Credit:
    """``values`` [N, Q]: positive lowers the query's loss. ``seconds`` hold the training only where
    the credit is made during it."""

    values: Tensor
    seconds: float
    training_included: bool = False

    def trainings(self, plain: float) -> float:
        """Cost in trainings, the model's own counted."""
        return self.seconds / plain + (not self.training_included)


Method = Callable[[Problem, int, Training], dict[str, Credit]]


def credited(name: str, work: Callable[[], Tensor], problem: Problem) -> dict[str, Credit]:
    """The scores of another library. ``work`` returns [N, Q]; what it prints is not shown."""
    begun = clock.now()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        values = work().detach().double().cpu()
    seconds = clock.now() - begun
    expected = (problem.examples, len(problem.queries[0]))
    if values.shape != expected:
        raise ValueError(f"{name} returned {tuple(values.shape)} instead of {expected}")
    return {name: Credit(values, seconds)}

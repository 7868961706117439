"""A credit: what a method says each training row did for each query, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

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

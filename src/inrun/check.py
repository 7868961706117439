"""``Run.check``: one step's values against exact Shapley values of the real thing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

EXACT_UP_TO = 12  # examples: 4,096 coalitions
PERMUTATIONS = 200  # above that


@dataclass
class Check:
    """What ``run.check()`` returns; filled in when the next scored step has been compared.

    Attributes:
        table: id, the estimate, the exact value (and its standard error above 12 examples).
        pearson: correlation of the two columns.
        relative_error: ‖estimate − exact‖ / ‖exact‖.
        sum_error: |Σ estimate − (U(∅) − U(B))| / Σ|exact|.
    """

    permutations: int = PERMUTATIONS
    done: bool = False
    step: int = -1
    estimator: str = ""
    coalitions: int = 0
    exact: bool = True
    table: pd.DataFrame | None = None
    pearson: float = float("nan")
    relative_error: float = float("nan")
    sum_error: float = float("nan")
    gradient_error: float = float("nan")

    def fill(
        self, ids: np.ndarray, estimate: np.ndarray, truth: np.ndarray, error: np.ndarray | None,
        batch_share: float,
    ) -> None:  # fmt: skip
        self.table = pd.DataFrame({"id": ids, "value": estimate, "exact": truth})
        if error is not None:
            self.table["standard_error"] = error
        self.exact = error is None
        if len(ids) > 1 and np.ptp(truth) > 0 and np.ptp(estimate) > 0:
            self.pearson = float(np.corrcoef(estimate, truth)[0, 1])
        size = float(np.linalg.norm(truth))
        self.relative_error = float(np.linalg.norm(estimate - truth)) / size if size else 0.0
        scale = float(np.abs(truth).sum())
        self.sum_error = abs(float(estimate.sum()) - batch_share) / scale if scale else 0.0
        self.done = True

    @property
    def noise(self) -> float:
        """Of the truth itself: ‖standard errors‖ / ‖exact‖; 0 where all coalitions were taken."""
        if self.table is None or self.exact:
            return 0.0
        return float(
            np.linalg.norm(self.table["standard_error"]) / np.linalg.norm(self.table["exact"])
        )

    @property
    def verdict(self) -> str:
        """One line a person can act on."""
        if not self.done:
            return "armed: the next scored step will be compared with exact Shapley values"
        slack = 2 * self.noise
        if self.relative_error <= 0.05 + slack and not self.pearson < 0.99 - slack:
            return "trustworthy: values match exact Shapley values of this step"
        if self.relative_error <= 0.25 + slack and not self.pearson < 0.9 - slack:
            return "usable: ranks are right, sizes are off by the error shown"
        return (
            "do not trust this step. In the first steps of an adaptive optimizer every linear "
            "estimator is poor: check again after step 20. Later, try point='gauss2' or a "
            "smaller learning rate"
        )

    def __str__(self) -> str:
        if self.table is None:
            return f"inrun check {self.verdict}"
        how = (
            f"all {self.coalitions} coalitions"
            if self.exact
            else f"{self.permutations} permutations, standard error {self.noise:.1%}"
        )
        return (
            f"inrun check at step {self.step} ({self.estimator}; {len(self.table)} examples, "
            f"{how})\n"
            f"  correlation with exact Shapley values   {self.pearson:.4f}\n"
            f"  relative error                          {self.relative_error:.2%}\n"
            f"  sum of values against the batch share   off by {self.sum_error:.2%}\n"
            f"  gradients captured against .grad        off by {self.gradient_error:.1e}\n"
            f"  {self.verdict}"
        )

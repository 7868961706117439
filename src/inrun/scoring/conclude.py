"""Are the numbers of a step good? Values, or the reason why there are none, said once."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np

from inrun.ledger.entries import Audit
from inrun.scoring.score import Score

NOT_FINITE = "the training gradient is not finite"
NOT_ADDING_UP = "captured gradients do not add up to .grad"
OTHER_STEP = "the optimizer took another step than its rule describes"


class Conclusion:
    """Concludes steps, and remembers what was said."""

    def __init__(self, targets: Sequence[str]) -> None:
        self.targets = targets
        self.verified = False  # captured gradients have added up to .grad once
        self.message = ""
        self.said: Counter[str] = Counter()  # void steps by their reason

    def void(self, step: int, reason: str, advice: str) -> Score:
        """A step without values. The first of its kind is told."""
        self.said[reason] += 1
        if self.said[reason] == 1:
            warnings.warn(
                f"step {step}: {reason}; the step is recorded as void. {advice}. (Said once; "
                "run.steps()['void'] shows every such step.)",
                stacklevel=7,
            )
        return Score(void=reason)

    def loss_not_finite(self, losses: np.ndarray) -> Score:
        target = self.targets[int(np.argmin(np.isfinite(losses)))]
        return Score(void=f"the validation loss of '{target}' is not finite")

    def of(
        self, step: int, audit: Audit | None, tolerance: float, advice: dict[str, str],
        *, values: np.ndarray, expected: np.ndarray, losses: np.ndarray, finite: np.ndarray,
        missed: np.ndarray, flags: np.ndarray,
    ) -> Score:  # fmt: skip
        """``advice``: by reason, in the order of ``flags``, those for which the step is void."""
        if not finite:
            return Score(void=NOT_FINITE)
        if not np.isfinite(losses).all():
            return self.loss_not_finite(losses)
        for up, (reason, what_to_do) in zip(flags, advice.items(), strict=True):
            if up:
                return self.void(step, reason, what_to_do)
        for q, target in enumerate(self.targets):
            if not np.isfinite(values[:, q]).all():
                return Score(void=f"the values for '{target}' are not finite")
        if self.add_up(step, tolerance, values, expected):
            return Score(values, None, audit, float(missed))
        return self.void(step, NOT_ADDING_UP, self.message)

    def add_up(self, step: int, tolerance: float, values: np.ndarray, expected: np.ndarray) -> bool:
        """Is the sum of the values what the gradient as a whole is worth?"""
        sums, size = values.sum(2), np.abs(values).sum(2) + np.abs(expected)
        off = np.abs(sums - expected)
        if not (off > tolerance * size).any():
            self.verified = True
            return True
        worst = np.unravel_index(np.argmax(off / (size + 1e-300)), off.shape)
        self.message = (
            f"step {step}: the captured per-example gradients do not add up to .grad "
            f"(⟨u, Σg_i⟩ = {sums[worst]:.6g}, ⟨u, G⟩ = {expected[worst]:.6g}). Possible causes: "
            "gradients from outside run.batch(ids); clipping, unscaling or torch.autograd.grad "
            "inside it; a hook that changes a parameter's gradient; a custom autograd function"
        )
        return False

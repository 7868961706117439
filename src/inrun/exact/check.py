"""``Run.check``: compares one step's values with exact Shapley values, by the real optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from inrun.capture.micro_batch import MicroBatch
from inrun.exact import reference
from inrun.gradients.nodes import pull_back
from inrun.ranks.world import ALONE, World

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
        credit_error: how far the captured per-example gradients are from those of every row
            alone, in a copy of the model and without the capture (repeat.py).
        unverified: why that could not be measured; None if it was.
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
    credit_error: float = float("nan")
    unverified: str | None = None
    calls: list[Any] = field(default_factory=list, repr=False)  # of the model in this step
    rounding: float = 1e-3  # what credit_error may be, by the precision of the model

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
        self.relative_error = _ratio(float(np.linalg.norm(estimate - truth)), size)
        scale = float(np.abs(truth).sum())
        self.sum_error = _ratio(abs(float(estimate.sum()) - batch_share), scale)
        self.done = True

    @property
    def noise(self) -> float:
        """Noise of the exact values: ‖standard errors‖ / ‖exact‖; 0 with all coalitions."""
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
        if self.unverified is not None:
            return (
                "not verified: whose gradient is whose could not be measured without the capture "
                f"({self.unverified}). The numbers above rest on the capture alone"
            )
        if not self.credit_error <= self.rounding:
            return (
                "do not trust this run: values go to the wrong examples in this model. Please "
                "report it, with the model's code"
            )
        if self._within(0.05, 0.99):
            return "trustworthy: values match exact Shapley values of this step"
        if self._within(0.25, 0.9):
            return "usable: ranks are right, sizes are off by the error shown"
        return (
            "do not trust this step. In the first steps of an adaptive optimizer every linear "
            "estimator is poor: use estimator='shapley', the default, or check again after step "
            "20. Later, try point='gauss2' or a smaller learning rate"
        )

    def _within(self, error: float, correlation: float) -> bool:
        """Is the error this small and the correlation, where there is one, this large?"""
        slack = 2 * self.noise
        table = self.table
        assert table is not None
        defined = bool(np.ptp(table["value"]) > 0 and np.ptp(table["exact"]) > 0)
        correlated = self.pearson >= correlation - slack or (not defined and len(table) == 1)
        return bool(np.isfinite(slack) and self.relative_error <= error + slack and correlated)

    @property
    def _credit(self) -> str:
        return "not measured" if self.unverified else f"off by {self.credit_error:.1e}"

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
            f"  gradients against each row alone        {self._credit}\n"
            f"  {self.verdict}"
        )


def _ratio(off: float, size: float) -> float:
    """Returns ``off / size``, where 0 / 0 is 0 and anything else / 0 is infinite."""
    return off / size if size else (0.0 if off == 0 else float("inf"))


def compare(
    check: Check, ids: np.ndarray, estimate: np.ndarray, rows: Mapping[str, Tensor],
    nobody: Mapping[str, Tensor], params: Mapping[str, Tensor], model: nn.Module,
    optimizer: reference.Optimizers, loss: Callable[[], float], clip: Any, say: bool = True,
) -> None:  # fmt: skip
    """Fill in a check: exact Shapley values by the real optimizer on copies. ``rows`` are the
    per-example gradients, ``clip`` what happens to a coalition's before the optimizer sees it.
    ``nobody``, what belongs to no example (a penalty), joins coalitions like one more example,
    whose value is dropped."""
    if nobody:
        zeros = {k: rows[k].new_zeros(1, *rows[k].shape[1:]) for k in rows.keys() - nobody.keys()}
        last = zeros | {k: g[None] for k, g in nobody.items()}
        rows = {k: torch.cat([rows[k], last[k]]) for k in rows}
    n = len(ids) + bool(nobody)
    name_of = {id(p): k for k, p in params.items()}
    gradients: list[Tensor | None] = []
    for group in reference.groups_of(optimizer):
        for p in group["params"]:
            own = rows.get(name_of.get(id(p), ""))
            if own is None and p.grad is not None:  # not scored: every example has a share
                own = (p.grad / n).expand(n, *p.shape)
            gradients.append(own)
    utility = reference.coalition_utility(model, optimizer, gradients, loss, clip)
    share, error = utility(frozenset()) - utility(frozenset(range(n))), None
    if n <= EXACT_UP_TO:
        check.coalitions = 2**n
        phi = reference.exact_shapley(n, utility)
    else:
        phi, error = reference.permutation_shapley(n, utility, check.permutations)
        check.coalitions = check.permutations * n
        error = error[: len(ids)]
    share += phi[len(ids) :].sum()
    check.fill(ids, estimate, -phi[: len(ids)], error, share)
    if say:
        print(check)


def per_example(params: Mapping[str, Tensor], micros: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Per-example gradients of the whole step by parameter: [B, *W]. Of ``params`` type and shape
    count."""
    total = sum(m.B for m in micros)
    rows: dict[str, Tensor] = {}
    start = 0
    for micro in micros:
        for node, records in micro.by_example(params, derived=True):
            for record in records:
                for k, g in pull_back(node, record.rows()).items():
                    if k not in params:  # of an optimizer that steps by itself
                        continue
                    p = params[k]
                    rows.setdefault(k, p.new_zeros((total, *p.shape)))
                    rows[k][start : start + micro.B] += g[: micro.B].to(p.device, p.dtype)
        start += micro.B
    return rows


def nobodys(
    micros: Sequence[MicroBatch], among: Collection[str] | None = None
) -> dict[str, Tensor]:
    """What belongs to no example, by parameter: [*W]; only parameters that have such a part.
    ``among``: of these."""
    found: dict[str, Tensor] = {}
    for micro in micros:
        for node, records in micro.records.items() if micro.nobody else ():
            for record in records if among is None or not node.roots.isdisjoint(among) else ():
                for k, g in pull_back(node, record.rows()[micro.rows :]).items():
                    if among is None or k in among:
                        found[k] = found.get(k, 0) + g.sum(0)
    return {k: g for k, g in found.items() if bool(g.any())}


def without(G: Mapping[str, Tensor], nobody: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch's gradient without nobody's part."""
    return {k: g - nobody[k].to(g) if k in nobody else g for k, g in G.items()}


def gradient_errors(
    G: Mapping[str, Tensor], rows: Mapping[str, Tensor], world: World = ALONE
) -> dict[str, float]:
    """How far the captured gradients' sum is from .grad, relative to their size, by parameter. Both
    may be those of shards; all ranks call it then.

    A parameter without any effect (the bias of attention's keys) has a gradient of rounding errors
    alone: what is below the rounding of the whole gradient is no difference.
    """
    sizes = world.norms({k: r.abs().sum(0) for k, r in rows.items() if k in G})
    off = world.norms({k: rows[k].sum(0) - g for k, g in G.items() if k in sizes})
    whole = math.hypot(*map(float, sizes.values()))
    errors = {k: 1.0 if bool(g.any()) else 0.0 for k, g in G.items()}
    for k, x in off.items():
        eps = min(torch.finfo(G[k].dtype).eps, torch.finfo(torch.float32).eps)
        errors[k] = max(0.0, float(x) - eps * whole) / (float(sizes[k]) + 1e-30)
    return errors

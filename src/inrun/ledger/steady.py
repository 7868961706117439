"""How steady is a ranking: how far would it agree with one by as many other validation rows?

In a sample of the steps, values were also measured by two halves of the step's validation rows, a
and b (scoring/halving.py). Two things follow:

* **of a step**: the rank correlation r of a and b among the examples of the step, mean over the
  measured steps. Values by all the rows would agree by 2r/(1 + r) (Spearman and Brown).
* **of the sums** over all steps, which is the ranking that is shown. Their noise may add up in
  another way than their values do: the same rows are used again. With X_i the sum of an example's
  values, known, and D_i that of d = (a − b)/2, the sums by both halves are X ± D, and what they
  agree, scaled up to the whole set, is 1 − Var D/Var X. Var D is made of products d_t·d_s of an
  example's visits. Their means are taken over the measured steps and multiplied by how many
  visits, and pairs of visits, there are in all steps: unbiased, because the measured steps are a
  random sample. The standard error is that of leaving out groups of steps (jackknife).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from inrun.ledger.signals import WHOLE, Window

if TYPE_CHECKING:
    from inrun.ledger.tables import LedgerTables

FEWEST = 3  # examples of a step, for a rank correlation
GROUPS = 20  # of steps, for the standard error
CLEAR = 0.15  # a standard error above this is said to tell nothing
APART = 0.1  # relative: halves that are further from making up the whole are none
PARTS = "its halves do not make up the whole (the loss is no mean over rows)"


@dataclass(frozen=True)
class Steadiness:
    """``agree``: rank correlation of a step's values by two halves of its validation rows, mean
    over ``measured`` of ``steps`` scored steps; ``of_step``: what values by all the rows would
    agree with those by as many others, from that. ``of_sums`` and its standard error ``error``:
    the same for the sums over all steps. None: not known, ``why`` says why."""

    agree: float | None = None
    of_step: float | None = None
    of_sums: float | None = None
    error: float | None = None
    measured: int = 0
    steps: int = 0
    why: str | None = None

    @property
    def clear(self) -> float | None:
        """``of_sums``, where its standard error is small."""
        known = self.of_sums is not None and self.error is not None and self.error <= CLEAR
        return self.of_sums if known else None

    def __str__(self) -> str:
        if self.agree is None and self.of_sums is None:
            return f"not measured: {self.why}"
        text = [f"measured by two halves of the validation rows in {self.measured:,} of "
                f"{self.steps:,} steps"]  # fmt: skip
        if self.agree is not None:
            text.append(
                f"values of one step by both halves agree by {self.agree:.2f} (Spearman), so by "
                f"all of its rows with as many others by {self.of_step:.2f}"
            )
        if self.why is not None:
            text.append(f"of sums not known: {self.why}")
        elif self.clear is not None:
            text.append(f"sums over all steps by {self.of_sums:.2f} ± {self.error:.2f}")
        else:
            rough = "" if self.error is None else f" (standard error {self.error:.2f})"
            text.append(f"of sums over all steps not known: too few were measured{rough}")
        return "; ".join(text)


def steadiness(
    ledger: LedgerTables, estimator: int, window: Window = WHOLE, validation: Any = None
) -> Steadiness:
    """Of the ranking by values in a window. ``validation``: that section of run.json, which may
    come from anywhere."""
    known: Mapping[str, Any] = validation if isinstance(validation, dict) else {}
    steps = ledger.steps(estimator)
    inside = steps["sum"].notna()
    if window.since is not None:
        inside &= steps["step"] >= window.since
    if window.until is not None:
        inside &= steps["step"] < window.until
    visits, n = ledger.by_halves(estimator, window), int(inside.sum())
    if visits.empty:
        why = known.get("halves") or f"none of the {n:,} steps was chosen for it (halves_every)"
        return Steadiness(steps=n, why=str(why))
    m = int(visits["step"].nunique())
    if _off(visits) > APART:
        return Steadiness(measured=m, steps=n, why=PARTS)
    agree = _agreement(visits)
    of_step = None if agree is None else _whole(agree)
    if not known.get("fixed_order"):
        why = "the validation rows come in another order each time"
        return Steadiness(agree, of_step, None, None, m, n, why)
    sums, error = _of_sums(visits, ledger.values(estimator, window), n)
    return Steadiness(agree, of_step, sums, error, m, n)


def _whole(r: float) -> float:
    """What two whole sets agree, from what their halves do."""
    return 2 * r / (1 + r) if r > 0 else r


def step_agreement(a: np.ndarray, b: np.ndarray) -> float | None:
    """The rank correlation of the values of one step by both halves."""
    good = np.isfinite(a) & np.isfinite(b)
    if good.sum() < FEWEST:
        return None
    x, y = pd.Series(a[good]).rank(), pd.Series(b[good]).rank()
    constant = x.nunique() < 2 or y.nunique() < 2
    return None if constant else float(x.corr(y))


def _agreement(visits: pd.DataFrame) -> float | None:
    """Mean over the steps, each counted by its examples."""
    total = weights = 0.0
    for _, step in visits.groupby("step"):
        r = step_agreement(step["a"].to_numpy(), step["b"].to_numpy())
        if r is not None:
            total, weights = total + r * (len(step) - 1), weights + len(step) - 1
    return total / weights if weights else None


def _off(visits: pd.DataFrame) -> float:
    """How far the values are from any w·a + (1 − w)·b, relative to their size: the worst step's is
    that of a loss that is made up otherwise, so the median."""
    found = []
    for _, step in visits.groupby("step"):
        x, a, b = (step[k].to_numpy() for k in ("value", "a", "b"))
        apart = a - b
        size = float(apart @ apart)
        w = float(np.clip((x - b) @ apart / size, 0, 1)) if size > 0 else 0.5
        left = np.linalg.norm(x - w * a - (1 - w) * b)
        scale = np.linalg.norm(x) + np.linalg.norm(apart) / 2
        found.append(left / scale if scale > 0 else 0.0)
    return float(np.median(found))


def _of_sums(
    visits: pd.DataFrame, values: pd.DataFrame, steps: int
) -> tuple[float | None, float | None]:
    """1 − Var D/Var X over the examples, and its standard error."""
    scored = values["scored"].to_numpy(np.float64)
    scored, x = scored[scored > 0], values["value"].dropna().to_numpy()
    count = len(x), scored.sum(), (scored * (scored - 1)).sum(), float(steps)
    spread = float(x.var()) if len(x) > 1 else 0.0
    step = pd.factorize(visits["step"])[0]
    example = pd.factorize(visits["id"])[0]
    d = visits["weight"].to_numpy() * (visits["a"] - visits["b"]).to_numpy() / 2
    if spread <= 0 or not np.isfinite(d).all():
        return None, None
    whole = _spread_of_sums(step, example, d, count)
    if whole is None:
        return None, None
    groups = min(GROUPS, int(step.max()) + 1)
    left_out = []
    for g in range(groups):
        keep = step % groups != g
        found = _spread_of_sums(step[keep], example[keep], d[keep], count)
        left_out.append(np.nan if found is None else found)
    error = np.sqrt((groups - 1) * np.var(left_out)) / spread
    return float(1 - whole / spread), float(error) if groups > 2 and np.isfinite(error) else None


def _spread_of_sums(
    step: np.ndarray, example: np.ndarray, d: np.ndarray, count: tuple[float, float, float, float]
) -> float | None:
    """Var D from a sample of the steps. ``count``: examples, visits, pairs of visits of an example,
    and steps of the whole. None: no pair was measured, and there are some."""
    examples, visits, pairs, steps = count
    if not len(d):
        return None
    sums, own = np.bincount(example, d), np.bincount(example).astype(np.float64)
    squares, pairs_here = float(d @ d), float((own * (own - 1)).sum())
    total = visits / len(d) * squares
    if pairs:
        if not pairs_here:
            return None
        total += pairs / pairs_here * (float(sums @ sums) - squares)
    by_step = np.bincount(step, d)
    by_step = by_step[np.bincount(step) > 0]
    m = len(by_step)
    mean = steps / m * float(by_step @ by_step)  # the square of ΣD, likewise
    if m > 1:
        cross = by_step.sum() ** 2 - float(by_step @ by_step)
        mean += steps * (steps - 1) / (m * (m - 1)) * cross
    return (total - mean / examples) / examples

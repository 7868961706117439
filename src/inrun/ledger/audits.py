"""Do the values add up? Sums of values beside the losses that were measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

AUDITED = ("loss", "batch_share", "momentum_share", "residual", "explained")
FORECASTS = ("influence",)  # estimators that do not add up to a loss change: nothing to audit


def audit_columns(
    total: Any, nobody: Any, before: Any, without: Any, after: Any, drop: Any = np.nan
) -> dict[str, Any]:
    """The columns of ``steps()`` that compare the sum of values with measured losses.

    Arguments: the sum of values and nobody's part of the batch (a penalty on weights: what it does
    is in the batch share, too), then ℓ(w_t), U(∅) and U(B) as means over targets; numbers or
    arrays over steps, NaN where a step was not scored or not audited. ``drop`` is known for
    "carry", whose sums belong to many steps: it is compared with the whole step instead.
    """
    share, whole = without - after, np.isfinite(drop)
    credited = np.where(whole, drop, total + nobody)[()]
    measured = np.where(whole, before - after, share)[()]
    return {
        "loss": before,
        "batch_share": share,
        "momentum_share": before - without,
        "residual": measured - credited,
        "explained": credited / np.where(measured == 0, np.nan, measured)[()],
    }


def audit_summary(steps: pd.DataFrame) -> dict[str, float]:
    """Do the values add up? The audited steps of ``steps()`` summed, and their ratio ``explained``.

    A ratio of sums, not a mean of ratios: a step whose batch share is near zero says little.
    """
    audited = steps[steps["batch_share"].notna() & steps["sum"].notna()]
    total, share = float(audited["sum"].sum()), float(audited["batch_share"].sum())
    nobody, momentum = float(audited["nobody"].sum()), float(audited["momentum_share"].sum())
    credited, measured = total + nobody, share
    if len(audited) and audited["drop"].notna().all():  # "carry": of the whole step
        credited, measured = float(audited["drop"].sum()), share + momentum
    return {
        "audited": len(audited),
        "sum": total,
        "nobody": nobody,
        "batch_share": share,
        "momentum_share": momentum,
        "residual": measured - credited,
        "explained": credited / measured if measured else float("nan"),
    }


def carry_summary(steps: pd.DataFrame) -> dict[str, float]:
    """Where the drop of the loss along all steps went, for ``estimator="carry"``; else empty.

    drop = credited + nobody + decay + older: to examples, to what belongs to no example, to
    decoupled weight decay, and to no one because it is older than the window (or the momentum of
    void steps, or L2 decay).
    """
    known = steps[steps["drop"].notna()]
    if not len(known):
        return {}
    found = {k: float(known[k].sum()) for k in ("drop", "sum", "nobody", "decay")}
    found["credited"] = found.pop("sum")
    found["older"] = found["drop"] - found["credited"] - found["nobody"] - found["decay"]
    return found

"""How much of a ranking is noise of the validation data? Shown beside the rankings.

With ``targets=inrun.halves(validation)`` every example has a value by each half of the validation
set in every step; otherwise a sample of the steps has (ledger/steady.py). Both are measured in
the same run, so what they disagree about is due to the validation rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from inrun.ledger.saved import SavedRun
from inrun.ledger.signals import WHOLE, Window
from inrun.ledger.steady import Steadiness
from inrun.ledger.tables import HALVES
from inrun.report.metrics import spearman


def halves_agree(targets: Sequence[str], values: pd.DataFrame) -> float | None:
    """The rank correlation of the values by both halves; None where the run has no such targets."""
    sums = []
    for half in HALVES:
        own = [q for q, t in enumerate(targets) if t == half or t.endswith(f", {half}")]
        names = [targets[q] if targets[q] in values else f"target {q}" for q in own]
        if not names:
            return None
        sums.append(values[names].mean(axis=1).to_numpy())
    known = np.isfinite(sums[0]) & np.isfinite(sums[1])
    r = spearman(sums[0][known], sums[1][known]) if known.sum() > 2 else np.nan
    return float(r) if np.isfinite(r) else None


def noise(
    targets: Sequence[str], values: pd.DataFrame, validation: Any, sampled: Steadiness | None = None
) -> dict[str, Any]:
    """What the report says: how the set was used, what its halves agree, and what the whole set
    would agree with another one like it (scaled up after Spearman and Brown).

    ``validation`` is that section of run.json, which may come from anywhere. ``sampled``: what was
    measured in a sample of the steps.
    """
    known = validation if isinstance(validation, dict) else {}
    how = str(known["how"]) if "how" in known else None
    r = halves_agree(targets, values)
    found: dict[str, Any] = {"validation": how, "halves_agree": r}
    found["steadiness"] = None if r is None else (2 * r / (1 + r) if r > 0 else r)
    if r is None and sampled is not None:
        found["steadiness"], found["steadiness_error"] = sampled.clear, sampled.error
        found["step_halves_agree"], found["halved_steps"] = sampled.agree, sampled.measured
        found["steadiness_of_step"], found["steady"] = sampled.of_step, str(sampled)
    return found


def noise_of(
    saved: SavedRun, estimator: str | None, values: pd.DataFrame, window: Window = WHOLE
) -> dict[str, Any]:
    """The same of a run's ranking by the values of a window."""
    since, until, half_life = window.since, window.until, window.half_life
    sampled = None
    if not all(t.endswith(HALVES) for t in saved.targets):
        sampled = saved.steadiness(estimator, since=since, until=until, half_life=half_life)
    return noise(saved.targets, values, saved.info.get("validation"), sampled)


def steadiness(saved: SavedRun, estimator: str | None, window: Window) -> str:
    """The same in one line for a ranking of some steps."""
    since, until, half_life = window.since, window.until, window.half_life
    values = pd.DataFrame()
    if any(t.endswith(HALVES) for t in saved.targets):
        values = saved.values(estimator, since=since, until=until, half_life=half_life)
    found = in_words(noise_of(saved, estimator, values, window))
    return f"steadiness of the ranking by value: {found}"


def in_words(f: dict[str, Any]) -> str:
    """One line for ``inrun info`` and the report."""
    if f["halves_agree"] is None:
        return f.get("steady") or "not measured"
    return (
        f"{f['steadiness']:.2f}, from two halves of the validation set whose rankings agree by "
        f"{f['halves_agree']:.2f} (Spearman)"
    )

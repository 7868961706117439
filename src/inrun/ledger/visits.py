"""Tables made of the signals of visits: epochs, suspects, rankings by one signal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from inrun.ledger import LedgerError, signals
from inrun.ledger.signals import WHOLE, Window
from inrun.ledger.suspects import suspects_table

if TYPE_CHECKING:
    from inrun.ledger.tables import LedgerTables


def epochs(ledger: LedgerTables, estimator: int) -> pd.DataFrame:
    """One row per epoch: see ``RunTables.epochs``."""
    found = ledger._query(estimator, [ledger.targets[0]], signals.epochs_sql)
    by_step = found[0] if found else pd.DataFrame({"step": [], "epoch": []}, dtype="int64")
    means = by_step[["step"]]
    if ledger.has_signals():
        sql = signals.means_sql
        (means,) = ledger._query(estimator, signals.SHOWN, lambda k: sql(k).replace(" id", " step"))
        means = means.set_axis(["step", *signals.shown_names(ledger.targets)], axis=1)
    return signals.epochs_table(by_step, ledger.steps(estimator), means)


def top_by_signal(
    ledger: LedgerTables, estimator: int, n: int, by: str, value: str, window: Window
) -> pd.DataFrame:
    """Those that the model fitted worst first."""
    if not ledger.has_signals():
        raise LedgerError(
            f"{ledger.name()} has no {by}: it is recorded where the training loss is a call of "
            "cross_entropy, nll_loss or binary_cross_entropy_with_logits inside run.batch(ids), "
            "outside a forward that torch.compile has compiled and not fused with its head"
        )
    table = ledger.values(estimator, window)
    name = signals.shown_names(ledger.targets)[signals.SHOWN.index(by)]
    known = table[table[name].notna()].sort_values([name, "id"], ascending=[by == "margin", True])
    value = value if value in table else "value"
    found = known[["id", value, name, "steps", "scored"]].head(int(n)).reset_index(drop=True)
    return found.set_axis(["id", "value", by, "steps", "scored"], axis=1)


def suspects(
    ledger: LedgerTables, estimator: int, window: Window = WHOLE, values: bool = True
) -> pd.DataFrame:
    """One row per example, most suspicious first: see ``RunTables.suspects``."""
    extra, names = ("loss", "el2n", "margin"), signals.shown_names(ledger.targets)

    def history(some: Window) -> Iterator[pd.DataFrame]:
        if ledger.has_signals():
            for piece in ledger.history_batches(estimator, window=some, label=True):
                own = piece[["step", "id", *names, "signal label"]]
                yield own.set_axis(["step", "id", *extra, "label"], axis=1)

    def against(some: Window) -> pd.Series:
        table = ledger.harm(estimator, ["value"], some, signed=True)
        return table.set_index("id")["harm"]

    by_value = against if values else None
    found = suspects_table(history, ledger.epochs(estimator), window, by_value)
    if len(ledger.targets) > 1 and len(found):
        by_target = ledger.values(estimator, window).set_index("id")[ledger.targets]
        own = by_target.reindex(found["id"])
        lowest = own.fillna(np.inf).idxmin(axis=1)
        hurt = (own.min(axis=1) < 0).to_numpy()
        found["hurts"] = lowest.where(pd.Series(hurt, lowest.index)).to_numpy()
    return found

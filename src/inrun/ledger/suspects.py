"""Which labels are probably wrong, and which examples a training can do without.

Both are made of the signals of visits (signals.py): how badly the model fitted an example while it
learned. Which of three signals is best depends on the data, so ``suspicion`` is the mean of an
example's ranks by loss, EL2N and margin, each averaged over a window of visits. Before the model
knows the labels the signals say how frequent a label is; so the window begins with the first epoch
in which the model got the given labels right clearly more often than the most frequent label would,
and goes on to the end. Rule and threshold were chosen on seeds 0 and 1 and measured on others;
docs/method.md says where they lose, and to whom (benchmarks/suspects.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from inrun.ledger import LedgerError
from inrun.ledger.signals import SHOWN, Window

LEARNED = 0.1  # of the way from the most frequent label's share to that of the best epoch
SURE = 0.9  # confidence of a suspect that is removed before anything else
History = Callable[[Window], Iterable[pd.DataFrame]]  # step, id, loss, el2n, margin, label


@dataclass(frozen=True)
class Choice:
    """The visits that a list of suspects is made of, in steps, and why these."""

    since: int
    until: int
    why: str


def suspects_table(history: History, epochs: pd.DataFrame, window: Window) -> pd.DataFrame:
    """One row per example, most suspicious first: id, suspicion, confidence, the means of loss,
    EL2N and margin, visits, label. ``attrs["window"]`` says which visits count."""
    chosen = _chosen(history, epochs, window)
    total = pd.DataFrame(columns=["id", *_SUMMED, "low", "high"])
    for batch in history(Window(chosen.since, chosen.until)):
        known = batch[batch["loss"].notna()]
        own = known[["id", *SHOWN]].assign(confidence=-np.expm1(-known["loss"]), visits=1)
        own = own.assign(low=known["label"], high=known["label"])
        total = _added(pd.concat([total, own], ignore_index=True) if len(total) else own)
    for name in (*SHOWN, "confidence"):
        total[name] = total[name] / total["visits"]
    total["label"] = total["low"].where(total["low"] == total["high"])
    ranks = [total["loss"].rank(), total["el2n"].rank(), (-total["margin"]).rank()]
    known = pd.concat(ranks, axis=1) / max(1, len(total))
    total["suspicion"] = known.mean(axis=1)
    found = total[["id", "suspicion", "confidence", *SHOWN, "visits", "label"]]
    found = found.sort_values(["suspicion", "id"], ascending=[False, True], ignore_index=True)
    found.attrs["window"] = asdict(chosen)
    return found


_SUMMED = (*SHOWN, "confidence", "visits")


def _added(rows: pd.DataFrame) -> pd.DataFrame:
    """Sums by example. A signal that one of the visits lacks is not known."""
    grouped = rows.groupby("id", sort=True)
    found = grouped[list(_SUMMED)].sum()
    found = found.where(grouped[list(_SUMMED)].count().eq(grouped.size(), axis=0))
    found["low"], found["high"] = grouped["low"].min(), grouped["high"].max()
    return found.reset_index()


def _chosen(history: History, epochs: pd.DataFrame, window: Window) -> Choice:
    """The window that was asked for, or the one that the run shows to be good."""
    steps: list[pd.DataFrame] = []
    labels = pd.Series(dtype="float64")
    for batch in history(window):
        known = batch[batch["loss"].notna()]
        own = pd.DataFrame({"step": known["step"], "n": 1, "right": known["margin"] > 0})
        steps.append(own.groupby("step", as_index=False).sum())
        labels = labels.add(known["label"].value_counts(), fill_value=0)
    if not sum(map(len, steps)):
        raise LedgerError(
            "no losses of single examples are on record: they are where the training loss is a "
            "call of cross_entropy, nll_loss or binary_cross_entropy_with_logits inside "
            "run.batch(ids). run.harm() ranks by what examples did to the validation loss"
        )
    table = pd.concat(steps).groupby("step", as_index=False).sum()
    since, until = int(table["step"].min()), int(table["step"].max()) + 1
    if not window.whole:
        return Choice(since, until, "the steps that were asked for")
    at = np.searchsorted(epochs["since"].to_numpy(), table["step"].to_numpy(), side="right") - 1
    sums = table.groupby(at)[["right", "n"]].sum()
    share = sums["right"] / sums["n"]
    frequent = float(labels.max() / labels.sum()) if len(labels) else float("nan")
    best = float(share.max())
    if not best > frequent or len(share) < 2:
        return Choice(
            since, until, "all visits: the run shows no epoch from which labels are known"
        )
    first = int(share.index[share >= frequent + LEARNED * (best - frequent)][0])
    why = (
        f"from epoch {first} of 0 to {int(at.max())} on: it is the first in which the model got "
        f"clearly more of the given labels right ({share[first]:.0%}; best epoch {best:.0%}) than "
        f"the most frequent label would ({frequent:.0%})"
    )
    return Choice(max(since, int(epochs["since"].iloc[first])), until, why)


def removed(table: pd.DataFrame, n: int, rule: str) -> np.ndarray:
    """Positions of n rows of ``suspects_table`` to remove, the first to go first.

    ``noisy``: the most suspicious. ``clean``: the easiest (lowest EL2N, or loss), an equal share of
    each label. ``auto``: suspects whose confidence is above ``SURE``, then the easiest. Never the
    lowest values: on clean SST-2 that was worse than removing at random. ``noisy`` is for no more
    than the share of wrong labels: beyond, it removes hard examples and did worse than random.
    """
    order = np.arange(len(table))  # the most suspicious first
    if rule == "noisy":
        return order[:n]
    sure = (table["confidence"] > SURE).to_numpy() & (rule == "auto")
    rest = table[~sure]
    by = rest["el2n"] if rest["el2n"].notna().all() else rest["loss"]
    labels = rest["label"].fillna(-1)
    place = by.groupby(labels).rank(method="first") - 0.5
    share = place / labels.map(labels.value_counts())  # 0: the easiest of its label
    easiest = share.sort_values(kind="stable").index.to_numpy()
    return np.concatenate([order[sure], easiest]).astype(int)[:n]

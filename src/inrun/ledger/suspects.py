"""Which labels are probably wrong, and which examples a training can do without.

Made of two things that a run knows of each visit (signals.py, tables.py):

* how badly the model fitted the example while it learned: the mean of its z-scores by loss, EL2N
  and margin (minus), each averaged over a window of visits. This finds labels that the model does
  not come to believe;
* its values, each divided by the spread of its step: Σ −value/spread, as a z-score, where that is
  above 0. This finds labels that the model learns to believe and that hurt it (many of one label
  given another one).

How far values can be trusted differs: with few validation rows they are noise. So they count
``VALUES``·ρ² as much as the first, ρ being the correlation, over examples, of the values in the
first half of the window with those in the second; or over the examples of the same label, where
that is lower. That the validation labels are right, and of the same kind as the training's, is
assumed.

Before the model knows the labels the signals say how frequent a label is; so the window begins with
the first epoch in which the model got the given labels right clearly more often than the most
frequent label would, and goes on to the end. Rules and constants were chosen on seeds 0 and 1 and
measured on others; docs/method.md says where they lose, and to whom (benchmarks/suspects.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd

from inrun.ledger import LedgerError
from inrun.ledger.signals import SHOWN, Window

LEARNED = 0.1  # of the way from the most frequent label's share to that of the best epoch
VALUES = 4.0  # weight of values that are the same in both halves of the window
FEWEST = 10  # examples that were scored in both halves, for a correlation
SURE = 0.9  # share of visits at which the model preferred another label, to be removed first ...
FITTED = 0.8  # ... where it gets so many of the given labels right in its last epoch ...
SEVERAL = 0.03  # ... and such suspects are so many of the examples: a few are hard examples
History = Callable[[Window], Iterable[pd.DataFrame]]  # step, id, loss, el2n, margin, label
Values = Callable[[Window], pd.Series]  # Σ −value/spread by id


@dataclass(frozen=True)
class Choice:
    """The visits that a list of suspects is made of, in steps, and why these; the share of labels
    that the model got right in the last epoch; how much values count."""

    since: int
    until: int
    why: str
    fitted: float
    agreement: float | None = None  # of values in both halves, a correlation
    weight: float = 0.0  # of values, the mean over examples


def suspects_table(
    history: History, epochs: pd.DataFrame, window: Window, values: Values | None = None
) -> pd.DataFrame:
    """One row per example, most suspicious first: id, suspicion, disagreed, the means of loss,
    EL2N and margin, visits, label. ``attrs["window"]`` says which visits count."""
    chosen = _chosen(history, epochs, window)
    total = pd.DataFrame(columns=["id", *_SUMMED, "low", "high"])
    for batch in history(Window(chosen.since, chosen.until)):
        known = batch[batch["loss"].notna()]
        margin = known["margin"]
        own = known[["id", *SHOWN]].assign(
            disagreed=(margin < 0).astype(float).where(margin.notna()), visits=1
        )
        own = own.assign(low=known["label"], high=known["label"])
        total = _added(pd.concat([total, own], ignore_index=True) if len(total) else own)
    for name in (*SHOWN, "disagreed"):
        total[name] = total[name] / total["visits"]
    total["label"] = total["low"].where(total["low"] == total["high"])
    scores = pd.concat([_z(total["loss"]), _z(total["el2n"]), -_z(total["margin"])], axis=1)
    score = scores.mean(axis=1)
    if values is not None:
        score, chosen = _with_values(score, total, values, chosen)
    total["suspicion"] = score.rank() / max(1, len(total))
    found = total[["id", "suspicion", "disagreed", *SHOWN, "visits", "label"]]
    found = found.sort_values(["suspicion", "id"], ascending=[False, True], ignore_index=True)
    found.attrs["window"] = asdict(chosen)
    return found


def _with_values(
    score: pd.Series, total: pd.DataFrame, values: Values, chosen: Choice
) -> tuple[pd.Series, Choice]:
    """The score with what the values say, weighted by how well they agree with themselves."""
    middle = (chosen.since + chosen.until) // 2
    if not chosen.since < middle < chosen.until:
        return score, chosen
    halves = [Window(chosen.since, middle), Window(middle, chosen.until)]
    both = pd.concat([values(w).reindex(total["id"]) for w in halves], axis=1, keys=["a", "b"])
    both.index = total.index
    agreement = _agreement(both)
    if agreement is None:
        return score, chosen
    rho = pd.Series(max(0.0, agreement), total.index)
    for _, own in both.groupby(total["label"]):
        within = _agreement(own)
        if within is not None:
            rho[own.index] = rho[own.index].clip(upper=max(0.0, within))
    against = _z(both.sum(axis=1, min_count=1)).clip(lower=0.0).fillna(0.0)
    weight = VALUES * rho**2
    chosen = replace(chosen, agreement=agreement, weight=float(weight.mean()))
    return score + weight * against, chosen


def _agreement(both: pd.DataFrame) -> float | None:
    """The correlation of two columns; None where too few examples have both."""
    known = both.dropna()
    if len(known) < FEWEST or not (known.std() > 0).all():
        return None
    return float(known["a"].corr(known["b"]))


def _z(x: pd.Series) -> pd.Series:
    """Standard scores; 0 where all are alike."""
    spread = x.std(ddof=0)
    return (x - x.mean()) / (spread if spread > 0 else np.inf)


_SUMMED = (*SHOWN, "disagreed", "visits")


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
            "run.batch(ids), outside a forward that torch.compile has compiled and not fused with "
            "its head. run.harm() ranks by what examples did to the validation loss"
        )
    table = pd.concat(steps).groupby("step", as_index=False).sum()
    since, until = int(table["step"].min()), int(table["step"].max()) + 1
    at = np.searchsorted(epochs["since"].to_numpy(), table["step"].to_numpy(), side="right") - 1
    sums = table.groupby(at)[["right", "n"]].sum()
    share = sums["right"] / sums["n"]
    fitted = float(share.iloc[-1])
    if not window.whole:
        return Choice(since, until, "the steps that were asked for", fitted)
    frequent = float(labels.max() / labels.sum()) if len(labels) else float("nan")
    best = float(share.max())
    if not best > frequent or len(share) < 2:
        why = "all visits: the run shows no epoch from which labels are known"
        return Choice(since, until, why, fitted)
    first = int(share.index[share >= frequent + LEARNED * (best - frequent)][0])
    why = (
        f"from epoch {first} of 0 to {int(at.max())} on: it is the first in which the model got "
        f"clearly more of the given labels right ({share[first]:.0%}; best epoch {best:.0%}) than "
        f"the most frequent label would ({frequent:.0%})"
    )
    return Choice(max(since, int(epochs["since"].iloc[first])), until, why, fitted)


def removed(table: pd.DataFrame, n: int, rule: str) -> np.ndarray:
    """Positions of n rows of ``suspects_table`` to remove, the first to go first.

    ``noisy``: the most suspicious. ``clean``: the easiest (lowest EL2N, or loss), an equal share of
    each label. ``auto``: suspects about whom the model disagreed at more than ``SURE`` of the
    visits, if it fits the other labels (``FITTED``: before, it disagrees about hard examples) and
    they are not just a few (``SEVERAL``: about 1 % of clean digits were), then the easiest. Never
    the lowest values: on clean SST-2 that was worse than removing at random. ``noisy`` is for no
    more than the share of wrong labels: beyond, it removes hard examples and did worse than random.
    """
    order = np.arange(len(table))  # the most suspicious first
    if rule == "noisy":
        return order[:n]
    sure = (table["disagreed"] > SURE).to_numpy(copy=True)
    fits = table.attrs["window"]["fitted"] >= FITTED
    sure &= rule == "auto" and fits and sure.mean() >= SEVERAL
    rest = table[~sure]
    by = rest["el2n"] if rest["el2n"].notna().all() else rest["loss"]
    labels = rest["label"].fillna(-1)
    place = by.groupby(labels).rank(method="first") - 0.5
    share = place / labels.map(labels.value_counts())  # 0: the easiest of its label
    easiest = share.sort_values(kind="stable").index.to_numpy()
    return np.concatenate([order[sure], easiest]).astype(int)[:n]

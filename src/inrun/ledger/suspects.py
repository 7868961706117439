"""Which labels are probably wrong, and which examples a training can do without.

Made of two things that a run knows of each visit (signals.py, tables.py), over a window of visits:

* fit: how badly the model fitted the example while it learned, the mean of its z-scores by EL2N
  and margin (minus), or by the loss where these are not on record. This finds labels that the model
  does not come to believe;
* harm: Σ −value/spread of its step, as a z-score. This finds labels that the model learns to
  believe and that hurt it (many of one label given another one).

What joins them is r, the correlation of the two among the examples of a label. Hard examples with
the right label help more than easy ones, so r is below 0 where labels are right; wrong ones fit
badly and hurt, so r is above 0 where there are some. It differs between labels for other reasons,
too (few validation rows of a label, or hard ones). So a label stands out if its r is far above the
mean of the others, counted in spreads (√(1 + 1/others) times that of the others' r, which is at
least ``SPREAD``), by the values of both halves of the window: s rises from 0 to 1 between the two
of ``STANDS``. And the mean of the others must be below 0 by the whole window: otherwise there are
wrong labels among them, too. Where no label stands out and r is not below 0, wrong ones are spread
evenly and the fit alone is best. Where none stands out and the mean r over all labels is below 0,
by h more than its standard error, most that fit badly are hard, and harm tells the wrong ones from
these. With s the highest of all labels, and for those that do not stand out the mean of their r,

    score = (1 + s r) · (fit − its lowest) + VALUES · (ρ² · s of the label · harm⁺
            + ρ · (1 − s) · h · harm).

ρ is how far values agree with themselves: the correlation, over the examples of the label (or over
all, where that is lower, and in the last term), of those in the first half of the window with those
in the second.

Confidence: if an example's label is right, its harm is as likely below its label's median as above
(and more likely, if it is hard). So of the k that fit worst, those above it less those below are
wrong, at least; less two standard errors, 2√k, they are the confidence for the first k of the
list. It does not count harm where that made the ranking, which would find what it has sought. Of
the better fitted half of each label, which is right, at least as many should be above as below; by
what share it is fewer, values say something else than which labels are wrong (a model that leans to
one label by many wrong ones, and what is right for it hurts), and so much is taken off.

How many are wrong of a label that stands out: if all were right, harm would be as often above its
median by some distance as below by as much. So the most that there are above any distance, beyond
those below, are wrong: as far as the label stands out and values agree with themselves, s ρ times
that number.

Both assume that the validation labels are right and of the same kind as the training's, and the
confidence that in no label more than half are wrong.

Before the model knows the labels the signals say how frequent a label is; so the window begins with
the first epoch in which the model got the given labels right clearly more often than the most
frequent label would, and goes on to the end. In the fit, a visit counts as much as the model knew
in its epoch: from 0 where it got no more right than that to 1 in the best epoch. Where that leaves
one visit of each example, harm begins an epoch or more earlier, since it needs two. docs/method.md
says on what rules and constants were chosen, and where they lose, and to whom
(benchmarks/suspects.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from inrun.ledger import LedgerError
from inrun.ledger.signals import SHOWN, Window

LEARNED = 0.1  # of the way from the most frequent label's share to that of the best epoch
VALUES = 8.0  # weight of values that are the same in both halves of the window
SPREAD, STANDS = 0.3, (1.5, 2.0)  # r differs by 0.4 between labels of clean digits
FEWEST = 10  # examples that were scored, for a correlation
SURE = 0.5  # confidence of the suspects that are removed first, at least
DOUBTED = 0.1  # of all examples: suspects that are removed first where labels are not right
History = Callable[[Window], Iterable[pd.DataFrame]]  # step, id, loss, el2n, margin, label
Values = Callable[[Window], pd.Series]  # Σ −value/spread by id


@dataclass(frozen=True)
class Choice:
    """The visits that a list of suspects is made of, in steps, and why these; what the values
    say."""

    since: int
    until: int
    why: str
    agreement: float | None = None  # of values in both halves, a correlation
    hurt: float | None = None  # correlation of bad fit and harm, over all examples
    stands_out: float = 0.0  # from 0 to 1: how far it is another in one label, ...
    label: float | None = None  # ... which is this one
    wrong: int = 0  # so many of its examples are wrong, by their harm
    others: float | None = None  # mean of r over the labels that do not stand out, ...
    right: float = 0.0  # ... and how far that is below 0, by more than its standard error
    weight: float = 0.0  # of values, the mean over examples


def suspects_table(
    history: History, epochs: pd.DataFrame, window: Window, values: Values | None = None
) -> pd.DataFrame:
    """One row per example, most suspicious first: id, suspicion, confidence, disagreed, the means
    of loss, EL2N and margin, visits, label. ``attrs["window"]`` says which visits count."""
    chosen, known_in = _chosen(history, epochs, window)
    total = pd.DataFrame(columns=["id", *_SUMMED, "low", "high"])
    for batch in history(Window(chosen.since, chosen.until)):
        known = batch[batch["loss"].notna()]
        margin = known["margin"]
        weight = known_in[_epoch(epochs, known["step"])]
        own = known[["id", *SHOWN]].assign(
            disagreed=(margin < 0).astype(float).where(margin.notna()), visits=1, weight=weight
        )
        own[list(SHOWN)] = own[list(SHOWN)].mul(weight, axis=0)
        own = own.assign(low=known["label"], high=known["label"])
        total = _added(pd.concat([total, own], ignore_index=True) if len(total) else own)
    for name in SHOWN:
        total[name] = total[name] / total["weight"]
    total["disagreed"] = total["disagreed"] / total["visits"]
    total["label"] = total["low"].where(total["low"] == total["high"])
    scores = pd.concat([_z(total["el2n"]), -_z(total["margin"])], axis=1)
    fit = scores.mean(axis=1).fillna(_z(total["loss"]))
    earlier = [int(x) for x in epochs["since"] if window.whole and x < chosen.since]
    seen = None if values is None else _seen(total, values, chosen, earlier[::-1])
    if seen is None:
        total["suspicion"], total["confidence"] = fit.rank(), float("nan")
    else:
        score, total["confidence"], chosen = _joined(fit, total["label"], seen, chosen)
        total["suspicion"] = score.rank()
    total["suspicion"] /= max(1, len(total))
    found = total[["id", "suspicion", "confidence", "disagreed", *SHOWN, "visits", "label"]]
    found = found.sort_values(["suspicion", "id"], ascending=[False, True], ignore_index=True)
    found.attrs["window"] = asdict(chosen)
    return found


def _seen(
    total: pd.DataFrame, values: Values, chosen: Choice, earlier: Iterable[int]
) -> pd.DataFrame | None:
    """Harm in both halves of the window, a and b; None where these do not tell anything. Where no
    example has two visits, the window begins at one of the ``earlier`` steps."""
    for since in (chosen.since, *earlier):
        middle = (since + chosen.until) // 2
        if not since < middle < chosen.until:
            continue
        halves = [Window(since, middle), Window(middle, chosen.until)]
        both = pd.concat([values(w).reindex(total["id"]) for w in halves], axis=1, keys=["a", "b"])
        both.index = total.index
        if not math.isnan(_correlation(both["a"], both["b"])):
            return both
    return None


def _joined(
    fit: pd.Series, label: pd.Series, both: pd.DataFrame, chosen: Choice
) -> tuple[pd.Series, pd.Series, Choice]:
    """The score (see above), the confidence, and what the choice was made of."""
    harm = both.sum(axis=1, min_count=1)
    codes = pd.factorize(label, use_na_sentinel=False)[0]
    groups = [np.flatnonzero(codes == c) for c in range(codes.max() + 1)]
    r = np.array([[_correlation(fit.iloc[at], x.iloc[at]) for at in groups]
                  for x in (harm, both["a"], both["b"])])  # fmt: skip
    apart, (low, high) = np.minimum(_apart(r[1]), _apart(r[2])), STANDS
    stands = np.clip((apart - low) / (high - low), 0, 1) * (_others(r[0]) < 0)
    agreement = _correlation(both["a"], both["b"])
    harm, most, factor = _z(harm), stands.max(), pd.Series(1.0, fit.index)
    median, weight = pd.Series(np.nan, fit.index), pd.Series(0.0, fit.index)
    wrong = np.zeros(len(groups))
    known = r[0][(stands == 0) & np.isfinite(r[0])]
    others = float(known.mean()) if len(known) else None
    help_if_hard = _surely_below(r[0]) if len(groups) > 1 else 0.0
    r[0][stands == 0] = others or 0.0
    for c, (at, own, alone) in enumerate(zip(groups, r[0], stands, strict=True)):
        median.iloc[at] = harm.iloc[at].median()
        factor.iloc[at] += most * own
        rho = np.nan_to_num(_correlation(both["a"].iloc[at], both["b"].iloc[at]))
        rho = max(0.0, min(agreement, rho))
        weight.iloc[at] = VALUES * alone * rho**2
        wrong[c] = alone * rho * _excess((harm - median).iloc[at].dropna().to_numpy())

    alike = VALUES * (1 - most) * max(0.0, agreement) * help_if_hard
    score = (fit - fit.min()) * factor
    score += (weight * harm.clip(lower=0.0) + alike * harm).fillna(0.0)
    which = int(stands.argmax())
    hurt = _correlation(fit, harm)
    chosen = replace(
        chosen, agreement=agreement, hurt=None if math.isnan(hurt) else hurt,
        stands_out=float(most), label=float(label.iloc[groups[which][0]]) if most > 0 else None,
        wrong=round(wrong[which]), others=others, right=_surely_below(known),
        weight=float(weight.mean() + alike),
    )  # fmt: skip
    easy = fit <= fit.groupby(codes).transform("median")
    return score, _confidence(score, fit, harm - median, easy), chosen


def _apart(r: np.ndarray) -> np.ndarray:
    """How far each label's r is above the mean of the others, in spreads of one more about the mean
    of so many."""
    found = np.zeros(len(r))
    for c in np.flatnonzero(np.isfinite(r)):
        others = np.delete(r, c)
        others = others[np.isfinite(others)]
        if len(others):
            spread = max(SPREAD, others.std()) * (1 + 1 / len(others)) ** 0.5
            found[c] = (r[c] - others.mean()) / spread
    return found


def _surely_below(r: np.ndarray) -> float:
    """How far the mean of r over the labels is below 0, by more than its standard error."""
    r = r[np.isfinite(r)]
    if not len(r):
        return 0.0
    return max(0.0, -float(r.mean()) - max(SPREAD, float(r.std())) / len(r) ** 0.5)


def _others(r: np.ndarray) -> np.ndarray:
    """The mean r of the labels other than each; 0 where there are none."""
    known = np.isfinite(r)
    n = known.sum() - known
    return (np.nansum(r) - np.where(known, r, 0.0)) / np.maximum(n, 1)


def _excess(above: np.ndarray) -> int:
    """Of how far each number is above their median: the most that there are above any distance,
    beyond those that are as far below."""
    up, down = np.sort(above[above > 0])[::-1], np.sort(-above[above < 0])
    as_far_below = len(down) - np.searchsorted(down, up)
    return int(np.max(np.arange(1, len(up) + 1) - as_far_below, initial=0))


def _confidence(score: pd.Series, fit: pd.Series, above: pd.Series, easy: pd.Series) -> pd.Series:
    """The least share of wrong labels among the examples up to each one in the ranking by score.

    ``above``: how far harm is above the median of the label. The share is taken to fall along the
    ranking: what holds of the first k holds of the first few of these. ``easy``: the better fitted
    half of each label.
    """
    k, sign = np.arange(1, len(score) + 1), np.nan_to_num(np.sign(above.to_numpy()))
    worst = np.argsort(-fit.to_numpy(), kind="stable")
    below = max(0.0, -float(sign[easy.to_numpy()].mean()))
    least = (sign[worst].cumsum() - 2 * np.sqrt(k)) / k - below
    found = np.empty(len(k))
    order = np.argsort(-score.to_numpy(), kind="stable")
    found[order] = np.maximum.accumulate(least[::-1])[::-1].clip(0.0, 1.0)
    return pd.Series(found, score.index)


def _correlation(a: pd.Series, b: pd.Series) -> float:
    """NaN where too few examples have both, or all are alike."""
    known = a.notna() & b.notna()
    a, b = a[known], b[known]
    return float(a.corr(b)) if len(a) >= FEWEST and a.std() > 0 and b.std() > 0 else math.nan


def by_values(window: dict[str, Any], sure: int) -> str:
    """One line about what the values said of a list of suspects: its ``attrs["window"]``, and of
    how many of the first at least half are wrong."""
    if window["hurt"] is None:
        return "values: not used"
    most = f"at least half of the first {sure:,} are wrong" if sure else "none is sure to be wrong"
    alone = "no label stands out"
    if window["label"] is not None:
        alone = (f"label {window['label']:g} stands out ({window['stands_out']:.0%}), "
                 f"about {window['wrong']:,} of its examples are wrong")  # fmt: skip
    return (
        f"values: {most}; bad fit and harm correlate by {window['hurt']:+.2f}, {alone}, "
        f"weight of harm {window['weight']:.2g}"
    )


def _z(x: pd.Series) -> pd.Series:
    """Standard scores; 0 where all are alike."""
    spread = x.std(ddof=0)
    return (x - x.mean()) / (spread if spread > 0 else np.inf)


_SUMMED = (*SHOWN, "disagreed", "visits", "weight")


def _added(rows: pd.DataFrame) -> pd.DataFrame:
    """Sums by example. A signal that one of the visits lacks is not known."""
    grouped = rows.groupby("id", sort=True)
    found = grouped[list(_SUMMED)].sum()
    found = found.where(grouped[list(_SUMMED)].count().eq(grouped.size(), axis=0))
    found["low"], found["high"] = grouped["low"].min(), grouped["high"].max()
    return found.reset_index()


def _epoch(epochs: pd.DataFrame, steps: pd.Series) -> np.ndarray:
    """The position of the epoch of each step."""
    return np.searchsorted(epochs["since"].to_numpy(), steps.to_numpy(), side="right") - 1


def _chosen(history: History, epochs: pd.DataFrame, window: Window) -> tuple[Choice, np.ndarray]:
    """The window that was asked for, or the one that the run shows to be good; and how much of the
    labels the model knew in each epoch, 1 where that is not told."""
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
    at, same = _epoch(epochs, table["step"]), np.ones(len(epochs))
    sums = table.groupby(at)[["right", "n"]].sum()
    share = sums["right"] / sums["n"]
    if not window.whole:
        return Choice(since, until, "the steps that were asked for"), same
    frequent = float(labels.max() / labels.sum()) if len(labels) else float("nan")
    best = float(share.max())
    if not best > frequent or len(share) < 2:
        why = "all visits: the run shows no epoch from which labels are known"
        return Choice(since, until, why), same
    knew = (share - frequent) / (best - frequent)
    first = int(knew.index[knew >= LEARNED][0])
    why = (
        f"from epoch {first} of 0 to {int(at.max())} on: it is the first in which the model got "
        f"clearly more of the given labels right ({share[first]:.0%}; best epoch {best:.0%}) than "
        f"the most frequent label would ({frequent:.0%}). Visits count as much as it knew then"
    )
    weights = knew.clip(lower=LEARNED).reindex(range(len(epochs)), fill_value=LEARNED)
    return Choice(max(since, int(epochs["since"].iloc[first])), until, why), weights.to_numpy()


def removed(
    table: pd.DataFrame, n: int, rule: str, seed: int = 0, groups: pd.Series | None = None
) -> np.ndarray:
    """Positions of n rows of ``suspects_table`` to remove, the first to go first.

    ``noisy``: the most suspicious. ``clean``: the easiest (lowest EL2N, or loss), an equal share of
    each label. ``auto``: first those that are wrong by the values (``_wrong``); then the easiest if
    values say that the other labels are right (their mean r is below 0 by more than its standard
    error). Otherwise the most suspicious tenth if values are steady and no label stands out
    (``_doubted``), and then at random, since without easy examples the share of wrong ones rises.
    Never the lowest values: on clean SST-2 that was worse than removing at random. ``noisy`` is for
    no more than the share of wrong labels: beyond, it removes hard examples and did worse than
    random.

    ``groups``: by row, which are near-duplicates of each other, null where of none. Of each group
    all but the least suspicious go after the wrong ones and before the others.
    """
    order = np.arange(len(table))  # the most suspicious first
    if rule == "noisy":
        return order[:n]
    auto = rule == "auto"
    first = _wrong(table) | _doubted(table) if auto else np.zeros(len(table), bool)
    twins = np.zeros(len(table), bool)
    if groups is not None:
        left = groups.reset_index(drop=True)[~first].dropna()
        twins[left.index[left.duplicated(keep="last")]] = True
    alone = ~first & ~twins
    if auto and not table.attrs["window"]["right"] > 0:
        rest = np.random.default_rng(seed).permutation(order[alone])
    else:
        rest = _easiest(table[alone])
    return np.concatenate([order[first], order[twins], rest]).astype(int)[:n]


def _wrong(table: pd.DataFrame) -> np.ndarray:
    """Which rows are wrong by the values: the first of whom at least the share ``SURE`` is, as many
    of the first as are wrong among all at least, and of a label that stands out as many as are
    wrong there."""
    confidence, window = table["confidence"].fillna(0.0).to_numpy(), table.attrs["window"]
    k = np.arange(1, len(table) + 1)
    least = int((k * confidence).max(initial=0.0))
    there = (table["label"] == window["label"]).to_numpy()
    found: np.ndarray = (confidence >= SURE) | (k <= least)
    return found | (there & (there.cumsum() <= window["wrong"]))


def _doubted(table: pd.DataFrame) -> np.ndarray:
    """The first ``DOUBTED`` of the rows, if there are wrong labels among all. Where labels are
    right, examples that fit badly are hard ones, and these help. So where they do not, though
    values agree with themselves beyond chance (three standard errors), some are wrong."""
    window, n = table.attrs["window"], len(table)
    steady = window["agreement"] is not None and window["agreement"] > 3 / max(1, n) ** 0.5
    known = window["others"] is not None and not window["right"] > 0 and window["stands_out"] == 0
    return np.arange(n) < (round(DOUBTED * n) if steady and known else 0)


def _easiest(table: pd.DataFrame) -> np.ndarray:
    """Positions of all rows, the easiest first, an equal share of each label."""
    by = table["el2n"] if table["el2n"].notna().all() else table["loss"]
    labels = table["label"].fillna(-1)
    place = by.groupby(labels).rank(method="first") - 0.5
    share = place / labels.map(labels.value_counts())  # 0: the easiest of its label
    found: np.ndarray = share.sort_values(kind="stable").index.to_numpy()
    return found

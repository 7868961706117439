"""Suspects by fit and values, how sure they are, and what is removed."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest

from inrun.ledger import suspects
from inrun.ledger.entries import MemoryLedger, StepEntry
from inrun.ledger.signals import Window
from inrun.ledger.suspects import (
    SPREAD,
    STANDS,
    VALUES,
    _confidence,
    _excess,
    _others,
    _surely_below,
    by_values,
    removed,
)

LABELS, EACH, STEPS = 4, 60, 8


def run(wrong: np.ndarray, fits: float = 2.0, turn: bool = False) -> MemoryLedger:
    """Every example in every step. Hard examples (high loss) help, wrong ones hurt and have a loss
    that is higher by ``fits``. ``turn``: values change their sign in the middle."""
    rng, n = np.random.default_rng(1), LABELS * EACH
    hard = np.abs(rng.normal(size=n))
    loss = 0.2 + hard + fits * wrong
    ledger = MemoryLedger(["all"])
    for step in range(STEPS):
        signals = np.stack([loss, 1 - np.exp(-loss), 2 - loss, np.arange(n) % LABELS])
        values = np.where(wrong, -2.0, 0.5 * hard - 0.3) + 0.4 * rng.normal(size=n)
        values *= -1 if turn and step >= STEPS // 2 else 1
        entry = StepEntry(step, np.arange(n), values[None, None], 0.1, signals=signals)
        ledger.append(entry)
    return ledger


def spread_evenly(share: float) -> np.ndarray:
    return np.random.default_rng(2).random(LABELS * EACH) < share


def in_label(label: int, share: float) -> np.ndarray:
    return spread_evenly(share) & (np.arange(LABELS * EACH) % LABELS == label)


def auroc(found: pd.DataFrame, wrong: np.ndarray) -> float:
    score = found.set_index("id")["suspicion"].sort_index().to_numpy()
    return float((score[wrong][:, None] > score[~wrong]).mean())


def test_values_count_where_a_label_stands_out():
    wrong = in_label(2, 0.25)
    ledger = run(wrong, fits=0.5)
    found, fit = ledger.suspects(0), ledger.suspects(0, values=False)
    window = found.attrs["window"]
    assert window["label"] == 2 and window["stands_out"] == 1 and window["weight"] > 0
    assert auroc(found, wrong) > 0.99 > 0.9 > auroc(fit, wrong)
    assert fit.attrs["window"]["hurt"] is None and fit["confidence"].isna().all()


@pytest.mark.parametrize("share", [0.0, 0.15])
def test_labels_that_are_alike_do_not_stand_out(share):
    """Where wrong labels are spread evenly values do not count at all."""
    ledger = run(spread_evenly(share))
    found, fit = ledger.suspects(0), ledger.suspects(0, values=False)
    assert found.attrs["window"]["label"] is None
    assert (found.attrs["window"]["weight"] == 0) == (share > 0)
    assert (found["id"].tolist() == fit["id"].tolist()) == (share > 0)
    assert (found.attrs["window"]["hurt"] > 0) == (share > 0)
    assert (found.attrs["window"]["others"] >= 0) == (share > 0)
    assert (found.attrs["window"]["right"] == 0) == (share > 0)


def test_harm_tells_few_wrong_labels_from_hard_ones():
    """Too few in each label for one to stand out; most that fit badly are hard and help."""
    wrong = spread_evenly(0.03)
    ledger = run(wrong, fits=0.5)
    found, fit = ledger.suspects(0), ledger.suspects(0, values=False)
    assert wrong.sum() > 3 and found.attrs["window"]["label"] is None
    assert auroc(found, wrong) > 0.99 > 0.9 > auroc(fit, wrong)


def test_values_of_earlier_epochs_count_where_labels_are_known_late():
    """Of a window of one epoch, in which every example has one visit, no two halves agree."""
    wrong, n = in_label(2, 0.25), LABELS * EACH
    rng, ledger = np.random.default_rng(1), MemoryLedger(["all"])
    for step in range(6):  # two of an epoch
        ids = np.arange(n)[step % 2 :: 2]
        hard = np.abs(np.random.default_rng(4).normal(size=n))[ids]
        margin = (0.5 - hard * 0.1 - wrong[ids]) if step >= 4 else -1 - hard
        signals = np.stack([hard + wrong[ids], hard + wrong[ids], margin, ids % LABELS])
        values = np.where(wrong[ids], -2.0, 0.5 * hard - 0.3) + 0.4 * rng.normal(size=len(ids))
        ledger.append(StepEntry(step, ids, values[None, None], 0.1, signals=signals))
    window = ledger.suspects(0).attrs["window"]
    assert window["since"] == 4 and window["label"] == 2 and window["agreement"] > 0.3
    asked = ledger.suspects(0, Window(4, 6)).attrs["window"]
    assert asked["agreement"] is None and asked["label"] is None


def test_values_that_turn_do_not_count():
    found = run(in_label(2, 0.25), fits=0.5, turn=True).suspects(0)
    assert found.attrs["window"]["agreement"] < 0 and found.attrs["window"]["weight"] == 0


@pytest.mark.parametrize("wrong", [in_label(2, 0.25), spread_evenly(0.03), in_label(2, 0.05)])
def test_the_score_is_the_formula(wrong):
    ledger = run(wrong, fits=0.5)
    found = ledger.suspects(0).set_index("id").sort_index()
    n, label = LABELS * EACH, np.arange(LABELS * EACH) % LABELS
    means, history = ledger.values(0), ledger.history(0)

    def z(x):
        return (np.asarray(x) - np.mean(x)) / np.std(x)

    fit = (z(means["el2n"]) - z(means["margin"])) / 2
    halves = np.zeros((2, n))
    for step in range(STEPS):
        values = history[history["step"] == step].sort_values("id")["value"].to_numpy()
        halves[int(step >= STEPS // 2)] -= values / values.std()
    harm = z(halves.sum(0))

    def r(of, c):
        return np.corrcoef(fit[label == c], of[label == c])[0, 1]

    s = np.ones(LABELS)
    for half in halves:
        for c in range(LABELS):
            others = [r(half, d) for d in range(LABELS) if d != c]
            spread = max(SPREAD, np.std(others)) * np.sqrt(1 + 1 / (LABELS - 1))
            apart = (r(half, c) - np.mean(others)) / spread
            s[c] = min(s[c], np.clip((apart - STANDS[0]) / (STANDS[1] - STANDS[0]), 0, 1))
    score, every = np.zeros(n), [r(harm, c) for c in range(LABELS)]
    hard = max(0, -np.mean(every) - max(SPREAD, np.std(every)) / np.sqrt(LABELS))
    weight = VALUES * (1 - s.max()) * max(0, np.corrcoef(halves)[0, 1]) * hard
    for i in range(n):
        c = label[i]
        rho = min(np.corrcoef(halves)[0, 1], np.corrcoef(halves[:, label == c])[0, 1])
        like = [c] if s[c] else np.flatnonzero(s == 0)
        score[i] = (1 + s.max() * np.mean([r(harm, d) for d in like])) * (fit[i] - fit.min())
        score[i] += VALUES * max(0, rho) ** 2 * s[c] * max(0, harm[i])
        score[i] += weight * harm[i]
    np.testing.assert_allclose(found["suspicion"], pd.Series(score).rank() / n, rtol=1e-9)


@pytest.mark.parametrize("label", [np.nan, 0.0])
def test_without_labels_the_fit_ranks(label):
    """Documents have none; one label cannot stand out. Fits that are all alike say nothing."""
    rng, ledger, same = np.random.default_rng(3), MemoryLedger(["all"]), MemoryLedger(["all"])
    loss = rng.random(30)
    for step in range(4):
        values = rng.normal(size=(1, 1, 30))
        for to, fit in ((ledger, loss), (same, np.ones(30))):
            signals = np.stack([fit, fit, -fit, np.full(30, label)])
            to.append(StepEntry(step, np.arange(30), values, 0.1, signals=signals))
    found = ledger.suspects(0)
    assert found["id"].tolist() == np.argsort(-loss).tolist() and found["confidence"].notna().all()
    assert found.attrs["window"]["label"] is None and found.attrs["window"]["weight"] == 0
    assert same.suspects(0).attrs["window"]["hurt"] is None
    assert same.suspects(0)["suspicion"].nunique() == 1


@pytest.mark.parametrize("kind", ["evenly", "one label", "clean"])
def test_confidence_is_at_most_the_share_of_wrong_labels(kind):
    wrong = {"evenly": spread_evenly(0.2), "one label": in_label(1, 0.3),
             "clean": spread_evenly(0.0)}[kind]  # fmt: skip
    found = run(wrong).suspects(0)
    share = wrong[found["id"]].cumsum() / np.arange(1, len(found) + 1)
    confidence = found["confidence"].to_numpy()
    assert (np.diff(confidence) <= 0).all() and ((confidence >= 0) & (confidence <= 1)).all()
    assert (confidence <= share + 0.05).all()
    if kind == "clean":
        assert (confidence < 0.05).all()
    else:
        assert confidence[5] > 0.25 and confidence[-1] == 0


def test_confidence_is_less_where_well_fitted_examples_are_mostly_below():
    """The model leans to one label, and what is right for it hurts: no sign of wrong labels."""
    k = np.arange(1000.0)
    fit, easy = pd.Series(-k), pd.Series(k >= 500)  # the worst first
    lean = _confidence(fit, fit, pd.Series(np.where(k < 500, 1.0, -1.0)), easy)
    assert (lean == 0).all()
    wrong = _confidence(fit, fit, pd.Series(np.where((k < 300) | (k % 2 == 0), 1.0, -1.0)), easy)
    assert wrong[0] == pytest.approx(1 - 2 / 301**0.5)  # the next one is above, too


def learning(right: list[float]) -> MemoryLedger:
    """So many of the given labels are right in each epoch: 10 examples, two labels."""
    ledger = MemoryLedger(["all"])
    for epoch, share in enumerate(right):
        margin = np.where(np.arange(10) < 10 * share, 1.0, -1.0)
        signals = np.stack([1 - margin / 2, 1 - margin / 2, margin, np.arange(10) % 2])
        ledger.append(StepEntry(epoch, np.arange(10), np.ones((1, 1, 10)), 0.1, signals=signals))
    return ledger


@pytest.mark.parametrize(
    "right, since, why",
    [
        ([0.3, 0.5, 0.8, 1.0], 2, "from epoch 2"),
        ([0.7, 0.8, 1.0], 0, "from epoch 0"),
        ([0.4, 0.5], 0, "all visits"),
        ([0.9], 0, "all visits"),
    ],
)
def test_the_window_begins_when_the_labels_are_known(right, since, why):
    window = learning(right).suspects(0).attrs["window"]
    assert (window["since"], window["until"]) == (since, len(right)) and why in window["why"]


def to_remove(confidence, **window):
    table = pd.DataFrame({
        "id": range(8), "confidence": confidence,
        "el2n": [1.3, 1.2, 0.8, 0.7, 0.6, 0.5, 0.2, 0.1], "loss": 1.0,
        "label": [0, 1, 0, 0, 1, 1, 0, 0],
    })  # fmt: skip
    nothing = {"agreement": None, "others": None, "stands_out": 0.0}
    table.attrs["window"] = {"label": None, "wrong": 0, "right": 0.1} | nothing | window
    return table


@pytest.mark.parametrize(
    "confidence, window, first",
    [
        ([0.6, 0.5, 0.1, 0, 0, 0, 0, 0], {}, [0, 1, 7, 5]),  # at least half wrong
        ([0.4, 0.4, 0.3, 0.3, 0.1, 0, 0, 0], {}, [0, 7, 5, 6]),  # of four at least one
        ([0.1] * 5 + [0] * 3, {}, [7, 5, 6, 3]),  # the easiest of each label in turn
        ([0.1] * 5 + [0] * 3, {"label": 1.0, "wrong": 2}, [1, 4, 7, 6]),  # a label stands out
        ([0.6] + [0] * 7, {"label": 1.0, "wrong": 2}, [0, 1, 4, 7]),
        ([np.nan] * 8, {}, [7, 5, 6, 3]),
    ],
)
def test_what_is_removed(confidence, window, first):
    table = to_remove(confidence, **window)
    assert removed(table, 3, "noisy").tolist() == [0, 1, 2]
    assert removed(table, 4, "auto").tolist() == first
    assert removed(table, 4, "clean").tolist() == [7, 5, 6, 3]


def test_the_rest_goes_at_random_where_others_may_be_wrong():
    table = to_remove([0.6, 0.5] + [0.1] * 6, right=0.0)
    found = [removed(table, 8, "auto", seed).tolist() for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2] and found[0][:2] == [0, 1]
    assert sorted(found[0]) == sorted(found[2]) == list(range(8))
    assert removed(table, 4, "clean").tolist() == [7, 5, 6, 3]


@pytest.mark.parametrize(
    "change, first",
    [
        ({}, [0, 1]),  # values are steady, and hard examples do not help
        ({"right": 0.1}, [7, 5]),  # they do: the easiest go
        ({"agreement": 0.9}, None),  # no more than by chance, of 8 examples
        ({"agreement": None}, None),
        ({"others": None}, None),  # not known
        ({"stands_out": 0.2, "label": 0.0}, None),
    ],
)
def test_suspects_go_first_where_hard_examples_do_not_help(change, first):
    window = {"agreement": 1.1, "others": -0.1, "right": 0.0} | change
    with patch.object(suspects, "DOUBTED", 0.25):
        found = [removed(to_remove([0.0] * 8, **window), 8, "auto", k).tolist() for k in range(9)]
    heads = {tuple(x[:2]) for x in found}
    assert heads == {tuple(first)} if first else len(heads) > 3
    assert (len({tuple(x) for x in found}) > 3) == (window["right"] == 0)


@pytest.mark.parametrize(
    "above, wrong",
    [
        ([], 0),
        ([1.0, 2.0, -1.0, -2.0], 0),
        ([-3.0, -2.0, 1.0, 0.5], 0),
        ([5.0, 4.0, 4.0, 1.0, -1.0, -1.5, -0.5, 0.0], 3),
        ([5.0, 4.0, -4.0, 3.0], 2),  # as far below counts against it
    ],
)
def test_how_many_are_far_above_beyond_those_below(above, wrong):
    assert _excess(np.array(above)) == wrong


def test_the_number_of_wrong_ones_of_a_label_that_stands_out():
    wrong = in_label(2, 0.25)
    found = run(wrong, fits=0.5).suspects(0)
    window = found.attrs["window"]
    own = found[found["label"] == 2]["id"].head(window["wrong"])
    assert wrong.sum() / 2 < window["wrong"] <= wrong.sum() and wrong[own].all()
    assert f"about {window['wrong']} of its examples are wrong" in by_values(window, 0)
    assert run(spread_evenly(0.15)).suspects(0).attrs["window"]["wrong"] == 0


def test_right_is_what_is_below_zero_by_more_than_its_error():
    assert _surely_below(np.array([-0.4, -0.6, np.nan])) == pytest.approx(0.5 - SPREAD / 2**0.5)
    assert _surely_below(np.array([-2.0, 0.0])) == pytest.approx(1 - 0.5**0.5)
    assert _surely_below(np.array([-0.2])) == _surely_below(np.array([np.nan])) == 0


def test_a_label_stands_out_among_right_ones_only():
    """Where fit and harm agree in the other labels, too, these have wrong ones."""
    assert _others(np.array([0.9, -0.2, np.nan, -0.4])) == pytest.approx([-0.3, 0.25, 0.1, 0.35])
    assert _others(np.array([0.9, np.nan])).tolist() == [0.0, 0.9]
    for more, label in ((0.0, 2.0), (0.3, None)):  # wrong ones in the others, too
        wrong = in_label(2, 0.4) | spread_evenly(more)
        with patch.object(suspects, "STANDS", (0.1, 0.2)):
            assert run(wrong, fits=0.5).suspects(0).attrs["window"]["label"] == label


def test_a_visit_counts_as_much_as_the_model_knew():
    """Epochs with 2, 6 and 10 of 10 labels right, 5 of the most frequent: the first does not
    count, the second (6 − 5) / (10 − 5)."""
    ledger = learning([0.2, 0.6, 1.0])
    found = ledger.suspects(0).set_index("id").sort_index()
    history = ledger.history(0).set_index("id")["margin"]
    for i in (0, 9):
        _, second, third = history[i]
        assert found["margin"][i] == pytest.approx((0.2 * second + third) / 1.2)
    plain = ledger.suspects(0, Window(0, 3)).set_index("id").sort_index()
    assert plain["margin"][9] == pytest.approx(history[9].mean())
    assert found["visits"].eq(2).all() and plain["disagreed"][9] == pytest.approx(2 / 3)

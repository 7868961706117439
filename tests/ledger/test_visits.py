"""Signals in the ledger, windows of steps, epochs, suspects: against plain pandas."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from inrun.ledger import LedgerError
from inrun.ledger.entries import MemoryLedger, StepEntry
from inrun.ledger.saved import Store, open_run
from inrun.ledger.signals import SHOWN, Window
from inrun.ledger.suspects import removed

N, B, EPOCHS, Q = 12, 4, 3, 2
NAMES = ["a", "loss"]  # a target may be called like a signal


def entries(known: bool = True, labels: int = 3) -> list[StepEntry]:
    """EPOCHS passes over N examples; the second step was not scored, the third has no signals."""
    rng, found = np.random.default_rng(0), []
    for step, ids in enumerate(
        ids for _ in range(EPOCHS) for ids in rng.permutation(N).reshape(-1, B)
    ):
        values = None if step == 1 else rng.normal(size=(1, Q, B))
        signals = rng.normal(size=(4, B)).astype(np.float32)
        signals[:2] = np.abs(signals[:2])
        signals[3] = ids % labels
        if not known or step in (1, 2):
            signals = None
        found.append(StepEntry(step, ids, values, 0.1, 2.0, signals=signals))
    return found


@pytest.fixture(params=["memory", "disk", "parts"])
def ledger(request, tmp_path):
    return filled(request.param, entries(), tmp_path / "run")


def filled(kind, rows, path):
    memory = kind == "memory"
    found = MemoryLedger(NAMES) if memory else Store.create(path, {}, NAMES, ["secant"])
    for entry in rows:
        found.append(entry)
        if kind == "parts":
            found.flush()
    found.flush()
    return found


def visits(since=0, until=99) -> pd.DataFrame:
    rows = []
    for e in entries():
        for i, id in enumerate(e.ids):
            if since <= e.step < until:
                value = np.nan if e.values is None else e.values[0, :, i].mean()
                own = [np.nan] * 4 if e.signals is None else e.signals[:, i]
                rows.append([e.step, id, value, *own])
    return pd.DataFrame(rows, columns=["step", "id", "value", *SHOWN, "label"])


@pytest.mark.parametrize("since, until", [(0, 99), (3, 99), (0, 6), (3, 6)])
def test_values_of_a_window(ledger, since, until):
    found = ledger.values(0, Window(since, until)).set_index("id")
    wanted = visits(since, until).groupby("id")
    np.testing.assert_allclose(found["value"], 2 * wanted["value"].sum(min_count=1), rtol=1e-9)
    np.testing.assert_array_equal(found["steps"], wanted.size())
    for name, shown in zip(SHOWN, ["signal loss", "el2n", "margin"], strict=True):
        np.testing.assert_allclose(found[shown], wanted[name].mean(), rtol=1e-6)
    history = ledger.history(0, Window(since, until))
    assert history["step"].between(since, until - 1).all()
    np.testing.assert_allclose(
        history["el2n"], visits(since, until).dropna(subset="value")["el2n"], rtol=1e-6
    )


def test_older_steps_count_less(ledger):
    found = ledger.values(0, Window(None, 7, 2.0)).set_index("id")["value"]
    rows = visits(0, 7)
    rows["value"] *= 2 * 0.5 ** ((6 - rows["step"]) / 2)
    wanted = rows.groupby("id")["value"].sum(min_count=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


@pytest.mark.parametrize("bad", [{"since": 1.5}, {"since": 3, "until": 3}, {"half_life": 0}])
def test_windows_that_make_no_sense_are_refused(bad):
    with pytest.raises(LedgerError, match="step"):
        Window(**bad)


def test_epochs(ledger):
    found = ledger.epochs(0)
    assert found["since"].tolist() == [0, 3, 6] and found["until"].tolist() == [3, 6, 9]
    assert found["examples"].tolist() == [N] * 3
    rows = visits()
    wanted = rows.groupby(rows["step"] // 3)
    np.testing.assert_allclose(found["value"], wanted["value"].sum(), rtol=1e-9)
    np.testing.assert_allclose(found["el2n"], wanted["el2n"].mean(), rtol=1e-6)


@pytest.mark.parametrize("by, lowest", [("loss", False), ("el2n", False), ("margin", True)])
def test_top_by_a_signal(ledger, by, lowest):
    means = visits().groupby("id")[by].mean().sort_values(ascending=lowest)
    found = ledger.top(0, 5, by)
    assert found["id"].tolist() == means.index[:5].tolist()
    np.testing.assert_allclose(found[by], means[:5], rtol=1e-6)


def test_a_ledger_without_signals_is_as_it_was(tmp_path):
    for kind in ("memory", "disk"):
        ledger = filled(kind, entries(known=False), tmp_path / "run")
        assert list(ledger.values(0)) == ["id", "value", *NAMES, "steps", "scored"]
        with pytest.raises(LedgerError, match="cross_entropy"):
            ledger.top(0, by="el2n")
        with pytest.raises(LedgerError, match="cross_entropy"):
            ledger.suspects(0)


def test_parts_with_and_without_signals_are_merged(tmp_path):
    store = filled("parts", entries(), tmp_path / "run")
    wanted = store.values(0)
    store.close()
    again = Store.create(tmp_path / "run", {}, NAMES, ["secant"])
    again.truncate(5)  # rewrites the part of step 5
    again.close()
    read = open_run(tmp_path / "run")
    pd.testing.assert_frame_equal(read.values(until=5), open_run(tmp_path / "run").values())
    assert len(wanted.columns) == len(read.values().columns)


def test_signals_of_another_shape_are_refused(tmp_path):
    store = Store.create(tmp_path / "run", {}, NAMES, ["secant"])
    with pytest.raises(LedgerError, match="signals have shape"):
        store.append(StepEntry(0, np.arange(3), None, 0.1, signals=np.zeros((4, 2))))


def test_a_checkpoint_carries_them():
    ledger = filled("memory", entries(), None)
    other = MemoryLedger(NAMES)
    other.load_state_dict(ledger.state_dict())
    pd.testing.assert_frame_equal(other.values(0), ledger.values(0))


def z(x):
    return (x - x.mean()) / x.std(ddof=0)


@pytest.mark.parametrize("by_value", [True, False])
def test_suspects_are_ranked_by_fit_and_values(ledger, by_value):
    found = ledger.suspects(0, Window(3, 9), by_value)
    window, found = found.attrs["window"], found.set_index("id").sort_index()
    rows = visits(3, 9)
    means = rows.groupby("id")[list(SHOWN)].mean()
    score = (z(means["loss"]) + z(means["el2n"]) - z(means["margin"])) / 3
    if by_value:
        history = ledger.history(0, Window(3, 9))
        spread = history.groupby("step")["value"].transform(lambda v: v.std(ddof=0))
        history["against"] = -history["value"] / spread
        late = history["step"] >= 6
        first, second = (history[m].groupby("id")["against"].sum() for m in (~late, late))
        weight = 4 * max(0.0, first.corr(second)) ** 2  # labels of four examples have none
        np.testing.assert_allclose(window["weight"], weight, rtol=1e-6)
        score = score + weight * z(first + second).clip(lower=0)
    else:
        assert window["weight"] == 0
    np.testing.assert_allclose(found["suspicion"], score.rank() / N, rtol=1e-9)
    doubt = (rows["margin"] < 0).groupby(rows["id"]).mean()
    np.testing.assert_allclose(found["disagreed"], doubt, rtol=1e-9)
    assert (found["label"] == found.index % 3).all() and (found["visits"] == 2).all()
    values = ledger.values(0, Window(3, 9)).set_index("id")[NAMES]
    hurts = values.idxmin(axis=1).where(values.min(axis=1) < 0)
    assert found["hurts"].fillna("").tolist() == hurts.fillna("").tolist()


def against(turn: set[int]) -> MemoryLedger:
    """40 examples of two labels that the model fits alike; odd ids have label 1. Values are the
    same at each step, but those of the labels in ``turn`` have another sign in the second half."""
    ledger, ids = MemoryLedger(["all"]), np.arange(40)
    alike = np.stack([np.ones(40), np.ones(40), np.ones(40), ids % 2])
    values = np.random.default_rng(0).normal(size=40)
    turned = np.isin(ids % 2, list(turn))
    for step in range(8):
        own = np.where(turned & (step >= 4), -values, values)
        ledger.append(StepEntry(step, ids, own[None, None], 0.1, signals=alike))
    return ledger


def test_values_count_as_far_as_they_agree_with_themselves():
    steady, turning = against(set()), against({0, 1}).suspects(0)
    found = steady.suspects(0)
    lowest = steady.values(0).sort_values("value")["id"].tolist()
    assert found["id"].tolist()[:5] == lowest[:5]
    assert found.attrs["window"]["weight"] == pytest.approx(4)
    assert turning.attrs["window"]["weight"] == 0 and turning.attrs["window"]["agreement"] < 0
    assert turning["suspicion"].nunique() == 1


def test_values_of_a_label_that_do_not_agree_do_not_count():
    ledger, ids = MemoryLedger(["all"]), np.arange(40)
    alike = np.stack([np.ones(40), np.ones(40), np.ones(40), ids % 2])
    rng = np.random.default_rng(0)
    kept, other = rng.normal(size=40), rng.normal(size=40)
    for step in range(8):  # label 1 is lower, and orders its own anew in the second half
        values = np.where(ids % 2 == 0, 4 * kept, (kept if step < 4 else other - kept) - 2)
        ledger.append(StepEntry(step, ids, values[None, None], 0.1, signals=alike))
    found = ledger.suspects(0)
    window, found = found.attrs["window"], found.set_index("id")["suspicion"].sort_index()
    assert window["agreement"] > 0.5 and 0 < window["weight"] < 4 * window["agreement"] ** 2
    assert found[ids % 2 == 1].nunique() == 1 and found[ids % 2 == 0].nunique() > 1


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


@pytest.mark.parametrize(
    "fitted, several, first",
    [(0.9, 0.2, [0, 1, 7, 5]), (0.7, 0.2, [7, 5, 6, 3]), (0.9, 0.3, [7, 5, 6, 3])],
)
def test_what_is_removed(fitted, several, first, monkeypatch):
    monkeypatch.setattr("inrun.ledger.suspects.SEVERAL", several)
    table = pd.DataFrame({
        "id": range(8), "disagreed": [0.95, 0.92, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05],
        "el2n": [1.3, 1.2, 0.8, 0.7, 0.6, 0.5, 0.2, 0.1], "loss": 1.0,
        "label": [0, 1, 0, 0, 1, 1, 0, 0],
    })  # fmt: skip
    table.attrs["window"] = {"fitted": fitted}
    assert removed(table, 3, "noisy").tolist() == [0, 1, 2]
    assert removed(table, 4, "auto").tolist() == first  # the easiest of each label in turn
    assert removed(table, 4, "clean").tolist() == [7, 5, 6, 3]

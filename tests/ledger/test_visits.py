"""Signals in the ledger, windows of steps, epochs: against plain pandas."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from inrun.ledger import LedgerError
from inrun.ledger.entries import MemoryLedger, StepEntry
from inrun.ledger.saved import Store, open_run
from inrun.ledger.signals import SHOWN, Window

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
    known = visits(since, until).dropna(subset="loss").sort_values("step").groupby("id")["loss"]
    change = (known.last() - known.first()).where(known.size() > 1).reindex(found.index)
    np.testing.assert_allclose(found["loss_change"], change, rtol=1e-5, atol=1e-6)
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
def test_suspects_of_alike_labels_are_ranked_by_fit(ledger, by_value):
    found = ledger.suspects(0, Window(3, 9), by_value)
    window, found = found.attrs["window"], found.set_index("id").sort_index()
    rows = visits(3, 9)
    means = rows.groupby("id")[list(SHOWN)].mean()
    score = (z(means["el2n"]) - z(means["margin"])) / 2
    assert window["weight"] == 0 and window["label"] is None  # labels of four examples do not tell
    assert found["confidence"].notna().all() == by_value == (window["hurt"] is not None)
    np.testing.assert_allclose(found["suspicion"], score.rank() / N, rtol=1e-9)
    doubt = (rows["margin"] < 0).groupby(rows["id"]).mean()
    np.testing.assert_allclose(found["disagreed"], doubt, rtol=1e-9)
    assert (found["label"] == found.index % 3).all() and (found["visits"] == 2).all()
    values = ledger.values(0, Window(3, 9)).set_index("id")[NAMES]
    hurts = values.idxmin(axis=1).where(values.min(axis=1) < 0)
    assert found["hurts"].fillna("").tolist() == hurts.fillna("").tolist()

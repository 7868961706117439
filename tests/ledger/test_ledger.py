"""The ledger in memory: its arithmetic by hand on a small case."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from inrun.ledger import LedgerError
from inrun.ledger.audits import audit_summary
from inrun.ledger.entries import Audit, MemoryLedger, StepEntry, step_row


def small():
    ledger = MemoryLedger(["a", "b"])
    one, two = np.array([[1.0, -3.0], [3.0, -1.0]]), np.array([[2.0, 2.0], [0.0, 4.0]])
    audit = Audit(np.array([5.0, 7.0]), np.array([4.0, 6.0]), np.array([3.0, 6.0]))
    ledger.append(StepEntry(0, np.array([10, 20]), one[None], 0.1, weight=2.0, audit=audit))
    ledger.append(StepEntry(1, np.array([20, 30]), None, 0.1))
    ledger.append(StepEntry(2, np.array([20, 10]), two[None], 0.1, weight=2.0))
    ledger.append(StepEntry(3, np.array([40]), None, 0.1, void="skipped"))
    return ledger


def test_values_are_weighted_sums():
    table = small().values(0)
    assert table["id"].tolist() == [10, 20, 30, 40]
    np.testing.assert_array_equal(table["a"], [2 * (1 + 2), 2 * (-3 + 2), np.nan, np.nan])
    np.testing.assert_array_equal(table["b"], [2 * (3 + 4), 2 * (-1 + 0), np.nan, np.nan])
    np.testing.assert_array_equal(table["value"], (table["a"] + table["b"]) / 2)
    assert table["steps"].tolist() == [2, 3, 1, 1] and table["scored"].tolist() == [2, 2, 0, 0]


def test_harm_counts_negative_values_in_standard_deviations():
    # step 0: both targets have standard deviation 2; step 2: target a has none, b nothing negative
    np.testing.assert_allclose(small().harm(0)["harm"], [0, 3 / 2 + 1 / 2, np.nan, np.nan])


def test_harm_needs_two_examples_and_finite_values():
    ledger = MemoryLedger(["v"])
    ledger.append(StepEntry(0, np.array([1]), np.array([[[-1.0]]]), 0.1))
    values = np.array([[[-1.0, 1.0, np.inf, np.nan]]])
    ledger.append(StepEntry(1, np.array([2, 3, 4, 5]), values, 0.1))
    np.testing.assert_allclose(ledger.harm(0)["harm"], [np.nan, 1, 0, np.nan, np.nan])


def test_steps_and_their_sum():
    steps = small().steps(0)
    first = steps.iloc[0]
    assert first["sum"] == 0 and first["loss"] == 6 and first["batch_share"] == 0.5
    assert first["momentum_share"] == 1 and first["residual"] == 0.5 and first["explained"] == 0
    assert steps["void"].tolist()[3] == "skipped" and steps["sum"].isna().tolist()[1]
    summary = audit_summary(steps)
    assert summary["audited"] == 1 and summary["batch_share"] == 0.5
    assert np.isnan(audit_summary(steps.iloc[1:])["explained"])
    assert step_row(StepEntry(0, np.array([1]), None, 0.1), 0)["examples"] == 1


def test_checkpoint_is_plain_and_exact():
    ledger, again = small(), MemoryLedger(["a", "b"])
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    for name in ("values", "history", "harm", "steps"):
        pd.testing.assert_frame_equal(getattr(ledger, name)(0), getattr(again, name)(0))
    again.truncate(1)
    assert again.steps(0)["step"].tolist() == [0]


def test_tables_of_an_empty_ledger_have_their_columns():
    ledger = MemoryLedger(["a", "b"])
    assert ledger.values(0).columns.tolist() == ["id", "value", "a", "b", "steps", "scored"]
    assert ledger.history(0).columns.tolist() == ["step", "id", "value", "a", "b"]
    assert ledger.harm(0).empty and ledger.steps(0).empty


def test_target_names_are_columns():
    for bad in ([], ["a", "a"], ["value", "b"]):
        with pytest.raises(LedgerError):
            MemoryLedger(bad)

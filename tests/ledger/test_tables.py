"""``values`` and ``harm`` are what a few obvious lines say, wherever one asks for them."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from inrun.cli.app import app
from inrun.ledger import tables
from inrun.ledger.entries import MemoryLedger, StepEntry
from inrun.ledger.saved import Store, open_run
from inrun.report.data import payload


def entries(targets, kind, infinite=True, seed=0):
    """Steps that are scored, unscored and void; rows that are NaN, infinite, alike or repeated."""
    rng = np.random.default_rng(seed)
    for step in range(60):
        B = int(rng.integers(1, 9))
        ids = rng.integers(0, 30, B)  # an id may occur twice in a batch
        ids = ids if kind is int else np.array([f"né-{i}" for i in ids], dtype=object)
        values = rng.normal(size=(1, targets, B))
        values[rng.random(values.shape) < 0.03] = np.nan
        if infinite:
            values[rng.random(values.shape) < 0.03] = rng.choice([-np.inf, np.inf])
        if step % 7 == 0:  # copies of one example, up to rounding
            values = np.full_like(values, -1.0) * (1 + 1e-9 * rng.normal(size=values.shape))
        void = "why" if step % 11 == 0 else None
        scored = void is None and step % 5 != 0
        yield StepEntry(step, ids, values if scored else None, 0.1, 1.0 + step % 3, void)


def obvious(steps, targets):
    """The tables, row by row of each step."""
    value, hurt, seen, scored = {}, {}, {}, {}
    for entry in steps:
        for i, key in enumerate(entry.ids):
            seen[key] = seen.get(key, 0) + 1
            if entry.values is not None:
                scored[key] = scored.get(key, 0) + 1
                V = entry.values[0]  # [Q, B]
                row = [V[:, i].mean(), *V[:, i]]
                value.setdefault(key, []).append(entry.weight * np.array(row))
        for q in range(targets) if entry.values is not None else ():
            V = entry.values[0, q]  # [B]
            fine = V[np.isfinite(V)]
            if len(fine) and fine.std() > tables.ROUNDING * np.abs(fine).max():
                for i, key in enumerate(entry.ids):
                    if np.isfinite(V[i]):
                        hurt[key] = hurt.get(key, 0.0) + max(-V[i] / fine.std(), 0.0)
    ids = sorted(seen)
    columns = ["value", *(f"t{q}" for q in range(targets))]
    sums = pd.DataFrame(
        [pd.DataFrame(value.get(k, []), columns=columns).sum(min_count=1) for k in ids]
    )
    values = pd.DataFrame({"id": ids}).join(sums if targets > 1 else sums[["value"]])
    values["steps"] = [seen[k] for k in ids]
    values["scored"] = [scored.get(k, 0) for k in ids]
    return values, pd.DataFrame({"id": ids, "harm": [hurt.get(k, np.nan) for k in ids]})


@pytest.mark.parametrize("kind", [int, str])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("together", [1, 32])
def test_one_definition_of_values_and_harm(tmp_path, monkeypatch, kind, targets, together):
    monkeypatch.setattr(tables, "TOGETHER", together)
    monkeypatch.setattr(tables, "BATCH_ROWS", 50)  # a step's rows may lie in two record batches
    names = [f"t{q}" for q in range(targets)]
    steps = list(entries(targets, kind))
    memory, disk = MemoryLedger(names), Store.create(tmp_path / "run", {}, names, ["secant"])
    for entry in steps:
        memory.append(entry)
        disk.append(entry)
        if entry.step % 9 == 0:
            disk.flush()
    values, harm = obvious(steps, targets)
    close = {"rtol": 1e-12, "atol": 1e-14}
    for ledger in (memory, disk):
        pd.testing.assert_frame_equal(ledger.values(0), values, **close)
        pd.testing.assert_frame_equal(ledger.harm(0), harm, **close)
    for by in ("value", "harm"):
        pd.testing.assert_frame_equal(memory.top(0, 5, by), disk.top(0, 5, by), **close)
    disk.close()
    saved = open_run(tmp_path / "run")
    pd.testing.assert_frame_equal(saved.values(), values, **close)
    pd.testing.assert_frame_equal(saved.harm(), harm, **close)


@pytest.mark.parametrize("targets", [1, 3])
def test_the_command_line_and_the_report_show_these_tables(tmp_path, targets):
    names = [f"t{q}" for q in range(targets)]
    steps = list(entries(targets, int, infinite=False))
    store = Store.create(tmp_path / "run", {}, names, ["secant"])
    for entry in steps:
        store.append(entry)
    store.close()
    values, harm = obvious(steps, targets)

    for by, table in (("value", values), ("harm", harm)):
        command = ["top", str(tmp_path / "run"), "--by", by, "-n", "100", "--json"]
        shown = pd.DataFrame(json.loads(CliRunner().invoke(app, command).stdout))
        wanted = table.dropna().set_index("id")[by]
        assert len(shown) == len(wanted)
        np.testing.assert_allclose(shown[by], wanted.loc[shown["id"]], rtol=1e-12, atol=1e-14)
        assert shown[by].tolist() == sorted(shown[by], reverse=True)

    columns = payload(open_run(tmp_path / "run"))["columns"]
    for name, table in (("value", values), ("harm", harm)):
        found = [np.nan if x is None else x for x in columns[name]]  # to five digits
        np.testing.assert_allclose(found, table[name], rtol=1e-4, atol=1e-9)


def test_a_table_of_a_ledger_in_memory_is_the_same_each_time():
    ledger = MemoryLedger(["v"])
    rng = np.random.default_rng(0)
    for step in range(40):  # more rows than DuckDB takes at a time
        values = rng.normal(size=(1, 1, 8192))
        ledger.append(StepEntry(step, rng.integers(0, 1000, 8192), values, 0.1))
    for name in ("values", "harm"):
        first, again = (getattr(ledger, name)(0) for _ in range(2))
        pd.testing.assert_frame_equal(first, again, check_exact=True)

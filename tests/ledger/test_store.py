"""The ledger on disk answers as the ledger in memory, and survives what can happen to a process."""

from __future__ import annotations

import atexit
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import inrun
from inrun.ledger import LedgerError, committed, files, writer
from inrun.ledger.entries import Audit, MemoryLedger, StepEntry
from inrun.ledger.folder import VERSION
from inrun.ledger.saved import Store, open_run
from inrun.ledger.tokens import Tokens

ESTIMATORS = ["secant", "sgd"]


def make_records(n, targets=2, kind="int", seed=0, every=1.0, pool=40):
    """Random steps: scored, unscored and void ones, audits, weights, batches of 1 to 8."""
    rng = np.random.default_rng(seed)
    for step in range(n):
        B = int(rng.integers(1, 9))
        ids = rng.choice(pool, B, replace=False).astype(np.int64)
        if kind == "str":
            ids = np.array([f"né-{i}" for i in ids], dtype=object)
        values = rng.normal(size=(len(ESTIMATORS), targets, B)) * 1e-3
        values[rng.random(values.shape) < 0.02] = np.nan
        scored = rng.random() < every
        audit = None
        if scored and step % 3 == 0:
            audit = Audit(*(rng.normal(size=targets) + 1 for _ in range(3)))
        void = "non-finite" if scored and rng.random() < 0.1 else None
        values = values if scored and void is None else None
        own = {} if values is None else _positions(step, B, targets, np.random.default_rng(step))
        yield StepEntry(step, ids, values, 1e-3 / (step + 1), 1 / every, void, audit, **own)


def _positions(step, B, targets, rng):
    """Nobody's part, and in some steps values of positions, with and without inputs."""
    own = {"nobody": rng.normal(size=(len(ESTIMATORS), targets))} if step % 2 else {}
    if step % 5 == 2:
        sizes = rng.integers(0, 4, B)
        V = rng.normal(size=(len(ESTIMATORS), targets, sizes.sum())).astype(np.float32)
        inputs = rng.integers(0, 50, sizes.sum()) if step % 10 == 2 else None
        own["tokens"] = Tokens(sizes, V, inputs)
    return own


def fill(path, records, targets=("a", "b"), config=None, flush=7):
    store = Store.create(path, config or {"lr": 0.1}, list(targets), ESTIMATORS)
    for r in records:
        store.append(r)
        if r.step % flush == flush - 1:
            store.flush()
    return store


def tables(ledger, estimator):
    names = ("values", "history", "harm", "steps", "tokens")
    return {k: getattr(ledger, k)(estimator=estimator) for k in names}


def assert_same(a, b):
    """Same columns, order and dtypes; sums may differ in the last bits (order of addition)."""
    for name in a:
        rtol = 1e-12 if name in ("values", "harm") else 0
        pd.testing.assert_frame_equal(
            a[name], b[name], rtol=rtol, atol=1e-18 if rtol else 0, obj=name
        )


@pytest.mark.parametrize("kind", ["int", "str"])
@pytest.mark.parametrize("targets", [["all"], ["a", "A", "odd \"name's"]])
@pytest.mark.parametrize("every", [1.0, 0.4])
def test_same_tables_as_memory(tmp_path, kind, targets, every):
    records = list(make_records(60, len(targets), kind, every=every))
    memory = MemoryLedger(targets)
    for r in records:
        memory.append(r)
    live = fill(tmp_path / "run", records, targets)
    for e in range(len(ESTIMATORS)):
        assert_same(tables(live, e), tables(memory, e))  # includes rows that were still buffered
    live.close()
    saved = open_run(tmp_path / "run")
    for e, name in enumerate(ESTIMATORS):
        assert_same(tables(saved, name), tables(memory, e))
    assert len(list((tmp_path / "run" / "values").iterdir())) == 1  # compacted


def test_never_scored_is_nan_and_counts_as_seen(tmp_path):
    ids = np.array([1, 2])
    records = [
        StepEntry(0, ids, np.ones((2, 1, 2)), 0.1),
        StepEntry(1, np.array([2, 3]), None, 0.1, void="skipped"),
    ]
    memory = MemoryLedger(["v"])
    store = fill(tmp_path / "run", records, ["v"])
    for r in records:
        memory.append(r)
    for table in (store.values(0), memory.values(0)):
        assert table["steps"].tolist() == [1, 2, 1]
        assert table["scored"].tolist() == [1, 1, 0]
        assert table["value"].tolist()[:2] == [1, 1] and np.isnan(table["value"][2])
    store.close()


def test_empty_and_unscored_ledgers(tmp_path):
    store = Store.create(tmp_path / "run", {}, ["a", "b"], ESTIMATORS)
    assert_same(tables(store, 0), tables(MemoryLedger(["a", "b"]), 0))
    memory = MemoryLedger(["a", "b"])
    record = StepEntry(0, np.array([3, 4]), None, 0.1)
    memory.append(record)
    store.append(record)
    assert_same(tables(store, 0), tables(memory, 0))
    assert store.top(0).empty and store.top(0, by="harm").empty
    store.close()


def test_top_gives_the_best_and_the_worst(tmp_path):
    store = fill(tmp_path / "run", make_records(50))
    values = store.values(0).merge(store.harm(0)).dropna()
    best = values.sort_values(["value", "id"], ascending=[False, True])["id"].tolist()
    assert store.top(0, 5)["id"].tolist() == best[:5]
    assert store.top(0, 3, worst=True)["id"].tolist() == best[:-4:-1]
    worst_b = values.sort_values(["b", "id"])["id"].tolist()
    assert store.top(0, 4, target="b", worst=True)["id"].tolist() == worst_b[:4]
    harm = values.sort_values(["harm", "id"], ascending=[False, True]).head(6)
    top = store.top(0, 6, by="harm")
    pd.testing.assert_frame_equal(
        top, harm[["id", "value", "harm", "steps", "scored"]].reset_index(drop=True)
    )
    with pytest.raises(LedgerError, match=r"no target 'c' in .*; it has a, b"):
        store.top(0, target="c")
    store.close()


def test_history_in_batches(tmp_path):
    store = fill(tmp_path / "run", make_records(50))
    pieces = list(store.history_batches(0, rows=10))
    assert max(map(len, pieces)) <= 10
    pd.testing.assert_frame_equal(pd.concat(pieces, ignore_index=True), store.history(0))
    store.close()


def test_pandas_reads_the_files_without_inrun(tmp_path):
    fill(tmp_path / "run", make_records(20, kind="str")).close()
    values = pd.read_parquet(tmp_path / "run" / "values")
    assert list(values.columns) == [
        "step", "id", "weight", "secant:a", "secant:b", "sgd:a", "sgd:b", "inputs",
        "tokens:secant:a", "tokens:secant:b", "tokens:sgd:a", "tokens:sgd:b",
    ]  # fmt: skip
    tokens = open_run(tmp_path / "run").tokens(estimator="sgd")
    lists = values["tokens:sgd:b"].dropna()
    assert len(tokens) > 5 and np.concatenate(lists.tolist()).tolist() == tokens["b"].tolist()
    by_hand = values.groupby("id")["sgd:b"].sum(min_count=1)
    ours = open_run(tmp_path / "run").values("sgd").set_index("id")["b"]
    np.testing.assert_allclose(by_hand, ours, rtol=1e-12)
    steps = pd.read_parquet(tmp_path / "run" / "steps")
    assert {"step", "lr", "examples", "weight", "void", "sum:secant", "loss_before:a"} <= set(steps)
    assert "nobody:sgd:b" in steps


# -- resuming ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 13, 14, 15, 29, 30, 99])
def test_truncating_gives_the_tables_of_memory(tmp_path, step):
    records = list(make_records(30))
    store = fill(tmp_path / "run", records)
    memory = MemoryLedger(["a", "b"])
    for r in records:
        memory.append(r)
    for ledger in (store, memory):
        ledger.truncate(step)
    assert_same(tables(store, 0), tables(memory, 0))
    for r in records[step:]:
        store.append(r), memory.append(r)
    store.close()
    assert_same(tables(Store.open(tmp_path / "run"), 0), tables(memory, 0))


def test_checkpoint_and_resume(tmp_path):
    records = list(make_records(40))
    store = fill(tmp_path / "run", records[:20])
    state = json.loads(json.dumps(store.state_dict()))
    for r in records[20:31]:
        store.append(r)
    store.close()
    again = Store.create(tmp_path / "run", {"lr": 0.1}, ["a", "b"], ESTIMATORS)
    with pytest.raises(LedgerError, match=r"already has steps up to 30 and step 20 came again"):
        again.append(records[20])
    again.load_state_dict(state)
    for r in records[20:]:
        again.append(r)
    whole = fill(tmp_path / "whole", records)
    assert_same(tables(again, 0), tables(whole, 0))
    again.truncate(10)
    with pytest.raises(LedgerError, match=r"holds 10 steps up to step 19, .* made with 20"):
        again.load_state_dict(state)
    again.close(), whole.close()


def test_many_parts_are_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SMALL_PARTS", 4)
    store = fill(tmp_path / "run", make_records(40), flush=1)
    assert len(list((tmp_path / "run" / "values").iterdir())) <= 5
    assert store.history(0)["step"].is_monotonic_increasing
    monkeypatch.setattr(committed, "SMALL_BYTES", 1)
    parts = len(store.sources())
    store.compact()
    assert len(store.sources()) == parts  # large parts are never rewritten
    store.close()


class Killed(BaseException):
    pass


def die(store):
    """What the end of a process does: the lock is free, nothing is flushed."""
    atexit.unregister(store.close)
    store._lock.release()
    store._lock = None


@pytest.mark.parametrize("operation", ["flush", "truncate", "compact", "create", "update_info"])
def test_killed_at_every_system_call(tmp_path, monkeypatch, operation):
    """Stop at the k-th fsync, rename or delete: the folder is as before or as after."""
    records = list(make_records(24))
    die(fill(tmp_path / "base", records[:20], flush=4))
    before = history_of(tmp_path / "base")
    after = {"flush": records, "truncate": records[:6]}.get(operation, records[:20])
    reached = 0
    for k in range(100):
        folder = tmp_path / f"k{k}"
        if operation != "create":
            shutil.copytree(tmp_path / "base", folder)
        calls = iter(range(100))

        def stop(real, calls=calls, k=k):
            def call(*args, **kwargs):
                if next(calls) == k:
                    raise Killed
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            store = None
            if operation != "create":
                store = Store.create(folder, {"lr": 0.1}, ["a", "b"], ESTIMATORS)
            patch.setattr(os, "fsync", stop(os.fsync))
            patch.setattr(os, "replace", stop(os.replace))
            patch.setattr(Path, "unlink", stop(Path.unlink))
            try:
                if operation == "create":
                    store = Store.create(folder, {"lr": 0.1}, ["a", "b"], ESTIMATORS)
                elif operation == "flush":
                    for r in records[20:]:
                        store.append(r)
                    store.flush()
                elif operation == "truncate":
                    store.truncate(6)
                elif operation == "update_info":
                    store.update_info(model="big")
                else:
                    store.compact()
                done = True
            except Killed:
                done = False
        if store is not None:
            die(store)
        if operation != "create":
            found = history_of(folder)
            expected = before if len(found) == len(before) else history_of_records(after)
            pd.testing.assert_frame_equal(found, expected)
            if done:
                pd.testing.assert_frame_equal(found, history_of_records(after))
        again = Store.create(folder, {"lr": 0.1}, ["a", "b"], ESTIMATORS)
        leftovers = list(folder.rglob("*.tmp"))
        live = {p.name for p in again.sources()}
        assert not leftovers
        assert {f.stem for f in (folder / "values").iterdir()} == live
        again.close()
        if done:
            break
        reached += 1
    assert done and reached >= 2


def history_of(folder):
    return _history(Store.open(folder))


def history_of_records(records):
    memory = MemoryLedger(["a", "b"])
    for r in records:
        memory.append(r)
    return _history(memory)


def _history(ledger):
    """What was recorded of examples, and of their positions."""
    return pd.concat([ledger.history(0), ledger.tokens(0)])


# Starts this file as a script without the rest of inrun: torch takes longer to import than to kill.
BARE = """
import runpy, sys, types
package = types.ModuleType("inrun")
package.__path__ = {path!r}
sys.modules["inrun"] = package
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
KILLS = int(os.environ.get("INRUN_KILLS", "5"))
STEPS = 150 * KILLS  # at 2 ms or more each: longer than all its lives of 0.3 s or less


def long_records():
    rng = np.random.default_rng(7)
    for step in range(STEPS):
        ids = rng.choice(200, 8, replace=False)
        values = rng.normal(size=(1, 2, 8))
        yield StepEntry(step, ids, values if step % 5 else None, 0.1, 1.25)


def write_until_killed(folder: str, checkpoint: str, last_life: str) -> None:
    """The process that is killed: resumes, records steps, checkpoints now and then."""
    print("at work", flush=True)
    hurry = last_life == "True"
    writer.SMALL_PARTS = 5
    store = Store.create(folder, {"seed": 7}, ["a", "b"], ["secant"])
    store.flush_seconds = 0.5 if hurry else 0.005
    file, start = Path(checkpoint), 0
    if file.exists():
        state = json.loads(file.read_text())
        store.load_state_dict(state)
        start = state["last_step"] + 1
    else:
        store.truncate(0)
    for record in long_records():
        if record.step < start:
            continue
        store.append(record)
        if record.step % 7 == 6 and not hurry:
            draft = file.with_suffix(".new")
            draft.write_text(json.dumps(store.state_dict()))
            draft.replace(file)
        time.sleep(0 if hurry else 0.002)
    store.close()


def test_killed_and_resumed(tmp_path):
    """A real process, killed with SIGKILL again and again, ends with the uninterrupted table."""
    rng = np.random.default_rng(KILLS)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    paths = [__file__, str(tmp_path / "run"), str(tmp_path / "checkpoint")]
    command = [sys.executable, "-c", BARE.format(path=list(inrun.__path__)), *paths]
    kills = 0
    while True:
        life = [*command, str(kills == KILLS)]
        process = subprocess.Popen(life, env=env, stdout=subprocess.PIPE)
        if kills == KILLS:
            process.communicate(timeout=120)
            assert process.returncode == 0
            break
        process.stdout.readline()  # the writer is at work
        try:
            process.wait(timeout=float(rng.uniform(0, 0.3)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
            if (tmp_path / "run" / "run.json").exists():
                open_run(tmp_path / "run").values()
        else:
            pytest.fail("the writer finished before it could be killed: make it slower")
        process.stdout.close()
    memory = MemoryLedger(["a", "b"])
    for r in long_records():
        memory.append(r)
    assert_same(tables(Store.open(tmp_path / "run"), 0), tables(memory, 0))


# -- refusals ---------------------------------------------------------------------------------


def test_second_writer_is_refused(tmp_path):
    store = fill(tmp_path / "run", make_records(5))
    message = rf"run is being written by process {os.getpid()}: one writer at a time"
    with pytest.raises(LedgerError, match=message):
        Store.create(tmp_path / "run", {"lr": 0.1}, ["a", "b"], ESTIMATORS)
    code = (
        "from inrun.ledger.saved import Store; import sys; Store.create(sys.argv[1], {'lr': 0.1}, "
    )
    code += "['a', 'b'], ['secant', 'sgd'])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    other = subprocess.run(command, env=env, capture_output=True, text=True)
    assert f"is being written by process {os.getpid()}" in other.stderr
    assert len(open_run(tmp_path / "run").steps()) == 0  # readers need no lock; nothing flushed yet
    store.flush()
    assert len(open_run(tmp_path / "run").steps()) == 5
    store.close()
    Store.create(tmp_path / "run", {"lr": 0.1}, ["a", "b"], ESTIMATORS).close()


def test_other_folders_are_refused(tmp_path):
    fill(tmp_path / "run", make_records(3)).close()
    with pytest.raises(LedgerError, match=r"holds another run: its lr is 0.1, this run's is 0.2"):
        Store.create(tmp_path / "run", {"lr": 0.2}, ["a", "b"], ESTIMATORS)
    with pytest.raises(LedgerError, match="holds another run: its targets is"):
        Store.create(tmp_path / "run", {"lr": 0.1}, ["a"], ESTIMATORS)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    with pytest.raises(LedgerError, match=r"holds other files \(thesis.tex\)"):
        Store.create(foreign, {}, ["a"], ESTIMATORS)
    assert [f.name for f in foreign.iterdir()] == ["thesis.tex"]
    with pytest.raises(LedgerError, match=r"it has no run.json"):
        open_run(foreign)
    (foreign / "run.json").write_text('{"format": "other"}')
    for use in (open_run, lambda p: Store.create(p, {}, ["a"], ESTIMATORS)):
        with pytest.raises(LedgerError, match="another program's"):
            use(foreign)
    with pytest.raises(LedgerError, match="no such folder"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(LedgerError, match="is a file"):
        Store.create(foreign / "thesis.tex", {}, ["a"], ESTIMATORS)


def test_newer_format_is_refused(tmp_path):
    fill(tmp_path / "run", make_records(3)).close()
    file = tmp_path / "run" / "run.json"
    file.write_text(file.read_text().replace(f'"version": {VERSION}', '"version": 99'))
    with pytest.raises(LedgerError, match=f"format 99, this inrun reads {VERSION}"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize("how", ["cut", "garbage", "gone"])
@pytest.mark.parametrize("kind", ["values", "steps"])
def test_damaged_parquet_names_the_file(tmp_path, how, kind):
    fill(tmp_path / "run", make_records(30)).close()
    file = next((tmp_path / "run" / kind).iterdir())
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:100] if how == "cut" else b"\0" * len(data))
    with pytest.raises(LedgerError, match=file.name) as caught:
        tables(open_run(tmp_path / "run"), None)
    assert "\n" not in str(caught.value)


def test_ids_are_of_one_kind(tmp_path):
    store = Store.create(tmp_path / "run", {}, ["a"], ESTIMATORS)
    values = np.ones((2, 1, 2))
    store.append(StepEntry(0, np.array([1, 2]), values, 0.1))
    bad = {
        "ids of this run are int64 and step 1 brought string": np.array(["x", "y"], object),
        "all int or all str, got int and str": np.array([1, "y"], object),
        "all int or all str, got float": np.array([0.5, 1.0]),
        "all int or all str, got bool": np.array([True, False]),
        "must fit int64": np.array([2**63, 1], np.uint64),
        "valid text": np.array(["\ud800", "b"], object),
    }
    for message, ids in bad.items():
        with pytest.raises(LedgerError, match=message):
            store.append(StepEntry(1, ids, values, 0.1))
    with pytest.raises(LedgerError, match="values have shape"):
        store.append(StepEntry(1, np.array([1]), values, 0.1))
    store.append(StepEntry(1, np.array([7, 2], np.uint8), values, 0.1))
    assert store.values(0)["id"].tolist() == [1, 2, 7]
    store.close()
    with pytest.raises(LedgerError, match="closed"):
        store.append(StepEntry(2, np.array([1, 2]), values, 0.1))


def test_a_full_disk_loses_nothing_that_was_written(tmp_path, monkeypatch):
    store = fill(tmp_path / "run", make_records(20))
    store.flush()
    extra = [StepEntry(r.step + 20, r.ids, r.values, r.lr) for r in make_records(5, seed=1)]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        for r in extra:
            store.append(r)
        with pytest.raises(LedgerError, match="No space left on device; 5 steps wait in memory"):
            store.flush()
        assert len(open_run(tmp_path / "run").steps()) == 20
    store.close()  # room again
    assert len(open_run(tmp_path / "run").steps()) == 25


def test_run_json_is_plain_json(tmp_path):
    config = {"lr": 1e-3, "betas": (0.9, 0.95), "clip": float("inf"), "n": np.int64(3)}
    store = Store.create(tmp_path / "run", config, ["a"], ESTIMATORS)
    store.update_info(
        model={"class": "GPT", "parameters": 10},
        coverage={"share": 0.5, "parameters": [{"parameter": "w", "size": 3}]},
    )
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["config"] == {"lr": 1e-3, "betas": [0.9, 0.95], "clip": "inf", "n": 3}
    assert info["model"]["class"] == "GPT" and info["versions"]["numpy"] == np.__version__
    assert open_run(tmp_path / "run").coverage().to_dict("list") == {
        "parameter": ["w"],
        "size": [3],
    }
    with pytest.raises(LedgerError, match=r"'config' of run.json is fixed"):
        store.update_info(config={})
    with pytest.raises(LedgerError, match=r"run.json.fn is a function"):
        store.update_info(fn=make_records)
    store.close()
    Store.create(tmp_path / "run", config, ["a"], ESTIMATORS).close()
    with pytest.raises(
        LedgerError, match=r"estimator 'x' was not recorded; this run has secant, sgd"
    ):
        open_run(tmp_path / "run").values("x")


def test_bad_target_names_are_refused(tmp_path):
    for bad in (["a", "a"], ["id", "b"], []):
        with pytest.raises(LedgerError):
            Store.create(tmp_path / "run", {}, bad, ESTIMATORS)
        with pytest.raises(LedgerError):
            MemoryLedger(bad)


if __name__ == "__main__":
    write_until_killed(*sys.argv[1:])

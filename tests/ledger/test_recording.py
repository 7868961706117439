"""Recording beside a training: other threads read, the disk fails, processes fork, locks vanish."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import inrun
from helpers.ledgers import assert_same, everything, expected, records, tables, write
from inrun.ledger import LedgerError, files, lock, outage, writer
from inrun.ledger.entries import MemoryLedger
from inrun.ledger.saved import Store, open_run


def create(path, **options):
    return Store.create(path, {"lr": 0.1}, ["a", "b"], ["secant"], **options)


def watched(out, steps=0):
    """A small training, watched, and a function that takes further steps."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    run = inrun.watch(model, optimizer, validation=[(x[32:], y[32:])], loss=loss, out=out)

    def go(n):
        for _ in range(n):
            rows = torch.arange(8) + 8 * (run.step % 4)
            with run.batch(rows):
                loss(model, (x[rows], y[rows])).backward()
            optimizer.step()
            optimizer.zero_grad()

    go(steps)
    return run, go


# -- threads ----------------------------------------------------------------------------------


def read_beside(write_all, ask):
    """Call ``ask`` in a second thread again and again while ``write_all`` runs."""
    done, failures, asked = threading.Event(), [], []

    def reader():
        while not done.is_set() or not asked:
            try:
                asked.append(ask())
            except BaseException as error:
                failures.append(error)
                return

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        write_all()
    finally:
        done.set()
        thread.join()
    if failures:
        raise failures[0]
    return asked


@pytest.mark.parametrize("on_disk", [True, False])
def test_reading_in_a_second_thread_loses_nothing(tmp_path, monkeypatch, on_disk):
    monkeypatch.setattr(writer, "SMALL_PARTS", 4)  # parts are merged under the reader's hands
    rows = list(records(600))
    ledger = create(tmp_path / "run") if on_disk else MemoryLedger(["a", "b"])
    ledger.flush_seconds = 0.01

    def append():
        for row in rows:
            ledger.append(row)

    def ask():
        return [len(t) for t in tables(ledger, 0).values()]

    asked = read_beside(append, ask)
    assert asked and all(a[3] <= b[3] for a, b in pairwise(asked))
    assert_same(tables(ledger, 0), expected(rows))
    ledger.close()
    if on_disk:
        assert_same(tables(open_run(tmp_path / "run")), expected(rows))


def test_a_table_in_a_second_thread_while_a_flush_is_written(tmp_path, monkeypatch):
    """Deterministic: the reader comes in the middle of the writer's flush, and appends go on."""
    store, rows = create(tmp_path / "run"), list(records(30))
    real, met = files.write_parquet, []

    def slow(*args):
        if not met:
            met.append(threading.Thread(target=lambda: met.append(len(store.steps(0)))))
            met[0].start()
            met[0].join(0.05)  # it waits for the lock, or (without one) flushes the same rows
        return real(*args)

    monkeypatch.setattr(files, "write_parquet", slow)
    for row in rows[:10]:
        store.append(row)
    store.flush()
    met[0].join()
    for row in rows[10:]:
        store.append(row)
    store.close()
    assert met[1] == 10
    assert_same(tables(open_run(tmp_path / "run")), expected(rows))


def test_tables_of_a_run_in_a_second_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "flush_seconds", 0.0)
    run, go = watched(tmp_path / "run")
    read_beside(lambda: go(60), lambda: (run.values(), run.steps()))
    run.close()
    assert inrun.open(tmp_path / "run").steps()["step"].tolist() == list(range(60))


# -- the disk fails ---------------------------------------------------------------------------


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_full_disk_does_not_stop_the_training(tmp_path, monkeypatch, call):
    calm, _ = watched(None, 9)
    run, go = watched(tmp_path / "run", 3)
    monkeypatch.setattr(Store, "flush_seconds", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, full)
        with pytest.warns(UserWarning, match=r"No space left.*training goes on") as told:
            go(6)
        assert len(told) == 1  # once
        with pytest.raises(LedgerError, match=r"No space left on device; .* steps wait in memory"):
            run.state_dict()
        with pytest.raises(LedgerError, match="No space left"):
            run.values()
        with pytest.raises(LedgerError, match="No space left"):
            run.close()
    assert all(
        torch.equal(a, b)
        for a, b in zip(run.model.parameters(), calm.model.parameters(), strict=True)
    )
    run.close()  # room again
    saved = inrun.open(tmp_path / "run")
    assert saved.steps().equals(calm.steps()) and saved.history().equals(calm.history())


def test_the_first_step_on_a_full_disk(tmp_path, monkeypatch):
    """Nothing of an old run is mixed into the new one that could not say so yet."""
    write(tmp_path / "run", list(records(7)))
    store = create(tmp_path / "run", overwrite=True)
    rows = list(records(4, seed=5))
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.warns(UserWarning, match="No space left"):
            store.restart()
            store.update_info(model="new")
            for row in rows:
                store.append(row)
        assert store.last_step == 3
        with pytest.raises(LedgerError, match="No space left"):
            store.steps(0)
        assert len(open_run(tmp_path / "run").steps()) == 7
    store.close()
    saved = open_run(tmp_path / "run")
    assert saved.info["model"] == "new" and saved.info["run"] == store.info["run"]
    assert_same(tables(saved), expected(rows))


def test_writing_is_tried_again_less_and_less_often(tmp_path, monkeypatch):
    store, clock = create(tmp_path / "run"), [1000.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: clock[0])
    store._flushed = clock[0]
    tried, rows = [], iter(records(1200))
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", lambda *_: tried.append(clock[0]) or full())
        with pytest.warns(UserWarning):
            for _ in range(1000):
                clock[0] += 1
                store.append(next(rows))
    gaps = np.diff(tried).tolist()
    assert gaps == [10, 20, 40, 80, 160, 300, 300][: len(gaps)] and len(gaps) >= 6
    clock[0] += 300
    store.append(next(rows))  # works again, at the next attempt
    assert len(open_run(tmp_path / "run").steps()) == 1001
    store.close()


def test_beyond_the_limit_values_are_dropped_loudly(tmp_path, monkeypatch):
    rows = list(records(20))
    size = 4 * 8 + 8 * 8  # ids and values of a step
    monkeypatch.setattr(outage, "LIMIT", 10 * size)
    store = create(tmp_path / "run")
    store.flush_seconds = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for row in rows:
                store.append(row)
    assert ["LOST" in str(w.message) for w in told] == [False, True]
    assert store.outage.dropped == 10
    with pytest.warns(UserWarning, match="values of 10 steps were lost"):
        store.close()
    steps = open_run(tmp_path / "run").steps()
    assert steps["step"].tolist() == list(range(20))
    assert steps["void"].notna().tolist() == [False] * 10 + [True] * 10
    assert steps["void"].iloc[-1].startswith("not recorded")
    found, right = open_run(tmp_path / "run"), expected(rows[:10])
    assert_same(tables(found) | {"steps": right["steps"]}, right)


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_a_folder_that_goes_away_does_not_stop_the_training(tmp_path, monkeypatch, how):
    run, go = watched(tmp_path / "run", 3)
    run.state_dict()
    monkeypatch.setattr(Store, "flush_seconds", 0.0)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    if how == "replaced":  # somebody else's ledger of the same name
        other, _ = watched(tmp_path / "run", 2)
        other.close()
        before = everything(tmp_path / "run")
    with pytest.warns(UserWarning, match="not as this run left it: the folder was moved"):
        go(4)
    with pytest.raises(LedgerError, match="not as this run left it"):
        run.close()
    if how == "replaced":
        assert everything(tmp_path / "run") == before
        shutil.rmtree(tmp_path / "run")
    assert not (tmp_path / "run").exists()  # nothing is made anew in its place
    source = "copy" if how == "deleted" else "elsewhere"
    (tmp_path / source).rename(tmp_path / "run")
    run.close()
    assert inrun.open(tmp_path / "run").steps()["step"].tolist() == list(range(7))


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, go = watched("run", 2)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    go(2)
    run.close()
    assert len(inrun.open(tmp_path / "run").steps()) == 4
    assert not list((tmp_path / "other").iterdir())


def test_a_failed_merge_is_harmless(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SMALL_PARTS", 3)
    store, rows = create(tmp_path / "run"), list(records(8))
    store.flush_seconds = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_tables", full)
        with pytest.warns(UserWarning, match="not merged: .*No space left") as told:
            for row in rows[:6]:
                store.append(row)
        assert len(told) == 1  # not again at every flush
        assert len(open_run(tmp_path / "run").steps()) == 6
    for row in rows[6:]:
        store.append(row)
    store.close()
    assert_same(tables(open_run(tmp_path / "run")), expected(rows))
    assert len(list((tmp_path / "run" / "values").iterdir())) == 1


def test_damage_is_not_merged_into_a_new_part(tmp_path):
    rows = list(records(10))
    write(tmp_path / "run", rows)
    file = tmp_path / "run" / "values" / "part-000000.parquet"
    data = bytearray(file.read_bytes())
    data[200] ^= 4
    file.write_bytes(bytes(data))
    store = create(tmp_path / "run")
    with pytest.warns(UserWarning, match=r"not merged: .*part-000000.parquet is damaged"):
        store.close()
    assert file.read_bytes() == bytes(data)
    with pytest.raises(LedgerError, match=r"part-000000.parquet is damaged.*inrun repair"):
        open_run(tmp_path / "run").values()


@pytest.mark.parametrize("after", ["replace", "fsync"])
def test_an_error_after_the_manifest_was_replaced_neither_repeats_nor_loses(
    tmp_path, monkeypatch, after
):
    """The change is on disk though the call failed: it is neither repeated nor lost."""
    store, rows = create(tmp_path / "run"), list(records(9))
    real, failed = os.replace, []
    for row in rows[:5]:
        store.append(row)

    def then_fail(a, b):
        real(a, b)
        if str(b).endswith("manifest.json"):
            failed.append(b)
            if after == "replace":
                full()
            patch.setattr(files.os, "fsync", full)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", then_fail)
        with pytest.raises(LedgerError, match="No space left"):
            store.flush()
    assert failed and len(open_run(tmp_path / "run").steps()) == 5
    for row in rows[5:]:
        store.append(row)
    assert_same(tables(store, 0), expected(rows))
    store.close()
    assert_same(tables(open_run(tmp_path / "run")), expected(rows))
    assert len(list((tmp_path / "run" / "values").iterdir())) == 1


def test_a_state_that_is_not_from_state_dict_is_refused(tmp_path):
    run, _ = watched(tmp_path / "run", 1)
    with pytest.raises(LedgerError, match=r"not what run.state_dict\(\) returned: it has no 'vali"):
        run.load_state_dict({"step": 3, "unwatched": 0, "next_audit": 0, "ledger": {}})
    run.close()


# -- other processes --------------------------------------------------------------------------

FORKED = """
import os, sys
sys.path[:0] = {path!r}
from helpers.ledgers import records
from inrun.ledger.saved import Store
rows = list(records(12))
store = Store.create({folder!r}, {{"lr": 0.1}}, ["a", "b"], ["secant"])
for row in rows[:6]:
    store.append(row)
    if row.step == 3:
        store.flush()
for ask in ("exit", "use", "collect"):
    pid = os.fork()
    if pid == 0:
        if ask == "use":
            import warnings
            warnings.simplefilter("ignore")
            store.append(rows[6])
            store.flush()
            assert len(store.steps(0)) == 4  # what is on disk
            store.close()
        elif ask == "collect":
            import gc
            store.__dict__.clear()
            gc.collect()
            os._exit(0)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, ask
second = os.fork()
if second == 0:  # the parent's lock has survived its children
    try:
        os.execv(sys.executable, [sys.executable, "-c", {again!r}])
    finally:
        os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) == 3
for row in rows[6:]:
    store.append(row)
store.close()
"""
AGAIN = """
import sys
sys.path[:0] = {path!r}
from inrun.ledger import LedgerError
from inrun.ledger.saved import Store
try:
    Store.create({folder!r}, {{"lr": 0.1}}, ["a", "b"], ["secant"])
except LedgerError as error:
    assert "is being written by process" in str(error)
    sys.exit(3)
"""
BARE = """
import sys, types
package = types.ModuleType("inrun")
package.__path__ = {path!r}
sys.modules["inrun"] = package
"""  # inrun without torch, which takes long to import


def test_forked_children_write_and_delete_nothing(tmp_path):
    """Children that end as a program does (exit handlers), that use the ledger, that free it."""
    names = {"path": [*sys.path], "folder": str(tmp_path / "run")}
    bare = BARE.format(path=list(inrun.__path__))
    code = bare + FORKED.format(**names, again=bare + AGAIN.format(**names))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same(tables(open_run(tmp_path / "run")), expected(list(records(12))))


def test_what_waits_in_memory_is_one_copy(tmp_path):
    """Else the limit of an outage would be exceeded by the values as the run had them."""
    store, row = create(tmp_path / "run"), next(records(1))
    store.append(row)
    (held,) = store._buffer
    assert held.entry.values.base is held.values or held.values.base is held.entry.values
    assert not np.shares_memory(held.values, row.values)
    store.close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_ledger_that_another_process_began_is_left_to_it(tmp_path, monkeypatch, overwrite):
    """A child forked before the first step trains on: describing the run is not its affair."""
    write(tmp_path / "run", records(5))
    store = create(tmp_path / "run", overwrite=overwrite)
    before = everything(tmp_path / "run")
    with monkeypatch.context() as child, pytest.warns(UserWarning, match="is a forked child of it"):
        child.setattr(os, "getpid", lambda: store._pid + 1)
        if overwrite:
            store.restart()
        store.update_info(model="net")
        store.append(next(records(1, first=5)))
    assert everything(tmp_path / "run") == before
    store.close()
    assert everything(tmp_path / "run") == before


def test_a_deleted_lock_lets_nobody_in(tmp_path):
    store, rows = create(tmp_path / "run"), list(records(6))
    store.append(rows[0])
    (tmp_path / "run" / ".lock").unlink()
    with pytest.raises(LedgerError, match=r"being written by process \d+ though its .lock was del"):
        create(tmp_path / "run")
    names = {"path": [*sys.path], "folder": str(tmp_path / "run")}
    code = BARE.format(path=list(inrun.__path__)) + AGAIN.format(**names)
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert other.returncode == 3, other.stderr
    for row in rows[1:]:
        store.append(row)
    store.close()
    assert_same(tables(open_run(tmp_path / "run")), expected(rows))
    create(tmp_path / "run").close()


def test_a_lock_taken_by_another_writer_stops_the_first(tmp_path, monkeypatch):
    """Where the system cannot tell that the first still lives: one of them writes, never both."""
    first, rows = create(tmp_path / "run"), list(records(6))
    first.append(rows[0])
    first.flush()
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".writer").unlink()
    monkeypatch.setattr(lock, "_HELD", type(lock._HELD)())
    second = create(tmp_path / "run")
    second.load_state_dict(second.state_dict())
    second.append(rows[1])
    second.flush()
    first.append(rows[1])
    with pytest.raises(LedgerError, match="not as this run left it"):
        first.flush()
    second.append(rows[2])
    second.close()
    with pytest.raises(LedgerError, match="not as this run left it"):
        first.close()
    assert_same(tables(open_run(tmp_path / "run")), expected(rows[:3]))
    first._buffer.clear()
    first._lock.release()
    first._lock = None


@pytest.mark.parametrize(
    "text", ["9" * 20, "-1", "0", "x", "", "١٢", "1e3", "\0", "9" * 5000, "7 7 7", "99999999999 1"]
)
def test_a_strange_writer_file_blocks_nobody(tmp_path, text):
    create(tmp_path / "run").close()
    (tmp_path / "run" / ".writer").write_text(text)
    store = create(tmp_path / "run")
    assert (tmp_path / "run" / ".writer").read_text().split()[0] == str(os.getpid())
    if text == "9" * 20:  # takes a second
        (tmp_path / "run" / ".writer").write_text(text)
        with pytest.raises(LedgerError, match="being written by another process"):
            create(tmp_path / "run")
    store.close()


@pytest.mark.parametrize("name", [".writer", ".lock"])
@pytest.mark.parametrize("exists", [True, False])
def test_links_under_our_names_are_refused(tmp_path, name, exists):
    create(tmp_path / "run").close()
    victim = tmp_path / "victim"
    if exists:
        victim.write_text("precious")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(victim)
    with pytest.raises(LedgerError, match=rf"{name} is a symbolic link: .*Delete it"):
        create(tmp_path / "run")
    assert victim.exists() == exists and (not exists or victim.read_text() == "precious")


@pytest.mark.parametrize(
    "name", ["run.json", "manifest.json", ".writer", "values/part-000000.parquet"]
)
def test_links_under_temporary_names_are_not_followed(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    create(tmp_path / "run").close()
    (tmp_path / "run" / (name + ".tmp")).symlink_to(victim)
    store = create(tmp_path / "run")
    (tmp_path / "run" / (name + ".tmp")).unlink(missing_ok=True)
    (tmp_path / "run" / (name + ".tmp")).symlink_to(victim)
    store.append(next(iter(records(1))))
    store.update_info(model="m")
    store.close()
    assert victim.read_text() == "precious"
    assert len(open_run(tmp_path / "run").steps()) == 1


def test_a_writer_that_ended_lets_the_next_one_in(tmp_path):
    """Its number may belong to another process by now; the time of its start tells them apart."""
    create(tmp_path / "run").close()
    (tmp_path / "run" / ".writer").write_text(f"{os.getppid()} 1")
    create(tmp_path / "run").close()


def test_json_of_the_folder_is_signed(tmp_path):
    write(tmp_path / "run", list(records(3)))
    for name in ("run.json", "manifest.json"):
        content = json.loads((tmp_path / "run" / name).read_text())
        assert content["check"] == files.checksum(content)

"""A folder of answers: killed and gone on with, read again, damaged, hostile, written by two."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import inrun
from helpers.asking import N, T, asked_model, batches, next_word
from inrun.asking import parts
from inrun.ledger import LedgerError, files

SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from helpers.asking import asked_model, batches, next_word
import inrun
from inrun.asking import parts
import torch
torch.set_default_dtype(torch.float32)
parts.SECONDS = 0.0  # a part for each batch
run, model, data, queries = asked_model()

def some():
    for number, item in enumerate(batches(data)):
        if number == {killed}:
            os.kill(os.getpid(), signal.SIGKILL)
        yield item

inrun.ask(model, some(), queries, run=run, loss=next_word, out={out!r})
"""


@pytest.fixture(scope="module")
def asked():
    return asked_model()


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_killed_pass_goes_on(tmp_path, asked):
    out, tests = tmp_path / "answers", str(Path(__file__).parents[1])
    code = SCRIPT.format(tests=tests, killed=2, out=str(out))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert len(list(out.glob("part-*.parquet"))) == 2
    with pytest.raises(LedgerError, match="a pass that is not complete"):
        inrun.open_answers(out)
    run, model, data, queries = asked
    seen = []

    def counted(model, ids):
        seen.append(len(ids))
        return next_word(model, ids)

    again = {"run": run, "loss": counted, "out": out}
    found = inrun.ask(model, batches(data), queries, **again)
    whole = inrun.ask(model, batches(data), queries, run=run, loss=next_word)
    pd.testing.assert_frame_equal(found, whole)
    assert seen.count(1) + seen.count(3) <= 6  # of four batches two were there already
    with pytest.raises(LedgerError, match="other ids"):
        inrun.ask(model, batches(data, rows=range(N - 1, -1, -1)), queries, **again)
    with pytest.raises(LedgerError, match="its questions differ"):
        inrun.ask(model, batches(data), {"else": queries["one"]}, **again)


def test_answers_are_read_as_they_were_returned(tmp_path, asked):
    run, model, data, queries = asked
    options = {"run": run, "loss": next_word, "out": tmp_path / "a"}
    found = inrun.ask(model, batches(data), queries, **options)
    answers = inrun.open_answers(tmp_path / "a")
    pd.testing.assert_frame_equal(answers.scores, found)
    assert answers.questions == list(queries) and answers.examples == N and answers.tokens is None
    assert answers.losses == pytest.approx([next_word(model, q).item() for q in queries.values()])
    tokens = inrun.ask(model, batches(data), queries, tokens=True, **options)
    kept = inrun.open_answers(tmp_path / "a").tokens
    pd.testing.assert_frame_equal(kept, tokens, check_dtype=False, rtol=1e-12)
    sums = tokens.groupby("id")[list(queries)].sum()
    wanted = found.set_index("id").loc[sums.index, list(queries)]
    np.testing.assert_allclose(sums.to_numpy(), wanted.to_numpy(), rtol=1e-9, atol=1e-15)
    other = {"one": queries["one"]}
    with pytest.raises(LedgerError, match="its questions differ"):
        inrun.ask(model, batches(data), other, tokens=True, **options)
    with pytest.raises(LedgerError, match="holds no answers"):
        inrun.ask(model, batches(data), queries, tokens=True, **options | {"out": tmp_path / "b"})
    found = inrun.ask(model, batches(data), queries, examples=5 * N, **options)
    assert inrun.open_answers(tmp_path / "a").examples == 5 * N  # divided anew
    np.testing.assert_allclose(5 * found["one"], answers.scores["one"], rtol=1e-12)


def test_tokens_are_of_the_examples_that_were_found(tmp_path, asked, monkeypatch):
    monkeypatch.setattr("inrun.asking.positions.FIRST", 2)
    monkeypatch.setattr("inrun.asking.positions.first_of.__defaults__", (2,))
    run, model, data, queries = asked
    options = {"run": run, "loss": next_word, "out": tmp_path / "a"}
    scores = inrun.ask(model, batches(data, 1), queries, **options)
    seen = []

    def counted(model, ids):
        seen.append(len(ids))
        return next_word(model, ids)

    options["loss"] = counted
    tokens = inrun.ask(model, batches(data, 1), queries, tokens=True, **options)
    first = {i for q in queries for i in scores.nlargest(2, q)["id"]}
    assert set(tokens["id"]) == first and len(tokens) == T * len(first)
    assert len(seen) <= 2 * len(first) + 8  # batches without them are passed over


def test_one_writer_at_a_time(tmp_path, asked):
    run, model, data, queries = asked

    def while_another_asks():
        yield batches(data)[0]
        with pytest.raises(LedgerError, match="one writer at a time"):
            inrun.ask(model, batches(data), queries, run=run, loss=next_word, out=tmp_path / "a")
        yield from batches(data)[1:]

    found = inrun.ask(
        model, while_another_asks(), queries, run=run, loss=next_word, out=tmp_path / "a"
    )
    pd.testing.assert_frame_equal(inrun.open_answers(tmp_path / "a").scores, found)


@pytest.fixture
def folder(tmp_path, asked):
    run, model, data, queries = asked
    out = tmp_path / "answers"
    options = {"run": run, "loss": next_word, "out": out}
    inrun.ask(model, batches(data), queries, **options)
    inrun.ask(model, batches(data), queries, tokens=True, **options)
    return out


def edited(file, change, sign=True):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(files.signed(content) if sign else content))


ABOUT = {
    "a name twice": lambda c: c.update(questions=["one", "one"]),
    "a name that is none": lambda c: c.update(questions=["one", 3]),
    "no names": lambda c: c.update(questions=[], losses=[]),
    "fewer losses": lambda c: c.update(losses=[1.0]),
    "a loss that is not finite": lambda c: c.update(losses=[1.0, float("inf")]),
    "many ranks": lambda c: c.update(ranks=10**9),
    "no ranks": lambda c: c.update(ranks=0),
    "a run that is none": lambda c: c.update(run=["x"]),
    "another format": lambda c: c.update(format="other"),
}


@pytest.mark.parametrize("change", ABOUT)
def test_what_was_asked_is_read_only_if_it_is_ours(folder, change):
    edited(folder / "asked.json", ABOUT[change])
    with pytest.raises(LedgerError, match="is not a file of inrun"):
        inrun.open_answers(folder)
    edited(folder / "asked.json", lambda c: None, sign=False)


def test_damage_is_noticed(folder):
    part = folder / "part-00000.parquet"
    data = part.read_bytes()
    part.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    with pytest.raises(LedgerError, match="damaged"):
        inrun.open_answers(folder)
    part.unlink()
    with pytest.raises(LedgerError, match="missing or damaged"):
        inrun.open_answers(folder)
    edited(folder / "asked.json", lambda c: c.update(step=99), sign=False)
    with pytest.raises(LedgerError, match="damaged or was edited"):
        inrun.open_answers(folder)


def table(**columns):
    return pa.table(columns)


def floats(n, value=0.0):
    return pa.array(np.full(n, value))


HOSTILE = {
    "a column more": table(id=pa.array([1]), q0=floats(1), q1=floats(1), q2=floats(1)),
    "another order": table(q0=floats(1), q1=floats(1), id=pa.array([1])),
    "lists for numbers": table(id=pa.array([1]), q0=pa.array([[1.0]]), q1=floats(1)),
    "NaN": table(id=pa.array([1]), q0=floats(1, np.nan), q1=floats(1)),
    "infinite": table(id=pa.array([1]), q0=floats(1), q1=floats(1, np.inf)),
    "ids that are floats": table(id=floats(1), q0=floats(1), q1=floats(1)),
    "an id missing": table(id=pa.array([1, None]), q0=floats(2), q1=floats(2)),
    "other rows than it says": table(id=pa.array([1, 2]), q0=floats(2), q1=floats(2)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_parts_are_refused(folder, kind):
    """Whoever made the folder has signed it."""
    part = folder / "part-00000.parquet"
    pq.write_table(HOSTILE[kind], part)
    rows = 1 if kind.startswith("other rows") else len(HOSTILE[kind])

    def change(done):
        done["parts"] = [{"rows": rows, "sha256": files.sha256_of(part)}]

    edited(folder / "done.json", change)
    with pytest.raises(LedgerError, match="is damaged"):
        inrun.open_answers(folder)


def test_a_part_of_a_billion_rows_is_not_read(folder, monkeypatch):
    """Equal numbers take no room in a file; what it claims is looked at before it is read."""
    part, n = folder / "part-00000.parquet", 1 << 20
    pq.write_table(table(id=pa.array(np.zeros(n, np.int64)), q0=floats(n), q1=floats(n)), part)
    assert part.stat().st_size < n / 10
    edited(
        folder / "done.json",
        lambda c: c.update(parts=[{"rows": n, "sha256": files.sha256_of(part)}]),
    )
    monkeypatch.setattr("inrun.asking.stored.CELLS", n)

    def read(self, *args, **kwargs):
        raise AssertionError("it was read")

    monkeypatch.setattr(pq.ParquetFile, "read", read)
    with pytest.raises(LedgerError, match=f"damaged \\({n} rows"):
        inrun.open_answers(folder)


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_links_out_of_the_folder_are_refused(folder, tmp_path):
    part = folder / "part-00000.parquet"
    part.rename(tmp_path / "elsewhere.parquet")
    part.symlink_to(tmp_path / "elsewhere.parquet")
    with pytest.raises(LedgerError, match="symbolic link"):
        inrun.open_answers(folder)


def member(array):
    held = io.BytesIO()
    np.lib.format.write_array(held, np.asarray(array), allow_pickle=True)
    return held.getvalue()


def claims(shape):
    """The header of an array of this shape, and nothing of it."""
    held = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(held, header)
    return held.getvalue()


class TestCurvature:
    """The file that questions are asked by."""

    @pytest.fixture
    def saved(self, tmp_path):
        _, model, data, queries = asked_model(tmp_path / "run")
        return tmp_path / "run", model, data, queries

    def ask(self, saved):
        run, model, data, queries = saved
        return inrun.ask(model, batches(data), queries, run=run, loss=next_word)

    def rewrite(self, saved, change, compression=zipfile.ZIP_STORED):
        file = saved[0] / "curvature.npz"
        with zipfile.ZipFile(file) as source:
            members = {n: source.read(n) for n in source.namelist()}
        change(members)
        with zipfile.ZipFile(file, "w", compression) as target:
            for name, content in members.items():
                target.writestr(name, content)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("0.spectrum.npy", claims((10**7, 10**7))),  # 800 TB
            ("0.spectrum.npy", claims((2**62,))),
            ("0.spectrum.npy", member(np.array([{"a": 1}], dtype=object))),
            ("0.spectrum.npy", b"\x93NUMPY"),
            ("0.tau.npy", member(np.float64(np.nan))),
            ("0.tau.npy", member(np.float64(-1))),
            ("0.tau.npy", member(np.float32([1, 2]))),
            ("about.npy", claims((2**40,))),
            ("about.npy", member(np.frombuffer(b"[1]", np.uint8))),
        ],
    )
    def test_hostile_members_are_refused(self, saved, name, content):
        self.ask(saved)
        self.rewrite(saved, lambda members: members.update({name: content}))
        with pytest.raises(LedgerError, match=r"curvature\.npz is damaged"):
            self.ask(saved)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
    def test_numbers_that_no_curvature_has_are_refused(self, saved, value):
        def change(members):
            array = np.load(io.BytesIO(members["0.spectrum.npy"])).copy()
            array.flat[-1] = value
            members["0.spectrum.npy"] = member(array)

        self.rewrite(saved, change)
        with pytest.raises(LedgerError, match=r"curvature\.npz is damaged"):
            self.ask(saved)

    def test_compressed_members_are_refused(self, saved):
        """A file of a megabyte can unpack to a thousand."""
        self.rewrite(saved, lambda members: None, zipfile.ZIP_DEFLATED)
        with pytest.raises(LedgerError, match=r"curvature\.npz is damaged: .*compressed"):
            self.ask(saved)


def test_parts_come_in_time(asked, tmp_path, monkeypatch):
    """A slow pass is not lost either: a part is written at least once in SECONDS."""
    run, model, data, queries = asked
    assert parts.SECONDS <= 60
    clock = iter(np.arange(0, 1e6, parts.SECONDS / 2 + 1))
    monkeypatch.setattr("inrun.asking.parts.time.monotonic", lambda: float(next(clock)))
    inrun.ask(model, batches(data, 1), queries, run=run, loss=next_word, out=tmp_path / "a")
    assert len(list((tmp_path / "a").glob("part-*.parquet"))) >= 3

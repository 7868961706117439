"""Ledgers that strangers made or that a disk has damaged: the right table or one of our errors."""

from __future__ import annotations

import copy as copying
import json
import os
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.ledgers import (
    as_format_1,
    assert_same,
    copy,
    damage,
    edit,
    everything,
    expected,
    records,
    tables,
    write,
)
from inrun.ledger import LedgerError, files
from inrun.ledger import tables as reading
from inrun.ledger.folder import VERSION
from inrun.ledger.saved import Store, open_run

ROWS = list(records(20))
HOSTILE = [
    "{values}",
    "x'); COPY (SELECT 42) TO 'stolen.csv'; --",
    "y\"; COPY (SELECT 42) TO 'stolen.csv'; SELECT \"",
    "{0}{self}%s$1?",
    "\x1b[31mred",
    "né\n\t",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A ledger of four parts and what its tables must be."""
    path = tmp_path_factory.mktemp("base") / "run"
    write(path, ROWS)
    return path


@pytest.fixture(scope="module")
def right():
    return expected(ROWS)


# -- opening runs nothing ---------------------------------------------------------------------


def test_names_are_never_part_of_a_query(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = list(records(6, targets=len(HOSTILE), estimators=2))
    write("run", rows, HOSTILE, HOSTILE[:2])
    before = everything(tmp_path)
    saved = open_run("run")
    for e, name in enumerate(HOSTILE[:2]):
        assert_same(tables(saved, name), expected(rows, HOSTILE, e))
        for target in HOSTILE:
            top = saved.top(3, target=target, estimator=name)
            assert len(top) == 3 and len(saved.top(3, "harm", target, estimator=name)) == 3
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    ["part-0'", "x') ; COPY (SELECT 1) TO 'stolen.csv' --", "../../outside", "/etc/passwd",
     "part-*", "part-٣", "part-1", "part-000000\n", "part-000000.parquet", "", 3, None,
     ["part-000000"]],
)  # fmt: skip
def test_part_names_are_ours_or_refused(tmp_path, base, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = copy(base, tmp_path / "run")
    for kind in ("values", "steps"):
        write_to = folder / kind / f"{name}.parquet"
        if isinstance(name, str) and "/" not in name:
            (folder / kind / "part-000000.parquet").rename(write_to)

    def rename(manifest):
        manifest["parts"][0]["name"] = name

    edit(folder / "manifest.json", rename)
    before = everything(tmp_path)
    with pytest.raises(LedgerError, match=r"manifest.json is damaged: .* no name of a part"):
        tables(open_run(folder))
    with pytest.raises(LedgerError, match=r"no name of a part.*inrun repair"):
        Store.create(folder, {"lr": 0.1}, ["a", "b"], ["secant"])
    assert everything(tmp_path) == before


def test_a_part_listed_twice_is_refused(tmp_path, base):
    folder = copy(base, tmp_path / "run")
    edit(folder / "manifest.json", lambda m: m | {"parts": m["parts"] + m["parts"][-1:]})
    with pytest.raises(LedgerError, match="part-000003 is listed twice"):
        open_run(folder)
    edit(folder / "manifest.json", lambda m: m | {"parts": m["parts"][3:1:-1]})
    with pytest.raises(LedgerError, match="begins at step 10, part-000003 ends at step 19"):
        open_run(folder)


@pytest.mark.parametrize("what", ["values", "values/part-000001.parquet", "run.json"])
def test_links_out_of_the_folder_are_refused(tmp_path, base, what):
    folder, outside = copy(base, tmp_path / "run"), tmp_path / "outside"
    (folder / what).rename(outside)
    (folder / what).symlink_to(outside)
    with pytest.raises(LedgerError, match=f"{what} is a symbolic link out of the ledger's folder"):
        tables(open_run(folder))
    if "part" not in what:
        with pytest.raises(LedgerError, match="is a symbolic link out"):
            Store.create(folder, {"lr": 0.1}, ["a", "b"], ["secant"])


def test_a_pipe_is_no_part(tmp_path, base):
    """Reading one would wait for ever."""
    for what in ("values/part-000001.parquet", "manifest.json"):
        folder = copy(base, tmp_path / what.replace("/", "-"))
        (folder / what).unlink()
        os.mkfifo(folder / what)
        with pytest.raises(LedgerError, match="plain file"):
            tables(open_run(folder))


def test_duckdb_reaches_nothing(tmp_path):
    import duckdb

    (tmp_path / "secret.csv").write_text("a\n1\n")
    secret = [1]  # noqa: F841 (a query must not see it)
    with reading.connect() as db:
        for query in (
            f"COPY (SELECT 1) TO '{tmp_path}/stolen.csv'",
            f"SELECT * FROM '{tmp_path}/secret.csv'",
            f"ATTACH '{tmp_path}/new.db'",
            "LOAD httpfs",
            "INSTALL httpfs",
            "SELECT * FROM secret",
            "SET enable_external_access = true",
            "SET memory_limit = '1TB'",
            "SET autoload_known_extensions = true",
        ):
            with pytest.raises(duckdb.Error):
                db.execute(query)
    assert [f.name for f in tmp_path.iterdir()] == ["secret.csv"]


def test_columns_of_another_ledger_are_refused(tmp_path, base):
    """Files with right checksums whose columns are not what run.json says."""
    for kind, wrong in (
        ("values", pa.table({"step": [0], "id": [1], "weight": [1.0], "evil": [1.0]})),
        ("steps", pa.table({"step": ["x"]})),
        ("values", pa.table({"step": [0], "id": [[1]], "weight": [1.0], "secant:a": [b"x"]})),
    ):
        folder = copy(base, tmp_path / f"run-{kind}-{wrong.num_columns}{wrong.schema.names[-1]}")
        file = folder / kind / "part-000003.parquet"
        pq.write_table(wrong, file)

        def fit(manifest, file=file, kind=kind):
            at = ("values", "steps").index(kind)
            part = manifest["parts"][3]
            part["bytes"][at], part["sha256"][at] = file.stat().st_size, files.sha256_of(file)
            part["rows" if kind == "values" else "steps"] = 1

        edit(folder / "manifest.json", fit)
        with pytest.raises(LedgerError, match=r"part-000003.parquet is damaged: .*column"):
            tables(open_run(folder))


# -- many targets -----------------------------------------------------------------------------


def test_more_than_a_thousand_targets(tmp_path):
    targets = [f"t{q}" for q in range(1200)]
    rows = list(records(3, targets=1200))
    write(tmp_path / "run", rows, targets, flush=2)
    saved = open_run(tmp_path / "run")
    right = expected(rows, targets)
    assert_same(tables(saved), right)
    best = right["values"].sort_values("value", ascending=False)["id"].tolist()
    assert saved.top(2)["id"].tolist() == best[:2]


# -- damage -----------------------------------------------------------------------------------


def outcome(folder):
    """The tables, or None after one of our errors; anything else fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return tables(open_run(folder))
        except LedgerError as error:
            assert str(error) and "\n" not in str(error)
            return None


def right_or_refused(folder, right):
    found = outcome(folder)
    if found is not None:
        assert_same(found, right)
    return found is None


def fuzz(base, work, right, rounds, seed):
    """Damage one file at a time; in files of the same name but other content nothing is cached."""
    rng = np.random.default_rng(seed)
    names = sorted(everything(base))
    refused = dict.fromkeys(names, 0)
    folder = copy(base, work)
    for round_ in range(rounds):
        name = names[round_ % len(names)]
        data = (base / name).read_bytes()
        changed = damage(data, rng)
        (folder / name).write_bytes(changed)
        refusal = right_or_refused(folder, right)
        if name.endswith(".parquet"):
            assert refusal == (changed != data), name
        refused[name] += refusal
        (folder / name).write_bytes(data)
    assert_same(outcome(folder), right)
    return refused


def test_damaged_files(tmp_path, base, right):
    refused = fuzz(base, tmp_path / "run", right, 50, seed=0)
    assert len(refused) == 10 and sum(refused.values()) > 30


@pytest.mark.slow
def test_damaged_files_many_times(tmp_path, base, right):
    fuzz(base, tmp_path / "run", right, 300, seed=1)


@pytest.mark.slow
def test_single_bits_in_all_places(tmp_path):
    """Not one flipped bit of either file of a part, or of the JSON files, gives another number.

    Every 61st bit of a Parquet file, every 31st of a JSON file: all kinds of bits in all places.
    """
    rows = list(records(2, targets=1, batch=2))
    write(tmp_path / "run", rows, ["a"])
    right = expected(rows, ["a"])
    for name, data in everything(tmp_path / "run").items():
        for bit in range(0, 8 * len(data), 31 if name.endswith("json") else 61):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            (tmp_path / "run" / name).write_bytes(bytes(changed))
            refusal = right_or_refused(tmp_path / "run", right)
            assert refusal or name.endswith("json")
        (tmp_path / "run" / name).write_bytes(data)


VALUES = [
    None, True, 0, -1, 2**63, 10**40, 1.5, "", "x", "../x", "\ud800", [], [[]], {}, {"a": {}},
    [None], ["a", "a"], [1], "part-000000", [{"a": 1}], "9" * 20, float("inf"),
]  # fmt: skip


def places(content, path=()):
    """Every entry of a JSON file, by the keys that lead to it."""
    for key in content if isinstance(content, dict) else range(len(content)):
        yield (*path, key)
        if isinstance(content[key], dict | list):
            yield from places(content[key], (*path, key))


def hostile_json(base, folder, right, name, sign, limit=None):
    """Put every value in every place (or ``limit`` of these); ``sign`` makes the checksum fit."""
    original = json.loads((base / name).read_text())
    cases = [(path, value) for path in places(original) for value in [*VALUES, KeyError]]
    if limit:
        chosen = np.random.default_rng(limit).choice(len(cases), limit, replace=False)
        cases = [cases[i] for i in chosen]
    refused = 0
    for path, value in cases:
        content = copying.deepcopy(original)
        at = content
        for key in path[:-1]:
            at = at[key]
        if value is KeyError:
            del at[path[-1]]
        else:
            at[path[-1]] = value
        content = files.signed(content) if sign else content
        (folder / name).write_text(json.dumps(content))
        found = outcome(folder)
        refused += found is None
        if found is not None and not sign:
            assert_same(found, right)
    return refused


@pytest.mark.parametrize("sign", [True, False])
@pytest.mark.parametrize("name", ["run.json", "manifest.json"])
def test_hostile_values_in_json(tmp_path, base, right, name, sign):
    assert hostile_json(base, copy(base, tmp_path / "run"), right, name, sign, 40) > 0


@pytest.mark.slow
@pytest.mark.parametrize("sign", [True, False])
@pytest.mark.parametrize("name", ["run.json", "manifest.json"])
def test_hostile_values_everywhere_in_json(tmp_path, base, right, name, sign):
    hostile_json(base, copy(base, tmp_path / "run"), right, name, sign, 150)


@pytest.mark.parametrize("name", ["run.json", "manifest.json"])
@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "3", "{", "[" * 100_000, '{"parts": ' + "9" * 5000 + "}", "\0", "{}"],
    ids=["empty", "list", "null", "number", "cut", "deep", "long-number", "zero", "nothing"],
)  # fmt: skip
def test_malformed_json_names_file_cause_and_way_out(tmp_path, base, name, text):
    folder = copy(base, tmp_path / "run")
    (folder / name).write_text(text)
    for use in (open_run, lambda p: Store.create(p, {"lr": 0.1}, ["a", "b"], ["secant"])):
        with pytest.raises(LedgerError) as caught:
            use(folder)
        message = str(caught.value)
        assert name in message and "\n" not in message and len(message) < 1000
        assert "inrun repair" in message or "copy of run.json" in message or text == "{}"


@pytest.mark.parametrize("share", [10**400, -1, 1.5, float("nan")])
def test_a_share_is_from_0_to_1(tmp_path, base, share):
    folder = copy(base, tmp_path / "run")
    edit(folder / "run.json", lambda info: info | {"coverage": {"share": share}})
    with pytest.raises(LedgerError, match="the share of 'coverage' is"):
        open_run(folder)


def test_deep_json_is_refused(tmp_path, base):
    folder, deep = copy(base, tmp_path / "run"), []
    for _ in range(70):
        deep = [deep]
    edit(folder / "run.json", lambda info: info | {"model": {"layers": deep}})
    with pytest.raises(LedgerError, match="nested more than 64 deep"):
        open_run(folder)


def test_bytes_that_are_no_text(tmp_path, base):
    folder = copy(base, tmp_path / "run")
    (folder / "run.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(LedgerError, match=r"run.json cannot be read"):
        open_run(folder)


def test_an_edited_run_json_is_noticed(tmp_path, base):
    folder = copy(base, tmp_path / "run")
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"lr": 0.1', '"lr": 0.3'))
    with pytest.raises(LedgerError, match=r"does not match its checksum.*inrun repair"):
        open_run(folder)


def test_a_ledger_of_format_1_is_readable_and_continued(tmp_path, base, right):
    folder = copy(base, tmp_path / "run")
    as_format_1(folder)
    assert_same(tables(open_run(folder)), right)
    store = Store.create(folder, {"lr": 0.1}, ["a", "b"], ["secant"])
    more = list(records(5, seed=9, first=20))
    for row in more:
        store.append(row)
    store.close()
    assert json.loads((folder / "run.json").read_text())["version"] == VERSION
    assert_same(tables(open_run(folder)), expected([*ROWS, *more]))


def test_parts_say_to_which_run_they_belong(base):
    schema = pq.read_schema(base / "steps" / "part-000000.parquet")
    assert schema.metadata[b"inrun.run"].decode() == open_run(base).info["run"]
    assert isinstance(pd.read_parquet(base / "values"), pd.DataFrame)  # any tool reads them

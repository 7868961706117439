"""Files that commands write: never over somebody's, whole or not there, read back as written."""

from __future__ import annotations

import csv
import json
import os
import stat

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from inrun.cli.app import app
from inrun.keeplist import SUFFIXES, read_ids, write_ids
from inrun.ledger import LedgerError
from inrun.ledger.entries import StepEntry
from inrun.ledger.saved import Store, open_run
from inrun.output import OutputError, check_output, write_output
from inrun.report import is_report, write_report


def call(*args, code=0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result


def refused(message, *args):
    said = call(*args, code=2).stderr
    assert message in said and said.count("\n") == 1, said


@pytest.fixture
def run(tmp_path):
    store = Store.create(tmp_path / "run", {}, ["a"], ["secant"])
    store.append(StepEntry(0, np.arange(10), np.arange(10.0)[None, None], 0.1))
    store.close()
    return tmp_path / "run"


def content(folder):
    files = (f for f in folder.rglob("*") if f.is_file() and f.name not in (".lock", ".writer"))
    return {f.relative_to(folder): f.read_bytes() for f in files}


def test_a_file_that_exists_is_replaced_with_force_only(run, tmp_path):
    for command in (["prune", run, "--ratio", 0.1, "--by", "value", "-o"], ["report", run, "-o"]):
        file = tmp_path / ("keep.csv" if command[0] == "prune" else "r.html")
        file.write_text("precious")
        refused("exists already: choose another file with -o, or pass --force", *command, file)
        assert file.read_text() == "precious"
        call(*command, file, "--force")
        assert file.read_text() != "precious"
    file = tmp_path / "bench.json"
    file.write_text("precious")
    refused("--force", "bench", "--device", "cpu", "--out", file)
    assert file.read_text() == "precious"


def test_a_report_of_ours_at_its_usual_place_is_replaced(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call("report", run)
    first = (tmp_path / "report.html").read_bytes()
    call("report", run)
    assert (tmp_path / "report.html").read_bytes() == first and is_report(tmp_path / "report.html")
    (tmp_path / "report.html").write_text("<html>of somebody else</html>")
    refused("--force", "report", run)
    call("prune", run, "--ratio", 0.1, "--by", "value")
    refused("--force", "prune", run, "--ratio", 0.1)


def test_the_input_is_never_written_over(run, tmp_path):
    examples = tmp_path / "examples.csv"
    examples.write_text("id,text\n" + "".join(f"{i},t\n" for i in range(10)))
    link = tmp_path / "link.html"
    link.symlink_to(examples)
    hard = tmp_path / "hard.html"
    hard.hardlink_to(examples)
    before = examples.read_bytes()
    for file in (examples, tmp_path / "run" / ".." / "examples.csv", link, hard):
        refused("is what the command reads", "report", run, "--examples", examples, "-o", file,
                "--force")  # fmt: skip
        with pytest.raises(OutputError, match="is what the command reads"):
            write_report(open_run(run), file, examples)
    assert examples.read_bytes() == before
    refused("is what the command reads", "variants", tmp_path / "s.jsonl", "--model", "m",
            "--base-url", "http://127.0.0.1:1/v1", "-o", tmp_path / "s.jsonl")  # fmt: skip
    (tmp_path / "s.jsonl").write_text('{"id": 1, "text": "a b c"}\n{"id": 2, "te')
    for args in (
        ("-o", tmp_path / "s.jsonl"),
        ("--cache", tmp_path / "s.jsonl"),
        ("-o", tmp_path / "v.jsonl", "--cache", tmp_path / "v.jsonl"),
        ("-o", tmp_path / "v.jsonl", "--cache", tmp_path / "v.settings.json"),
    ):
        refused("is what the command reads", "variants", tmp_path / "s.jsonl", "--model", "m",
                "--base-url", "http://127.0.0.1:1/v1", *args)  # fmt: skip
    assert (tmp_path / "s.jsonl").read_text() == '{"id": 1, "text": "a b c"}\n{"id": 2, "te'


def test_files_of_a_ledger_are_never_written_over(run, tmp_path):
    before = content(run)
    (part,) = (run / "values").iterdir()
    link = tmp_path / "link.json"
    link.symlink_to(run / "run.json")
    for file in (run / "run.json", run / "manifest.json", part, run / "values" / "new.csv", link):
        for command in (["prune", run, "--ratio", 0.1, "--by", "value"], ["report", run]):
            if command[0] == "report" or file.suffix != ".lock":
                refused("is a file of the ledger", *command, "-o", file, "--force")
    refused("is a folder", "report", run, "-o", run)
    assert content(run) == before
    call("report", run, "-o", run / "report.html")  # beside its files there is room
    (tmp_path / "values").mkdir()
    file = tmp_path / "values" / "keep.csv"
    call("prune", run, "--ratio", 0.1, "--by", "value", "-o", file)  # no ledger here


def test_writing_is_at_once_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("before")
    file.chmod(0o640)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("inrun.output.os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_output(file, b"after")
    assert file.read_text() == "before" and [f.name for f in tmp_path.iterdir()] == ["file"]
    with pytest.raises(OutputError, match="--force"):  # appeared after it was checked
        write_output(file, b"after", replace=False)
    assert write_output(file, b"after") == 5
    assert file.read_text() == "after" and stat.S_IMODE(file.stat().st_mode) == 0o640
    write_output(tmp_path / "new" / "folder" / "file", b"x", replace=False)
    assert [f.name for f in (tmp_path / "new" / "folder").iterdir()] == ["file"]


def test_a_draft_that_is_not_ours_stays(tmp_path):
    other = tmp_path / f".file.{os.getpid()}.tmp"
    other.write_text("of somebody else")
    with pytest.raises(FileExistsError):
        write_output(tmp_path / "file", b"x")
    assert other.read_text() == "of somebody else"
    longest = tmp_path / ("é" * 127)  # 254 of 255 bytes
    assert write_output(longest, b"x") == 1 and longest.exists()


def test_without_hard_links_a_file_is_still_not_replaced(tmp_path, monkeypatch):
    def none(self, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("pathlib.Path.hardlink_to", none)
    write_output(tmp_path / "a", b"1", replace=False)
    with pytest.raises(OutputError, match="--force"):
        write_output(tmp_path / "a", b"2", replace=False)
    assert (tmp_path / "a").read_bytes() == b"1"


def test_links_stay_links_and_devices_are_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OutputError, match="--force"):
        check_output(tmp_path / "link")
    write_output(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"x"
    check_output(os_device := tmp_path.__class__(os.devnull))
    write_output(os_device, b"x")


ODD = [
    "=1+1", "＝1", "+x", "-x", "@x", "\tx", "\rx", "\nx", "'", "'=x", "a\nb", "a\r\nb", "a\rb",
    'a"b', '"', "a,b", " a ", "", "7", "007", "NA", "\u2028", "\x1b[2J", "\x85", "id", "\ufeffx",
]  # fmt: skip
NAMES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), unique=True)
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True)


@given(st.one_of(NAMES, NUMBERS))
@example(ODD)
@example([-1, -(2**63), 2**63 - 1])
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_lists_of_ids_read_back_as_they_were(tmp_path_factory, ids):
    folder = tmp_path_factory.mktemp("ids")
    for suffix in SUFFIXES:
        file = folder / f"keep{suffix}"
        if suffix == ".csv" and any("\0" in str(x) for x in ids):
            with pytest.raises(LedgerError, match="NUL"):
                write_ids(ids, suffix)
            continue
        file.write_bytes(write_ids(ids, suffix))
        found = read_ids(file)
        if suffix == ".txt" and all(
            isinstance(x, int) for x in found
        ):  # it does not tell 7 from "7"
            ids = [int(x) for x in ids]
        assert found == ids, suffix


def test_csv_cells_are_no_formulas_and_lines_are_ids(tmp_path):
    file = tmp_path / "keep.csv"
    file.write_bytes(write_ids(ODD, ".csv"))
    with file.open(newline="", encoding="utf-8") as lines:
        cells = [row[0] for row in csv.reader(lines)][1:]
    assert len(cells) == len(ODD) and not [c for c in cells if c.startswith(tuple("=+-@＝\t\r"))]
    assert [c[1:] if c[:1] == "'" else c for c in cells] == ODD
    assert pd.read_csv(file, dtype=str, keep_default_na=False)["id"].tolist() == cells
    file.write_bytes(write_ids([-3, 4], ".csv"))
    assert file.read_text() == "id\n-3\n4\n"  # numbers stay numbers
    lines = write_ids(ODD, ".txt").decode().split("\n")[:-1]
    assert len(lines) == len(ODD) and not any("\x1b" in x or "\r" in x for x in lines)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_prune_writes_ids_that_read_back(tmp_path, suffix):
    ids = np.array([*ODD, "hurt"], object)
    store = Store.create(tmp_path / "run", {}, ["a"], ["secant"])
    values = np.where(ids == "hurt", -1.0, 1.0)
    store.append(StepEntry(0, ids, values[None, None], 0.1))
    store.close()
    file = tmp_path / f"keep{suffix}"
    ratio = 1 / len(ids)
    said = json.loads(
        call(
            "prune", tmp_path / "run", "--by", "value", "--ratio", ratio, "-o", file, "--json"
        ).stdout
    )
    assert said["kept"] == len(ODD)
    assert read_ids(file) == sorted(ODD)

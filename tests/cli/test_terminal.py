"""Nothing that a ledger or a dataset holds steers a terminal, and Ctrl-C is quiet."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import inrun
from inrun import console as terminal
from inrun.cli.app import app
from inrun.console import as_json, excerpt, safe
from inrun.ledger.entries import Audit, StepEntry
from inrun.ledger.saved import Store, open_run
from inrun.report import write_report
from inrun.run.logging import Tally, _named

SOURCE = Path(inrun.__file__).parents[1]
STEERING = (
    "\x1b[2J\x1b]0;title\x07\x9b31m\x90\r\x08\x7f\u202etxt\u2066\u200f\u061c\u2028\u200b\ufeff"
)
HOSTILE = f"[red]{STEERING}[/red]{{x}}\n= </script>"


def steers(text, kept="\n"):
    """The characters that a terminal obeys, line breaks aside."""
    bad = {"Cc", "Zl", "Zp", "Cs"}
    turning = {"RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI"}
    return [
        c
        for c in text
        if c not in kept
        and (unicodedata.category(c) in bad or unicodedata.bidirectional(c) in turning)
    ]


@given(st.text())
@example(HOSTILE)
@example("\ud800\U000e0041")
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_safe_text_is_one_inert_line(text):
    assert not steers(safe(text), kept="") and not steers(excerpt(text), kept="")
    assert len(excerpt(text, 5)) <= 5 * len("\\U000e0041")
    shown = as_json({"text": [text]})
    assert not steers(shown)
    assert json.loads(shown) == {"text": [text]}


def test_what_is_harmless_stays_as_it_is():
    for text in (
        "é ß 中文 العربية שלום",
        "👩\u200d👩\u200d👧",
        "می\u200cخواهم",
        "[bold]",
        "a\xa0b",
        "\\x1b",
    ):
        assert safe(text) == text
    assert safe("a\tb\x1b") == "a\\tb\\x1b" and excerpt(" a \n\t b ") == "a b"
    assert safe("abcdef", 3) == "ab…"


def test_the_console_makes_inert_what_was_forgotten():
    console = terminal.console()
    console.file = io.StringIO()
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(Text(HOSTILE))
    for shown in (HOSTILE, Text(HOSTILE), table):
        console.print(shown, markup=False)
    assert not steers(console.file.getvalue())
    assert "\\x1b[2J" in console.file.getvalue() and "[red]" in console.file.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A ledger whose every name is hostile."""
    folder = tmp_path_factory.mktemp("terminal") / "run"
    store = Store.create(folder, {"x": HOSTILE}, [HOSTILE, "b" + HOSTILE], [f"sgd{HOSTILE}", "sgd"])
    rows = [{"parameter": HOSTILE, "shape": "()", "size": 1, "status": HOSTILE, "operations": "",
             "forms": ""}]  # fmt: skip
    store.update_info(
        model={"class": HOSTILE}, optimizer={"class": HOSTILE},
        coverage={"share": 0.5, "parameters": rows},
    )  # fmt: skip
    ids = np.array([f"{i}{HOSTILE}" for i in range(6)], object)
    for step in range(3):
        values = np.arange(24.0).reshape(2, 2, 6) - 10
        losses = (np.full(2, 2.0), np.full(2, 1.9), np.full(2, 1.8))
        store.append(StepEntry(step, ids, values, 0.1, audit=Audit(*losses)))
    store.append(StepEntry(3, ids, None, 0.1, void=HOSTILE))
    store.close()
    return folder


@pytest.fixture
def examples(tmp_path, run):
    file = tmp_path / "examples.jsonl"
    ids = open_run(run).values()["id"]
    rows = [{"id": i, "text": HOSTILE, "label": HOSTILE, "group": HOSTILE} for i in ids]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def commands(run, examples, out):
    odd = run.parent / f"no{HOSTILE}".replace("/", "")
    yield from (["info", run], ["top", run], ["top", run, "--worst"], ["compare", run, run])
    yield ["top", run, "--by", "harm", "--examples", examples, "--target", HOSTILE]
    yield ["prune", run, "--ratio", 0.3, "--by", "value", "-o", out / f"k{STEERING}.csv"]
    yield ["report", run, "--examples", examples, "-o", out / f"r{STEERING}.html"]
    yield ["info", run, "--estimator", "none"]
    yield ["top", run, "--target", "none"]
    yield ["top", run, "--examples", odd]
    yield ["info", odd]
    yield ["variants", "--check", examples]
    yield ["variants", odd, "--model", "m", "--base-url", "http://127.0.0.1:1/v1"]


def test_no_command_lets_names_steer_the_terminal(run, examples, tmp_path):
    for json_wanted in (False, True):
        out = tmp_path / str(json_wanted)
        for args in commands(run, examples, out):
            more = ["--json"] if json_wanted else []
            result = CliRunner().invoke(app, [str(a) for a in [*args, *more]])
            assert result.exit_code in (0, 1, 2), (args, result.exception)
            assert not isinstance(result.exception, Exception), args
            assert not steers(result.stdout), args
            assert not steers(result.stderr), args
    assert "[red]\\x1b[2J" in CliRunner().invoke(app, ["top", str(run)]).stdout


def test_variants_that_do_not_pass_are_shown_inert(tmp_path):
    row = {"id": HOSTILE, "z_star": "one two three four", "paraphrase": [HOSTILE, 7, STEERING]}
    file = tmp_path / "v.jsonl"
    file.write_text(json.dumps(row) + "\n")
    result = CliRunner().invoke(app, ["variants", "--check", str(file), "--entities", "capitals"])
    assert result.exit_code == 1 and "dropped" in result.stdout and not steers(result.stdout)


def test_the_report_holds_names_as_data_only(run, examples, tmp_path):
    file = tmp_path / "report.html"
    folder = tmp_path / "<script>window.pwned=1<"
    folder.symlink_to(run)
    write_report(open_run(folder), file, examples)
    page = file.read_text("utf-8")
    assert page.count("<script") == 2 and page.count("</script>") == 2
    data = re.search(r'id="data">(.*?)</script>', page, re.S)[1]
    assert not set("<>&") & set(data)
    found = json.loads(data)
    assert HOSTILE in found["targets"] and HOSTILE in found["about"]
    outside = page.replace(data, "")
    assert "[red]" not in outside and "\x1b" not in outside and "pwned=1<" not in outside


def test_the_report_holds_half_a_surrogate_pair_as_a_question_mark(tmp_path):
    store = Store.create(tmp_path / "run", {}, ["a"], ["secant"])
    store.update_info(model="half \ud800")
    store.close()
    file = tmp_path / "report.html"
    run = open_run(tmp_path / "run")
    assert run.info["model"] == "half \ud800"
    write_report(run, file)
    assert "half ?" in file.read_text("utf-8")


def test_long_ids_hide_no_numbers(tmp_path):
    store = Store.create(tmp_path / "run", {}, ["a"], ["secant"])
    store.append(StepEntry(0, np.array(["x" * 150], object), np.array([[[0.25]]]), 0.1))
    store.close()
    shown = CliRunner().invoke(app, ["top", str(tmp_path / "run")]).stdout
    assert "0.25" in shown and shown.count("x") == 150 and "…" not in shown


def test_a_runs_own_words_are_inert(run):
    assert not steers(repr(open_run(run)))
    tally = Tally()
    tally.by_id = {HOSTILE: -1.0}
    assert not steers(_named(tally, 5)["inrun/lowest ids"], kept="")


STUB = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
try:
    time.sleep(10)
except KeyboardInterrupt:
    raise ImportError("a library that takes Ctrl-C for a fault of its own")
"""


@pytest.mark.parametrize("module", ["inrun", "inrun.bench"])
@pytest.mark.parametrize("library", ["torch", "numpy", "typer"])
def test_ctrl_c_during_import(tmp_path, module, library):
    (tmp_path / f"{library}.py").write_text(STUB)
    path = os.pathsep.join([str(tmp_path), str(SOURCE)])
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130 and done.stderr.strip() == "inrun: stopped"
    assert done.stdout == ""


def test_ctrl_c_during_a_command(monkeypatch, run):
    def stopped(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("inrun.cli.app.open_run", stopped)
    result = CliRunner().invoke(app, ["info", str(run)])
    assert result.exit_code == 130 and result.stderr == "inrun: stopped\n"


def test_the_installed_command_is_the_quiet_one():
    lines = (SOURCE.parent / "pyproject.toml").read_text().splitlines()
    assert 'inrun = "inrun.__main__:main"' in lines


def test_importing_inrun_imports_nothing_heavy():
    heavy = {"torch", "numpy", "rich", "email"}  # importlib.metadata imports email
    code = (
        "import sys; there = {*sys.modules}; import inrun, inrun.__main__; "
        f"assert not {heavy} & ({{*sys.modules}} - there)"
    )
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert all(hasattr(inrun, name) and name in dir(inrun) for name in inrun.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = inrun.nothing

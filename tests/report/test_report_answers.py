"""Answers in the report, on a page of their own and in the terminal: escaped, shaded, the run's."""

import json
import re
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import inrun
from helpers.asking import N, T, asked_model, batches, next_word
from inrun.cli.app import app
from inrun.ledger import LedgerError
from inrun.report import write_report
from inrun.report.answers import entries, write_answers


def data_of(page):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]
    )


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A run with answers in its folder, and what its ids stand for."""
    folder = tmp_path_factory.mktemp("asked") / "run"
    _, model, data, queries = asked_model(folder)
    options = {"run": folder, "loss": next_word, "out": folder / "answers"}
    scores = inrun.ask(model, batches(data), queries, **options)
    inrun.ask(model, batches(data), queries, tokens=True, **options)
    examples = folder.parent / "examples.jsonl"
    with examples.open("w") as file:
        for i in range(N):
            tokens = [f"<{t}> " for t in data[i].tolist()]
            text = f"</script><script>alert({i})</script>"
            file.write(json.dumps({"id": i, "text": text, "tokens": tokens}) + "\n")
    return folder, scores, list(queries), examples, data


def call(*args, code=0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, result.output + result.stderr
    return result


def test_entries_are_the_highest_and_the_lowest(asked):
    folder, scores, names, examples, data = asked
    answers = inrun.open_answers(folder / "answers")
    for worst in (False, True):
        found = entries(answers, 3, worst, examples)
        assert [q["question"] for q in found] == names
        for question in found:
            ordered = scores.sort_values(question["question"], ascending=worst)
            assert [e["id"] for e in question["examples"]] == ordered["id"].head(3).tolist()
            for e in question["examples"]:
                values = [v for _, v, _ in e["pieces"]]
                assert sum(values) == pytest.approx(e["score"], rel=1e-2) and len(values) == T
                assert [s for s, *_ in e["pieces"]] == [f"<{t}> " for t in data[e["id"]].tolist()]
                assert e["words"] and e["text"].startswith("</script>")
    plain = entries(answers, 2)
    assert not plain[0]["examples"][0]["words"] and "text" not in plain[0]["examples"][0]
    decoded = entries(answers, 2, tokenizer=lambda ids: "".join(f"w{i} " for i in ids))
    assert decoded[0]["examples"][0]["pieces"][0][0].startswith("w")
    assert entries(answers, 1, examples={i: f"text {i}" for i in range(N)})[0]["examples"][0][
        "text"
    ]


def test_the_report_has_them_and_so_has_a_page_alone(asked, tmp_path):
    folder, _, names, examples, _ = asked
    write_report(inrun.open(folder), tmp_path / "report.html", examples)
    size = write_answers(tmp_path / "answers.html", folder / "answers", examples, n=4)
    for file, many in (("report.html", 5), ("answers.html", 4)):
        page = (tmp_path / file).read_text()
        found = data_of(page)["answers"]
        assert [q["question"] for q in found] == names
        assert all(len(q["examples"]) == many for q in found)
        assert "<script>alert" not in page and "two & <b>" not in page and 'id="answers"' in page
        assert "default-src &#x27;none&#x27;" in page and "%%" not in page
    assert size == (tmp_path / "answers.html").stat().st_size
    with pytest.raises(Exception, match="exists already"):
        write_answers(tmp_path / "answers.html", folder / "answers", examples)
    with pytest.raises(Exception, match="what the command reads"):
        write_answers(folder / "answers" / "asked.json", folder / "answers", replace=True)


def test_answers_of_another_run_are_told_and_left_out(asked, tmp_path):
    folder, *_ = asked
    asked_model(tmp_path / "other")
    write_report(inrun.open(tmp_path / "other"), tmp_path / "none.html")
    assert data_of((tmp_path / "none.html").read_text())["answers"] is None
    (folder / "answers").rename(tmp_path / "other" / "answers")
    try:
        with pytest.warns(UserWarning, match="holds answers of another run"):
            write_report(inrun.open(tmp_path / "other"), tmp_path / "report.html")
        assert data_of((tmp_path / "report.html").read_text())["answers"] is None
        with pytest.raises(LedgerError, match="holds answers of another run"):
            write_report(
                inrun.open(tmp_path / "other"), tmp_path / "report.html",
                answers=tmp_path / "other" / "answers",
            )  # fmt: skip
    finally:
        (tmp_path / "other" / "answers").rename(folder / "answers")


SETUP = """
import sys
sys.path.insert(0, {tests!r})
from helpers.asking import batches, asked_model, next_word

def questions(run):
    assert (run / "run.json").is_file()
    _, model, data, queries = asked_model()
    return {{"model": model, "data": batches(data), "queries": queries, "loss": next_word}}

def once(run):
    found = questions(run)
    return found | {{"data": iter(found["data"])}}

def fewer(run):
    return {{"model": None}}

def more(run):
    return questions(run) | {{"out": "elsewhere"}}

number = 3
"""


def test_the_command_asks_and_shows(asked, tmp_path):
    folder, scores, names, examples, _ = asked
    setup = tmp_path / "my_questions.py"
    setup.write_text(textwrap.dedent(SETUP.format(tests=str(Path(__file__).parents[1]))))
    made, page = tmp_path / "made", tmp_path / "page.html"
    result = call(
        "ask", folder, f"{setup}:questions", "--answers", made, "--tokens", "--examples", examples,
        "-n", 2, "-o", page,
    )  # fmt: skip
    pd.testing.assert_frame_equal(inrun.open_answers(made).scores, scores, rtol=1e-9)
    assert inrun.open_answers(made).tokens is not None and page.is_file()
    assert "two & <b>" in result.stdout and str(page) in result.stdout
    first = scores.nlargest(1, "one")
    shown = json.loads(call("ask", folder, "--answers", made, "--json", "-n", 1).stdout)
    top = shown["questions"][0]["examples"][0]
    assert shown["examples"] == N and top["id"] == first["id"].item()
    assert top["score"] == pytest.approx(first["one"].item(), rel=1e-4)
    low = json.loads(call("ask", folder, "--json", "-n", 1, "--worst").stdout)["questions"][0]
    assert low["examples"][0]["score"] == pytest.approx(scores["one"].min(), rel=1e-4)
    assert names == [q["question"] for q in shown["questions"]]
    assert np.isfinite(low["loss"])
    refused = {
        (folder, f"{setup}:nothing"): "has no function 'nothing'",
        (folder, f"{setup}:number"): "has no function 'number'",
        (folder, f"{setup}:fewer"): "must return a dict with model, data, queries",
        (folder, f"{setup}:more"): "returned 'out', which is none of",
        (folder, f"{setup}:once", "--tokens"): "an iterator can be read only once",
        (folder, "no_such_module:questions"): "there is no module 'no_such_module'",
        (folder, str(tmp_path / "none.py") + ":questions"): "there is no file",
        (folder, "just_a_word"): "my_file.py:function or module:function",
        (folder, "--tokens"): "--tokens needs SETUP",
        (folder, "--answers", tmp_path / "nowhere"): "holds no answers",
    }
    for args, why in refused.items():
        assert why in call("ask", *args, code=2).stderr
    asked_model(tmp_path / "plain")
    assert "has no answers yet" in call("ask", tmp_path / "plain", code=2).stderr

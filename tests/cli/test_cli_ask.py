"""`inrun ask`: asks, goes on, shows, and refuses in one line."""

import json
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import inrun
from helpers.asking import N, answered, asked_model
from inrun.cli.app import app


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    return answered(tmp_path_factory.mktemp("asked") / "run")


def call(*args, code=0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, result.output + result.stderr
    return result


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

def noisy(run):
    import torch

    found = questions(run)
    return found | {{"loss": lambda model, ids: next_word(model, ids) * torch.rand(())}}

number = 3

def broken(run):
    raise ValueError("of the user's")
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
    assert "two & <b>" in result.stdout
    assert str(page) in "".join(result.stdout.split())  # a long path is broken
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
    failed = CliRunner().invoke(app, ["ask", str(folder), f"{setup}:broken"])
    assert isinstance(failed.exception, RuntimeError)  # with its traceback
    assert "of the user's" in str(failed.exception.__cause__)
    other = ("--answers", tmp_path / "noisy")
    assert "do not add up" in call("ask", folder, f"{setup}:noisy", *other, code=2).stderr
    for args, why in refused.items():
        assert why in call("ask", *args, code=2).stderr
    asked_model(tmp_path / "plain")
    assert "has no answers yet" in call("ask", tmp_path / "plain", code=2).stderr

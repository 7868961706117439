"""The demo through the command line, smaller: its numbers are sane and its report opens."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

import inrun
from inrun.cli.app import app
from inrun.demo import digits, passages


def call(*args, code=0):
    result = CliRunner().invoke(app, ["demo", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(digits, "WIDTH", 8)
    monkeypatch.setattr(digits, "RETRAINED", 1)
    monkeypatch.setattr(digits, "VALIDATION", 100)
    monkeypatch.setattr(digits, "TEST", 1297)  # leaves 400 for training


def test_the_digits_demo_finds_flipped_labels(tmp_path, small):
    pytest.importorskip("sklearn")
    out = tmp_path / "demo"
    result = call("--out", out, "--epochs", 12, "--json")
    numbers = json.loads(result.stdout)
    mean = numbers["mean"]
    assert mean["examples"] == 400 and mean["flipped"] == 40
    assert mean["auroc"]["harm"] > 0.8 and set(mean["auroc"]) == set(digits.RANKINGS)
    assert mean["auroc"]["harm"] > mean["auroc"]["sgd"]
    assert all(0 <= p <= 1 for p in mean["precision_at_k"].values())
    assert all(a > 0.5 for a in [mean["accuracy"], *mean["accuracy_after"].values()])
    assert mean["explained"] == pytest.approx(1, abs=0.15)
    for words in (*digits.RANKINGS.values(), "of most harm", "report.html"):
        assert words in result.stderr
    page = (out / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>") and "data:image/png" in page
    assert "flipped label" in page
    saved = inrun.open(out)
    assert saved.estimators == list(digits.WATCHED) and len(saved.values()) == 400
    assert saved.targets == [str(i) for i in range(10)]
    result = call("--out", out, "--epochs", 1)  # a demo's folder is overwritten
    assert "Finding the 40 flipped labels" in result.stdout
    assert len(inrun.open(out).steps()) == 7


def test_the_text_demo_names_passages_for_each_question(tmp_path, monkeypatch):
    some = dict(list(passages.passages().items())[:64])
    monkeypatch.setattr(passages, "passages", lambda: some)
    result = call("--task", "text", "--out", tmp_path / "demo", "--epochs", 2, "--json")
    numbers = json.loads(result.stdout)
    assert numbers["passages"] == 64 and numbers["steps"] == 8
    for name, question in numbers["questions"].items():
        assert question["loss"][1] < question["loss"][0]
        assert len(question["taught_by"]) == passages.SHOWN and set(question["taught_by"]) <= {
            *some
        }
        assert passages.QUESTIONS[name].split("?")[0] in " ".join(result.stderr.split())
    page = (tmp_path / "demo" / "report.html").read_text("utf-8")
    by_word = json.loads(page.split('id="data">')[1].split("</script>")[0])["tokens"]
    assert by_word["count"] == passages.BATCH and by_word["words"]
    for text in by_word["texts"]:  # the last step, in the words of the passage
        assert text["step"] == 7
        assert some[text["id"]].startswith("".join(piece for piece, *_ in text["pieces"]))


def test_passages_are_readable_pieces_that_come_once():
    found = passages.passages()
    assert len(found) > 500 and len(set(found.values())) == len(found)
    assert any(key.startswith("with/") for key in found)
    everything = " ".join(" ".join(text.split()) for text in found.values())
    assert all(q not in everything for q in passages.QUESTIONS.values())
    vocabulary = passages.Vocabulary(list(found.values()))
    tokens = vocabulary.encode(["with with nonsensical", "a"])
    assert tokens.shape == (2, 3) and tokens[0, 2] == passages.RARE
    assert tokens[1].tolist()[1:] == [passages.PAD] * 2


def test_bad_input_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("x")
    cases = {
        ("--out", tmp_path / "mine"): "was not made by a demo",
        ("--out", tmp_path / "file"): "is a file, not a folder",
        ("--task", "text", "--seeds", 2): "--seeds is for the digits demo",
    }
    for args, message in cases.items():
        result = call(*args, code=2)
        assert message in result.stderr and result.stderr.count("\n") == 1
    assert (tmp_path / "mine" / "thesis.txt").exists()
    for name in ("thesis.txt", "values/thesis.txt", "values/part-1.parquet/thesis.txt"):
        folder = tmp_path / f"demo-{len(name)}"  # a demo's, with a file of somebody else's
        (folder / name).parent.mkdir(parents=True)
        for file in ("demo.json", "report.html", name):
            (folder / file).write_text("{}")
        result = call("--out", folder, code=2)
        assert f"{folder / name} was not made by a demo" in result.stderr
        assert (folder / name).exists() and (folder / "report.html").exists()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = call("--out", tmp_path / "new", code=2)
    assert "pip install 'inrun[demo]'" in result.stderr
    assert not (tmp_path / "new").exists()

"""``inrun variants`` as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from helpers.chat_server import KEY, ChatServer, Status, completion, slow
from helpers.variants import SOURCES, fine, good, rows
from inrun.cli.app import app


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "100")
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(s.z_star for s in SOURCES[:3]) + "\n\n" + SOURCES[4].z_star, "utf-8")
    return file


def call(*args, code=0):
    result = CliRunner().invoke(app, ["variants", *map(str, args)])
    assert result.exit_code == code, result.output + result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_the_command_asks_once_and_samples(texts, tmp_path):
    with ChatServer(fine) as server:
        ask = (texts, "--model", "m", "--base-url", server.url)
        text = " ".join(call(*ask).stdout.split())
        assert "complete 4 of 4 sources" in text and "in variants.jsonl" in text
        assert [r["id"] for r in rows(tmp_path / "variants.jsonl")] == [0, 1, 2, 4]  # lines
        facts = json.loads(call(*ask, "--json").stdout)
        assert (facts["there"], facts["asked"], facts["output"]) == (4, 0, "variants.jsonl")
        two = call(*ask, "--sample", 2, "-k", 2, "--seed", 3, "-o", "two.jsonl").stdout
        assert "2 of 2 sources" in " ".join(two.split())
        assert [len(r["paraphrase"]) for r in rows(tmp_path / "two.jsonl")] == [2, 2]
    text = " ".join(call("--check", "variants.jsonl").stdout.split())
    assert "complete 4 sources have 1 partial_same and 3" in text
    assert "paraphrase 0.2–0.8 12 12" in text


def test_sources_that_are_short_or_had_no_reply_are_listed(texts):
    def answer(text, request):
        if text == SOURCES[0].z_star:
            raise Status(400, "too [bold]long[/bold]")
        few = good(text) | {"similar_topic": ["Bruno sat down [red]again."]}
        return completion(json.dumps(few)) if text == SOURCES[1].z_star else fine(text, request)

    with ChatServer(answer) as server:
        ask = (texts, "--model", "m", "--base-url", server.url, "--rounds", 2)
        text = " ".join(call(*ask, code=1).stdout.split())
        facts = json.loads(call(*ask, "--json", code=1).stdout)
    assert "complete 2 of 4 sources" in text
    assert "short 1: lacks 3 × similar_topic" in text
    assert "no reply 0: 127.0.0.1 answered HTTP 400, too [bold]long[/bold]" in text
    assert "next run the same command again" in text
    assert facts["short"] == [{"id": 1, "lacks": {"similar_topic": 3}}]
    assert [x["id"] for x in facts["failed"]] == [0] and facts["dropped"]["forbidden word"] == 2


def test_check_says_what_fails_and_why(tmp_path):
    row = SOURCES[0]._asdict() | good(SOURCES[0].z_star)
    row["similar_topic"][0] = "Dairy prices hurt [red]Alba again."
    (tmp_path / "v.jsonl").write_text(json.dumps(row) + "\n")
    text = " ".join(call("--check", tmp_path / "v.jsonl", code=1).stdout.split())
    assert "0 sources have" in text
    assert "0 similar_topic: forbidden word, alba Dairy prices hurt [red]Alba again." in text
    report = json.loads(call(tmp_path / "v.jsonl", "--check", "--json", code=1).stdout)
    assert report["categories"]["similar_topic"]["forbidden word"] == 1
    assert report["short"] == [{"id": 0, "lacks": {"similar_topic": 1}}]
    narrow = ("--window", "paraphrase=0.99:1", "-k", 2)
    report = json.loads(call(tmp_path / "v.jsonl", "--check", "--json", *narrow, code=1).stdout)
    assert report["categories"]["paraphrase"]["overlap"] == 3


def test_bad_input_is_one_line_and_exit_code_2(texts, tmp_path):
    files = {
        "list.jsonl": "[1]\n",
        "none.jsonl": '{"id": 1}\n',
        "twice.jsonl": '{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}\n',
        "float.jsonl": '{"id": 1.5, "text": "a"}\n',
        "empty.txt": "\n\n",
        "string.jsonl": '{"z_star": "a", "paraphrase": "b"}\n',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    m = ("--model", "m")
    cases = {
        (texts,): "--model is missing",
        ("nowhere.txt", *m): "nowhere.txt: no such file",
        ("texts.csv", *m): "sources come from .txt (one per line) or .jsonl",
        ("list.jsonl", *m): "list.jsonl, line 1 is not a JSON object",
        ("none.jsonl", *m): "line 1 has no text: name the field z_star or text or sentence",
        ("twice.jsonl", *m): "the id 1 occurs twice",
        ("float.jsonl", *m): "the id is 1.5; it must be an integer or a string",
        ("empty.txt", *m): "empty.txt holds no source",
        ("latin.txt", *m): "latin.txt is not UTF-8 text",
        (texts, *m, "--request", "[]"): "--request []: write a JSON object",
        (texts, *m, "--window", "x=0:1"): "write CATEGORY=LOW:HIGH",
        (texts, *m, "--base-url", "localhost"): "write it as http(s)://HOST/v1",
        (texts, *m, "--key-env", "NO_SUCH_KEY"): "variable NO_SUCH_KEY is not set",
        ("--check", "string.jsonl"): "line 1: paraphrase is not a list of strings",
    }
    for args, message in cases.items():
        result = call(*args, code=2)
        assert message in result.stderr, args
        assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


def listening():
    """A process started in the background of a shell ignores interrupts, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupted_it_says_so_and_goes_on_later(texts, tmp_path):
    slowly = lambda text, request: slow(  # noqa: E731
        600 if text == SOURCES[2].z_star and len(server.requests) <= 4 else 0, fine(text, request)
    )
    with ChatServer(slowly) as server:
        args = ["variants", str(texts), "--model", "m", "--base-url", server.url]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-m", "inrun", *args], env=env, stderr=subprocess.PIPE, text=True,
            preexec_fn=listening,
        )  # fmt: skip
        out = tmp_path / "variants.jsonl"
        try:
            while process.poll() is None and not (out.exists() and len(rows(out)) == 3):
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 130, said
        assert "inrun: stopped." in said and "run the same command again" in said
        assert "Traceback" not in said
        assert sorted(r["id"] for r in rows(out)) == [0, 1, 4]
        facts = json.loads(call(*args[1:], "--json").stdout)
        assert (facts["there"], facts["complete"], facts["asked"]) == (3, 1, 1)
    assert [r["id"] for r in rows(out)] == [0, 1, 2, 4]

"""The commands of the guide, as they stand there, at small size."""

import importlib.util
import re
import shlex
import shutil
from pathlib import Path

import torch
from typer.testing import CliRunner

import inrun
from inrun.cli.app import app

ROOT = Path(__file__).parents[2]
GUIDE, PAGE = ROOT / "docs" / "guide-ask.md", ROOT / "docs" / "commands" / "ask.md"


def commands(page):
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_the_guide_asks_and_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    Path("examples").mkdir()
    shutil.copy(ROOT / "examples" / "ask_docs.py", "examples")
    first, ask, report = commands(GUIDE)
    assert first == ["python", "examples/ask_docs.py"]
    spec = importlib.util.spec_from_file_location("ask_docs", first[1])
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(["--passages", "40", "--epochs", "1"])
    for command in (ask, report, *commands(PAGE)):
        assert command[0] == "inrun"
        result = CliRunner().invoke(app, command[1:])
        assert result.exit_code == 0, result.output + result.stderr
        if command[1] == "ask":
            assert all(question in result.stdout for question in ("What is a slice?", "loss "))
    answers = inrun.open_answers("runs/docs/answers")
    assert answers.questions == list(script.QUESTIONS) and answers.examples == 40
    sums = answers.tokens.groupby("id")[answers.questions].sum()
    wanted = answers.scores.set_index("id").loc[sums.index, answers.questions]
    assert (sums - wanted).abs().to_numpy().max() < 1e-3 * wanted.abs().to_numpy().max()
    assert Path("answers.html").read_text().count("What is a slice?") == 1
    assert "What is a slice?" in Path("report.html").read_text()

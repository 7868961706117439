"""The scripts in examples/ that run in one process, in this one, at tiny size."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import inrun

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCUMENTED = [p for p in sorted(EXAMPLES.glob("*.py")) if "Recorded" in p.read_text("utf-8")]


@pytest.fixture(autouse=True)
def _script_settings(monkeypatch):
    torch.set_default_dtype(torch.float32)  # as a script finds it
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def main_of(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        return module.main
    finally:
        del sys.modules[spec.name]


def check(run, steps, examples, explained=0.1):
    table = run.steps()
    assert len(table) == steps and table["void"].isna().all()
    assert len(run.values()) == examples and run.values()["value"].notna().all()
    if explained is not None:
        assert table["explained"].dropna().iloc[0] == pytest.approx(1, abs=explained)


def test_mnist(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    run = main_of("mnist")(["--train", "96", "--epochs", "1", "--batch-size", "32"])
    check(run, steps=3, examples=96)
    assert "harm finds the" in capsys.readouterr().out


def test_imagenet_and_its_resumption(tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    main = main_of("imagenet")
    small = ["--train", "64", "--batch-size", "32", "--width", "4", "--lr", "0.01"]

    def train(name, epochs, *more):
        return main([*small, "--out", str(tmp_path / name), "--epochs", epochs, *more])

    check(train("run", "1"), steps=2, examples=64)
    assert (tmp_path / "run/checkpoint.pth").is_file()
    check(train("run", "2", "--resume"), steps=4, examples=64)
    assert inrun.open(tmp_path / "run").values()["steps"].tolist() == [2] * 64


def test_word_language_model():
    small = ["--words", "1300", "--width", "8", "--epochs", "1", "--batch-size", "6", "--lr", "1"]
    check(main_of("word_language_model")(small), steps=6, examples=36)


def test_nanogpt_and_its_resumption(tmp_path):
    main = main_of("nanogpt")
    small = ["--n_embd=16", "--n_layer=1", "--block_size=16", "--batch_size=4", "--eval_iters=1",
             "--eval_interval=2", "--warmup_iters=2", "--min_lr=3e-3"]  # fmt: skip

    def train(name, *more):
        return main([*small, f"--out_dir={tmp_path / name}", "--max_iters=4", *more])

    whole = train("whole")
    assert len(whole.steps()) == 4 and whole.steps()["void"].isna().all()
    assert len(whole.history()) == 4 * 8
    checkpoint = tmp_path / "parts/ckpt.pt"
    main([*small, f"--out_dir={tmp_path / 'parts'}", "--max_iters=2"])
    assert torch.load(checkpoint, weights_only=True)["iter_num"] == 2
    again = train("parts", "--init_from=resume")
    assert len(again.steps()) == 4
    assert again.history().equals(whole.history())
    with pytest.raises(SystemExit, match="no setting 'nlayer'"):
        main(["--nlayer=1"])


def test_timm_train(tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    small = ["--train", "64", "--epochs", "1", "--width", "8", "--depth", "1", "--batch-size", "32"]
    run = main_of("timm_train")([*small, "--output", str(tmp_path)])
    check(run, steps=2, examples=64)
    lines = (tmp_path / "summary.csv").read_text().splitlines()
    assert lines[0].startswith("epoch,train_loss") and len(lines) == 2


OURS = ["--use_cpu", "True", "--disable_tqdm", "True", "--num_train_epochs", "1",
        "--learning_rate", "1e-4"]  # fmt: skip
theirs = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning"
)


@theirs
@pytest.mark.parametrize("source", ["pages", "files"])
def test_run_glue(tmp_path, source, capsys):
    pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
    pytest.importorskip("accelerate", reason="needs the extra inrun[hf]")
    small = ["--max_train_samples", "48", "--max_seq_length", "16", "--width", "8",
             "--per_device_train_batch_size", "16", "--output_dir", str(tmp_path)]  # fmt: skip
    if source == "files":
        for part, n in {"train": 48, "dev": 12}.items():
            rows = [f'a "{["good", "bad"][i % 3 > 0]}" {i}\t{int(i % 3 > 0)}' for i in range(n)]
            (tmp_path / f"{part}.tsv").write_text("\n".join(["sentence\tlabel", *rows]), "utf-8")
        small += ["--data", str(tmp_path)]
    run = main_of("run_glue")([*OURS, *small])
    # the mean over labels hardly moves in the first step: what it explains is rounding
    check(run, steps=3, examples=48, explained=None)
    assert run.values()[run.targets].abs().to_numpy().max() > 1e-6
    assert (tmp_path / "inrun/report.html").is_file()
    assert ("harm finds the" in capsys.readouterr().out) == (source == "pages")


@theirs
@pytest.mark.parametrize("source", ["pages", "files"])
def test_run_clm(tmp_path, source):
    pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
    pytest.importorskip("accelerate", reason="needs the extra inrun[hf]")
    small = ["--max_train_samples", "32", "--block_size", "8", "--width", "8",
             "--max_eval_samples", "8", "--output_dir", str(tmp_path)]  # fmt: skip
    if source == "files":
        for part, n in {"train_file": 60, "validation_file": 20}.items():
            file = tmp_path / f"{part}.txt"
            file.write_text("\n".join(f"line {i} has {i % 7} words" for i in range(n)), "utf-8")
            small += [f"--{part}", str(file)]
    run = main_of("run_clm")([*OURS, *small])
    check(run, steps=2, examples=32)
    assert run.values()["id"].str.contains(" @ block ").all()


def test_each_says_what_it_found():
    scripts = [p.stem for p in EXAMPLES.glob("*.py") if "def main(argv" in p.read_text("utf-8")]
    assert len(scripts) == 7 and sorted(scripts) == [p.stem for p in DOCUMENTED]

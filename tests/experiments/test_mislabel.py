"""Who finds flipped labels: every detector against a slow and obvious version of itself."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments import load
from experiments.common.parts import Context, reproduce
from experiments.mislabel import detectors, parts, problems
from experiments.mislabel.summary import ORDER, confident, cost_table
from experiments.mislabel.training import Trainer, copy_of, taken
from helpers.tiny_experiment import run

pytest.importorskip("sklearn", reason="needs the extra inrun[experiments]")

CPU = Context(torch.device("cpu"))
DIGITS = parts("tiny")["digits-20"] | {"examples": 40, "epochs": 2, "channels": 2, "each": 4}
TEXT = parts("tiny")["text-20"] | {"examples": 20, "epochs": 1, "batch": 10}


def trainer(settings):
    torch.set_default_dtype(torch.float32)
    return Trainer(problems.make(settings, CPU), settings, CPU)


def gradients(mine, model):
    """One row per training example, by plain autograd."""
    x, y = mine.problem.train
    rows = []
    for i in range(len(y)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())]))
    return torch.stack(rows)


def test_the_tiny_experiment_has_every_detector(tmp_path):
    pytest.importorskip("cleanlab", reason="needs the extra inrun[experiments]")
    pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
    summary = run("mislabel", tmp_path)
    assert {s["task"] for s in summary.values()} == {"digits", "passages"}
    for s in summary.values():
        assert set(s["detectors"]) == set(ORDER) and s["flips"] == round(0.2 * s["examples"])
    found = summary["digits, 8 epochs, 20% flipped"]
    auroc = {name: c["auroc"]["mean"] for name, c in found["detectors"].items()}
    assert found["accuracy"]["mean"] > 0.7
    assert auroc["harm, secant"] > 0.9 and auroc["confident learning"] > 0.9
    assert auroc["harm, secant"] > auroc["secant"] > 0.6  # harm ranks suspects, sums do not
    assert auroc["loss, end"] > 0.9
    # measured seconds; that their order is right is seen where passes are counted, below
    assert all(np.isfinite(c["cost"]["mean"]) for c in found["detectors"].values())
    untimed = next(s for s in summary.values() if s["task"] == "passages")["detectors"]
    assert all(c["cost"] is None and c["counted"] > 0 for c in untimed.values())
    shown = cost_table({"tiny": {"summary": summary}})
    assert f"({untimed['EL2N']['counted']:.2f})" in shown and shown.count("–") == 1


@pytest.mark.parametrize("settings", [DIGITS, TEXT], ids=["digits", "text"])
def test_gradients_of_examples_are_those_of_autograd(settings):
    if settings is TEXT:
        pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
    mine = trainer(settings)
    model = mine.problem.build(3)
    weights, rows = taken(model), gradients(mine, model)
    np.testing.assert_allclose(mine.norms(weights), rows.norm(dim=1), rtol=1e-3)
    x, y = mine.problem.validation
    by_label = torch.stack(
        [F.cross_entropy(model(x[y == c]), y[y == c]) for c in range(mine.problem.classes)]
    ).mean()
    target = torch.autograd.grad(by_label, list(model.parameters()))
    direction = mine.validation_gradient(weights)
    for mine_too, g in zip(direction.values(), target, strict=True):
        torch.testing.assert_close(mine_too, g, rtol=1e-3, atol=1e-6)
    expected = rows @ torch.cat([g.flatten() for g in target])
    torch.testing.assert_close(mine.alignment(weights, direction), expected, rtol=1e-2, atol=1e-4)
    losses = F.cross_entropy(model(mine.problem.train[0]), mine.problem.train[1], reduction="none")
    torch.testing.assert_close(mine.losses(weights), losses.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [20, 15])  # 40 examples: epochs may end with a smaller batch
def test_side_by_side_is_one_by_one(batch):
    mine = trainer(DIGITS | {"batch": batch})
    seeds = [DIGITS["seed"], DIGITS["seed"] + 7]
    everything = np.arange(mine.problem.examples)
    orders = [mine.order(everything, seed) for seed in seeds]
    stack = mine.side_by_side(seeds, orders, mine.steps)
    *_, (steps, model, _) = mine.run()
    assert steps == mine.steps
    for k, w in taken(model).items():
        torch.testing.assert_close(copy_of(stack, 0)[k], w, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(copy_of(stack, 1)[k], w, atol=1e-3)


def test_watching_leaves_the_training_alone():
    mine = trainer(DIGITS)
    weights = []
    for estimators in ((), ("secant",)):
        *_, (_, model, _) = mine.run(estimators)
        weights.append(taken(model))
    assert all(torch.equal(weights[0][k], w) for k, w in weights[1].items())


def test_out_of_fold_probabilities_do_not_see_the_own_label():
    mine, other = trainer(DIGITS), trainer(DIGITS)
    other.problem.train[1][3] = (other.problem.train[1][3] + 1) % 10
    a, b = (np.asarray(detectors.out_of_fold(t)["probabilities"]) for t in (mine, other))
    assert a.shape == (40, 10) and np.allclose(a.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(a[3], b[3], atol=1e-6)
    assert np.abs(a - b).max() > 1e-4  # the others' trainings saw it
    with pytest.raises(ValueError, match="equal folds"):
        detectors.out_of_fold(trainer(DIGITS | {"examples": 41}))


def test_flips_change_labels_only_and_targets_are_balanced():
    torch.set_default_dtype(torch.float32)
    clean = problems.make(DIGITS | {"rate": 0.0}, CPU)
    problem = problems.make(DIGITS | {"rate": 0.25}, CPU)
    assert torch.equal(clean.train[0], problem.train[0])
    assert ((clean.train[1] != problem.train[1]).numpy() == problem.flipped).all()
    assert problem.flipped.sum() == 10
    targets = problem.targets(2, by_label=True)
    assert len(targets) == 10 and all(len(b) == 2 for b in targets.values())
    assert all((y == int(c)).all() for c, batches in targets.items() for _, y in batches)
    (joined,) = problem.targets(2, by_label=False).values()
    assert [len(y) for _, y in joined] == [20, 20]
    with pytest.raises(ValueError, match="of each label are wanted"):
        problems.make(DIGITS | {"each": 500}, CPU)


def test_checkpoints_are_spread_and_end_with_the_last():
    assert detectors.checkpoints({"checkpoints": 5, "epochs": 20}) == [3, 7, 11, 15, 19]
    assert detectors.checkpoints({"checkpoints": 5, "epochs": 3}) == [0, 1, 2]


def test_cost_by_counting_passes():
    found = detectors.counted(trainer(DIGITS | {"epochs": 2}))
    assert set(found) == set(ORDER)
    assert found["loss, end"] == pytest.approx(1 / 6)  # one forward pass of 2 × 3
    assert found["confident learning"] == pytest.approx(4 + 1 / 6)


def test_missing_cleanlab_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cleanlab.filter", None)
    said = []
    some = {"tiny": {"digits-20": DIGITS | {"epochs": 1, "early": 1}, "text-20": TEXT}}
    experiment = replace(load("mislabel"), parts=some.get)
    reproduce(experiment, "tiny", tmp_path, only=["digits"], device="cpu", show=said.append)
    assert "the parts are saved" in said[-1] and (tmp_path / "parts" / "digits-20.json").exists()
    with pytest.raises(ValueError, match=r"inrun\[experiments\]"):
        confident({"labels": "01", "flipped": [0], "probabilities": "0.5 0.5 0.5 0.5"})

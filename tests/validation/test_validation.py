"""Targets, estimators side by side, the order of validation batches, resuming, memory."""

import gc
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import inrun
from inrun.ledger.entries import MemoryLedger
from inrun.validation.targets import Batches


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def problem(seed=0, **options):
    torch.manual_seed(seed)
    X, Y = torch.randn(60, 4), torch.randint(0, 3, (60,))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if "targets" not in options:
        options.setdefault("validation", [(X[40:50], Y[40:50]), (X[50:], Y[50:])])
    run = inrun.watch(model, optimizer, loss=loss, **options)

    def step(t):
        rows = torch.arange(8) + 8 * (t % 5)
        with run.batch(rows):
            loss(model, (X[rows], Y[rows])).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run, step, (X, Y)


def test_a_loader_is_cycled_in_its_own_order():
    data = TensorDataset(torch.arange(5))
    batches = Batches("v", DataLoader(data, batch_size=2), seed=0)
    drawn = [b[0].tolist() for b in batches.take(7)]
    assert drawn == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4], [0, 1]]


def test_a_shuffling_loader_leaves_the_random_state_alone_and_can_be_resumed():
    data = TensorDataset(torch.arange(50))
    make = lambda: Batches("v", DataLoader(data, batch_size=7, shuffle=True), seed=3)  # noqa: E731
    batches = make()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = [b[0].tolist() for b in batches.take(11)]
    state = batches.state_dict()
    rest = [b[0].tolist() for b in batches.take(9)]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])
    assert first[:8] != first[8:], "each epoch has an order of its own"
    again = make()
    again.load_state_dict(state)
    assert [b[0].tolist() for b in again.take(9)] == rest


def test_targets_have_columns_and_value_is_their_mean():
    X, Y = torch.randn(60, 4), torch.randint(0, 3, (60,))
    targets = {"first": [(X[:9], Y[:9])], "second": [(X[9:20], Y[9:20])]}
    run, step, _ = problem(targets=targets)
    for t in range(3):
        step(t)
    values = run.values()
    columns = ["id", "value", "first", "second", "steps", "scored"]
    assert list(values.columns) == [*columns, "loss", "el2n", "margin", "loss_change"]
    assert np.allclose(values["value"], values[["first", "second"]].mean(axis=1))
    assert list(run.history().columns)[:5] == ["step", "id", "value", "first", "second"]
    alone, step, _ = problem(validation=targets["second"])
    for t in range(3):
        step(t)
    assert np.allclose(alone.values()["value"], values["second"], rtol=1e-9)


def test_by_label_gives_one_target_per_label():
    X, Y = torch.randn(30, 4), torch.arange(30) % 3
    targets = inrun.by_label(TensorDataset(X, Y), batch_size=4)
    assert list(targets) == ["0", "1", "2"]
    assert all((y == int(k)).all() for k, loader in targets.items() for _, y in loader)
    rows = [{"x": float(i), "label": "ab"[i % 2]} for i in range(6)]
    assert {k: len(v.dataset) for k, v in inrun.by_label(rows).items()} == {"a": 3, "b": 3}
    assert list(inrun.by_label(rows, [1, 1, 1, 2, 2, 2])) == ["1", "2"]
    assert list(inrun.by_label(rows, lambda r: r["x"] > 2)) == ["False", "True"]
    with pytest.raises(inrun.ValidationError, match="2 labels for 6 rows"):
        inrun.by_label(rows, [1, 2])
    run, step, _ = problem(targets=targets)
    step(0)
    assert {"0", "1", "2"} <= set(run.values().columns)


def test_estimators_side_by_side_are_those_of_separate_runs():
    names = ["secant", "tangent", "sgd", "secant+gauss2", "tangent+midpoint"]
    together, step, _ = problem(estimator=names)
    for t in range(4):
        step(t)
    for name in names:
        alone, step, _ = problem(estimator=name)
        for t in range(4):
            step(t)
        assert np.allclose(
            together.history(name)["value"], alone.history()["value"], rtol=1e-12, atol=0
        ), name
    point, step, _ = problem(estimator="secant", point="gauss2")
    for t in range(4):
        step(t)
    assert np.allclose(point.history()["value"], together.history("secant+gauss2")["value"])


def test_chunks_and_per_step_average_the_loss():
    X, Y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    tables = []
    for options in (
        {"validation": [(X, Y)]},
        {"validation": [(X, Y)], "chunk": 7},
        {"validation": [(X[:10], Y[:10]), (X[10:], Y[10:])], "per_step": 2},
    ):
        run, step, _ = problem(**options)
        for t in range(3):
            step(t)
        tables.append(run.history()["value"])
    assert np.allclose(tables[0], tables[1], rtol=1e-9)
    assert np.allclose(tables[0], tables[2], rtol=1e-9)


def test_random_steps_are_weighted_and_unscored_examples_are_nan():
    run, step, _ = problem(every=3, seed=1)
    for t in range(10):
        step(t % 4 if t < 8 else 4)  # rows 32..39 come in the last two steps only
    scored = run.steps()["sum"].notna()
    assert 0 < scored.sum() < 10
    values, history = run.values().set_index("id"), run.history()
    assert values["steps"].sum() == 80
    seen = history.groupby("id")["value"].sum() * 3
    assert np.allclose(values["value"].dropna(), seen.reindex(values["value"].dropna().index))
    never = set(values.index) - set(history["id"])
    assert values.loc[sorted(never), "value"].isna().all()


def test_audits_are_not_missed_by_random_steps():
    run, step, _ = problem(every=3, audit_every=5, seed=1)
    for t in range(30):
        step(t)
    audited = run.steps().dropna(subset="explained")["step"]
    scored = run.steps().dropna(subset="sum")["step"]
    first = {s // 5: s for s in sorted(scored, reverse=True)}  # the first scored of each five
    assert sorted(audited) == sorted(first.values())


def test_resuming_gives_the_values_of_an_uninterrupted_run(tmp_path):
    whole, step, _ = problem()
    for t in range(10):
        step(t)
    first, step, _ = problem()
    for t in range(6):
        step(t)
    checkpoint = {
        "model": first.model.state_dict(),
        "optimizer": first.optimizer.state_dict(),
        "run": first.state_dict(),
    }
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    for t in range(6, 8):  # work that the crash undoes
        step(t)
    second, step, _ = problem(seed=0)
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    second.model.load_state_dict(loaded["model"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    second.load_state_dict(loaded["run"])
    for t in range(6, 10):
        step(t)
    assert second.history().equals(whole.history())
    assert second.steps().equals(whole.steps())


def test_memory_does_not_grow(monkeypatch):
    """Apart from the history, what lives after 170 steps is what lived after 110, when
    orders are sampled no longer."""
    monkeypatch.setattr(MemoryLedger, "append", lambda ledger, record: None)
    monkeypatch.setattr("inrun.capture.later.BATCHES", 10)  # none wait at either count
    _, step, _ = problem(audit_every=10)

    def tensors():
        gc.collect()
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return len(found), sum(t.numel() * t.element_size() for t in found)

    for t in range(110):
        step(t)
    at_110 = tensors()
    for t in range(110, 170):
        step(t)
    count, size = tensors()  # fewer where another test's were still being let go of
    assert count <= at_110[0] and size <= at_110[1]


def test_random_states_survive_the_validation_loss():
    def noisy(model, batch):
        random.random()
        np.random.rand()
        return loss(model, (batch[0] + torch.randn(4), batch[1]))

    torch.manual_seed(0)
    X, Y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = inrun.watch(model, optimizer, validation=[(X, Y)], loss=noisy)
    with run.batch(range(8)):
        loss(model, (X, Y)).backward()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    optimizer.step()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])

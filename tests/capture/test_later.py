"""Signals of small classifiers that wait for others: the same numbers whenever they are read."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inrun
from inrun.capture import later, signals
from inrun.capture.later import Deferred, Several, Together

N, C = 24, 5


def obvious(z: Tensor, y: Tensor) -> np.ndarray:
    """[4, B] of logits and labels."""
    p = z.double().softmax(1)
    onehot = F.one_hot(y, z.shape[1])
    own = (z.double() * onehot).sum(1)
    margin = own - z.double().masked_fill(onehot.bool(), -torch.inf).amax(1)
    loss = F.cross_entropy(z.double(), y, reduction="none")
    return torch.stack([loss, (p - onehot).norm(dim=1), margin, y.double()]).numpy()


def kept(
    together: Together, B: int, classes: int, ignore: int = -100
) -> tuple[Deferred, np.ndarray]:
    z, y = torch.randn(B, classes), torch.randint(classes, (B,))
    wanted = obvious(z, y)
    if ignore >= 0:
        wanted[:, (y == ignore).numpy()] = np.nan
    return Deferred(z.log_softmax(1), y, ignore, together), wanted


def test_each_step_gets_its_own_signals():
    torch.manual_seed(0)
    together = Together()
    steps = [kept(together, B, c, i) for B, c, i in [(4, 3, -100), (6, 3, 1), (2, 7, 0), (5, 3, 2)]]
    for step, _ in steps:
        step.wait()
    for step, wanted in reversed(steps):
        np.testing.assert_allclose(np.asarray(step), wanted, rtol=2e-6, atol=1e-6)
        assert step.shape == wanted.shape and step.nbytes == np.asarray(step).nbytes
        assert not step.logp.numel()  # what it was made of is gone


def test_they_are_computed_when_many_wait(monkeypatch):
    monkeypatch.setattr(later, "MOST", 30)
    together = Together()
    first, second = kept(together, 4, 5)[0], kept(together, 4, 5)[0]
    first.wait()
    first.wait()  # once is enough
    assert first.signals is None
    second.wait()
    assert first.signals is not None and second.signals is not None


def test_one_that_nobody_waits_for_and_copies():
    together = Together()
    one, wanted = kept(together, 4, 3)
    other, behind = kept(together, 2, 3)
    both = Several([one, other])
    assert both.shape == (4, 6) and both.nbytes == 96
    np.testing.assert_allclose(np.asarray(both), np.hstack([wanted, behind]), rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(one), copy.copy(one).__array__())


@pytest.mark.parametrize("piece", [7, 2**16])
def test_pieces(monkeypatch, piece):
    monkeypatch.setattr(later, "PIECE", piece)
    one, wanted = kept(Together(), 9, 3)
    np.testing.assert_allclose(np.asarray(one), wanted, rtol=2e-6, atol=1e-6)


def training(run_steps, out=None, micro=1, state=None, write=False, steps=9):
    """A run; ``run_steps(run, step)`` is called after each. What it recorded, and its state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, C))
    x, y = torch.randn(N, 4), torch.randint(C, (N,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with inrun.watch(
        model, optimizer, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), out=out,
        validation=[(x[:6], y[:6])], estimator="secant",
    ) as run:  # fmt: skip
        if state is not None:
            run.load_state_dict(state[0])
            model.load_state_dict(state[1])
            optimizer.load_state_dict(state[2])
        for step in range(0 if state is None else state[3], steps):
            rows = torch.arange(8) + 8 * (step % 3)
            for part in rows.chunk(micro):
                with run.batch(part.tolist()):
                    xs, ys = x[part], y[part].clone()
                    (F.cross_entropy(model(xs), ys) / micro).backward()
                if write:
                    ys.zero_()  # the labels are the loop's own
            optimizer.step()
            optimizer.zero_grad()
            run_steps(run, step)
        found = run.history()
        saved = run.state_dict(), model.state_dict(), optimizer.state_dict(), steps
    return found, copy.deepcopy(saved)


def same(a, b):
    columns = ["step", "id", "loss", "el2n", "margin"]
    assert a[columns].notna().all().all()
    np.testing.assert_allclose(a[columns].to_numpy(), b[columns].to_numpy(), rtol=1e-5, atol=1e-6)


@pytest.fixture
def at_once(monkeypatch):
    """The history of a run in which nothing waits."""
    with monkeypatch.context() as m:
        m.setattr(signals, "FEW", 0)
        return training(lambda *_: None)[0]


def test_reading_during_a_run(at_once):
    seen = []
    found, _ = training(lambda run, step: seen.append(run.history()) if step in (0, 4) else None)
    same(found, at_once)
    for early in seen:
        same(early, at_once.head(len(early)))


@pytest.mark.parametrize("micro", [2, 4])
def test_accumulated_micro_batches(at_once, micro):
    same(training(lambda *_: None, micro=micro)[0], at_once)


def test_labels_that_the_loop_writes_to(at_once):
    same(training(lambda *_: None, write=True)[0], at_once)


@pytest.mark.parametrize("disk", [False, True])
def test_a_run_that_is_resumed(at_once, disk, tmp_path):
    out = tmp_path / "run" if disk else None
    _, state = training(lambda *_: None, out=out, steps=5)
    same(training(lambda *_: None, out=out, state=state)[0], at_once)


def test_what_a_killed_run_had_flushed(at_once, tmp_path):
    def read(run, step):
        if step == 5:  # another process would see this much
            run.state_dict()
            same(inrun.open(tmp_path / "run").history(), at_once.head(48))

    same(training(read, out=tmp_path / "run")[0], at_once)
    same(inrun.open(tmp_path / "run").history(), at_once)

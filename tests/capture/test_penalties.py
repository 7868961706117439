"""Losses with a part that is made of parameters alone: penalties on weights. Examples have the
gradient of the data part; the rest is in the step and nobody's."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from helpers.captures import close, gradients_of, nobodys, trainable
from inrun.capture.capture import Capture
from inrun.exact import reference

B = 4


class Net(nn.Module):
    def __init__(self, learned=False):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)
        if learned:
            self.s = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def rows(model, batch):
    """The loss of each example; their sum is the data part."""
    x, y = batch
    return (model(x) - y).pow(2).sum(1) / len(x)


def data(model, batch):
    return rows(model, batch).sum()


def weights(model):
    return [p for name, p in model.named_parameters() if name != "s"]


def all_in_one(model):
    return torch.cat([p.flatten() for p in weights(model)])


def orthogonal(model):
    W = model.a.weight
    return (W @ W.T - torch.eye(len(W))).square().sum()


# What is added to the data part, and what the data part is multiplied by
LOSSES = {
    "l2": (lambda m: 0.1 * sum(p.square().sum() for p in weights(m)), None),
    "l1": (lambda m: 0.01 * sum(p.abs().sum() for p in weights(m)), None),
    "norm": (lambda m: 0.1 * all_in_one(m).norm(), None),
    "one-weight": (lambda m: 0.1 * m.a.weight.pow(2).mean(), None),
    "proximal": (lambda m: 0.1 * F.mse_loss(m.a.weight, torch.ones(5, 6)), None),
    "orthogonal": (orthogonal, None),
}  # fmt: skip


def made(name):
    return Net(learned="learned" in name or "uncertainty" in name)


def whole(name):
    added, factor = LOSSES[name]

    def loss(model, batch):
        found = data(model, batch)
        found = found if factor is None else factor(model) * found
        return found if added is None else found + added(model)

    return loss


def truth(name, model, batch):
    """Gradients of the examples and, as one more row, of nobody: [B + 1, *W] by name."""
    _, factor = LOSSES[name]
    params = trainable(model)
    scale = 1.0 if factor is None else float(factor(model).detach())

    def gradient(loss):
        found = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
        return list(found)

    own = [gradient(scale * rows(model, batch)[k]) for k in range(B)]
    total = gradient(whole(name)(model, batch))
    rest = [G - sum(g) for G, *g in zip(total, *own, strict=True)]
    return dict(zip(params, map(torch.stack, zip(*own, rest, strict=True)), strict=True))


@pytest.fixture
def batch():
    return torch.randn(B, 6), torch.randn(B, 3)


@pytest.mark.parametrize("fast", [False, True], ids=["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("name", LOSSES)
def test_examples_have_the_gradient_of_the_data_part(name, form, fast, batch):
    model = made(name)
    expected = truth(name, model, batch)
    capture = Capture(model, trainable(model), form=form, fast=fast)
    for _ in range(2):
        model.zero_grad()
        with capture.batch(B) as micro:
            whole(name)(model, batch).backward()
        got, rest = gradients_of(micro), nobodys(micro)
        for k, g in expected.items():
            assert close(got[k], g[:B], 1e-9), k
            assert close(rest.get(k, torch.zeros_like(g[B])), g[B], 1e-9), k
            assert close(model.get_parameter(k).grad, g.sum(0), 1e-9), k


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("name", LOSSES)
def test_values_are_those_of_the_data_part_and_training_is_untouched(name, training, batch):
    model = made(name)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    options = {
        "validation": [batch],
        "loss": data,
        "training": training,
        "audit_every": 1,
        "estimator": "secant",
    }
    with inrun.watch(model, optimizers[0], **options) as run:
        expected = []
        for _ in range(3):
            with run.batch(range(B)):
                whole(name)(model, batch).backward()
            gradients = list(truth(name, twin, batch).values())
            whole(name)(twin, batch).backward()
            values = reference.values(twin, optimizers[1], gradients, lambda m: data(m, batch))
            expected.append(values[:B])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        got, steps = run.history()["value"].to_numpy(), run.steps()
    assert np.allclose(got, np.concatenate(expected), rtol=1e-9, atol=1e-12)
    assert steps["void"].isna().all()  # the sum of all gradients is .grad
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if training == "bitwise":
            assert torch.equal(p, q)
        else:
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_a_penalty_in_a_backward_pass_of_its_own(batch):
    """After that of the data part it is nobody's, too."""
    tables = []
    for apart in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with inrun.watch(
            model, optimizer, validation=[batch], loss=data, estimator="secant"
        ) as run:
            with run.batch(range(B)):
                penalty = 0.1 * model.a.weight.square().sum()
                if apart:
                    data(model, batch).backward()
                    penalty.backward()
                else:
                    (data(model, batch) + penalty).backward()
            optimizer.step()
            tables.append(run.values()["value"].to_numpy())
            assert run.steps()["void"].isna().all()
    assert np.allclose(*tables, rtol=1e-9, atol=1e-14)


def test_a_penalty_of_each_micro_batch(batch):
    model = Net()
    half = [(x[0::2], x[1::2]) for x in batch]
    expected = truth("l2", model, batch)
    nobody = [torch.cat([g[:B], 2 * g[B:]]) for g in expected.values()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = reference.values(model, optimizer, nobody, lambda m: data(m, batch))
    with inrun.watch(model, optimizer, validation=[batch], loss=data, estimator="secant") as run:
        for k in (0, 1):
            with run.batch(range(k, B, 2)):
                part = tuple(x[k] for x in half)
                (data(model, part) / 2 + LOSSES["l2"][0](model)).backward()
        optimizer.step()
        got = run.values().sort_values("id")["value"].to_numpy()
    assert np.allclose(got, values[:B], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("n", [B - 1, B + 1])
def test_data_without_ids_is_refused(n, first, batch):
    """A second forward pass on rows that have no ids is no penalty: nobody would be credited."""
    model, other = Net(), torch.randn(n, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = inrun.watch(model, optimizer, validation=[batch], loss=data)
    message = r"parameter a\.bias, a\.weight, b\.bias through data that is not the batch.*detach"
    with pytest.raises(inrun.CaptureError, match=message), run.batch(range(B)):
        parts = [0.1 * model(other).pow(2).mean()] if first else []
        parts.append(data(model, batch))
        parts += [] if first else [0.1 * model(other).pow(2).mean()]
        sum(parts).backward()


def test_data_without_ids_that_has_no_gradient_is_fine(batch):
    model, other = Net(), torch.randn(B + 1, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with inrun.watch(model, optimizer, validation=[batch], loss=data) as run:
        with run.batch(range(B)):
            with torch.no_grad():
                scale = model(other).std()
            (data(model, batch) * scale).backward()
        optimizer.step()
        assert run.steps()["void"].isna().all()


@pytest.mark.parametrize("name", ["l2", "orthogonal"])
def test_check_knows_what_is_nobodys(name, batch, capsys):
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with inrun.watch(model, optimizer, validation=[batch], loss=data) as run:
        for step in range(25):
            check = run.check() if step == 24 else None
            with run.batch(range(B)):
                whole(name)(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert check.gradient_error < 1e-9 and check.credit_error < 1e-9
    assert check.unverified is None
    assert check.coalitions == 2 ** (B + 1) and len(check.table) == B
    assert check.verdict.startswith(("trustworthy", "usable"))

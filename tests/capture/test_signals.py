"""Loss, EL2N, margin and label of each example, against the obvious loop over rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inrun.capture.capture import Capture
from inrun.capture.later import Deferred, Together
from inrun.capture.later import means as example_means
from inrun.capture.signals import FEW, Labelled, computed, of_examples, on_host, row_signals

B, T, C = 5, 4, 3


def obvious(z: Tensor, y: Tensor) -> list[float]:
    """Of one row: logits [C] and its label."""
    p = z.softmax(0)
    onehot = torch.zeros_like(p)
    onehot[y] = 1
    others = torch.cat([z[:y], z[y + 1 :]])
    return [float(-p[y].log()), float((p - onehot).norm()), float(z[y] - others.max()), float(y)]


def means(rows: list[list[float]]) -> list[float]:
    if not rows:
        return [math.nan] * 4
    found = np.mean(rows, axis=0).tolist()
    return found if len(rows) == 1 else [*found[:3], math.nan]


class Reader(nn.Module):
    """[B, T] tokens → [B, T, C] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


@pytest.fixture
def model() -> Reader:
    torch.manual_seed(0)
    return Reader().double()


def signals(model: nn.Module, x: Tensor, loss, B: int = B, **options) -> Tensor | None:
    capture = Capture(model, dict(model.named_parameters()))
    with capture.batch(B, **options) as micro:
        loss(model(x)).backward()
    found = of_examples([micro])
    capture.close()
    return exact(found)


def exact(found: Tensor | Deferred | None) -> Tensor | None:
    """The signals, as exact as the model."""
    if isinstance(found, Deferred):
        found = found.rows()
    return None if found is None else torch.from_numpy(example_means(found.numpy()))


def same(found: Tensor | None, wanted: list[list[float]]) -> None:
    assert found is not None
    torch.testing.assert_close(
        found, torch.tensor(wanted, dtype=found.dtype).T, rtol=1e-9, atol=1e-9, equal_nan=True
    )


TOKENS = torch.arange(B * T).view(B, T) % 7
LABELS = torch.arange(B * T).view(B, T) % C


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss", "smoothed", "weighted"])
def test_one_row_per_example(model, reduction, name):
    def loss(z):
        z, y = z[:, 0], LABELS[:, 0]
        if name == "nll_loss":
            return F.nll_loss(z.log_softmax(1), y, reduction=reduction).sum()
        more = {"smoothed": {"label_smoothing": 0.1}}.get(name, {})
        if name == "weighted":
            more = {"weight": torch.tensor([1.0, 2.0, 3.0]).double()}
        return F.cross_entropy(z, y, reduction=reduction, **more).sum()

    z = model(TOKENS).detach()[:, 0]
    same(signals(model, TOKENS, loss), [obvious(z[i], LABELS[i, 0]) for i in range(B)])


def test_language_model_with_ignored_tokens_and_a_shift(model):
    y = LABELS.clone()
    y[1, 2:], y[3] = -100, -100

    def loss(z):
        return F.cross_entropy(z[:, :-1].reshape(-1, C), y[:, 1:].reshape(-1)) * 3

    z = model(TOKENS).detach()
    wanted = [
        means([obvious(z[i, t], y[i, t + 1]) for t in range(T - 1) if y[i, t + 1] >= 0])
        for i in range(B)
    ]
    same(signals(model, TOKENS, loss), wanted)


def test_classes_in_the_middle(model):
    z = model(TOKENS).detach()
    wanted = [means([obvious(z[i, t], LABELS[i, t]) for t in range(T)]) for i in range(B)]
    same(signals(model, TOKENS, lambda z: F.cross_entropy(z.transpose(1, 2), LABELS)), wanted)


def test_masked_after_the_loss(model):
    mask = torch.ones(B, T).double()
    mask[0, 1:], mask[2] = 0, 0

    def loss(z):
        each = F.cross_entropy(z.flatten(0, 1), LABELS.flatten(), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum()

    z = model(TOKENS).detach()
    wanted = [
        means([obvious(z[i, t], LABELS[i, t]) for t in range(T) if mask[i, t]]) for i in range(B)
    ]
    same(signals(model, TOKENS, loss), wanted)


@pytest.mark.parametrize("tokens", [False, True])
def test_packed_rows(model, tokens):
    owner = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -1]])
    x, y = TOKENS[:2], LABELS[:2]
    z = model(x).detach()
    wanted = [
        means([obvious(z[r, t], y[r, t]) for r in range(2) for t in range(T) if owner[r, t] == i])
        for i in range(3)
    ]
    loss = lambda z: F.cross_entropy(z.flatten(0, 1), y.flatten())  # noqa: E731
    same(signals(model, x, loss, 3, owner=owner, tokens=tokens), wanted)


def test_rows_that_moved(model):
    def loss(z):
        return F.cross_entropy(z[:, 0].flip(0), LABELS[:, 0].flip(0))

    z = model(TOKENS).detach()[:, 0]
    same(signals(model, TOKENS, loss), [obvious(z[i], LABELS[i, 0]) for i in range(B)])


def test_soft_labels_have_no_margin(model):
    t = torch.rand(B, C).double()
    t /= t.sum(1, keepdim=True)
    z = model(TOKENS).detach()[:, 0]
    p = z.softmax(1)
    loss, el2n = -(t * p.log()).sum(1), (p - t).norm(dim=1)
    wanted = [[float(loss[i]), float(el2n[i]), math.nan, math.nan] for i in range(B)]
    same(signals(model, TOKENS, lambda z: F.cross_entropy(z[:, 0], t)), wanted)


def test_binary(model):
    t = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5]).double()
    z = model(TOKENS).detach()[:, 0, 0]
    p = z.sigmoid()
    loss = -(t * p.log() + (1 - t) * (1 - p).log())
    margin = [float(z[i] * (2 * t[i] - 1)) if t[i] != 0.5 else math.nan for i in range(B)]
    wanted = [
        [float(loss[i]), float((p[i] - t[i]).abs()), margin[i], float(t[i])] for i in range(B)
    ]
    found = signals(model, TOKENS, lambda z: F.binary_cross_entropy_with_logits(z[:, 0, 0], t) * 2)
    same(found, wanted)


def test_what_takes_no_part_in_the_training_does_not_count(model):
    def loss(z):
        F.cross_entropy(z[:, 1], LABELS[:, 1])  # looked at, not trained on
        with torch.no_grad():
            F.cross_entropy(z[:, 2], LABELS[:, 2])
        return F.cross_entropy(z[:, 0], LABELS[:, 0]) + 0 * F.cross_entropy(z[:, 3], LABELS[:, 3])

    z = model(TOKENS).detach()[:, 0]
    same(signals(model, TOKENS, loss), [obvious(z[i], LABELS[i, 0]) for i in range(B)])


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: z.square().mean(),
        lambda z: F.nll_loss(z[:, 0], LABELS[:, 0]),  # logits are no log-probabilities
        lambda z: F.mse_loss(z[:, 0], torch.zeros(B, C).double()),
    ],
)
def test_other_losses_have_no_signals(model, loss):
    found = signals(model, TOKENS, loss)
    assert found is None or bool(found[:3].isnan().all())


def test_half_precision_logits(model):
    small = model.to(torch.bfloat16)
    z = small(TOKENS).detach()[:, 0].double()
    found = signals(small, TOKENS, lambda z: F.cross_entropy(z[:, 0], LABELS[:, 0]))
    wanted = torch.tensor([obvious(z[i], LABELS[i, 0]) for i in range(B)], dtype=torch.float32).T
    assert found is not None and found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_training_is_the_same_to_the_last_bit(model):
    def loss(z):
        return F.cross_entropy(z.flatten(0, 1), LABELS.flatten())

    loss(model(TOKENS)).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert signals(model, TOKENS, loss) is not None
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


@pytest.mark.parametrize("logarithms", [False, True])
def test_of_many_classes_the_loss_alone(logarithms, monkeypatch):
    monkeypatch.setattr("inrun.capture.signals.MANY", C - 1)
    z, y = torch.randn(B, C).double(), LABELS[:, 0]
    given = z.log_softmax(1) if logarithms else z
    rows = row_signals(Labelled(given, y, 1, logarithms=logarithms))
    wanted = torch.tensor([obvious(z[i], y[i]) for i in range(B)], dtype=torch.float64)
    wanted[:, 1:3] = math.nan
    found = torch.from_numpy(example_means(rows.numpy()))
    torch.testing.assert_close(found, wanted.T, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_rows_by_numpy_are_those_by_torch(monkeypatch, dtype):
    torch.manual_seed(0)
    z = (5 * torch.randn(9, 4, dtype=dtype)).log_softmax(1)
    y = torch.tensor([0, 1, 2, 3, 7, 0, 7, 1, 2])
    loss = Labelled(z, y, 1, ignore=7, logarithms=True, normalised=True)
    assert on_host(loss, FEW)
    found = Deferred(z, y, 7, Together()).rows()
    z0, y0 = z.clone(), y.clone()
    monkeypatch.setattr("inrun.capture.signals.SOME", 0)
    torch.testing.assert_close(found, computed(loss), rtol=1e-6, atol=1e-6)
    assert torch.equal(z, z0) and torch.equal(y, y0)


def test_many_rows_are_worked_on_in_pieces(monkeypatch):
    z, y = torch.randn(B, C, T).double(), LABELS.clone()
    y[2, 1] = -100
    whole = row_signals(Labelled(z, y, 1))
    monkeypatch.setattr("inrun.capture.signals.TOGETHER", 7)
    assert torch.equal(row_signals(Labelled(z, y, 1)), whole) and not whole[:, 2, 1].any()

"""Signals of passes in which the mode stands aside: a loss inside the model is read from its node
in the autograd graph. Against the obvious loop; inputs and labels change with every pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.test_signals import B, C, T, exact, means, obvious
from inrun.capture.capture import Capture
from inrun.capture.signals import of_examples

PASSES = 8
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randint(7, (B, T), generator=g), torch.randint(C, (B, T), generator=g)


class Reader(nn.Module):
    """The loss is computed in forward, as by models of transformers."""

    def __init__(self, loss, auxiliary: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, C)
        self.early = nn.Linear(6, C) if auxiliary else None
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        h = self.table(x)
        first = None if self.early is None or y is None else self.loss(self.early(h), y)
        z = self.head(self.body(h).tanh())
        if y is None:
            return {"logits": z}
        loss = self.loss(z, y)
        return {"loss": loss if first is None else loss + first, "logits": z}


def first_token(z: Tensor, y: Tensor, **options) -> Tensor:
    return F.cross_entropy(z[:, 0], y[:, 0], **options)


INSIDE = {
    "mean": first_token,
    "sum": lambda z, y: first_token(z, y, reduction="sum") / 7,
    "none": lambda z, y: first_token(z, y, reduction="none").sum(),
    "weighted": lambda z, y: first_token(z, y, weight=torch.arange(1.0, 1 + C).double()),
    "nll": lambda z, y: F.nll_loss(z[:, 0].log_softmax(-1), y[:, 0]),
    "module": lambda z, y: nn.CrossEntropyLoss()(z[:, 0], y[:, 0]),
}
TO_THE_MODE = {"smoothed": lambda z, y: first_token(z, y, label_smoothing=0.1)}


def last(model: Reader, outside=None, **options):
    """The signals of the last of several passes, and that pass."""
    capture = Capture(model, dict(model.named_parameters()))
    for step in range(PASSES):
        x, y = batch(step)
        with capture.batch(B, **options) as micro:
            loss = model(x, y)["loss"] if outside is None else outside(model(x)["logits"], y)
            loss.backward()
    assert micro.void is None
    return exact(of_examples([micro])), model(x)["logits"].detach(), y, capture.aside.followed


def same(found: Tensor | None, wanted: list[list[float]]) -> None:
    assert found is not None
    wanted = torch.tensor(wanted, dtype=torch.float64).T
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", [*INSIDE, *TO_THE_MODE])
def test_a_loss_inside_the_model(name):
    found, z, y, followed = last(Reader((INSIDE | TO_THE_MODE)[name]).double())
    assert followed == (name in INSIDE)
    same(found, [obvious(z[i, 0], y[i, 0]) for i in range(B)])


def test_a_loss_outside_the_model():
    found, z, y, followed = last(Reader(None).double(), first_token)
    assert followed == 1
    same(found, [obvious(z[i, 0], y[i, 0]) for i in range(B)])


def test_rows_that_get_no_gradient():
    def loss(z, y):
        return (first_token(z, y, reduction="none") * MASK).sum()

    found, z, y, followed = last(Reader(loss).double())
    assert followed == 1
    same(found, [means([obvious(z[i, 0], y[i, 0])] * int(MASK[i])) for i in range(B)])


@pytest.mark.parametrize("ignore", [-100, 1, 255])
def test_tokens_of_which_some_are_ignored(ignore):
    def loss(z, y):
        y = y.masked_fill(y == 1, ignore)
        return F.cross_entropy(z[:, :-1].reshape(-1, C), y[:, 1:].flatten(), ignore_index=ignore)

    found, z, y, followed = last(Reader(loss).double())
    assert followed == 1
    rows = [
        [obvious(z[i, t], y[i, t + 1]) for t in range(T - 1) if y[i, t + 1] != 1] for i in range(B)
    ]
    same(found, [means(r) for r in rows])


def test_binary_logits():
    def loss(z, y):
        return F.binary_cross_entropy_with_logits(z[:, 0, 0], (y[:, 0] > 0).double())

    found, z, y, followed = last(Reader(loss).double())
    z, t = z[:, 0, 0], (y[:, 0] > 0).double()
    p = z.sigmoid()
    each = F.binary_cross_entropy(p, t, reduction="none")
    assert followed == 1 and found is not None
    wanted = torch.stack([each, (p - t).abs(), z * (2 * t - 1), t])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_a_loss_between_layers_counts_once():
    model = Reader(first_token, auxiliary=True).double()
    found, z, y, _ = last(model)
    early = model.early(model.table(batch(PASSES - 1)[0])).detach()
    rows = [[obvious(a[i, 0], y[i, 0]) for a in (early, z)] for i in range(B)]
    same(found, [means(r) for r in rows])


def test_labels_that_are_not_looked_at_have_no_effect():
    """Two losses, of which one takes no part in the training."""

    def loss(z, y):
        return first_token(z, y) + 0 * F.cross_entropy(z[:, 1], y[:, 1])

    found, z, y, followed = last(Reader(loss).double())
    assert followed == 1
    same(found, [obvious(z[i, 0], y[i, 0]) for i in range(B)])


def test_packed_rows_of_changing_owners():
    model = Reader(lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten())).double()
    capture = Capture(model, dict(model.named_parameters()))
    for step in range(PASSES):
        x, y = batch(step)
        g = torch.Generator().manual_seed(100 + step)
        owner = torch.randint(-1, 3, (B, T), generator=g)
        with capture.batch(3, owner=owner) as micro:
            model(x, y)["loss"].backward()
    assert micro.void is None and capture.aside.followed == 1
    z = model(x)["logits"].detach()
    rows = [
        [obvious(z[i, t], y[i, t]) for i in range(B) for t in range(T) if owner[i, t] == k]
        for k in range(3)
    ]
    same(exact(of_examples([micro])), [means(r) for r in rows])


def test_training_is_the_same_to_the_last_bit():
    model = Reader(first_token).double()
    last(model)
    watched = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for step in range(PASSES):
        model(*batch(step))["loss"].backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(watched, model.parameters(), strict=True))


def test_half_precision_is_left_to_the_mode():
    found, z, y, followed = last(Reader(first_token).to(torch.bfloat16))
    assert followed == 0 and found is not None
    wanted = [obvious(z[i, 0].double(), y[i, 0]) for i in range(B)]
    torch.testing.assert_close(
        found.double(), torch.tensor(wanted).double().T, rtol=1e-5, atol=1e-5
    )

"""Fused ops (operation and tap in one autograd node) beside the same operations with a tap."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import inrun
from inrun.capture.tap import Fused

CLASSES = 3


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(4, 8, bias=kind != "without bias")
        self.norm = nn.LayerNorm(8, elementwise_affine=kind != "without scale")
        self.head = nn.Linear(8, CLASSES)

    def inside(self, x):
        return self.norm(F.relu(self.up(x), inplace=True))  # writes to the output

    def forward(self, x):
        if self.kind == "checkpoint":
            h = checkpoint(self.inside, x, use_reentrant=False)
        elif self.kind == "keywords":
            h = F.relu(F.linear(x, bias=self.up.bias, weight=self.up.weight))
        elif self.kind == "transposed":
            h = self.inside(x.transpose(1, 2).contiguous().transpose(1, 2))
        else:
            h = self.inside(x)
        return self.head(h).mean(1)


def train(kind, training, monkeypatch, apart):
    """Values and weights after some steps, and how many nodes were fused."""
    torch.manual_seed(0)
    dtype = torch.float32 if kind == "single" else torch.float64
    model = Net(kind).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(6, 16, 4, dtype=dtype), torch.randint(0, CLASSES, (6,))
    count = [0]
    if apart:
        monkeypatch.setattr("inrun.capture.site.fused_op", lambda *args: None)
    real = Fused.backward

    def backward(ctx, delta):
        count[0] += 1
        return real(ctx, delta)

    monkeypatch.setattr(Fused, "backward", staticmethod(backward))
    with inrun.watch(
        model, optimizer, validation=[(x[:2], y[:2])], training=training, form="materialise",
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    ) as run:  # fmt: skip
        for _ in range(4):
            with run.batch(range(6)):
                loss = F.cross_entropy(model(x), y)
                if kind == "twice":
                    (loss / 2).backward(retain_graph=True)
                    (loss / 2).backward()
                else:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        values = torch.tensor(run.history()["value"].to_numpy())
    monkeypatch.undo()
    return values, copy.deepcopy(model.state_dict()), count[0]


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        ("usual", 3 * 3),
        ("single", 3 * 3),
        ("without bias", 3 * 3),
        ("without scale", 3 * 2),
        ("transposed", 3 * 3),
        ("twice", 3 * 6),
        ("checkpoint", 3),  # of the head alone: what is recomputed has taps of its own
        ("keywords", 3),
    ],
)
def test_fused_operations_give_the_same(kind, fused, monkeypatch):
    values, weights, found = train(kind, "fast", monkeypatch, apart=False)
    expected, others, none = train(kind, "fast", monkeypatch, apart=True)
    assert (found, none) == (fused, 0)  # from the second step on, when the calls are known
    # Values are kept in float64 whatever they were computed in: sums over weights and positions,
    # each rounded in the model's precision, hence as large an error as the largest of them has.
    error = 100 * torch.finfo(weights["head.weight"].dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(values, expected, rtol=0, atol=error)
    torch.testing.assert_close(weights, others)


def test_bitwise_training_fuses_nothing(monkeypatch):
    assert train("usual", "bitwise", monkeypatch, apart=False)[2] == 0


def test_a_backward_pass_of_the_backward_pass_is_refused():
    torch.manual_seed(0)
    model = Net("usual")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(6, 16, 4), torch.randint(0, CLASSES, (6,))
    with inrun.watch(
        model, optimizer, validation=[(x, y)], training="fast", form="materialise",
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    ) as run:  # fmt: skip
        with run.batch(range(6)):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with pytest.raises(inrun.CaptureError, match="create_graph"), run.batch(range(6)):
            F.cross_entropy(model(x), y).backward(create_graph=True)


@pytest.mark.parametrize("left_out", ["up.bias", "up.weight", "norm.weight", "norm.bias"])
def test_parameters_that_are_left_out_are_trained(left_out):
    def trained(watched):
        torch.manual_seed(0)
        model = Net("plain").double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, y = torch.randn(6, 16, 4, dtype=torch.float64), torch.randint(0, CLASSES, (6,))
        options = {"training": "fast", "form": "materialise", "ignore": left_out}
        run = inrun.watch(
            model, optimizer, validation=[(x[:2], y[:2])], **options,
            loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        ) if watched else None  # fmt: skip
        for _ in range(4):  # calls are fused once they are known
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "the loss inside run.batch also trains")
                with run.batch(range(6)) if watched else nullcontext():
                    F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if watched:
            run.close()
        return dict(model.named_parameters())

    plain, watched = trained(False), trained(True)
    for k, p in plain.items():
        assert torch.allclose(p, watched[k], rtol=1e-9, atol=1e-11), k

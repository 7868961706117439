"""A forward pass that writes to its input: each pass sees the original, and so does the user."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.validation.targets import copy_batch

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


@dataclass
class Rows:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    rest: dict = field(default_factory=dict)


class Encoding(UserDict):
    """Like a tokenizer's ``BatchEncoding``."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Slots:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


class Dict(dict):
    pass


Pair = namedtuple("Pair", "x y")

BATCHES = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y},
    "own dict": lambda x, y: Dict(x=x, y=y),
    "ordered": lambda x, y: OrderedDict(x=x, y=y),
    "named": Pair,
    "dataclass": Rows,
    "frozen": Frozen,
    "slots": Slots,
    "encoding": lambda x, y: Encoding(x=x, y=y),
    "nested": lambda x, y: {"inputs": [Rows(x, y)]},
    "array": lambda x, y: {"x": x.numpy(), "y": y},
}


def parts(batch):
    if isinstance(batch, dict) and "inputs" in batch:
        batch = batch["inputs"][0]
    if isinstance(batch, (dict, Encoding)):
        return batch["x"], batch["y"]
    if isinstance(batch, (tuple, list)):
        return tuple(batch)
    return batch.x, batch.y


WRITES = {
    "in place": lambda x, y: x.mul_(1.5),
    "through data": lambda x, y: x.data.mul_(1.5),
    "through numpy": lambda x, y: np.multiply(x.numpy(), 1.5, out=x.numpy()),
    "labels": lambda x, y: y.add_(1).remainder_(3),
}


def trained(writes, make=BATCHES["tuple"], Q=1, **options):
    def loss(model, batch):
        x, y = parts(batch)
        if isinstance(x, np.ndarray):
            x = torch.from_numpy(x)
        writes(x, y)
        return F.cross_entropy(model(x), y)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    targets = {f"t{q}": [make(X[20 + 3 * q :][:3].clone(), Y[20 + 3 * q :][:3].clone())]
               for q in range(Q)}  # fmt: skip
    options = {"estimator": ["secant+gauss2", "sgd"], "audit_every": 1} | options
    with inrun.watch(model, optimizer, targets=targets, loss=loss, **options) as run:
        for t in range(3):
            rows = torch.arange(6 * t, 6 * t + 6)
            with run.batch(rows):
                F.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for q, (batch,) in enumerate(targets.values()):
        x, y = parts(batch)
        assert np.array_equal(x, X[20 + 3 * q :][:3]) and torch.equal(y, Y[20 + 3 * q :][:3])
    return run


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("Q", [1, 3])
def test_every_pass_sees_the_original(how, Q):
    def on_copies(model, batch):
        x, y = (t.clone() for t in batch)
        WRITES[how](x, y)
        return F.cross_entropy(model(x), y)

    run = trained(WRITES[how], Q=Q)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    targets = {f"t{q}": [(X[20 + 3 * q :][:3], Y[20 + 3 * q :][:3])] for q in range(Q)}
    with inrun.watch(
        model, optimizer, targets=targets, loss=on_copies, audit_every=1,
        estimator=["secant+gauss2", "sgd"],
    ) as other:  # fmt: skip
        for t in range(3):
            rows = torch.arange(6 * t, 6 * t + 6)
            with other.batch(rows):
                F.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name in ("secant+gauss2", "sgd"):
        assert run.history(name).equals(other.history(name))
        assert run.steps(name).equals(other.steps(name))


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_in_every_container_are_copied(kind):
    assert len(trained(WRITES["in place"], BATCHES[kind]).history()) == 18


def test_a_layer_that_writes_to_its_input():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = X[:6].clone(), Y[:6]
    with inrun.watch(
        model, optimizer, validation=[batch], loss=lambda m, b: F.cross_entropy(m(b[0]), b[1])
    ) as run:
        with run.batch(range(6)):
            F.cross_entropy(model(X[6:12].clone()), Y[6:12]).backward()
        optimizer.step()
    assert torch.equal(batch[0], X[:6])


def test_copies_keep_what_is_shared_and_what_is_no_tensor():
    x = torch.ones(2, requires_grad=True)
    shared = [x.detach(), 1]
    batch = {"x": x, "a": shared, "b": shared, "same": x, "f": len, "m": nn.Linear(1, 1)}
    made = copy_batch(batch)
    assert made["x"] is made["same"] is not x and made["x"].requires_grad and made["x"].is_leaf
    assert made["a"] is made["b"] is not shared and made["a"][0] is not shared[0]
    assert made["f"] is len and made["m"] is batch["m"]
    ring = Dict(x=x)
    ring["self"] = ring
    again = copy_batch(ring)
    assert again["self"] is again and again["x"] is not x and type(again) is Dict
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 1), [3, 1])
    other = copy_batch(packed)
    assert type(other) is type(packed) and other.data is not packed.data
    assert torch.equal(other.data, packed.data)

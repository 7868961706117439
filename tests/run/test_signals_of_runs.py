"""Signals of a whole run: accumulation, a loss inside the model, every=k."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun

X, Y = torch.arange(24.0).sin().view(8, 3), torch.arange(8) % 2


class WithLoss(nn.Module):
    """As models of transformers: the loss is computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, y=None):
        z = self.head(self.body(x).tanh())
        return z if y is None else F.cross_entropy(z, y)


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("parts", [1, 2])
def test_of_each_visit(training, parts):
    model = WithLoss().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = inrun.watch(
        model, optimizer, validation=[(X.double(), Y)], loss=lambda m, b: m(*b), training=training
    )
    wanted = []
    for step in range(6):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            each = F.cross_entropy(model(X.double()), Y, reduction="none")
            right = F.one_hot(Y, 2).double()
            el2n = (model(X.double()).softmax(1) - right).norm(dim=1)
        wanted += [(step, int(i), float(each[i]), float(el2n[i])) for i in order]
        for ids in order.chunk(parts):
            with run.batch(ids):
                (model(X[ids].double(), Y[ids]) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    found = run.history()[["step", "id", "loss", "el2n"]].to_numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_steps_that_are_not_scored_have_none():
    model = WithLoss().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = inrun.watch(
        model, optimizer, validation=[(X.double(), Y)], loss=lambda m, b: m(*b), every=2
    )
    for _ in range(8):
        with run.batch(range(8)):
            model(X.double(), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    values, history = run.values(), run.history()
    assert 0 < history["step"].nunique() < 8 and history["loss"].notna().all()
    np.testing.assert_allclose(values["loss"], history.groupby("id")["loss"].mean(), rtol=1e-9)
    assert len(run.suspects()) == 8

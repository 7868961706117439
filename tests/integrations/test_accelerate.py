"""Accelerate: ``watch`` before or after ``prepare``, with accumulation and clipping."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import inrun

accelerate = pytest.importorskip("accelerate", reason="needs the extra inrun[hf]")

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def made():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def data():
    rows = TensorDataset(X.to(torch.get_default_dtype()), Y)
    return DataLoader(inrun.with_ids(rows), batch_size=4)


def by_hand():
    model, optimizer = made()
    held_out = (X[:6].to(torch.get_default_dtype()), Y[:6])
    run = inrun.watch(model, optimizer, validation=[held_out], loss=loss, max_norm=0.2)
    for step, batch in enumerate(data()):
        names, batch = inrun.take_ids(batch)
        with run.batch(**names):
            (loss(model, batch) / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return model, run


@pytest.mark.parametrize("when", ["before", "after", "mixed"])
def test_prepared_in_any_order(when):
    model, optimizer = made()
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    held_out = (X[:6].to(torch.get_default_dtype()), Y[:6])
    how = {"validation": [held_out], "loss": loss, "max_norm": 0.2}
    if when == "before":
        run = inrun.watch(model, optimizer, **how)
    prepared, wrapped, loader = accelerator.prepare(model, optimizer, data())
    if when != "before":
        run = inrun.watch(prepared, wrapped if when == "after" else optimizer, **how)
    assert run.optimizer is optimizer is wrapped.optimizer
    for batch in loader:
        names, batch = inrun.take_ids(batch)
        with accelerator.accumulate(prepared):
            with run.batch(**names):
                accelerator.backward(loss(prepared, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 0.2)
            wrapped.step()
            wrapped.zero_grad()
    run.close()
    other, twin = by_hand()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert run.step == twin.step == 3 and run.steps()["void"].isna().all()
    np.testing.assert_allclose(run.values()["value"], twin.values()["value"], rtol=1e-12)


def test_the_scaler_of_a_prepared_optimizer_is_found():
    from inrun.run.wrapped import unwrapped

    _, optimizer = made()
    wrapped = accelerate.optimizer.AcceleratedOptimizer.__new__(
        accelerate.optimizer.AcceleratedOptimizer
    )
    wrapped.optimizer, wrapped.scaler = optimizer, object()
    mine = object()
    assert unwrapped(wrapped, None) == (optimizer, wrapped.scaler)
    assert unwrapped(wrapped, mine) == (optimizer, mine)
    assert unwrapped([wrapped, optimizer], None) == ([optimizer, optimizer], wrapped.scaler)
    assert unwrapped(optimizer, None) == (optimizer, None)

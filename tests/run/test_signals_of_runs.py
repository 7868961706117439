"""Signals of a whole run: accumulation, a loss inside the model, every=k, models of transformers,
compiled models. Long enough that the mode stands aside (capture/aside.py)."""

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
    for step in range(9):
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


def transformer(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            num_labels=3,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config).double()
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_models_of_transformers(kind, inside):
    model = transformer(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(11, (8, 6), generator=g)
    y = torch.randint(3, (8,), generator=g) if kind == "bert" else ids

    def each(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if kind == "bert":
            return F.cross_entropy(logits, y, reduction="none")
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="none")
        return own.view(len(y), -1).mean(1)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, labels = batch
        if inside:
            return model(input_ids=x, labels=labels).loss
        return each(model(input_ids=x).logits, labels).mean()

    run = inrun.watch(model, optimizer, validation=[(ids[:2], y[:2])], loss=loss)
    wanted = []
    for step in range(9):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            own = each(model(input_ids=ids).logits, y)
        wanted += [(step, int(i), float(own[i])) for i in order]
        with run.batch(order):
            loss(model, (ids[order], y[order])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run._capture.aside.followed == 1
    run.close()
    np.testing.assert_allclose(run.history()[["step", "id", "loss"]], wanted, rtol=1e-6)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_compiled_models_have_signals_where_the_loss_is_outside(inside):
    model = WithLoss().double()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = inrun.watch(model, optimizer, validation=[(X.double(), Y)], loss=lambda m, b: m(*b))
    wanted = []
    for _ in range(6):
        with torch.no_grad():
            wanted.append(F.cross_entropy(model(X.double()), Y, reduction="none"))
        with run.batch(range(8)):
            x = X.double()
            (compiled(x, Y) if inside else F.cross_entropy(compiled(x), Y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    history = run.history()
    if inside:
        assert "loss" not in history
        with pytest.raises(inrun.LedgerError, match="no losses of single examples"):
            run.suspects()
    else:
        np.testing.assert_allclose(history["loss"], torch.cat(wanted), rtol=1e-6)

"""Joined targets: nothing is joined that was not measured to be right, for these very batches."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from helpers.inside import are_joined
from inrun.validation import joining

X = torch.randn(90, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (90,), generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(1, 7, (90, 4), generator=torch.Generator().manual_seed(2))
WEIGHT = torch.tensor([1.0, 10.0, 3.0], dtype=torch.float64)
REFUSED = "cannot be joined in one pass, so each has its own"


class Zero(nn.Module):
    """A head of zeros: at first every row has the same loss."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(x)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        return self.head(self.table(ids).tanh())


def plain(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def weighted(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHT)


def smoothed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def weighted_and_smoothed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHT, label_smoothing=0.1)


def next_token(model, ids):
    """Zero is padding."""
    out = model(ids)[:, :-1].flatten(0, 1)
    return F.cross_entropy(out, ids[:, 1:].flatten(), ignore_index=0)


def per_valid_token(model, ids):
    out = F.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:], reduction="none")
    valid = ids[:, 1:] != 0
    return (out * valid).sum() / valid.sum()


def trained(kind, data, loss, targets, steps=3, **options):
    torch.manual_seed(3)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"audit_every": 0} | options
    with inrun.watch(model, optimizer, targets=targets, loss=loss, **options) as run:
        for t in range(steps):
            rows = torch.arange(6 * t, 6 * t + 6)
            batch = data[rows] if isinstance(data, torch.Tensor) else tuple(d[rows] for d in data)
            with run.batch(rows):
                loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


def assert_as_alone(run, kind, data, loss, targets, steps=3, **options):
    for name, batches in targets.items():
        one = trained(kind, data, loss, {name: batches}, steps, **options).history().iloc[:, 2]
        scale = one.abs().max()
        assert np.allclose(run.history()[name], one, rtol=1e-9, atol=1e-9 * scale), name


def by_class():
    rows = {c: (torch.arange(90) >= 40) & (c == Y) for c in range(3)}
    return {str(c): [(X[r], Y[r])] for c, r in rows.items()}


@pytest.mark.parametrize(
    ("loss", "joinable"),
    [(plain, True), (smoothed, True), (weighted, False), (weighted_and_smoothed, False)],
)
def test_class_weights_are_noticed_though_a_head_of_zeros_hides_them(loss, joinable):
    targets = by_class()
    if joinable:
        run = trained(Zero, (X, Y), loss, targets)
    else:
        with pytest.warns(UserWarning, match=REFUSED):
            run = trained(Zero, (X, Y), loss, targets)
    assert are_joined(run) == joinable
    assert_as_alone(run, Zero, (X, Y), loss, targets)


@pytest.mark.parametrize("loss", [next_token, per_valid_token])
def test_padding_that_begins_later_is_noticed(loss):
    """The first sets are joined, and a set with padding is measured before it is."""
    targets = {}
    for q in range(3):
        batches = [TOKENS[40 + 9 * q + 3 * t : 43 + 9 * q + 3 * t].clone() for t in range(3)]
        batches[2][0, 1 : 2 + q] = 0  # another number of tokens in each target
        targets[f"t{q}"] = batches
    with pytest.warns(UserWarning, match=REFUSED):
        run = trained(Words, TOKENS, loss, targets)
    assert_as_alone(run, Words, TOKENS, loss, targets)
    early = {k: b[:2] for k, b in targets.items()}
    run = trained(Words, TOKENS, loss, early)
    assert are_joined(run)
    assert_as_alone(run, Words, TOKENS, loss, early)


def test_class_weights_that_change_during_the_run_are_noticed():
    """Joinable while they are equal; the tensor, or the number, is part of what is measured."""
    weight = torch.ones(3)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    def run_with(targets):
        weight.fill_(1.0)
        torch.manual_seed(3)
        model = Zero()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with inrun.watch(model, optimizer, targets=targets, loss=loss, audit_every=0) as run:
            for t in range(3):
                rows = torch.arange(6 * t, 6 * t + 6)
                with run.batch(rows):
                    loss(model, (X[rows], Y[rows])).backward()
                optimizer.step()
                optimizer.zero_grad()
                if t == 1:
                    assert len(targets) == 1 or are_joined(run)
                    weight.copy_(WEIGHT)
        return run

    targets = by_class()
    with pytest.warns(UserWarning, match=REFUSED):
        run = run_with(targets)
    for name, batches in targets.items():
        one = run_with({name: batches}).history().iloc[:, 2]
        assert np.allclose(run.history()[name], one, rtol=1e-9), name


@pytest.mark.parametrize("where", ["attribute", "buffer", "criterion", "closure"])
def test_other_settings_of_a_loss_that_change_are_noticed(where):
    class Weighing(Zero):
        def __init__(self):
            super().__init__()
            self.sharpness = 0.0
            self.register_buffer("weights", torch.ones(3))

    class Criterion:
        sharpness = 0.0

        def __init__(self):
            self.sharpness = 0.0

    criterion, sharp = Criterion(), 0.0

    def loss(model, batch):
        power = model.sharpness + criterion.sharpness + sharp
        weight = model.weights * WEIGHT**power
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    torch.manual_seed(0)
    model = Weighing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inrun.watch(model, optimizer, targets=by_class(), loss=loss, audit_every=0) as run:

        def step():
            with run.batch(range(6)):
                loss(model, (X[:6], Y[:6])).backward()
            optimizer.step()
            optimizer.zero_grad()
            return are_joined(run)

        assert step() and step()
        if where == "attribute":
            model.sharpness = 1.0
        elif where == "buffer":
            model.weights.copy_(WEIGHT)
        elif where == "criterion":
            criterion.sharpness = 1.0
        else:
            sharp = 1.0
        with pytest.warns(UserWarning, match=REFUSED):
            assert not step()


def test_sets_that_do_not_come_back_are_not_measured_for_ever(monkeypatch):
    monkeypatch.setattr(joining, "_ONCE", 3)
    measured = []
    real = joining.Joining.measure
    monkeypatch.setattr(
        joining.Joining, "measure", lambda self, *a: measured.append(1) or real(self, *a)
    )
    # of 3 and 4 batches: they meet again after 12 steps
    targets = {
        f"t{q}": [(X[20 + 4 * t :][:4], Y[20 + 4 * t :][:4]) for t in range(3 + q)]
        for q in range(2)
    }
    run = trained(Zero, (X, Y), plain, targets, steps=12, per_step=1)
    assert len(measured) == 3 and not are_joined(run)
    assert_as_alone(run, Zero, (X, Y), plain, targets, steps=12, per_step=1)
    measured.clear()
    run = trained(Zero, (X, Y), plain, targets, steps=15, per_step=1)
    assert len(measured) == 3, "those that came back are joined"
    assert are_joined(run)


class RowsMeet(nn.Module):
    """Rows reach each other: each is compared with the mean of all."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        nn.init.zeros_(self.head.weight)  # unseen in the loss at first

    def forward(self, x):
        h = self.inner(x)
        return self.head(h if self.training else h - h.flatten(1).mean(0, keepdim=True))


def test_rows_that_depend_on_each_other_are_not_joined():
    targets = by_class()
    with pytest.warns(UserWarning, match=REFUSED):
        run = trained(RowsMeet, (X, Y), plain, targets)
    assert_as_alone(run, RowsMeet, (X, Y), plain, targets)


def test_contents_are_told_apart():
    found = joining.Joining(0)
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    first = found.join([[a], [b]])
    assert found.join([[a.clone()], [b.clone()]]) == first, "the same numbers"
    a.numpy()[0, 0] = 1.0  # its version does not tell
    assert found.join([[a], [b]]) != first
    assert found.join([[b], [a]]) != found.join([[a], [b]])


def test_weights_are_their_own_again_after_a_measurement():
    model = copy.deepcopy(Zero())
    params = dict(model.named_parameters())
    before = {k: (p.data_ptr(), p.clone(), p._version) for k, p in params.items()}
    state = torch.get_rng_state()
    with pytest.raises(KeyError), joining.moved(params, 1):
        assert all(bool((p != 0).all()) for p in params.values())
        raise KeyError
    for k, p in params.items():
        assert (p.data_ptr(), p._version) == (before[k][0], before[k][2])
        assert torch.equal(p, before[k][1])
    assert torch.equal(state, torch.get_rng_state())

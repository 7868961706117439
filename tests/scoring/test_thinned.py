"""Orders of a part of the coordinates: what a sample leaves out comes in the next ones."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.gradients import Dense
from inrun.gradients.embedding import Lookup
from inrun.gradients.records import Pair
from inrun.scoring import coalitions, packs, sampling, thinned

T, V = 13, 12
IDS = torch.randint(0, V, (2, 4, T), generator=torch.Generator().manual_seed(0))
IDS[0, 0, :V] = torch.arange(V)  # every row of the table is looked up


class Model(nn.Module):
    """A table, a layer whose rows are a part of all, and small parameters."""

    def __init__(self):
        super().__init__()
        self.table, self.large = nn.Embedding(V, 8), nn.Linear(8, 16)
        self.small = nn.Linear(16, V)

    def forward(self, ids):
        return self.small(self.large(self.table(ids)).tanh())


def loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def trained(estimator="shapley", B=4, steps=2, clip=None, value=None, pieces=1, penalty=0.0,
            tokens=False, check=False, tied=False, optimizer=None, **options):  # fmt: skip
    torch.manual_seed(0)
    model = Model().double()
    if tied:
        model.small = nn.Linear(16, 8)
        model.forward = lambda ids: F.linear(
            model.small(model.large(model.table(ids)).tanh()), model.table.weight
        )
    model.double()
    made = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(model.parameters())
    options = {"validation": [IDS[1]], "loss": loss, "audit_every": 0} | options
    run = inrun.watch(model, made, estimator=estimator, **options)
    found = []
    for _ in range(steps):
        if check:
            found.append(run.check())
        for own in torch.arange(B).chunk(pieces):
            with run.batch(own.tolist(), tokens=tokens):
                part = loss(model, IDS[0][own]) / pieces
                if penalty:
                    part = part + penalty * sum(p.square().sum() for p in model.parameters())
                part.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if value:
            nn.utils.clip_grad_value_(model.parameters(), value)
        made.step()
        made.zero_grad()
    run.close()
    return run, found


@pytest.fixture
def thin(monkeypatch):
    """One in two rows of the table and of the layer; few examples do not go by all coalitions."""
    monkeypatch.setattr(packs, "PACK_SIZE", {"cpu": 2 * 8 * 9})
    monkeypatch.setattr(coalitions, "LARGE", 8 * 9)
    monkeypatch.setattr(thinned, "LARGE", 8 * 9)
    monkeypatch.setattr(thinned, "SAMPLE", 100)


def test_how_sparse_a_sample_is():
    assert thinned.stride_of([]) == thinned.stride_of([2**13] * 100) == 1
    assert thinned.stride_of([2**15, 2**15 + 1]) == 2
    assert thinned.stride_of([2**16 - 1]) == 1
    assert thinned.stride_of([2**23] * 3) == thinned.SPARSEST


CASES = [
    {}, {"clip": 0.05}, {"value": 0.01}, {"pieces": 2}, {"penalty": 0.05}, {"tokens": True},
    {"penalty": 0.05, "pieces": 2, "clip": 0.1}, {"tied": True},
    {"validation": None, "targets": {"a": [IDS[1][:1]], "b": [IDS[1][1:]]}},
    {"optimizer": lambda p: torch.optim.RMSprop(p, lr=1e-2)}, {"training": "fast"},
]  # fmt: skip


def named(how):
    """The same in every process."""
    return "-".join(how) or "plain"


@pytest.mark.parametrize("how", CASES, ids=named)
def test_the_parts_of_all_samples_are_the_whole(how, thin, monkeypatch):
    """After whole turns the secant brings what it brings of all coordinates, whatever was done to
    the gradient; and so do all orders, which for two players are one and its reverse."""
    kept = []
    values = coalitions.Game.values
    keep = lambda *a, **k: kept.append((a[0], values(*a, **k))) or kept[-1][1]  # noqa: E731
    monkeypatch.setattr(coalitions.Game, "values", keep)
    for name in ("EARLY", "ENOUGH"):
        monkeypatch.setattr(sampling, name, np.inf)
    run, _ = trained(B=2, **how)
    columns = ["a", "b"] if "targets" in how else ["value"]
    secant, _ = trained("secant", B=2, **how)
    monkeypatch.setattr(thinned, "LARGE", 10**9)
    exact, _ = trained(B=2, **how)
    for step, (game, found) in enumerate(kept[:2]):
        linear = torch.stack(found.linear)
        assert len(linear) == 8 and linear.std(0).norm() > 0.01 * linear.mean(0).norm()
        mine = game.players.by_example(linear.mean(0))  # [Q, B + 1]
        table = secant.history().query("step == @step")
        np.testing.assert_allclose(mine[:, :-1].T, table[columns], rtol=1e-9, atol=1e-13)
        own = secant.steps()["nobody"].iloc[step]
        np.testing.assert_allclose(mine[:, -1].mean(), own, rtol=1e-9, atol=1e-13)
    assert len(kept) == 4 and not kept[2][1].linear
    found, expected = (x.history()[columns].to_numpy() for x in (run, exact))
    if "penalty" in how:  # nobody is a player, too
        assert np.linalg.norm(found - expected) < 0.2 * np.linalg.norm(expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("how", [{}, {"clip": 0.05}, {"tokens": True}], ids=named)
def test_samples_tend_to_all_coalitions(how, beside, thin, monkeypatch):
    own = property(lambda found: beside and bool(found.linear))
    monkeypatch.setattr(coalitions.Sampled, "beside", own)
    monkeypatch.setattr(sampling, "EARLY", 0.01)
    run, checks = trained(check=True, **how)
    monkeypatch.setattr(thinned, "LARGE", 10**9)
    exact, _ = trained(**how)
    found, expected = (x.history()["value"].to_numpy() for x in (run, exact))
    assert not np.array_equal(found, expected)
    assert np.linalg.norm(found - expected) < 0.04 * np.linalg.norm(expected)
    assert all(c.pearson > 0.99 and c.relative_error < 0.15 for c in checks)


def test_what_serves_is_what_differs_less():
    """The secant helps where the update is nearly linear, and only there."""
    rng = torch.Generator().manual_seed(0)
    linear = [*torch.randn(8, 1, 5, generator=rng)]
    bent = [x + 0.01 * torch.randn(1, 5, generator=rng) for x in linear]
    other = [*torch.randn(8, 1, 5, generator=rng)]
    assert coalitions.Sampled(bent, linear).beside
    assert not coalitions.Sampled(other, [100 * x for x in linear]).beside
    assert not coalitions.Sampled(other).beside
    apart = torch.stack(bent).mean(0) - torch.stack(linear).mean(0)
    torch.testing.assert_close(coalitions.Sampled(bent, linear).mean, apart)


def test_the_first_samples_of_a_step_are_half_of_those_of_the_last(thin, monkeypatch):
    begun = []
    own = coalitions.Game._thinned
    note = lambda self, samples, *a: begun.append(samples) or own(self, samples, *a)  # noqa: E731
    monkeypatch.setattr(coalitions.Game, "_thinned", note)
    monkeypatch.setattr(sampling, "EARLY", 0.005)
    trained(steps=2)
    firsts = [i for i, x in enumerate(begun) if x.start == 0]
    assert len(firsts) == 2
    last = begun[firsts[1] - 1].stop
    assert last > 16 and len(begun[firsts[1]]) == last // 2


def test_a_table_that_is_hardly_looked_up(thin, monkeypatch):
    """Only rows of the batch are read."""
    seen = []
    own = thinned.rows_of
    monkeypatch.setattr(thinned, "rows_of", lambda *a: seen.append(own(*a)) or seen[-1])
    ids = torch.tensor([[3, 3, 7, 90], [7, 50, 3, 3]])
    found = []
    for large in (72, 10**9):
        monkeypatch.setattr(thinned, "LARGE", large)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 2)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = inrun.watch(model, optimizer, validation=[ids], audit_every=0,
                          loss=lambda m, x: m(x).mean(1).square().sum() / 2)  # fmt: skip
        with run.batch([0, 1]):
            model(ids).mean(1).square().sum().backward()
        optimizer.step()
        found.append(run.values()["value"])
        run.close()
    assert {x.shape for x in seen} == {(2, 4 * 8)}  # 3, 7, 50 and 90
    np.testing.assert_allclose(*found, rtol=1e-9)


@pytest.mark.parametrize("dims", [(40, 24), (24, 10, 3)], ids=str)
def test_some_rows_of_a_parameter_are_those_of_the_whole(dims):
    rows, at = torch.randn(3, *dims), torch.tensor([7, 0, 19])
    found = [Dense(rows)]
    if len(dims) == 2:
        pair = torch.randn(3, 5, dims[1]), torch.randn(3, 5, dims[0])
        ids = torch.randint(0, dims[0], (3, 6))
        found += [Pair(*pair), Pair(*pair[::-1], transposed=True)]
        found += [Lookup(ids, torch.randn(3, 6, dims[1]), dims[0])]
    for record in found:
        torch.testing.assert_close(record.part(at), record.rows()[:, at])

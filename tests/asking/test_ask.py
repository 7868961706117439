"""inrun.ask against its definition: whole matrices, gradients of single examples by autograd."""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.errors import CaptureError
from inrun.ledger import LedgerError

N, T, V = 10, 4, 7


class Small(nn.Module):
    """Tied table and head, a norm, dropout that must not act, a convolution."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(V, 6), nn.LayerNorm(6)
        self.inner, self.conv = nn.Linear(6, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.drop = nn.Dropout(0.3)

    def forward(self, ids):
        z = self.drop(torch.tanh(self.inner(self.norm(self.table(ids)))))
        return (z + self.conv(z.mT).mT) @ self.table.weight.t()


def lm(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def trained(out=None, steps=12):
    torch.manual_seed(0)
    model = Small().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randint(0, V, (N, T))
    run = inrun.watch(
        model, optimizer, validation=[data[:3]], loss=lm, out=out, estimator="influence"
    )
    for _ in range(steps):
        ids = torch.randperm(N)[:5]
        with run.batch(ids):
            lm(model, data[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    queries = {"one": torch.randint(0, V, (1, T)), "two": torch.randint(0, V, (2, T))}
    return run, model, data, queries


def batches(data, n=3, names=int):
    return [([names(k) for k in range(i, min(i + n, N))], data[i : i + n]) for i in range(0, N, n)]


def definition(run, model, data, queries, a=0.1):
    """A weight and its bias have one matrix, in the scale of κ."""
    model.eval()
    params = dict(model.named_parameters())
    found = {}
    for name, query in queries.items():
        scores = torch.zeros(N, dtype=torch.float64)
        for layer in run.curvature.layers.values():
            own = [params[k] for k in layer.place.names]

            def gradient(batch, own=own, layer=layer):
                g = [x.flatten(1) if x.ndim > 2 else x for x in
                     torch.autograd.grad(lm(model, batch), own)]  # fmt: skip
                whole = g[0] if len(g) == 1 else torch.cat([g[0], g[1][:, None]], dim=1)
                kappa = layer.left if layer.right is None else torch.outer(layer.left, layer.right)
                return (kappa * whole).flatten()

            F_ = torch.diag(layer.spectrum.flatten())
            if layer.kind == "two-sided":
                basis = torch.kron(layer.U_S, layer.U_A)
                F_ = basis @ F_ @ basis.T
            damped = F_ + a / layer.tau * torch.eye(len(F_), dtype=torch.float64)
            u = torch.linalg.solve(damped, gradient(query))
            for i in range(N):
                scores[i] += u @ gradient(data[i : i + 1]) / N
        found[name] = scores.numpy()
    kinds = {x.place.name: x.kind for x in run.curvature.layers.values()}
    assert kinds["table.weight"] == "diagonal" and kinds["inner.weight"] == "two-sided"
    model.train()
    return found


def test_scores_are_those_of_the_definition(tmp_path):
    run, model, data, queries = trained(tmp_path / "run")
    before = [p.detach().clone() for p in model.parameters()]
    found = inrun.ask(model, batches(data), queries, run=run, loss=lm)
    wanted = definition(run, model, data, queries)
    assert list(found.columns) == ["id", "one", "two"] and list(found["id"]) == list(range(N))
    for name, scores in wanted.items():
        off = np.linalg.norm(found[name] - scores) / np.linalg.norm(scores)
        assert off < 2e-7  # parts are kept in float32
    assert all(map(torch.equal, before, model.parameters()))
    assert model.training and all(p.grad is None for p in model.parameters())
    # from the ledger, as a run and as a folder: the same
    for saved in (inrun.open(tmp_path / "run"), tmp_path / "run"):
        again = inrun.ask(model, batches(data, 4), queries, run=saved, loss=lm)
        np.testing.assert_allclose(again["one"], found["one"], rtol=1e-5, atol=1e-12)
    other = inrun.ask(model, batches(data), queries, run=run, loss=lm, damping=3.0)
    wanted = definition(run, model, data, queries, 3.0)
    np.testing.assert_allclose(other["two"], wanted["two"], rtol=1e-5, atol=1e-12)


def test_a_row_that_comes_twice_and_owners():
    run, model, data, queries = trained()
    model.conv.weight.data.zero_()  # packed rows must not see each other
    once = inrun.ask(model, batches(data, 2), queries, run=run, loss=lm)
    owner = torch.arange(2)
    packed = [(ids, x, owner) for ids, x in batches(data, 2)]
    found = inrun.ask(model, packed, queries, run=run, loss=lm)
    pd.testing.assert_frame_equal(once, found, rtol=1e-6)
    twice = inrun.ask(model, batches(data, 2) * 2, queries, run=run, loss=lm)
    np.testing.assert_allclose(twice["one"], once["one"], rtol=1e-6)


def test_goes_on_after_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setattr("inrun.asking.parts.ROWS", 3)
    run, model, data, queries = trained()
    names = "example {}".format
    whole = inrun.ask(model, batches(data, names=names), queries, run=run, loss=lm)
    seen = []

    def some(n):
        yield from batches(data, names=names)[:n]

    def broken():
        yield from some(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inrun.ask(model, broken(), queries, run=run, loss=lm, out=tmp_path / "asked")

    def counted(model, ids):
        seen.append(len(ids))
        return lm(model, ids)

    out = {"run": run, "loss": counted, "out": tmp_path / "asked"}
    found = inrun.ask(model, some(4), queries, **out)
    pd.testing.assert_frame_equal(found, whole)
    assert seen.count(3) == 1  # of three full batches two were there already
    for changed, why in (
        ({"queries": {"one": queries["one"]}}, "its questions differ"),
        ({"queries": {"one": queries["two"], "two": queries["one"]}}, "its losses differ"),
        ({"damping": 1.0}, "its damping differ"),
        ({"data": batches(data, 5, names)[::-1]}, "other ids"),
        ({"data": batches(data, names=names)[:2]}, "has only 6"),
    ):
        given = {"data": some(4), "queries": queries} | changed
        with pytest.raises(LedgerError, match=why):
            inrun.ask(model, **given, **out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(LedgerError, match="holds something else"):
        inrun.ask(model, some(4), queries, run=run, loss=lm, out=tmp_path / "full")


def test_refused(tmp_path):
    run, model, data, queries = trained()
    other = nn.Linear(2, 2).double()
    with pytest.raises(ValueError, match="this is not the model of that run"):
        inrun.ask(other, batches(data), queries, run=run, loss=lm)
    with pytest.raises(ValueError, match="at least one question"):
        inrun.ask(model, batches(data), {}, run=run, loss=lm)
    with pytest.raises(ValueError, match="ask fewer at a time"):
        inrun.ask(model, batches(data), queries, run=run, loss=lm, memory_limit=1000)
    with pytest.raises(ValueError, match="pairs \\(ids, batch\\)"):
        inrun.ask(model, [data], queries, run=run, loss=lm)
    with pytest.raises(ValueError, match="training data is empty"):
        inrun.ask(model, [], queries, run=run, loss=lm)
    model.norm.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"norm\.weight was trained and is frozen"):
        inrun.ask(model, batches(data), queries, run=run, loss=lm)
    model.norm.weight.requires_grad_(True)

    def noisy(model, ids):
        return lm(model, ids) * torch.rand(())

    torch.manual_seed(1)
    with pytest.raises(CaptureError, match="do not add up"):
        inrun.ask(model, batches(data), queries, run=run, loss=noisy)
    plain = inrun.watch(
        other, torch.optim.SGD(other.parameters(), lr=0.1), validation=[data], loss=lm,
        out=tmp_path / "plain",
    )  # fmt: skip
    with pytest.raises(ValueError, match="a run whose curvature is known"):
        inrun.ask(model, batches(data), queries, run=plain, loss=lm)
    plain.close()
    with pytest.raises(LedgerError, match=r"has no curvature\.npz"):
        inrun.ask(model, batches(data), queries, run=tmp_path / "plain", loss=lm)

"""``run.batch(ids, tokens=True)``: a value for each position."""

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from helpers.captures import gradients_of, trainable
from helpers.ledgers import TABLES
from inrun.capture.capture import Capture
from inrun.errors import BatchError, CaptureError
from inrun.gpt import GPT
from inrun.ledger.entries import MemoryLedger, StepEntry
from inrun.ledger.saved import Store, open_run
from inrun.ledger.tokens import Tokens

V, T = 20, 6
DATA = torch.randint(0, V, (40, T), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(2))


class Pooled(nn.Module):
    """A classifier of the mean (or of the last) over positions."""

    def __init__(self, how):
        super().__init__()
        self.how, self.table = how, nn.Embedding(V, 8)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids):
        h = torch.tanh(self.inner(self.table(ids)))
        return self.head({"mean": h.mean(1), "last": h[:, -1], "max": h.amax(1)}[self.how])


MODELS = {
    "gpt": lambda: GPT(V, 8, 2, 2, T),
    "mean": lambda: Pooled("mean"),
    "last": lambda: Pooled("last"),
    "max": lambda: Pooled("max"),
}


def loss(model, rows):
    out = model(DATA[rows])
    if out.ndim == 2:
        return F.cross_entropy(out, LABELS[rows])
    return F.cross_entropy(out[:, :-1].flatten(0, 1), DATA[rows][:, 1:].flatten())


def train(make, tokens, steps=4, B=T, clip=None, out=None, ids=int, **options):
    """The last steps with tokens=True, or none. As many examples as positions, to confuse them."""
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(
        model, optimizer, targets={"a": [range(30, 34)], "b": [range(34, 40)]}, loss=loss,
        audit_every=2, out=out, **options,
    )  # fmt: skip
    for s in range(steps):
        rows = range(s * B, (s + 1) * B)
        with run.batch([ids(r) for r in rows], tokens=tokens and s >= 2):
            loss(model, rows).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return run


def same(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


# Values


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_values_of_examples_stay_and_those_of_positions_add_up(name, training, clip):
    plain = train(MODELS[name], False, training=training, clip=clip)
    run = train(MODELS[name], True, training=training, clip=clip)
    assert run.steps()["void"].isna().all()
    for column in ("value", "a", "b"):
        same(run.history()[column], plain.history()[column])
    found = run.tokens()
    assert sorted(found["step"].unique()) == [2, 3]
    assert found.groupby(["step", "id"])["position"].agg(list).map(lambda p: p == [*range(T)]).all()
    sums = found.groupby(["step", "id"])[["value", "a", "b"]].sum()
    whole = run.history().query("step >= 2").set_index(["step", "id"])
    size = found["value"].abs().max() * T
    whole = whole.loc[sums.index, sums.columns]
    np.testing.assert_allclose(sums, whole, atol=1e-6 * size)  # kept in float32
    for row in (13, 20):
        assert run.tokens(row)["input"].tolist() == DATA[row].tolist()
    assert run.tokens(row, step=2).empty and len(run.tokens(row, step=3)) == T
    run.close()
    plain.close()


@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_positions_of_the_capture_add_up_exactly(form):
    torch.manual_seed(0)
    model = GPT(V, 8, 2, 2, T).double()
    rows = range(5)
    found = []
    for tokens in (False, True):
        capture = Capture(model, trainable(model), form=form)
        with capture.batch(5, tokens=tokens) as micro:
            loss(model, rows).backward()
        found.append(gradients_of(micro))
    examples, positions = found
    for k, g in examples.items():
        assert positions[k].shape == (5 * T, *g.shape[1:])
        same(positions[k].view(5, T, *g.shape[1:]).sum(1), g)


class Own(nn.Module):
    """A table, a product, a causal mean and a head; with ``copies``, each position uses its own
    copy [B, T, *W] of every parameter, written out without inrun."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(V, 5), nn.Linear(5, 4)
        self.gain, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, V, bias=False)

    def forward(self, ids, copies=None):
        if copies is None:
            h = self.inner(self.table(ids))
        else:
            own = torch.arange(len(ids))[:, None], torch.arange(ids.shape[1]), ids
            x = copies["table.weight"][own]
            h = torch.einsum("bti,btoi->bto", x, copies["inner.weight"]) + copies["inner.bias"]
        counts = torch.arange(1, ids.shape[1] + 1)[:, None]
        mixed = h.cumsum(1) / counts
        if copies is None:
            return self.head(torch.tanh(mixed) * self.gain)
        z = torch.tanh(mixed) * copies["gain"]
        return torch.einsum("bti,btoi->bto", z, copies["head.weight"])


@pytest.mark.parametrize("form", ["auto", "ghost", "materialise"])
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_a_position_has_the_gradient_of_its_own_copy_of_the_parameters(form, batch_dim):
    torch.manual_seed(0)
    model, ids = Own().double(), DATA[:4]
    copies = {
        k: p.detach().expand(4, T, *p.shape).clone().requires_grad_()
        for k, p in model.named_parameters()
    }
    F.cross_entropy(model(ids, copies)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    class First(nn.Module):  # the sequence first
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids.t()).transpose(0, 1)

    params = trainable(model)
    capture = Capture(First() if batch_dim else model, params, form=form, batch_dim=batch_dim)
    given = ids.t().contiguous() if batch_dim else ids
    with capture.batch(4, tokens=True) as micro:
        out = capture.model(given)
        out = out.transpose(0, 1) if batch_dim else out
        F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    found = gradients_of(micro)
    assert set(found) == set(copies)
    for k, g in found.items():
        shape = (T, 4) if batch_dim else (4, T)
        own = g[: 4 * T].view(*shape, *g.shape[1:])
        same(own.transpose(0, 1) if batch_dim else own, copies[k].grad)


def test_owner_by_hand_gives_the_same():
    """Each position as an example of its own is what tokens=True does."""
    model = GPT(V, 8, 2, 2, T).double()
    found = []
    for B, options in ((4, {"tokens": True}), (4 * T, {"owner": torch.arange(4 * T).view(4, T)})):
        capture = Capture(model, trainable(model), form="ghost")
        with capture.batch(B, **options) as micro:
            loss(model, range(4)).backward()
        found.append(gradients_of(micro))
    for k, g in found[0].items():
        same(g, found[1][k])


def test_packed_rows_count_positions_in_each_document():
    """``owner`` says whose positions are; those of nobody are in no document."""
    torch.manual_seed(0)
    owner = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, -1, -1]])
    found = []
    for tokens in (False, True):
        torch.manual_seed(0)
        model = GPT(V, 8, 1, 2, T).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = inrun.watch(
            model, optimizer, validation=[range(30, 34)], loss=loss, estimator=["secant", "sgd"]
        )
        with run.batch(["x", "y", "z"], owner=owner, tokens=tokens):
            loss(model, range(2)).backward()
        optimizer.step()
        run.close()
        found.append(run)
    plain, run = found
    same(run.history("sgd")["value"], plain.history("sgd")["value"])
    same(run.steps()["nobody"], plain.steps()["nobody"])
    assert abs(run.steps()["nobody"][0]) > 1e-6
    for k, name in enumerate("xyz"):
        own = run.tokens(name, estimator="sgd")
        assert own["position"].tolist() == list(range(int((owner == k).sum())))
        assert own["input"].tolist() == DATA[:2][owner == k].tolist()
        value = run.history("sgd").set_index("id")["value"][name]
        assert own["value"].sum() == pytest.approx(value, rel=1e-5, abs=1e-9)
    assert run.tokens(7).empty  # the ids of this run are strings


def test_micro_batches_with_and_without():
    torch.manual_seed(0)
    model = GPT(V, 8, 1, 2, T).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = inrun.watch(model, optimizer, validation=[range(30, 34)], loss=loss)
    check = run.check()
    for first, tokens in ((0, True), (3, False), (6, True)):
        with run.batch(range(first, first + 3), tokens=tokens):
            loss(model, range(first, first + 3)).backward()
    optimizer.step()
    found = run.tokens()
    assert found["id"].unique().tolist() == [0, 1, 2, 6, 7, 8]
    sums = found.groupby("id")["value"].sum()
    whole = run.history().set_index("id")["value"][sums.index]
    np.testing.assert_allclose(sums, whole, atol=1e-6 * found["value"].abs().max())
    assert check.gradient_error < 1e-12 and check.credit_error < 1e-9
    run.close()


# Refusals


def test_vectors_without_positions_are_refused():
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4, dtype=torch.float64)
    run = inrun.watch(model, optimizer, validation=[x], loss=lambda m, b: m(b).square().mean())
    with (
        pytest.raises(BatchError, match=r"input.0 .*shape \(6, 4\).* no dimension of positions"),
        run.batch(range(6), tokens=True),
    ):
        model(x).square().mean().backward()
    with run.batch(range(6)):
        model(x).square().mean().backward()
    optimizer.step()
    assert run.values()["value"].notna().all()
    run.close()


class Mixing(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.table, self.head = nn.Embedding(V, 4), nn.Linear(4, 3)
        self.mix = nn.Conv1d(4, 4, 3, padding=1) if kind == "conv1d" else nn.GRU(4, 4)

    def forward(self, ids):
        h = self.table(ids)
        if isinstance(self.mix, nn.GRU):
            return self.head(self.mix(h.transpose(0, 1))[0][-1])
        return self.head(self.mix(h.transpose(1, 2)).mean(2))


@pytest.mark.parametrize("kind", ["conv1d", "gru"])
def test_operations_that_mix_positions_are_refused_by_name(kind):
    model = Mixing(kind).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = inrun.watch(model, optimizer, validation=[range(30, 35)], loss=loss)
    message = rf"tokens=True\) tells positions apart.*Without tokens=True.*'{kind}'"
    with pytest.raises(CaptureError, match=message), run.batch(range(5), tokens=True):
        loss(model, range(5)).backward()
    with run.batch(range(5)):
        loss(model, range(5)).backward()
    optimizer.step()
    assert run.values()["value"].notna().all()
    run.close()


# The ledger


@pytest.mark.parametrize("ids", [int, str])
def test_on_disk_as_in_memory(tmp_path, ids):
    options = {"ids": ids, "estimator": ["secant", "sgd"], "steps": 5, "B": 4}
    memory = train(MODELS["gpt"], True, **options)
    run = train(MODELS["gpt"], True, out=tmp_path / "run", **options)
    run.close()
    saved = open_run(tmp_path / "run")
    for estimator in ("secant", "sgd"):
        expected = memory.tokens(estimator=estimator)
        assert len(expected) == 3 * 4 * T
        pd.testing.assert_frame_equal(saved.tokens(estimator=estimator), expected)
        pd.testing.assert_frame_equal(saved.tokens(ids(9), 2, estimator),
                                      memory.tokens(ids(9), 2, estimator))  # fmt: skip
    again = MemoryLedger(["a", "b"])
    again.load_state_dict(json.loads(json.dumps(memory.state_dict()["ledger"])))
    pd.testing.assert_frame_equal(again.tokens(1), memory.tokens(estimator="sgd"))
    memory.close()


def entries(n=12, with_tokens=(2, 3, 7)):
    rng = np.random.default_rng(0)
    for step in range(n):
        ids, values, tokens = np.arange(3) + step, rng.normal(size=(1, 2, 3)), None
        if step in with_tokens:
            sizes = np.array([2, 0, 3])
            inputs = None if step == 3 else rng.integers(0, 99, 5)
            tokens = Tokens(sizes, rng.normal(size=(1, 2, 5)).astype(np.float32), inputs)
        yield StepEntry(step, ids, values, 0.1, tokens=tokens, nobody=rng.normal(size=(1, 2)))


@pytest.mark.parametrize("cut", [None, 0, 3, 4, 8])
def test_parts_with_and_without_positions_are_merged_and_cut(tmp_path, cut):
    store = Store.create(tmp_path / "run", {}, ["a", "b"], ["secant"])
    memory = MemoryLedger(["a", "b"])
    for entry in entries():
        store.append(entry)
        memory.append(entry)
        store.flush()
    if cut is not None:
        store.truncate(cut)
        memory.truncate(cut)
    store.close()
    saved = open_run(tmp_path / "run")
    assert len(saved._ledger.sources()) <= 1
    pd.testing.assert_frame_equal(saved.tokens(), memory.tokens(0))
    for table in TABLES:
        pd.testing.assert_frame_equal(getattr(saved, table)(), getattr(memory, table)(0))
    if cut is None:
        found = saved.tokens(5)
        assert found["step"].tolist() == [3, 3, 3] and found["input"].isna().all()
        assert saved.tokens(4, step=2)["input"].notna().all()
        [part] = saved._ledger.sources()
        raw = pq.read_table(tmp_path / "run" / "values" / f"{part.name}.parquet")
        assert raw.column_names[-3:] == ["inputs", "tokens:secant:a", "tokens:secant:b"]
        assert raw["tokens:secant:a"].null_count == len(raw) - 6


def test_a_ledger_without_positions_has_no_such_columns(tmp_path):
    store = Store.create(tmp_path / "run", {}, ["a", "b"], ["secant"])
    for entry in entries(with_tokens=()):
        store.append(entry)
    store.close()
    saved = open_run(tmp_path / "run")
    [part] = saved._ledger.sources()
    names = pq.read_schema(tmp_path / "run" / "values" / f"{part.name}.parquet").names
    assert names == ["step", "id", "weight", "secant:a", "secant:b"]
    assert saved.tokens().columns.tolist() == ["step", "id", "position", "input", "value", "a", "b"]
    assert saved.tokens().empty

"""Nobody's part of a step: what belongs to no example of the batch."""

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from helpers.ledgers import as_format_2, records, write
from inrun.ledger.entries import MemoryLedger
from inrun.ledger.saved import Store, open_run
from inrun.report.data import payload
from inrun.report.facts import describe, facts_of

LR = 0.05
X = torch.randn(30, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 3, (30,), generator=torch.Generator().manual_seed(2))
VALIDATION = {"a": [(X[24:27], Y[24:27])], "b": [(X[27:], Y[27:])]}


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def penalty(model):
    return 0.3 * sum(p.square().sum() for p in model.parameters())


def train(out=None, steps=4, **options):
    """SGD without momentum on a loss with a penalty. The model before each step comes along."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    run = inrun.watch(model, optimizer, targets=VALIDATION, loss=loss, audit_every=2, out=out,
                      estimator=["secant", "sgd"], **options)  # fmt: skip
    weights = []
    for s in range(steps):
        weights.append([p.detach().clone() for p in model.parameters()])
        own = slice(6 * s, 6 * s + 6)
        with run.batch(range(6 * s, 6 * s + 6)):
            (loss(model, (X[own], Y[own])) + penalty(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run, model, weights


def test_a_penalty_is_nobodys_and_the_step_adds_up():
    run, model, weights = train()
    for s, before in enumerate(weights):
        with torch.no_grad():
            for p, w in zip(model.parameters(), before, strict=True):
                p.copy_(w)
        params = list(model.parameters())
        expected = {}
        for name, [batch] in VALIDATION.items():  # η⟨∇ℓ(w), ∇penalty⟩, what the penalty did
            v = torch.autograd.grad(loss(model, batch), params)
            g = torch.autograd.grad(penalty(model), params)
            expected[name] = LR * sum(float((a * b).sum()) for a, b in zip(v, g, strict=True))
        entry = list(run._ledger)[s]
        np.testing.assert_allclose(entry.nobody[1], list(expected.values()), rtol=1e-9)
        row = run.steps("sgd").iloc[s]
        assert row["nobody"] == pytest.approx(np.mean(list(expected.values())), rel=1e-9)
    steps = run.steps()
    audited = steps[steps["batch_share"].notna()]
    assert len(audited) == 2
    credited = audited["sum"] + audited["nobody"]
    np.testing.assert_allclose(audited["explained"], credited / audited["batch_share"], rtol=1e-12)
    np.testing.assert_allclose(audited["residual"], audited["batch_share"] - credited, atol=1e-15)
    np.testing.assert_allclose(audited["explained"], 1.0, atol=5e-3)
    assert (audited["sum"] / audited["batch_share"] - 1).abs().min() > 0.05  # not without it
    assert run.tally.explained == pytest.approx(credited.sum() / audited["batch_share"].sum())
    run.close()


def test_on_disk_and_in_texts(tmp_path):
    memory, *_ = train()
    run, *_ = train(out=tmp_path / "run")
    run.close()
    saved = open_run(tmp_path / "run")
    for estimator in ("secant", "sgd"):
        pd.testing.assert_frame_equal(saved.steps(estimator), memory.steps(estimator))
    facts = facts_of(saved)
    assert facts["nobody"] == pytest.approx(memory.steps()["nobody"][[0, 2]].sum())
    assert "of the batch share" in describe(facts)["nobody's part"]
    audit = payload(saved)["audit"]
    assert audit["nobody"][-1] == pytest.approx(facts["nobody"], rel=1e-4)
    state = memory.state_dict()["ledger"]
    again = MemoryLedger(list(VALIDATION))
    again.load_state_dict(json.loads(json.dumps(state)))
    pd.testing.assert_frame_equal(again.steps(1), memory.steps("sgd"))
    memory.close()


def test_without_a_penalty_there_is_none(tmp_path):
    write(tmp_path / "run", list(records(6)))
    saved = open_run(tmp_path / "run")
    assert saved.steps()["nobody"].tolist() == [0.0] * 6
    assert "nobody's part" not in describe(facts_of(saved))
    assert "nobody" not in payload(saved)["audit"]


def test_a_ledger_from_before_is_read_continued_and_merged(tmp_path):
    folder, rows = tmp_path / "run", list(records(12))
    write(folder, rows[:8], flush=4)
    before = open_run(folder).steps()
    as_format_2(folder)
    steps = pq.read_schema(folder / "steps" / "part-000000.parquet").names
    assert not any(name.startswith("nobody") for name in steps)
    pd.testing.assert_frame_equal(open_run(folder).steps(), before)
    assert (open_run(folder).steps()["nobody"] == 0).all()
    store = Store.create(folder, {"lr": 0.1}, ["a", "b"], ["secant"])
    for row in rows[8:]:
        store.append(row)
    store.close()  # merges the small parts
    saved, memory = open_run(folder), MemoryLedger(["a", "b"])
    for row in rows:
        memory.append(row)
    assert len(saved._ledger.sources()) == 1
    pd.testing.assert_frame_equal(saved.steps(), memory.steps(0))
    assert (saved.steps()["nobody"] == 0).all()

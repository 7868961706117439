"""Values of single steps against exact Shapley values over all coalitions of their examples."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import inrun
from helpers.zoo import GPT

BYTES = 64


def next_token(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def learnable_text(rows: int, length: int = 16) -> torch.Tensor:
    """Sequences in which every second token follows from the one before."""
    ids = torch.randint(0, BYTES, (rows, length))
    ids[:, 1::2] = (ids[:, ::2] * 7 + 3) % BYTES
    return ids


@pytest.mark.parametrize("lr", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize(
    ("B", "steps"),
    [(6, (5, 12, 20)), pytest.param(10, (5, 12, 20, 100), marks=pytest.mark.slow)],
    ids=["2^6 coalitions", "2^10 coalitions"],
)
def test_secant_midpoint_is_exact_shapley(B, steps, lr):
    train, val = learnable_text(100), learnable_text(8)
    model = GPT(BYTES, 16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    run = inrun.watch(
        model, optimizer, validation=[val], loss=next_token,
        estimator=["secant", "tangent", "sgd"], audit_every=0,
    )  # fmt: skip
    for step in range(steps[-1] + 1):
        rows = torch.randint(0, len(train), (B,))
        check = run.check() if step in steps else None
        with run.batch(rows):
            next_token(model, train[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if check is None:
            continue
        assert check.done and check.coalitions == 2**B
        assert check.gradient_error < 1e-12
        assert check.sum_error <= 0.01
        exact = check.table["exact"].to_numpy()
        R = {
            e: np.corrcoef(run.history(e).query(f"step == {step}")["value"], exact)[0, 1]
            for e in ("secant", "tangent", "sgd")
        }
        print(f"lr {lr:.0e} step {step:3d}", {k: round(v, 4) for k, v in R.items()})
        assert check.pearson == pytest.approx(R["secant"], abs=1e-12)
        if step < 20:
            assert check.pearson >= 0.998
        else:
            assert check.pearson >= 0.999
            assert check.relative_error <= 0.02
        assert R["secant"] >= max(R["tangent"], R["sgd"])


def test_permutation_sampling_above_twelve_examples(capsys):
    train, val = learnable_text(40, 8), learnable_text(4, 8)
    model = GPT(BYTES, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(model, optimizer, validation=[val], loss=next_token)
    for step in range(22):
        check = run.check(permutations=20) if step == 21 else None
        with run.batch(rows := torch.randint(0, len(train), (13,))):
            next_token(model, train[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert check is not None and check.done and not check.exact
    assert "standard_error" in check.table
    assert check.relative_error <= 0.05 + 2 * check.noise
    assert "trustworthy" in capsys.readouterr().out

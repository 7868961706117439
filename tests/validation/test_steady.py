"""How much of the validation set each step sees, its running mean, and halves of it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import inrun
from inrun.report.facts import describe, facts_of
from inrun.report.noise import halves_agree, in_words

STEPS, B = 6, 4


def rows(n, seed):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=rng, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=rng)


X, Y = rows(20, 0)
V = rows(24, 9)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def cut(n):
    """The validation rows in n batches."""
    return list(zip(*(t.chunk(n) for t in V), strict=True))


def train(steps=STEPS, kind=torch.optim.AdamW, lr=0.01, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = kind(model.parameters(), lr=lr)
    run = inrun.watch(model, optimizer, loss=loss_of, **{"audit_every": 0} | options)
    rng = torch.Generator().manual_seed(3)
    for t in range(steps):
        ids = torch.randint(0, 20, (B,), generator=rng)
        with run.batch(list(range(t * B, (t + 1) * B))):
            loss_of(model, (X[ids], Y[ids])).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return run


def of(run):
    return run.values().sort_values("id")["value"].to_numpy()


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_a_small_set_is_used_whole(batches):
    """However it is cut, all of it counts at every step."""
    whole = of(train(validation=cut(1), per_step=1))
    run = train(validation=cut(batches))
    np.testing.assert_allclose(of(run), whole, rtol=1e-9, atol=1e-14)
    assert run._validator.described["whole"]
    assert run._validator.described["passes"] == batches


def test_a_large_set_is_used_in_turn_or_whole_on_request():
    six = cut(6)
    run = train(validation=six)
    assert run._validator.described["drawn"] == {"validation": 1}
    np.testing.assert_array_equal(of(run), of(train(validation=six, per_step=1)))
    run = train(validation=six, per_step="all")
    np.testing.assert_allclose(of(run), of(train(validation=cut(1))), rtol=1e-9, atol=1e-14)
    assert "whole validation set" in run._validator.described["how"]
    one = of(train(validation=cut(2), per_step=1))
    assert not np.allclose(one, of(train(validation=cut(2))))


class Endless:
    """A loader that does not say how long it is."""

    def __iter__(self):
        return iter(cut(2))


def test_a_loader_of_unknown_length():
    run = train(validation=Endless())
    assert run._validator.per_step == [1] and not run._validator.described["whole"]
    with pytest.raises(inrun.ValidationError, match="per_step='all' needs to know"):
        train(validation=Endless(), per_step="all")


def obvious_smooth(keep):
    """Values of "sgd" with the running mean of the gradients, one loop."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rng, six, params = torch.Generator().manual_seed(3), cut(6), list(model.parameters())
    mean, found = [torch.zeros_like(p) for p in params], []
    for t in range(STEPS):
        ids = torch.randint(0, 20, (B,), generator=rng)
        v = torch.autograd.grad(loss_of(model, six[t % 6]), params)
        mean = [keep * m + (1 - keep) * x for m, x in zip(mean, v, strict=True)]
        for i in ids:
            loss = loss_of(model, (X[i][None], Y[i][None])) / B
            g = torch.autograd.grad(loss, params)
            dot = sum(float((m * x).sum()) for m, x in zip(mean, g, strict=True))
            found.append(0.1 * dot / (1 - keep ** (t + 1)))
        loss_of(model, (X[ids], Y[ids])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return np.array(found)


def test_a_running_mean_of_directions():
    run = train(kind=torch.optim.SGD, lr=0.1, validation=cut(6), estimator="sgd", smooth=0.7)
    np.testing.assert_allclose(of(run), obvious_smooth(0.7), rtol=1e-9, atol=1e-14)
    assert "running mean 0.7" in run._validator.described["how"]


def test_a_running_mean_of_several_targets_is_that_of_each():
    targets = {"a": cut(6)[:3], "b": cut(6)[3:]}
    both = train(targets=targets, per_step=1, smooth=0.5).values()
    for name, batches in targets.items():
        alone = train(validation=batches, per_step=1, smooth=0.5)
        np.testing.assert_allclose(both[name], of(alone), rtol=1e-9, atol=1e-14)


def test_a_loss_that_is_not_finite_does_not_enter_the_mean():
    bad = [(torch.full_like(V[0], torch.nan), V[1])]
    six = cut(6)
    run = train(validation=[*six[:2], *bad, *six[2:]], smooth=0.7)
    steps = run.steps()
    assert list(steps["void"].notna()) == [t == 2 for t in range(STEPS)]
    assert np.isfinite(run.history()["value"]).all()


def test_halves_are_the_whole_set():
    whole = of(train(validation=cut(1)))
    halved = train(targets=inrun.halves([V]))
    np.testing.assert_allclose(of(halved), whole, rtol=1e-9, atol=1e-14)
    assert halved.targets == ["half 1", "half 2"]


def test_halves_of_everything():
    data = TensorDataset(*V)
    assert [len(x) for x in inrun.halves(data).values()] == [12, 12]
    loader = inrun.halves(DataLoader(data, batch_size=5))["half 2"]
    assert torch.equal(next(iter(loader))[0], V[0][1:10:2])
    batches = inrun.halves(cut(3))
    assert [len(x) for x in batches.values()] == [2, 1]
    labels = inrun.halves(inrun.by_label(data))
    assert list(labels)[:2] == ["0, half 1", "0, half 2"] and len(labels) == 6
    for bad in ([], [(V[0][:1], V[1][:1])], Endless(), TensorDataset(V[0][:1])):
        with pytest.raises(inrun.ValidationError, match="halves"):
            inrun.halves(bad)


def test_the_noise_is_shown(tmp_path):
    train(targets=inrun.halves([V]), out=tmp_path / "a", steps=3)
    facts = facts_of(inrun.open(tmp_path / "a"))
    values = inrun.open(tmp_path / "a").values()
    r = values["half 1"].rank().corr(values["half 2"].rank())
    assert facts["halves_agree"] == pytest.approx(r)
    assert facts["steadiness"] == pytest.approx(2 * r / (1 + r) if r > 0 else r)
    text = describe(facts)
    assert text["validation"] == "the whole validation set at every step"
    assert "two halves of the validation set" in text["steadiness"]
    renamed = values.rename(columns={"half 1": "target 0", "half 2": "target 1"})
    assert halves_agree(["half 1", "half 2"], renamed) == pytest.approx(r)
    assert halves_agree(["validation"], values[["id", "value"]]) is None
    assert "not measured" in in_words({"halves_agree": None})


def test_what_is_refused():
    with pytest.raises(ValueError, match="per_step='some' is not known"):
        train(validation=cut(1), per_step="some")
    with pytest.raises(ValueError, match="smooth=1"):
        train(validation=cut(1), smooth=1.0)
    with pytest.raises(ValueError, match="smooth= mixes"):
        train(validation=cut(1), smooth=0.5, estimator="carry")

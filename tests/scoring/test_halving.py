"""Values by two halves of a step's validation rows, in a sample of the steps."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import inrun
from inrun.ledger.steady import PARTS
from inrun.report.facts import cards, describe, facts_of

STEPS, B, FEATURES = 12, 8, 40


def rows(n, seed):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=rng, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=rng)


X, Y = rows(32, 0)
V = rows(24, 9)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train(steps=STEPS, clip=None, tokens=False, loss=loss_of, trained=False, run=None, **options):
    """Train on batches of 8 of 32 rows; returns the run, or with ``trained`` the weights, too."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"loss": loss, "audit_every": 5, "halves_every": 3} | options
    run = inrun.watch(model, optimizer, **options)
    rng = torch.Generator().manual_seed(3)
    for _ in range(steps):
        ids = torch.randperm(32, generator=rng)[:B]
        with run.batch(ids.tolist()):
            loss_of(model, (X[ids], Y[ids])).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return (run, [p.detach().clone() for p in model.parameters()]) if trained else run


def by_halves(run, estimator=0):
    return run._ledger.by_halves(estimator).sort_values(["step", "id"], ignore_index=True)


def of_targets(run, estimator=None):
    """Values by half of a run with halves as targets."""
    found = run.history(estimator)
    for h, name in enumerate("ab"):
        found[name] = found[[t for t in run.targets if t.endswith(f"half {h + 1}")]].mean(axis=1)
    return found.sort_values(["step", "id"], ignore_index=True)


LABELS = inrun.by_label(TensorDataset(*V))
SETS = {
    "a batch": ({"validation": [V]}, inrun.halves([V])),
    "two batches": (
        {"validation": [tuple(t[:12] for t in V), tuple(t[12:] for t in V)]},
        {"half 1": [tuple(t[:12] for t in V)], "half 2": [tuple(t[12:] for t in V)]},
    ),
    "labels": ({"targets": LABELS}, inrun.halves(LABELS)),
}


@pytest.mark.parametrize("estimator", ["shapley", "secant+gauss2", "tangent", "sgd", "influence"])
@pytest.mark.parametrize("data", SETS)
def test_they_are_what_halves_as_targets_give(data, estimator):
    options, targets = SETS[data]
    run = train(**options, estimator=estimator, halves_every=1)
    real, found = of_targets(train(targets=targets, estimator=estimator)), by_halves(run)
    assert list(found["step"]) == list(real["step"]) and list(found["id"]) == list(real["id"])
    scale = real["value"].abs().max()
    # orders are sampled until they are precise enough: for other targets perhaps others
    close = 2e-2 if estimator == "shapley" else 1e-9
    for name in "ab":
        np.testing.assert_allclose(found[name], real[name], atol=close * scale, rtol=0)
    if data != "labels":
        np.testing.assert_allclose(
            found["value"], (found["a"] + found["b"]) / 2, atol=close * scale
        )


@pytest.mark.parametrize("options", [
    {}, {"clip": 0.1, "max_norm": 0.1}, {"chunk": 5}, {"training": "fast"},
    {"estimator": ["carry", "secant"], "window": 3}, {"every": 2, "seed": 1},
], ids=str)  # fmt: skip
def test_nothing_else_changes(options):
    """Values, weights and audits are the same, bit for bit."""
    (plain, before), (halved, after) = (
        train(validation=[V], halves_every=n, trained=True, **options) for n in (0, 2)
    )
    for table in ("history", "steps"):
        a, b = (getattr(run, table)() for run in (plain, halved))
        assert a.equals(b)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    e = 1 if "estimator" in options else 0
    found, steps = by_halves(halved, e), halved.steps()
    scored = int(steps["sum"].notna().sum())
    assert 1 <= found["step"].nunique() < scored and found["a"].notna().all()
    if e:
        assert by_halves(halved, 0).empty  # of "carry"


def alike():
    """A validation set whose halves are the same."""
    return [tuple(t.repeat_interleave(2, 0) for t in rows(12, 9))]


def test_alike_and_unrelated_halves_are_told_apart():
    same = train(validation=alike(), halves_every=1).steadiness()
    assert same.agree == pytest.approx(1) and same.of_step == pytest.approx(1)
    assert same.of_sums == pytest.approx(1) and same.error == pytest.approx(0, abs=1e-9)
    assert same.measured == same.steps == STEPS
    found = []
    for seed in range(6):  # two rows with nothing in common
        said = train(validation=[rows(2, 5 + seed)], halves_every=1, estimator="sgd").steadiness()
        found.append(said.agree)
    assert abs(np.mean(found)) < 0.3 and max(found) < 0.9


def test_the_schedule_is_random_and_bounded():
    halving = train(validation=[V], halves_every=7, steps=1)._steppers[0].scorer.halving
    chosen = [step for step in range(700) if halving.due(step)]
    assert len(chosen) == 100 and [step // 7 for step in chosen] == list(range(100))
    assert len({step % 7 for step in chosen}) == 7


def fixed_size(model, batch):
    if len(batch[0]) != 24:
        raise RuntimeError("this model takes 24 rows")
    return loss_of(model, batch)


def contrasts(model, batch):
    """No mean over rows: what a row counts depends on the others."""
    return model(batch[0]).var(0).sum() ** 2 * (len(batch[0]) == 24) + model(batch[0])[0].sum()


REASONS = {
    "halves_every=0": {"validation": [V], "halves_every": 0},
    "one row": {"validation": [tuple(t[:1] for t in V)]},
    "no rows in common": {"validation": [(*V, torch.zeros(3))], "loss": lambda m, b: loss_of(m, b)},
    "smooth=": {"validation": [tuple(t[i::6] for t in V) for i in range(6)], "smooth": 0.5},
    "carried value": {"validation": [V], "estimator": "carry"},
    r"half of the rows failed \(RuntimeError": {"validation": [V], "loss": fixed_size},
    "do not make up the whole": {"validation": [V], "loss": contrasts},
    "the targets are halves": {"targets": inrun.halves([V])},
    "none of the 1 steps was chosen": {"validation": [V], "steps": 1, "halves_every": 10**6},
}


@pytest.mark.parametrize("why", REASONS)
def test_why_nothing_is_measured(why, tmp_path):
    run = train(out=tmp_path / "run", **REASONS[why])
    assert run.history()["value"].notna().all()
    for said in (run.steadiness(), inrun.open(tmp_path / "run").steadiness()):
        assert said.agree is said.of_sums is said.clear is None
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(str(said))
    if "targets" not in REASONS[why]:
        text = describe(facts_of(inrun.open(tmp_path / "run")))["steadiness"]
        assert text == f"not measured: {said.why}"
    assert (said.why == PARTS) == (why == "do not make up the whole")


def test_a_loader_that_shuffles_says_nothing_of_sums():
    loader = DataLoader(TensorDataset(*V), batch_size=12, shuffle=True)
    said = train(validation=loader, halves_every=1).steadiness()
    assert said.agree is not None and said.of_sums is None
    assert "another order each time" in str(said)


def test_it_is_on_disk_and_in_a_checkpoint(tmp_path):
    kept, saved = train(validation=[V]), train(validation=[V], out=tmp_path / "run")
    assert by_halves(kept).equals(by_halves(saved))
    assert str(kept.steadiness()) == str(inrun.open(tmp_path / "run").steadiness())
    window = {"since": 2, "until": 9, "half_life": 4.0}
    assert kept.steadiness(**window) == inrun.open(tmp_path / "run").steadiness(**window)
    assert kept.steadiness(**window).steps == 7
    state = kept.state_dict()["ledger"]
    other = train(validation=[V], steps=0)
    other._ledger.load_state_dict(state)
    assert by_halves(other).equals(by_halves(kept))


def test_it_is_shown(tmp_path):
    run = train(validation=alike(), halves_every=1, out=tmp_path / "run")
    assert "halves of the validation rows agree by 1.00 (12 steps)" in repr(run)
    saved = inrun.open(tmp_path / "run")
    for shown in (run._repr_html_(), saved._repr_html_()):
        assert "sums over all steps by 1.00 ± 0.00" in shown
    facts = facts_of(saved)
    assert facts["steadiness"] == pytest.approx(1) and facts["halved_steps"] == STEPS
    card = next(c for c in cards(facts) if c["name"] == "Steadiness")
    assert card["value"] == "1.00" and "± 0.00, agreement with a ranking by" in card["note"]


def test_what_is_refused():
    with pytest.raises(ValueError, match="halves_every=-1"):
        train(validation=[V], halves_every=-1)

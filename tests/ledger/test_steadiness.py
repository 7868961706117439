"""The estimate of a ranking's steadiness from a sample of the steps: its arithmetic."""

import numpy as np
import pandas as pd
import pytest

from inrun.ledger import steady

STEPS, EPOCH, B = 120, 12, 10  # ten epochs of 120 examples


def run(noise, persists, seed=0):
    """A run's visits: values common to both halves, and noise of each half that an example meets
    again at each visit (``persists``: the share of it)."""
    rng = np.random.default_rng(seed)
    n = EPOCH * B
    kept, rows = rng.normal(size=n), []
    own = rng.normal(size=(2, n))
    for t in range(STEPS):
        if t % EPOCH == 0:
            order = rng.permutation(n)
        ids = order[t % EPOCH * B : t % EPOCH * B + B]
        fresh = rng.normal(size=(2, B))
        common = kept[ids] + 0.5 * rng.normal(size=B)
        a, b = common + noise * (persists * own[:, ids] + (1 - persists) * fresh)
        rows.append(pd.DataFrame({"step": t, "id": ids, "weight": 1.0, "a": a, "b": b}))
    visits = pd.concat(rows, ignore_index=True)
    visits["value"] = (visits["a"] + visits["b"]) / 2
    return visits


def table(visits):
    by_id = visits.groupby("id")
    return pd.DataFrame({"value": by_id["value"].sum(), "scored": by_id.size()})


def truth(visits):
    """1 − Var D/Var X, and the correlation of the sums by both halves scaled up."""
    sums = visits.groupby("id")[["a", "b"]].sum()
    x, d = (sums["a"] + sums["b"]) / 2, (sums["a"] - sums["b"]) / 2
    r = sums["a"].corr(sums["b"])
    return 1 - d.var() / x.var(), 2 * r / (1 + r)


@pytest.mark.parametrize("noise, persists", [(0.0, 0.0), (1.0, 0.0), (1.0, 0.7), (3.0, 1.0)])
def test_with_every_step_it_is_exact(noise, persists):
    visits = run(noise, persists)
    found, _ = steady._of_sums(visits, table(visits), STEPS)
    exact, scaled = truth(visits)
    assert found == pytest.approx(exact, abs=1e-12)
    assert exact == pytest.approx(scaled, abs=0.1)


@pytest.mark.parametrize("persists", [0.0, 0.7])
def test_a_sample_of_steps_is_unbiased_and_knows_its_error(persists):
    visits = run(1.0, persists)
    exact, _ = truth(visits)
    values, rng, found = table(visits), np.random.default_rng(1), []
    for _ in range(200):
        chosen = np.arange(0, STEPS, 5) + rng.integers(5, size=STEPS // 5)
        found.append(steady._of_sums(visits[visits["step"].isin(chosen)], values, STEPS))
    means, errors = np.array(found, float).T
    assert means.mean() == pytest.approx(exact, abs=4 * means.std() / 200**0.5)
    assert np.median(errors) > 0.7 * means.std()
    assert (np.abs(means - exact) < 2 * errors).mean() > 0.85


def test_noise_that_stays_counts_more_than_noise_that_averages_out():
    """One step is as noisy in both runs; their sums are not."""
    fresh, stays = (run(1.0, p) for p in (0.0, 1.0))
    one = [steady._agreement(v) for v in (fresh, stays)]
    sums = [steady._of_sums(v, table(v), STEPS)[0] for v in (fresh, stays)]
    assert one[0] == pytest.approx(one[1], abs=0.1)
    assert sums[0] > 0.9 > 0.7 > sums[1]


def test_what_cannot_be_told():
    visits = run(1.0, 0.5)
    one = visits[visits["step"] == 3]  # no example is seen twice
    assert steady._of_sums(one, table(visits), STEPS) == (None, None)
    once = visits[visits["step"] < EPOCH]  # of one epoch no pairs are needed
    some = once[once["step"] % 3 == 0]
    found, error = steady._of_sums(some, table(once), EPOCH)
    assert abs(found - truth(once)[0]) < 3 * error
    assert steady.step_agreement(np.arange(2.0), np.arange(2.0)) is None
    assert steady.step_agreement(np.ones(5), np.arange(5.0)) is None
    assert steady.step_agreement(np.arange(5.0), -np.arange(5.0)) == pytest.approx(-1)


def test_halves_make_up_the_whole():
    visits = run(1.0, 0.5)
    assert steady._off(visits) < 1e-12
    weighed = visits.assign(value=0.3 * visits["a"] + 0.7 * visits["b"])  # one has more tokens
    assert steady._off(weighed) < 1e-12
    assert steady._off(visits.assign(value=visits["value"] + 1.0)) > steady.APART

"""Maps and points are listed in one place, and all of them work."""

import pytest
import torch
from torch import nn

import inrun
from inrun.optimizers import Rule, rule_for
from inrun.scoring import estimators
from inrun.scoring.estimators import MAPS, POINTS, Estimator, Map
from inrun.scoring.path import ParamStep


def test_an_estimator_is_a_map_and_a_point():
    assert Estimator.parse("secant", None) == Estimator("secant", "secant", "midpoint")
    assert Estimator.parse("secant", "current").point == "current"
    assert Estimator.parse("secant+gauss2", "current").point == "gauss2"
    with pytest.raises(ValueError, match="'newton' is not known: use shapley, secant, tan"):
        Estimator.parse("newton", None)
    with pytest.raises(ValueError, match="'end' is not known: use current, midpoint, gauss2"):
        Estimator.parse("secant+end", None)


@pytest.mark.parametrize("kind", MAPS)
def test_a_map_comes_from_the_rule_is_a_number_or_the_curvature(kind):
    found = MAPS[kind]
    assert [found.of_rule is None, found.factor is None, not found.curvature].count(False) == 1
    assert found.default_point in POINTS


def test_a_map_that_is_not_known_is_not_taken_for_another():
    p = nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    step = ParamStep.of(p, torch.randn(3), rule_for(optimizer), {}, optimizer.param_groups[0])
    with pytest.raises(KeyError):
        step.map("newton")
    with pytest.raises(ValueError, match="does not come from the optimizer's rule"):
        step.map("sgd")


def test_a_new_map_is_one_entry(monkeypatch):
    """Twice the secant gives twice the values, also where Adam has a faster way to the secant."""

    def doubled(rule: Rule, g, w, s, o):
        secant = rule.secant(g, w, s, o)
        return lambda v: 2 * secant(v)

    monkeypatch.setitem(estimators.MAPS, "doubled", Map("midpoint", of_rule=doubled))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(6, 4)

    def loss(model, batch):
        return model(batch).square().mean()

    run = inrun.watch(model, optimizer, validation=[x], loss=loss, estimator=["secant", "doubled"])
    for _ in range(5):
        with run.batch(range(6)):
            loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    once, twice = (run.history(e)["value"].to_numpy() for e in ("secant", "doubled"))
    assert len(once) == 30 and (abs(2 * once - twice) <= 1e-9 * abs(once).max()).all()

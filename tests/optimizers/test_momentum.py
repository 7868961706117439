"""A step is P of an average of past gradients: the map and the numbers of each rule, against real
steps of the optimizer."""

import pytest
import torch
from torch import optim

from helpers.optimizer_zoo import MUON, OPTIONS
from inrun.optimizers import rule_for
from inrun.optimizers.common import effective_gradient, sign

KNOWN = [c for c in [*OPTIONS, *MUON] if c.cls not in (
    optim.ASGD, optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Adafactor
)]  # fmt: skip


def random_like(x, seed):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=rng, dtype=x.dtype)


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_the_step_is_the_map_of_the_average(case):
    compared = 0
    for i, (optimizer, m) in enumerate(case.moments()):
        rule = rule_for(optimizer)
        momentum = rule.momentum
        share = momentum.share(m.s, m.o)
        end = effective_gradient(m.g, m.w, m.o) if case.cls is not optim.Muon else m.g
        b = m.s.get(momentum.buffer)
        b = torch.zeros_like(end) if b is None else b
        average = share.own * end + share.old * b
        update = (rule.twin or rule.update)(*m.args)
        v = random_like(m.g, i)
        found = (rule.carried(*m.args)(v) * sign(m.o) * average).sum()
        assert found == pytest.approx(float((v * update).sum()), rel=1e-9, abs=1e-14)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        after = optimizer.state[params[i % len(params)]].get(momentum.buffer)
        if after is not None:
            torch.testing.assert_close(share.add * end + share.keep * b, after)
            assert share.keep == momentum.keep(m.o)
        else:
            assert share.add == share.keep == 0
        compared += 1
    assert compared >= 9


def test_coordinates_that_never_moved_carry_nothing():
    p = torch.zeros(3, requires_grad=True)
    for cls in (optim.Adam, optim.NAdam, optim.RAdam):
        optimizer = cls([p])
        rule, o = rule_for(optimizer), optimizer.param_groups[0]
        g = torch.tensor([1.0, 0.0, -1.0])
        u = rule.carried(g, p.detach(), {}, o)(torch.ones(3))
        assert u[1] == 0 and u[0] > 0 and u[2] > 0


@pytest.mark.parametrize(
    "cls", [optim.ASGD, optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Adafactor]
)
def test_rules_without_such_an_average(cls):
    assert rule_for(cls([torch.zeros(2, requires_grad=True)], lr=0.1)).momentum is None

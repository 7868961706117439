"""Learned temperatures, scales and spreads: one number that meets every example.

Sizes coincide on purpose: batch = classes = 4. (Contrastive models: test_ordinary.py.)
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

from helpers.captures import captured, close, gradients_of, reference_rows
from helpers.small_models import Model
from helpers.zoo import Problem

N = 4
CLASSES = torch.eye(N, dtype=torch.float64)


def entropies(z, y):
    return F.cross_entropy(z, y, reduction="none")


def bank(m, x, y):
    """Similarities with what belongs to no example."""
    return entropies(F.normalize(m.a(x), dim=-1) @ CLASSES / m.t, y)


def focal(m, x, y):
    return (1 - torch.exp(-entropies(m.a(x), y))) ** m.t


def policy(m, x, y):
    """A Gaussian whose spread is learned, as in PPO."""
    return -Normal(m.a(x), m.u.exp()).log_prob(y[:, None].double()).sum(-1)


def uncertain(m, x, y):
    """Kendall's weighting, of the loss of each example."""
    return entropies(m.a(x), y) * torch.exp(-m.t) + m.t


# The rows of the loss; ``t`` is a number, ``u`` has one element
CASES = {
    "divided": lambda m, x, y: entropies(m.a(x) / m.t, y),
    "divided-one-element": lambda m, x, y: entropies(m.a(x) / m.u, y),
    "in-place": lambda m, x, y: entropies(m.a(x).div_(m.t), y),
    "exp": lambda m, x, y: entropies(m.a(x) * m.t.exp(), y),
    "exp-clamped": lambda m, x, y: entropies(m.t.exp().clamp(max=100) * m.a(x), y),
    "softplus-and-shift": lambda m, x, y: entropies(m.a(x) * F.softplus(m.t) + m.u * CLASSES[1], y),
    "inside-softmax": lambda m, x, y: -(m.a(x) / m.t).softmax(-1).gather(1, y[:, None])[:, 0],
    "categorical": lambda m, x, y: -Categorical(logits=m.a(x) / m.t).log_prob(y),
    "of-each-loss": lambda m, x, y: entropies(m.a(x), y) * m.t,
    "of-each-loss-divided": lambda m, x, y: entropies(m.a(x), y) / m.u + m.u.log(),
    "uncertain": uncertain,
    "bank": bank,
    "focal": focal,
    "policy": policy,
    "gaussian": lambda m, x, y: F.gaussian_nll_loss(
        m.a(x), CLASSES[y], m.t.exp().expand(len(x), N), reduction="none"
    ).sum(1),
}


@pytest.mark.parametrize("B", [1, N])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("name", CASES)
def test_a_temperature_is_credited_to_the_examples_that_it_meets(name, form, B):
    torch.manual_seed(1)
    model = Model(lambda m, batch: CASES[name](m, *batch), a=nn.Linear(N, N))
    model.t, model.u = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor([0.7]))
    batch = torch.randn(B, N), torch.arange(B).flip(0)
    p = Problem(
        model, batch, B, lambda m, b: m(b), lambda rows, b: (rows * rows.detach().exp()).mean()
    )
    expected = reference_rows(p)
    expected = {k: g for k, g in expected.items() if g.any()}
    for fast in (False, True):
        _, micro = captured(p, form=form, fast=fast)
        rows = gradients_of(micro)
        assert rows.keys() == expected.keys()
        for k, g in expected.items():
            assert close(rows[k], g, 1e-9), (k, fast)
            assert close(model.get_parameter(k).grad, g.sum(0), 1e-9), (k, fast)

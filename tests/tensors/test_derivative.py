"""Jacobian-vector products: forward mode, backward twice and many directions at once agree."""

import pytest
import torch
from torch.autograd.functional import jvp as twice_backward

from inrun.tensors import derivative
from inrun.tensors.derivative import VMAP_PAYS, backward_twice, jvp, jvps


class NoForwardRule(torch.autograd.Function):
    """sin, as a function that has a backward pass only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


FUNCTIONS = {
    "product": lambda a, b: (a @ b).tanh(),
    "no forward rule": lambda a, b: NoForwardRule.apply(a @ b) * 2,
    "one input unused": lambda a, b: a.square(),
    "constant": lambda a, b: torch.ones(3, dtype=torch.float64),
}


@pytest.fixture(params=FUNCTIONS)
def case(request):
    torch.manual_seed(0)
    at = [torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)]
    us = [torch.randn(VMAP_PAYS, *x.shape, dtype=torch.float64) for x in at]
    f = FUNCTIONS[request.param]
    expected = [twice_backward(f, tuple(at), u)[1] for u in zip(*us, strict=True)]
    return f, at, us, torch.stack(expected)


def test_along_one_direction(case):
    f, at, us, expected = case
    found = torch.stack([jvp(f, at, u) for u in zip(*us, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if f is not FUNCTIONS["constant"]:  # of which there is nothing to go back through
        found = torch.stack([backward_twice(f, at, u) for u in zip(*us, strict=True)])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_along_many_directions_at_once_and_one_by_one(case, monkeypatch):
    f, at, us, expected = case
    for pays in (VMAP_PAYS, VMAP_PAYS + 1):
        monkeypatch.setattr(derivative, "VMAP_PAYS", pays)
        torch.testing.assert_close(jvps(f, at, us), expected, rtol=1e-12, atol=1e-12)


def test_directions_take_the_type_of_the_point():
    at, u = [torch.ones(3, dtype=torch.float64)], [torch.ones(3)]
    assert jvp(torch.exp, at, u).dtype == torch.float64

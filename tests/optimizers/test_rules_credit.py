"""Tangent and secant: against autograd, against plain divided differences, and adding up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from helpers.optimizer_zoo import MUON, OPTIONS, Case, Moment, table
from inrun.optimizers import Rule, rule_for
from inrun.optimizers.base import widen

ADAMS = [case for case in OPTIONS if case.cls in (optim.Adam, optim.AdamW)]
EVERY = [*OPTIONS, *MUON]


def difference(rule: Rule, moment: Moment) -> Tensor:
    """update(g) − update(0) in float64, whatever the dtype of the moment."""
    g, s = widen(moment.g, moment.s, torch.float64)
    zero = torch.zeros_like(g)
    return rule.update(g, moment.w, s, moment.o) - rule.update(zero, moment.w, s, moment.o)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_tangent_is_the_vjp(case: Case) -> None:
    for optimizer, (g, w, s, o, _) in case.moments(zeros=False):
        rule = rule_for(optimizer)
        v = torch.randn_like(g)
        x = g.clone().requires_grad_()
        (expected,) = torch.autograd.grad((rule.twin or rule.update)(x, w, s, o), x, v)
        u = rule.tangent(g, w, s, o)(v)
        assert (u - expected).abs().max() <= 1e-9 * max(expected.abs().max().item(), 1e-6)


@pytest.mark.parametrize("case", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["f64", "f32"]
)
def test_secant_adds_up(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    for optimizer, moment in case.moments(dtype=dtype):
        rule = rule_for(optimizer)
        v = torch.randn_like(moment.g)
        u = rule.secant(*moment.args)(v)
        expected = difference(rule, moment) * v
        assert u.isfinite().all()
        assert u.dtype == dtype
        scale = expected.abs().max().item()
        assert (u * moment.g - expected).abs().max() <= tolerance * scale


@pytest.mark.parametrize("case", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["f64", "f32"]
)
def test_secant_is_the_divided_difference(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    for optimizer, moment in case.moments(dtype=dtype):
        rule = rule_for(optimizer)
        apart = moment.g.abs() > 1e-2  # float64 divides well there
        K = rule.secant(*moment.args)(torch.ones_like(moment.g))[apart]
        expected = (difference(rule, moment) / moment.g)[apart]
        assert (K - expected).abs().max() <= tolerance * expected.abs().max()
        torch.testing.assert_close(K.double(), expected, rtol=2 * tolerance, atol=0)


@pytest.mark.parametrize("case", table(optim.AdamW, amsgrad=[False, True]), ids=str)
def test_closed_form_survives_tiny_gradients(case: Case) -> None:
    """Where g is tiny beside the moments K meets the derivative; a division by g cannot."""
    for optimizer, moment in case.moments(at=(1, 6), dtype=torch.float32, zeros=False):
        rule = rule_for(optimizer)
        tiny = moment.g * 1e-9
        _, w, s, o, _ = moment
        K = rule.secant(tiny, w, s, o)(torch.ones_like(tiny))
        wide, state = widen(tiny, s, torch.float64)
        J = rule.tangent(wide, w, state, o)(torch.ones_like(wide))
        assert (K - J).abs().max() <= 1e-6 * J.abs().max()


@pytest.mark.parametrize("case", ADAMS, ids=str)
def test_adam_tangent_in_float32(case: Case) -> None:
    for optimizer, (g, w, s, o, _) in case.moments(dtype=torch.float32):
        rule = rule_for(optimizer)
        J = rule.tangent(g, w, s, o)(torch.ones_like(g))
        wide, state = widen(g, s, torch.float64)
        expected = rule.tangent(wide, w, state, o)(torch.ones_like(wide))
        assert J.isfinite().all()
        assert (J - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("case", EVERY, ids=str)
@pytest.mark.parametrize("steps", [0, 3])
def test_untouched_coordinates_carry_nothing(case: Case, steps: int) -> None:
    """g, w and state 0, as in an embedding row that never occurred."""
    params = [torch.zeros(shape) for shape in case.shapes]
    optimizer = case.cls(params, **copy.deepcopy(case.options))
    for _ in range(steps):
        for p in params:
            p.grad = torch.zeros_like(p)
        with torch.no_grad():
            optimizer.step()
    rule = rule_for(optimizer)
    linear = case.cls in (optim.SGD, optim.ASGD)
    for p in params:
        args = (torch.zeros_like(p), p, optimizer.state.get(p, {}), optimizer.param_groups[0])
        v = torch.ones_like(p)
        assert rule.update(*args).isfinite().all()
        assert rule.tangent(*args)(v).isfinite().all()
        u = rule.secant(*args)(v)
        # Adamax keeps eps in its state, Adagrad starts from where it is told
        touched = case.options.get("initial_accumulator_value", 0) > 0 or case.cls is optim.Adamax
        if linear:
            assert (u.abs() > 0).all()
        elif touched or case.cls is optim.Muon:
            assert u.isfinite().all()
        else:
            assert (u == 0).all()
        assert rule.completeness(*args).isfinite()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EVERY[::3], ids=str)
def test_arguments_stay_as_they_are(case: Case, dtype: torch.dtype) -> None:
    for optimizer, moment in case.moments(at=(0, 2), dtype=dtype):
        rule = rule_for(optimizer)
        v = torch.randn_like(moment.g)
        before = copy.deepcopy((moment.args, v))
        with torch.no_grad():
            update = rule.update(*moment.args)
            tangent = rule.tangent(*moment.args)(v)
            secant = rule.secant(*moment.args)(v)
            rule.completeness(*moment.args)
        for x in (update, tangent, secant):
            assert x.dtype == dtype
            assert x.shape == moment.g.shape
            assert not x.requires_grad
            assert x.isfinite().all()
        assert_same((moment.args, v), before)


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a:
            assert_same(a[k], b[k])
    elif isinstance(a, (tuple, list)):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("case", table(optim.AdamW, amsgrad=[False, True]), ids=str)
def test_low_precision_is_credited_in_float32(case: Case) -> None:
    for optimizer, moment in case.moments(dtype=torch.bfloat16):
        rule = rule_for(optimizer)
        v = torch.ones_like(moment.g, dtype=torch.float32)  # a float32 direction stays float32
        u = rule.secant(*moment.args)(v)
        expected = difference(rule, moment)
        assert u.dtype == torch.float32
        assert (u * moment.g - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_nan_gradients_stay_visible() -> None:
    for optimizer, moment in Case(optim.RMSprop, {}).moments(at=(0,)):
        rule = rule_for(optimizer)
        bad = torch.full_like(moment.g, torch.nan)
        v = torch.ones_like(bad)
        assert rule.secant(bad, *moment.args[1:])(v).isnan().all()
        assert rule.tangent(bad, *moment.args[1:])(v).isnan().all()


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_path_integral(nesterov: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    signal = torch.randn(16, 48, generator=rng)
    w = torch.zeros(16, 48)
    optimizer = optim.Muon([w], nesterov=nesterov, lr=1.0)
    rule = rule_for(optimizer)
    assert rule.twin is not None
    for step in range(12):
        w.grad = signal + torch.randn(16, 48, generator=rng)
        args = (w.grad, w, optimizer.state[w], optimizer.param_groups[0])
        if step == 0:  # without momentum the update ignores the size of g
            assert abs(rule.completeness(*args).item() - 1) < 1e-5
        if step > 5:
            v = torch.randn(16, 48, generator=rng)
            zero = torch.zeros_like(w)
            change = rule.twin(*args) - rule.twin(zero, *args[1:])
            missing = rule.completeness(*args)
            assert missing.shape == ()
            assert missing < 0.01
            gap = ((rule.secant(*args)(v) * w.grad).sum() - (v * change).sum()).abs()
            assert gap <= (missing + 1e-5) * v.norm() * change.norm()
        optimizer.step()


@pytest.mark.parametrize("shape", [(16, 48), (64, 64), (128, 64)])
def test_muon_twin_tolerance(shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(0)
    w = torch.zeros(shape)
    optimizer = optim.Muon([w], lr=1.0)
    rule = rule_for(optimizer)
    assert rule.twin is not None
    for _ in range(6):
        w.grad = torch.randn(shape, generator=rng)
        args = (w.grad, w, optimizer.state[w], optimizer.param_groups[0])
        update, twin = rule.update(*args), rule.twin(*args)
        assert (update - twin).norm() < 0.025 * twin.norm()
        optimizer.step()

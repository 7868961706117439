"""NAdam, RAdam and Adamax.

Symbols as in adam.py: m ``exp_avg``, v ``exp_avg_sq``, u ``exp_inf``, ε ``eps``, β₁, β₂ ``betas``,
t = ``step`` + 1, c₁ = 1 − β₁ᵗ, c₂ = 1 − β₂ᵗ; ĝ = ±g + ĝ₀; a and b are the moments after ĝ.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Adamax, NAdam, RAdam

from inrun.optimizers.adam import quotient
from inrun.optimizers.base import Scale, divided_difference, register_optimizer
from inrun.optimizers.common import (
    Options,
    Scalar,
    State,
    average,
    decoupled_decay,
    effective_gradient,
    has_l2,
    learning_rate,
    ratio,
    running_scalar,
    sign,
    step_count,
)
from inrun.optimizers.momentum import Momentum, Share, average_share, beta1_of, betas_on_device


def _nadam_sizes(g: Tensor, s: State, o: Options) -> tuple[Scalar, Scalar, Scalar]:
    """η(1−μ_t)/(1−P), η·μ_{t+1}/(1−Pμ_{t+1}) and c₂."""
    lr, (beta1, beta2), psi = learning_rate(o), o["betas"], o["momentum_decay"]
    t = step_count(s, o, g)
    mu = beta1 * (1 - 0.5 * 0.96 ** (t * psi))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * psi))
    home = g.device if o.get("capturable") else "cpu"
    P: Scalar = running_scalar(s, "mu_product", 1.0, home) * mu  # rounded as it is kept
    if P.device.type == "cpu" and not (o.get("capturable") or o.get("differentiable")):
        P = P.item()
    return lr * (1 - mu) / (1 - P), lr * mu_next / (1 - P * mu_next), 1 - beta2**t


def nadam_factor(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """As Adam's (adam.py), with other sizes for ĝ and for a."""
    if has_l2(o):
        return divided_difference(nadam, g, w, s, o)
    (beta1, beta2), zero = o["betas"], torch.zeros_like(g)
    for_g, for_a, c2 = _nadam_sizes(g, s, o)
    end = effective_gradient(g, w, o)
    m, b0 = s.get("exp_avg", zero), beta2 * s.get("exp_avg_sq", zero)
    r0, r = (b0 / c2).sqrt(), ((b0 + (1 - beta2) * end * end) / c2).sqrt()
    rho = ratio((1 - beta2) * end / c2, r + r0)
    K = quotient(end, for_g + for_a * (1 - beta1), for_a * beta1 * m, rho, r0, r, o["eps"])
    return sign(o) * K


def _nadam_share(s: State, o: Options) -> Share:
    beta1 = beta1_of(o)
    for_g, for_a, _ = _nadam_sizes(torch.zeros((), device="cpu"), s, {**o, "lr": 1.0})
    return Share(for_g + for_a * (1 - beta1), for_a * beta1, 1 - beta1, beta1)


def _nadam_carried(g: Tensor, w: Tensor, s: State, o: Options) -> Scale:
    """P = η/(√(b/c₂) + ε)."""
    beta2, c2 = o["betas"][1], _nadam_sizes(g, s, o)[2]
    b = average(s.get("exp_avg_sq"), effective_gradient(g, w, o).square(), beta2)
    return Scale(_unless_still(b, sign(o) * learning_rate(o) / ((b / c2).sqrt() + o["eps"])))


def _unless_still(size: Tensor, K: Tensor) -> Tensor:
    """K, and 0 where nothing ever moved."""
    return torch.where(size == 0, 0.0, K)


def _nadam_unsupported(o: Options) -> str | None:
    if o.get("capturable") or o.get("differentiable"):
        return "NAdam(capturable=True) keeps its momentum's size on the device; leave that out"
    return betas_on_device(o)


@register_optimizer(
    NAdam, decay=decoupled_decay, factor=nadam_factor, elementwise=True,
    momentum=Momentum("exp_avg", _nadam_share, _nadam_carried, beta1_of, _nadam_unsupported),
)  # fmt: skip
def nadam(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η [ (1−μ_t)/(1−P)·ĝ + μ_{t+1}/(1−Pμ_{t+1})·a ] / (√(b/c₂) + ε).

    μ_t = β₁(1 − ½·0.96^{tψ}), ψ ``momentum_decay``, and P = μ₁⋯μ_t, kept in ``mu_product``.
    """
    beta1, beta2 = o["betas"]
    for_g, for_a, c2 = _nadam_sizes(g, s, o)
    end = effective_gradient(g, w, o)
    a = average(s.get("exp_avg"), end, beta1)
    b = average(s.get("exp_avg_sq"), end * end, beta2)
    return (for_g * end + for_a * a) / ((b / c2).sqrt() + o["eps"])


def _radam_carried(g: Tensor, w: Tensor, s: State, o: Options) -> Scale:
    b = average(s.get("exp_avg_sq"), effective_gradient(g, w, o).square(), o["betas"][1])
    size, K = _radam_sizes(g, b, s, o)
    return Scale(_unless_still(b, torch.ones_like(b) * (sign(o) * size * K)))


@register_optimizer(
    RAdam, decay=decoupled_decay, elementwise=True,
    momentum=Momentum("exp_avg", average_share, _radam_carried, beta1_of, betas_on_device),
)  # fmt: skip
def radam(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """(η/c₁)·a·(rect·√c₂/(√b + ε)), or (η/c₁)·a while the length ρ_t of the average is at most 5.

    ρ_∞ = 2/(1−β₂) − 1, ρ_t = ρ_∞ − 2tβ₂ᵗ/c₂; ε stands beside √b, before the bias correction.
    """
    beta1, beta2 = o["betas"]
    end = effective_gradient(g, w, o)
    a = average(s.get("exp_avg"), end, beta1)
    b = average(s.get("exp_avg_sq"), end * end, beta2)
    size, K = _radam_sizes(g, b, s, o)
    return size * a * K


def _radam_sizes(g: Tensor, b: Tensor, s: State, o: Options) -> tuple[Scalar, Scalar]:
    """η/c₁ and rect·√c₂/(√b + ε), or 1."""
    (beta1, beta2), t = o["betas"], step_count(s, o, g)
    size = learning_rate(o) / (1 - beta1**t)
    c2 = 1 - beta2**t
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * t * beta2**t / c2
    if not isinstance(rho, Tensor):
        return size, _rectify(rho, rho_inf, c2) / (b.sqrt() + o["eps"]) if rho > 5 else 1.0
    # Both branches are formed: keep the idle one finite, for its derivative's sake.
    rect = _rectify(rho.clamp(min=5), rho_inf, c2)
    return size, torch.where(rho > 5, rect / (b.sqrt() + o["eps"]), 1.0)


def _rectify(rho: Scalar, rho_inf: float, c2: Scalar) -> Scalar:
    rect = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
    return (rect * c2) ** 0.5


def _adamax_carried(g: Tensor, w: Tensor, s: State, o: Options) -> Scale:
    size = learning_rate(o) / (1 - o["betas"][0] ** step_count(s, o, g))
    return Scale(sign(o) * size / _adamax_largest(effective_gradient(g, w, o), s, o))


@register_optimizer(
    Adamax, elementwise=True,
    momentum=Momentum("exp_avg", average_share, _adamax_carried, beta1_of, betas_on_device),
)  # fmt: skip
def adamax(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """(η/c₁)·a / max(β₂u, |ĝ| + ε): ε is inside the maximum."""
    beta1, end = o["betas"][0], effective_gradient(g, w, o)
    a = average(s.get("exp_avg"), end, beta1)
    return learning_rate(o) / (1 - beta1 ** step_count(s, o, g)) * a / _adamax_largest(end, s, o)


def _adamax_largest(end: Tensor, s: State, o: Options) -> Tensor:
    largest = end.abs() + o["eps"]
    if "exp_inf" in s:
        largest = torch.maximum(o["betas"][1] * s["exp_inf"], largest)
    return largest

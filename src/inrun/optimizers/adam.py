"""Adam and AdamW, with closed forms of the secant K and of the derivative J.

Symbols: η ``lr``, β₁, β₂ ``betas``, m ``exp_avg``, v ``exp_avg_sq``, ε ``eps``; c₁ = 1 − β₁ᵗ and
c₂ = 1 − β₂ᵗ correct the bias at step t = ``step`` + 1. ĝ = σg + ĝ₀ with σ = −1 under ``maximize``
and ĝ₀ = ``weight_decay``·w for L2 decay; decoupled decay leaves ĝ₀ = 0. At ĝ the moments are

    a = β₁m + (1−β₁)ĝ,     b = β₂v + (1−β₂)ĝ²,     r = √b / √c₂

(amsgrad: max(``max_exp_avg_sq``, b) in the place of b), and the step subtracts (η/c₁)·a/(r+ε).
Index 0 marks the same quantities at g = 0.

The secant for ĝ₀ = 0, with no difference of nearly equal numbers:

    K = σ(η/c₁) [ (1−β₁) − ρ·β₁m/(r₀+ε) ] / (r+ε),     ρ = (r − r₀)/ĝ = (1−β₂)ĝ / (c₂(r+r₀));

amsgrad multiplies ρ by the share of the change of b that raises the maximum. The diagonal of J,
with the ĝ² of numerator and denominator cancelled by hand:

    J = σ(η/c₁) [ (1−β₁)(β₂v + c₂εr) − β₁(1−β₂)mĝ ] / (c₂ r (r+ε)²);

where amsgrad's maximum does not follow b, J = σ(η/c₁)(1−β₁)/(r+ε). K = J = 0 where v = ĝ = 0.

``factor`` and ``derivative`` compute them for all options. For the common options ``one_pass``
arranges K for speed on a CPU, and adam_kernel.py is K, J and the weights in one launch on a GPU.
Tests compare both with the functions here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from inrun.optimizers.adam_kernel import AdamStep, Numbers
from inrun.optimizers.adam_orders import gains
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
    scalar,
    sign,
    step_count,
)
from inrun.optimizers.momentum import Momentum, average_share, beta1_of, betas_on_device


@dataclass(frozen=True)
class _Scalars:
    beta1: Scalar
    beta2: Scalar
    eps: float
    size: Scalar  # η / c₁
    c2: Scalar


def _scalars(g: Tensor, s: State, o: Options) -> _Scalars:
    beta1, beta2 = map(scalar, o["betas"])
    in_tensor = bool((o.get("capturable") or o.get("differentiable")) and not o.get("fused"))
    t = step_count(s, o, g, in_tensor=in_tensor)
    return _Scalars(beta1, beta2, o["eps"], learning_rate(o) / (1 - beta1**t), 1 - beta2**t)


def _largest(b: Tensor, s: State, o: Options) -> Tensor:
    largest = s.get("max_exp_avg_sq") if o["amsgrad"] else None
    return b if largest is None else torch.maximum(largest, b)


def quotient(
    end: Tensor, slope: Scalar, start: Tensor, rho: Tensor, r0: Tensor, r: Tensor, eps: float
) -> Tensor:
    """The secant of (``start`` + slope·ĝ)/(r+ε) with ρ = (r − r₀)/ĝ; 0 where v = ĝ = 0."""
    K = (slope - rho * start / (r0 + eps)) / (r + eps)
    return torch.where((end == 0) & (r == 0), 0.0, K)


def factor(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """K, the secant. L2 decay moves both of its ends by ĝ₀, and near the first step they then lie
    on the same side of what is almost a sign function: the float64 difference serves there."""
    if has_l2(o):
        return divided_difference(adam, g, w, s, o)
    c = _scalars(g, s, o)
    zero = torch.zeros_like(g)
    m, v = s.get("exp_avg", zero), s.get("exp_avg_sq", zero)
    end = effective_gradient(g, w, o)
    b0, rise = c.beta2 * v, (1 - c.beta2) * end * end
    top0, top = _largest(b0, s, o), _largest(b0 + rise, s, o)
    r0, r = (top0 / c.c2).sqrt(), (top / c.c2).sqrt()
    rho = ratio((1 - c.beta2) * end / c.c2, r + r0)
    if o["amsgrad"]:
        rho = rho * torch.where(top0 > b0, ratio(top - top0, rise).clamp(max=1), 1.0)
    return quotient(end, 1 - c.beta1, c.beta1 * m, rho, r0, r, c.eps) * (sign(o) * c.size)


def derivative(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """The diagonal of J."""
    c = _scalars(g, s, o)
    zero = torch.zeros_like(g)
    m, v = s.get("exp_avg", zero), s.get("exp_avg_sq", zero)
    end = effective_gradient(g, w, o)
    b = average(v, end * end, c.beta2)
    top = _largest(b, s, o)
    r = (top / c.c2).sqrt()
    slope = (1 - c.beta1) * (c.beta2 * v + c.c2 * c.eps * r) - c.beta1 * (1 - c.beta2) * m * end
    J = ratio(slope / c.c2, r) / (r + c.eps) ** 2
    J = torch.where(top > b, (1 - c.beta1) / (r + c.eps), J)
    return sign(o) * c.size * J


def carried(g: Tensor, w: Tensor, s: State, o: Options) -> Scale:
    """P = (η/c₁)/(r+ε) with the second moment after the step; 0 where nothing ever moved."""
    c = _scalars(g, s, o)
    end = effective_gradient(g, w, o)
    r = (_largest(average(s.get("exp_avg_sq"), end * end, c.beta2), s, o) / c.c2).sqrt()
    return Scale(torch.where(r == 0, 0.0, sign(o) * c.size / (r + c.eps)))


def _common(o: Options) -> Numbers | None:
    """β₁, β₂, ε, η and the decay if these options are all that counts; None with amsgrad, L2 decay,
    ``maximize``, or where the optimizer computes with numbers in tensors."""
    in_tensor = (o.get("capturable") or o.get("differentiable")) and not o.get("fused")
    if in_tensor or has_l2(o) or o["amsgrad"] or o["maximize"]:
        return None
    return (*o["betas"], o["eps"], learning_rate(o), decoupled_decay(o))


def one_pass(g: Tensor, w: Tensor, s: State, o: Options, x: float) -> tuple[Tensor, Tensor] | None:
    """K and the weights at x on the path, each quantity computed once and in place, with r, r₀ and
    ε in units of √(β₂/c₂). None without the common options, at the first step, where β₂ = 0, and
    where a number is in a tensor (the step: on a device)."""
    numbers, step = _common(o), s.get("step")
    if numbers is None or "exp_avg" not in s or any(map(torch.is_tensor, numbers)):
        return None
    beta1, beta2, eps, lr, decay = numbers
    if beta2 == 0 or (isinstance(step, Tensor) and step.device.type != "cpu"):
        return None
    t, v = step_count(s, o, g, in_tensor=False), s["exp_avg_sq"]
    unit, a2 = (beta2 / (1 - beta2**t)) ** 0.5, (1 - beta2) / beta2
    size, eps = lr / (1 - beta1**t) / unit, eps / unit
    r = torch.addcmul(v, g, g, value=a2).sqrt_()
    r0 = v.sqrt()
    both = r + r0
    still = None
    # Where both are 0, K is 0. A CPU looks for zeros first; asking a device would mean to wait.
    if both.device.type != "cpu" or not both.numel() or not float(both.min()) > 0:
        still = both == 0
        both.clamp_(min=torch.finfo(g.dtype).tiny)
    without = s["exp_avg"] / r0.add_(eps)
    full = torch.full((), (1 - beta1) * size, dtype=g.dtype, device=g.device)
    rise = torch.mul(g, without, out=r0)
    K = torch.addcdiv(full, rise, both, value=-a2 * beta1 * size, out=both).div_(r.add_(eps))
    if still is not None:
        K.masked_fill_(still, 0.0)
    moved = (w.to(g.dtype) * decay).add_(without, alpha=-beta1 * size)
    return K, moved.addcmul_(K, g, value=-x)


def whole_model(
    g: Sequence[Tensor], w: Sequence[Tensor], s: Sequence[State], o: Sequence[Options]
) -> AdamStep | None:
    """All parameters as one step for the GPU kernel. None without the common options, at the first
    step, and for tensors that the kernel cannot read."""
    places: dict[int, int] = {}  # of the parameter groups
    own: list[Options] = []
    for options in o:
        if id(options) not in places:
            places[id(options)] = len(own)
            own.append(options)
    if any("exp_avg" not in state for state in s):
        return None

    def read() -> list[Numbers] | None:
        found = [numbers for options in own if (numbers := _common(options)) is not None]
        return found if len(found) == len(own) else None

    step = AdamStep(
        list(w), [], [state["exp_avg"] for state in s], [state["exp_avg_sq"] for state in s],
        [state["step"] for state in s], read, tuple(places[id(options)] for options in o),
    )  # fmt: skip
    return step.again(list(g)) if step.usable() else None


def squares(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """v̂ after the step, without amsgrad's maximum."""
    c = _scalars(g, s, o)
    return average(s.get("exp_avg_sq"), effective_gradient(g, w, o).square(), c.beta2) / c.c2


def gained(
    g: Tensor, w: Tensor, s: State, o: Options, rows: Tensor, directions: Tensor, orders: Tensor,
    block: int, factor: Tensor | float,
) -> Tensor | None:  # fmt: skip
    """What the update gains when examples join in these orders, by the GPU kernel (adam_orders.py);
    None where it does not apply. Before the first step the moments are 0."""
    if _common(o) is None:
        return None
    c, zero = _scalars(g, s, o), torch.zeros_like(g)
    numbers = c.beta1, 1 - c.beta1, c.beta2 / c.c2, (1 - c.beta2) / c.c2, c.size, c.eps
    m, v = (s.get(k, zero).contiguous() for k in ("exp_avg", "exp_avg_sq"))
    return gains(g, m, v, numbers, rows, directions, orders, block, factor)


_OPTIONS = {
    "decay": decoupled_decay, "factor": factor, "derivative": derivative, "elementwise": True,
    "squares": squares, "one_pass": {"secant": one_pass}, "whole_model": whole_model,
    "gained": gained,
    "momentum": Momentum("exp_avg", average_share, carried, beta1_of, betas_on_device),
}  # fmt: skip


@register_optimizer(Adam, **_OPTIONS)
@register_optimizer(AdamW, **_OPTIONS)
def adam(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """(η/c₁)·a/(r+ε): see the top of this file."""
    c = _scalars(g, s, o)
    end = effective_gradient(g, w, o)
    a = average(s.get("exp_avg"), end, c.beta1)
    b = _largest(average(s.get("exp_avg_sq"), end * end, c.beta2), s, o)
    return c.size * (a / (b.sqrt() / c.c2**0.5 + c.eps))

"""LAMB (You et al. 2020) of pytorch_optimizer: Adam's direction, as long as the weights.

Symbols: η ``lr``, β₁, β₂ ``betas``, m ``exp_avg``, v ``exp_avg_sq``, ε ``eps``, λ ``weight_decay``,
c₁ = 1 − β₁ᵗ (v is not corrected), W = min(‖w‖, 10) of the decayed weights. With

    r = a/(√b + ε),     a = β₁m + (1−β₁)g,     b = β₂v + (1−β₂)g²,     n = ‖r‖,     τ = W/(n + ε)

the step subtracts (η/c₁)·τ·r (τ = 1 where W or n is 0; r + λw in the place of r without
``weight_decouple``; 1 in the place of 1−β₁ without ``grad_averaging``).

τ looks at all coordinates, but the difference between the update at g and at 0 (index 0) is an
exact linear function of Δr = K_r ⊙ g, which is coordinate-wise as in adam.py:

    τr − τ₀r₀ = τ̄·Δr + r̄·Δτ,     Δτ = −W ⟨r + r₀, Δr⟩ / ((n+ε)(n₀+ε)(n+n₀)),

bars for means of both ends. The secant is its transpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.optimizers.adam import quotient
from inrun.optimizers.base import LinearMap, register_optimizer
from inrun.optimizers.common import Options, Scalar, State, learning_rate
from inrun.optimizers.library_options import (
    PYTORCH_OPTIMIZER,
    library_decay,
    moments,
    refuses,
    step_of_group,
)

CLAMP = 10.0  # pytorch_optimizer.Lamb.clamp


def _share(o: Options) -> float:
    """The weight of g in a."""
    return 1 - o["betas"][0] if o["grad_averaging"] else 1.0


def _direction(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """r."""
    beta1, beta2 = o["betas"]
    a = beta1 * s.get("exp_avg", 0.0) + _share(o) * g
    b = beta2 * s.get("exp_avg_sq", 0.0) + (1 - beta2) * g * g
    r = a / (b.sqrt() + o["eps"])
    if not o["weight_decouple"] and o["weight_decay"] > 0:
        r = r + o["weight_decay"] * w.to(g.dtype)
    return r


def _weight_norm(w: Tensor, g: Tensor, o: Options) -> Tensor:
    """W."""
    return (w.to(g.dtype) * library_decay(o)).norm().clamp(max=CLAMP)


def _trust(W: Tensor, n: Tensor, o: Options) -> Tensor:
    """τ."""
    if o["adam"]:
        return torch.ones_like(n)
    return torch.where((W != 0) & (n != 0), W / (n + o["eps"]), 1.0)


def _size(o: Options) -> Scalar:
    return learning_rate(o) / (1 - o["betas"][0] ** step_of_group(o))


def secant(g: Tensor, w: Tensor, s: State, o: Options) -> LinearMap:
    """v ↦ (η/c₁) K_r ⊙ (τ̄·v − W ⟨r̄, v⟩ (r + r₀) / ((n+ε)(n₀+ε)(n+n₀)))."""
    beta1, beta2 = o["betas"]
    zero = torch.zeros_like(g)
    r, r0 = _direction(g, w, s, o), _direction(zero, w, s, o)
    n, n0, W, eps = r.norm(), r0.norm(), _weight_norm(w, g, o), o["eps"]
    t, t0 = _trust(W, n, o), _trust(W, n0, o)
    start = beta1 * s.get("exp_avg", zero)
    root0, root, rho = moments(g, s.get("exp_avg_sq"), beta2, 1 - beta2)
    K = _size(o) * quotient(g, _share(o), start, rho, root0, root, eps)
    both = (n != 0) & (n0 != 0)  # otherwise one end of the update is 0, whatever its τ
    mean = torch.where(both, (t + t0) / 2, torch.where(n0 == 0, t, t0))
    cross = W / ((n + eps) * (n0 + eps) * (n + n0))
    cross = torch.where(both & (W != 0), cross, 0.0) * (not o["adam"])
    sides = r + r0

    def carry(v: Tensor) -> Tensor:
        wide = v.to(g.dtype)
        along = (sides * wide).sum() / 2
        return (K * (mean * wide - cross * along * sides)).to(v.dtype)

    return carry


@register_optimizer(
    "pytorch_optimizer.Lamb", decay=library_decay, coordinatewise=False, secant_map=secant,
    unsupported=refuses("rectify", "pre_norm", *PYTORCH_OPTIMIZER),
)  # fmt: skip
def lamb(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """(η/c₁)·τ·r: see the top of this file."""
    r = _direction(g, w, s, o)
    n = _safe_norm(r)
    return _size(o) * _trust(_weight_norm(w, g, o), n, o) * r


def _safe_norm(r: Tensor) -> Tensor:
    """‖r‖ with derivative 0 at r = 0."""
    square = (r * r).sum()
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)

"""Prodigy (Mishchenko and Defazio 2024) of prodigyopt: Adam whose step size d is estimated.

Symbols: η ``lr``, d ``d`` of the parameter group *before* the step, β₁, β₂ ``betas``, m
``exp_avg``, v ``exp_avg_sq``, k ``k``. The step subtracts γ·a/(√b + d'ε) with γ = dη (times √c₂/c₁
with ``use_bias_correction``), a = β₁m + d(1−β₁)ĝ, b = β₂v + d²(1−β₂)ĝ².

d' is the estimate that this very step makes from the gradients of all parameters. It stands beside
ε alone (the step itself is taken with d), so the rule takes d for it. Where d' is far from d and ε
counts, which happens in the first steps, the weights are not as predicted and the step is void.
How a batch changes the size of later steps through d is in no value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.optimizers.adam import quotient
from inrun.optimizers.base import divided_difference, register_optimizer
from inrun.optimizers.common import Options, Scalar, State
from inrun.optimizers.library_options import moments, refuses


def _size(o: Options) -> Scalar:
    """γ."""
    beta1, beta2 = o["betas"]
    t = o["k"] + 1
    corrected = (1 - beta2**t) ** 0.5 / (1 - beta1**t) if o["use_bias_correction"] else 1.0
    return o["d"] * o["lr"] * corrected


def _decay(o: Options) -> Scalar:
    return 1.0 - o["weight_decay"] * _size(o) if o["decouple"] else 1.0


def _gradient(g: Tensor, w: Tensor, o: Options) -> Tensor:
    if o["decouple"] or o["weight_decay"] == 0:
        return g
    return g + o["weight_decay"] * w.to(g.dtype)


def factor(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """K as in adam.py; with L2 decay the float64 difference."""
    if _gradient(g, w, o) is not g:
        return divided_difference(prodigy, g, w, s, o)
    (beta1, beta2), d = o["betas"], o["d"]
    r0, r, rho = moments(g, s.get("exp_avg_sq"), beta2, d * d * (1 - beta2))
    start = beta1 * s["exp_avg"] if "exp_avg" in s else torch.zeros_like(g)
    return _size(o) * quotient(g, d * (1 - beta1), start, rho, r0, r, d * o["eps"])


@register_optimizer(
    "prodigyopt.Prodigy", decay=_decay, elementwise=True, factor=factor,
    unsupported=refuses("fsdp_in_use"),
)  # fmt: skip
def prodigy(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """γ·a/(√b + dε): see the top of this file."""
    (beta1, beta2), d = o["betas"], o["d"]
    end = _gradient(g, w, o)
    a = beta1 * s.get("exp_avg", 0.0) + d * (1 - beta1) * end
    b = beta2 * s.get("exp_avg_sq", 0.0) + d * d * (1 - beta2) * end * end
    return _size(o) * a / (b.sqrt() + d * o["eps"])

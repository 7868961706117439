"""AdEMAMix (Pagliardini et al. 2024) of pytorch_optimizer: Adam with a second, slow momentum.

Symbols as in adam.py, and m₂ ``exp_avg_slow``, β₃ ``betas[2]``, α ``alpha``, both warmed up over
``t_alpha_beta3`` steps. The step subtracts η(a/c₁ + α·a₂)/(√b/√c₂ + ε).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inrun.optimizers.adam import quotient
from inrun.optimizers.base import divided_difference, register_optimizer
from inrun.optimizers.common import Options, State, average, learning_rate
from inrun.optimizers.library_options import (
    PYTORCH_OPTIMIZER,
    library_decay,
    library_gradient,
    moments,
    refuses,
    step_of_group,
)


def _mix(o: Options, t: int) -> tuple[float, float]:
    """α and β₃ at step t."""
    beta1, _, beta3 = o["betas"]
    alpha, warmup = o["alpha"], o["t_alpha_beta3"]
    if warmup is None:
        return alpha, beta3
    x, log1, log3 = t / warmup, math.log(beta1), math.log(beta3)
    slow = math.exp(log1 * log3 / ((1 - x) * log3 + x * log1))
    return min(t * alpha / warmup, alpha), min(slow, beta3)


def factor(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """K as in adam.py, with the sum of both momenta; with L2 decay the float64 difference."""
    if library_gradient(g, w, o) is not g:
        return divided_difference(ademamix, g, w, s, o)
    (beta1, beta2, _), t = o["betas"], step_of_group(o)
    alpha, beta3 = _mix(o, t)
    c1, c2, zero = 1 - beta1**t, 1 - beta2**t, torch.zeros_like(g)
    start = beta1 / c1 * s.get("exp_avg", zero) + alpha * beta3 * s.get("exp_avg_slow", zero)
    slope = (1 - beta1) / c1 + alpha * (1 - beta3)
    r0, r, rho = (x / c2**0.5 for x in moments(g, s.get("exp_avg_sq"), beta2, 1 - beta2))
    return learning_rate(o) * quotient(g, slope, start, rho, r0, r, o["eps"])


@register_optimizer(
    "pytorch_optimizer.AdEMAMix", decay=library_decay, elementwise=True, factor=factor,
    unsupported=refuses(*PYTORCH_OPTIMIZER),
)  # fmt: skip
def ademamix(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η(a/c₁ + α·a₂)/(√b/√c₂ + ε): see the top of this file."""
    (beta1, beta2, _), t = o["betas"], step_of_group(o)
    alpha, beta3 = _mix(o, t)
    end = library_gradient(g, w, o)
    a = average(s.get("exp_avg"), end, beta1) / (1 - beta1**t)
    slow = average(s.get("exp_avg_slow"), end, beta3)
    b = average(s.get("exp_avg_sq"), end * end, beta2)
    return learning_rate(o) * (a + alpha * slow) / (b.sqrt() / (1 - beta2**t) ** 0.5 + o["eps"])

"""Schedule-Free AdamW (Defazio et al. 2024) of schedulefree.

Symbols: y the weights that the model holds in training, where the gradient is taken; z ``z``; x the
average of the z, which ``optimizer.eval()`` puts into the model, y = (1−β₁)z + β₁x. v
``exp_avg_sq``, η = ``lr`` after warm-up, λ ``weight_decay``, c the weight of the new z in the
average. A step is

    ĝ = g/(√(b/c₂) + ε) + λy,     z ← z − ηĝ,     y ← y + c(z − y) − η(1 − β₁(1−c))ĝ.

Which weights does the validation pass see? y. Utilities are the validation loss at the weights
that the model holds, on the way from y_∅ to y_B. x moves along the same line, c/(1−β₁+β₁c) as far:
examples of one step are ranked alike to first order at x, but their values there would fade with c
(1/t), although what a batch did to z stays in all later averages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.optimizers.base import register_optimizer
from inrun.optimizers.common import Options, Scalar, State, average


def _sizes(o: Options) -> tuple[Scalar, Scalar, float]:
    """η(1 − β₁(1−c)), c and c₂."""
    beta1, beta2 = o["betas"]
    k, warmup = o["k"], o["warmup_steps"]
    lr = o["lr"] * ((k + 1) / warmup if k < warmup else 1.0)
    weight = (k + 1) ** o["r"] * max(lr, o["lr_max"]) ** o["weight_lr_power"]
    total = o["weight_sum"] + weight
    c = weight / total if total else 0.0
    return lr * (1 - beta1 * (1 - c)), c, 1 - beta2 ** (k + 1)


def _denominator(g: Tensor, s: State, o: Options, c2: float) -> Tensor:
    return (average(s.get("exp_avg_sq"), g * g, o["betas"][1]) / c2).sqrt() + o["eps"]


def factor(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """K = η(1 − β₁(1−c))/(√(b/c₂) + ε): g stands in the numerator alone. 0 where v = g = 0."""
    size, _, c2 = _sizes(o)
    v = s.get("exp_avg_sq", torch.zeros_like(g))
    return torch.where((g == 0) & (v == 0), 0.0, size / _denominator(g, s, o, c2))


@register_optimizer("schedulefree.AdamWScheduleFree", elementwise=True, factor=factor)
def adamw_schedule_free(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """y before the step − y after it: see the top of this file."""
    size, c, c2 = _sizes(o)
    y = w.to(g.dtype)
    z = s.get("z", y).to(g.dtype)
    return size * (g / _denominator(g, s, o, c2) + o["weight_decay"] * y) - c * (z - y)

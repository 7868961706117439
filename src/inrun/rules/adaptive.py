"""Adagrad, Adadelta and RMSprop: a step divided by a running size of the gradient."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Adadelta, Adagrad, RMSprop

from inrun.rules.base import Options, State, learning_rate, register_optimizer
from inrun.rules.common import average, effective_gradient, step_count


@register_optimizer(Adagrad)
def adagrad(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η_t·ĝ / (√(G + ĝ²) + ε), η_t = η / (1 + (t−1)·``lr_decay``), G ``sum``."""
    end = effective_gradient(g, w, o)
    total = s.get("sum", o["initial_accumulator_value"]) + end * end
    lr = learning_rate(o) / (1 + (step_count(s, o, g) - 1) * o["lr_decay"])
    return lr * (end / (total.sqrt() + o["eps"]))


@register_optimizer(Adadelta)
def adadelta(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η·ĝ·√(D + ε) / √(b + ε), b = ρv + (1−ρ)ĝ²: v ``square_avg``, D ``acc_delta``, ρ ``rho``.

    D is the average *before* this step's own square, as in the optimizer.
    """
    end = effective_gradient(g, w, o)
    b = average(s.get("square_avg"), end * end, o["rho"])
    past = (s.get("acc_delta", 0.0) + o["eps"]) ** 0.5
    return learning_rate(o) * (past / (b + o["eps"]).sqrt() * end)


@register_optimizer(RMSprop)
def rmsprop(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η(μB + ĝ/(√b + ε)), b = αv + (1−α)ĝ², less the square of the averaged ĝ when ``centered``.

    Symbols: v ``square_avg``, α ``alpha``, B ``momentum_buffer``, μ ``momentum``; the average of
    ĝ is ``grad_avg``. There is no bias correction.
    """
    end = effective_gradient(g, w, o)
    b = average(s.get("square_avg"), end * end, o["alpha"])
    if o["centered"]:
        mean = average(s.get("grad_avg"), end, o["alpha"])
        b = b - mean * mean
    step = end / (b.sqrt() + o["eps"])
    if o["momentum"] > 0 and "momentum_buffer" in s:
        step = step + o["momentum"] * s["momentum_buffer"]
    return learning_rate(o) * step

"""Adagrad, Adadelta and RMSprop: a step divided by a running size of the gradient.

Such a step is ĝ·γ(ĝ), besides what does not depend on g, so without L2 decay its secant is γ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Adadelta, Adagrad, RMSprop

from inrun.optimizers.base import UpdateMap, divided_difference, register_optimizer
from inrun.optimizers.common import (
    Options,
    State,
    average,
    effective_gradient,
    has_l2,
    learning_rate,
    sign,
    step_count,
)


def _secant(
    update: Callable[[], UpdateMap],
    gain: Callable[[Tensor, Tensor, State, Options], Tensor],
    size: str,
) -> UpdateMap:
    """K = γ(ĝ), ``gain``, and 0 where g and the running ``size`` are; with L2 decay the difference
    of ``update`` at both ends."""

    def factor(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
        if has_l2(o):
            return divided_difference(update(), g, w, s, o)
        K = sign(o) * gain(effective_gradient(g, w, o), g, s, o)
        still = (g == 0) & (s.get(size, torch.zeros_like(g)) == 0)
        return torch.where(still, 0.0, K)

    return factor


def _adagrad_gain(end: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    total = s.get("sum", o["initial_accumulator_value"]) + end * end
    lr = learning_rate(o) / (1 + (step_count(s, o, g) - 1) * o["lr_decay"])
    return lr / (total.sqrt() + o["eps"])


@register_optimizer(
    Adagrad, factor=_secant(lambda: adagrad, _adagrad_gain, "sum"), elementwise=True
)
def adagrad(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η_t·ĝ / (√(G + ĝ²) + ε), η_t = η / (1 + (t−1)·``lr_decay``), G ``sum``."""
    end = effective_gradient(g, w, o)
    return _adagrad_gain(end, g, s, o) * end


def _adadelta_gain(end: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    b = average(s.get("square_avg"), end * end, o["rho"])
    past = (s.get("acc_delta", 0.0) + o["eps"]) ** 0.5
    return learning_rate(o) * (past / (b + o["eps"]).sqrt())


@register_optimizer(
    Adadelta, factor=_secant(lambda: adadelta, _adadelta_gain, "square_avg"), elementwise=True
)
def adadelta(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η·ĝ·√(D + ε) / √(b + ε), b = ρv + (1−ρ)ĝ²: v ``square_avg``, D ``acc_delta``, ρ ``rho``.

    D is the average *before* this step's own square, as in the optimizer.
    """
    end = effective_gradient(g, w, o)
    return _adadelta_gain(end, g, s, o) * end


def _rmsprop_gain(end: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    b = average(s.get("square_avg"), end * end, o["alpha"])
    if o["centered"]:
        mean = average(s.get("grad_avg"), end, o["alpha"])
        b = b - mean * mean
    return learning_rate(o) / (b.sqrt() + o["eps"])


def _rmsprop_squares(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    return average(s.get("square_avg"), effective_gradient(g, w, o).square(), o["alpha"])


@register_optimizer(
    RMSprop, factor=_secant(lambda: rmsprop, _rmsprop_gain, "square_avg"), elementwise=True,
    squares=_rmsprop_squares,
)  # fmt: skip
def rmsprop(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η(μB + ĝ/(√b + ε)), b = αv + (1−α)ĝ², less the square of the averaged ĝ when ``centered``.

    Symbols: v ``square_avg``, α ``alpha``, B ``momentum_buffer``, μ ``momentum``; the average of
    ĝ is ``grad_avg``. There is no bias correction.
    """
    end = effective_gradient(g, w, o)
    step = _rmsprop_gain(end, g, s, o) * end
    if o["momentum"] > 0 and "momentum_buffer" in s:
        step = step + learning_rate(o) * o["momentum"] * s["momentum_buffer"]
    return step

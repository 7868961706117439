"""SGD with momentum, and averaged SGD: updates linear in the gradient, so J = K is one number."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import ASGD, SGD

from inrun.optimizers.base import Scale, register_optimizer
from inrun.optimizers.common import (
    Options,
    Scalar,
    State,
    effective_gradient,
    learning_rate,
    running_scalar,
    scalar,
    sign,
)
from inrun.optimizers.momentum import Momentum, Share


def _sgd_gain(s: State, o: Options) -> Scalar:
    """How much of ĝ reaches the direction: through the momentum buffer and, nesterov, beside it."""
    mu = o["momentum"]
    if mu == 0:
        return 1.0
    into_buffer = 1.0 if s.get("momentum_buffer") is None else 1 - o["dampening"]
    return 1 + mu * into_buffer if o["nesterov"] else into_buffer


def sgd_factor(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """K = J = ση·gain, the same for each coordinate."""
    return _filled(g, sign(o) * learning_rate(o) * _sgd_gain(s, o))


def _filled(g: Tensor, x: Scalar) -> Tensor:
    return torch.ones_like(g) * x


def _sgd_share(s: State, o: Options) -> Share:
    mu, first = float(o["momentum"]), s.get("momentum_buffer") is None
    if mu == 0:
        return Share(1.0, 0.0, 0.0, 0.0)
    add = 1.0 if first else 1.0 - float(o["dampening"])
    return Share(float(_sgd_gain(s, o)), mu * mu if o["nesterov"] else mu, add, mu)


_MOMENTUM = Momentum(
    "momentum_buffer", _sgd_share, lambda g, w, s, o: Scale(_filled(g, sign(o) * learning_rate(o))),
    lambda o: float(o["momentum"]),
)  # fmt: skip


@register_optimizer(
    SGD, factor=sgd_factor, derivative=sgd_factor, adaptive=False, elementwise=True,
    momentum=_MOMENTUM,
)  # fmt: skip
def sgd(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η·b, or η(ĝ + μb) with nesterov, b = μ·b₋ + (1 − τ)ĝ; the first step has b = ĝ, undampened.

    Symbols: η ``lr``, μ ``momentum``, τ ``dampening``, b₋ ``momentum_buffer``,
    ĝ = ±g + ``weight_decay``·w.
    """
    direction = _sgd_gain(s, o) * effective_gradient(g, w, o)
    mu, buffer = o["momentum"], s.get("momentum_buffer")
    if mu != 0 and buffer is not None:
        direction = direction + (mu * mu if o["nesterov"] else mu) * buffer
    return learning_rate(o) * direction


def asgd_factor(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """K = J = ση_t."""
    return torch.ones_like(g) * (sign(o) * _eta(g, s, o))


@register_optimizer(
    ASGD, factor=asgd_factor, derivative=asgd_factor, adaptive=False, elementwise=True
)
def asgd(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η_t(ĝ + λw): the step of the weights themselves, not of their running average ``ax``.

    Symbols: η_t ``eta`` (kept in the state, so the shrinking of the weights by 1 − λη_t is here
    and not in ``decay``), λ ``lambd``.
    """
    shrink = scalar(o["lambd"]) * w.to(g.dtype)
    return (_eta(g, s, o) * (effective_gradient(g, w, o) + shrink)).to(g.dtype)


def _eta(g: Tensor, s: State, o: Options) -> Tensor:
    return running_scalar(s, "eta", learning_rate(o), g.device)

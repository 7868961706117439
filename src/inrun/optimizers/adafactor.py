"""Adafactor, as `torch.optim` has it (no momentum, eps at the end, decoupled decay).

Its update has the form Ψ(g) = K(g)⊙g, with a K that looks at whole rows and columns of g and at
its norm. So Ψ(0) = 0, and K(g) is itself the divided difference (Ψ(g) − Ψ(0))/g, coordinate by
coordinate: exact, without a division by g, and adding up. In this sense the rule counts as
coordinate-wise; the path integral would do no better and breaks down at the first step, where
the update ignores the size of g. The tangent is the full Jᵀv.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Adafactor

from inrun.optimizers.base import register_optimizer
from inrun.optimizers.common import (
    Options,
    Scalar,
    State,
    decoupled_decay,
    learning_rate,
    sign,
    step_count,
)


def _gain(g: Tensor, w: Tensor, s: State, o: Options) -> tuple[Tensor, Tensor]:
    """K(g) for σ = 1, and the variance estimate V."""
    eps1, eps2 = o["eps"]
    if eps1 is None:
        eps1 = torch.finfo(w.dtype).eps
    t = step_count(s, o, g)
    fresh = t ** o["beta2_decay"]  # 1 − β̂₂

    def blend(name: str, new: Tensor) -> Tensor:
        old = s.get(name)
        return fresh * new if old is None else old + fresh * (new - old)

    square = g * g
    if g.dim() > 1:
        row = blend("row_var", square.mean(-1, keepdim=True))
        col = blend("col_var", square.mean(-2, keepdim=True))
        V = row @ col / row.mean(-2, keepdim=True).clamp(min=eps1)
    else:
        V = blend("variance", square)

    inverse = V.clamp(min=eps1 * eps1).rsqrt()
    clip = (_rms(inverse * g) / o["d"]).clamp(min=1.0)
    size = _rms(w.to(g.dtype)).clamp(min=eps2) * _smaller(learning_rate(o), t**-0.5)
    return size / clip * inverse, V


def _rms(x: Tensor) -> Tensor:
    return x.norm() / x.numel() ** 0.5


def _smaller(a: Scalar, b: float) -> Scalar:
    return a.clamp(max=b) if isinstance(a, Tensor) else min(a, b)


def factor(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """K(g), and 0 where V = 0: a row or column that was never touched."""
    K, V = _gain(g, w, s, o)
    return torch.where(V == 0, 0.0, sign(o) * K)


@register_optimizer(Adafactor, decay=decoupled_decay, factor=factor)
def adafactor(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """K(g)⊙g, K = α / (clip·max(√V, ε₁)).

    Symbols: α = max(ε₂, rms(w))·min(η, 1/√t) with the weights before decay, (ε₁, ε₂) ``eps``
    (ε₁ defaults to the machine epsilon of the weights' dtype), 1 − β̂₂ = t^τ with τ
    ``beta2_decay``, V = R·C/mean(R) from the row and column averages R ``row_var`` and
    C ``col_var`` (vectors: ``variance``), clip = max(1, rms(g/√V)/d) with ``d``.
    """
    return sign(o) * _gain(g, w, s, o)[0] * g

"""Lion (Chen et al. 2023) of lion_pytorch and pytorch_optimizer.

Symbols: η ``lr``, β₁ ``betas[0]``, m ``exp_avg``. The update is a sign, so its derivative is zero
and the tangent credits nobody; the secant is the divided difference of the sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.optimizers.base import Scale, register_optimizer
from inrun.optimizers.common import Options, State, decoupled_decay, learning_rate
from inrun.optimizers.library_options import (
    PYTORCH_OPTIMIZER,
    library_decay,
    library_gradient,
    refuses,
)
from inrun.optimizers.momentum import Momentum, Share, beta1_of


def _share(s: State, o: Options) -> Share:
    beta1, beta2 = map(float, o["betas"])
    return Share(1 - beta1, beta1, 1 - beta2, beta2)


def _carried(g: Tensor, w: Tensor, s: State, o: Options) -> Scale:
    """P = η/|a|: the divided difference of the sign, from a = 0 on."""
    a = beta1_of(o) * s.get("exp_avg", 0.0) + (1 - beta1_of(o)) * g
    return Scale(torch.where(a == 0, 0.0, learning_rate(o) / torch.where(a == 0, 1.0, a.abs())))


def _with_l2_carried(g: Tensor, w: Tensor, s: State, o: Options) -> Scale:
    return _carried(library_gradient(g, w, o), w, s, o)


def _keep(o: Options) -> float:
    return float(o["betas"][1])


@register_optimizer(
    "lion_pytorch.Lion",
    decay=decoupled_decay,
    elementwise=True,
    unsupported=refuses("decoupled_wd"),
    momentum=Momentum("exp_avg", _share, _carried, _keep),
)
def lion(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η·sign(β₁m + (1−β₁)g)."""
    beta1 = o["betas"][0]
    return learning_rate(o) * torch.sign(beta1 * s.get("exp_avg", 0.0) + (1 - beta1) * g)


@register_optimizer(
    "pytorch_optimizer.Lion", decay=library_decay, elementwise=True,
    unsupported=refuses(*PYTORCH_OPTIMIZER),
    momentum=Momentum("exp_avg", _share, _with_l2_carried, _keep),
)  # fmt: skip
def lion_with_l2(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """The same with ĝ = g + λw for L2 weight decay."""
    return lion(library_gradient(g, w, o), w, s, o)

"""SOAP (Vyas et al. 2024) of pytorch_optimizer: Adam in the eigenbasis of Shampoo's preconditioner.

Symbols: P the projection to the basis ``Q`` of the state (P(g) = Q₁ᵀ g Q₂ for a matrix), R its
transpose back; m ``exp_avg`` (not projected), v ``exp_avg_sq`` (projected), η ``lr``, β₁, β₂
``betas``, ε ``eps``, c₁ = 1 − β₁ᵗ, c₂ = 1 − β₂ᵗ, t the number of steps before this one. The step
subtracts η(√c₂/c₁)·R(P(a)/(√b + ε)), a = β₁m + (1−β₁)g, b = β₂v + (1−β₂)P(g)², and then decays
the weights; the first step only initialises. The basis changes after the update, so it is fixed
within a step, and in it the update is coordinate-wise: the secant is v ↦ R(K ⊙ P(v)).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from inrun.optimizers.adam import quotient
from inrun.optimizers.base import LinearMap, register_optimizer
from inrun.optimizers.common import Options, Scalar, State, decoupled_decay, learning_rate
from inrun.optimizers.library_options import PYTORCH_OPTIMIZER, moments, refuses


def _project(x: Tensor, s: State, back: bool = False) -> Tensor:
    """P, or R. A dimension without a basis is left as it is."""
    for basis in s["Q"]:
        if len(basis) > 0:
            x = torch.tensordot(x, basis.to(x.dtype), dims=([0], [1 if back else 0]))
        else:
            x = x.movedim(0, -1)
    return x


def _begun(s: State, o: Options) -> bool:
    """Does this step move anything? A parameter that comes later has no basis before its step."""
    return bool(o.get("step", 0)) and s.get("Q") is not None


def _decay(o: Options) -> Scalar:
    return decoupled_decay(o) if o.get("step", 0) else 1.0


def _size(o: Options) -> Scalar:
    (beta1, beta2), t = o["betas"], o["step"]
    corrected = (1 - beta2**t) ** 0.5 / (1 - beta1**t) if o["correct_bias"] else 1.0
    return learning_rate(o) * corrected * _decay(o)  # the decay comes after the update


def secant(g: Tensor, w: Tensor, s: State, o: Options) -> LinearMap:
    """v ↦ R(K ⊙ P(v)), K as in adam.py."""
    if not _begun(s, o):
        return torch.zeros_like
    beta1, beta2 = o["betas"]
    end, start = _project(g, s), beta1 * _project(s["exp_avg"].to(g.dtype), s)
    r0, r, rho = moments(end, s["exp_avg_sq"], beta2, 1 - beta2)
    K = _size(o) * quotient(end, 1 - beta1, start, rho, r0, r, o["eps"])
    return lambda v: _project(K * _project(v.to(g.dtype), s), s, back=True).to(v.dtype)


def _unsupported(optimizer: Optimizer) -> str | None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in params):
        return (
            "in half precision much of its step is the rounding of its eigenbasis, which no rule "
            "can follow. Keep the weights in float32 and use torch.autocast"
        )
    return _options(optimizer)


_options = refuses("merge_dims", "normalize_gradient", *PYTORCH_OPTIMIZER)


@register_optimizer(
    "pytorch_optimizer.SOAP", decay=_decay, coordinatewise=False, secant_map=secant,
    unsupported=_unsupported,
)  # fmt: skip
def soap(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
    """η(√c₂/c₁)·R(P(a)/(√b + ε)): see the top of this file. Operation by operation as the optimizer
    does it: where a gradient has no part along an axis of the basis, both P(a) and √b are rounding
    errors, and the optimizer moves by their ratio."""
    if not _begun(s, o):
        return torch.zeros_like(g)
    beta1, beta2 = o["betas"]
    a = torch.lerp(s["exp_avg"].to(g.dtype), g, 1 - beta1)
    b = torch.lerp(s["exp_avg_sq"].to(g.dtype), _project(g, s).square(), 1 - beta2)
    return _size(o) * _project(_project(a, s) / (b.sqrt() + o["eps"]), s, back=True)

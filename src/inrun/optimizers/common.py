"""Types of a rule's arguments, and the terms that the updates of `torch.optim` share.

``State`` is the optimizer's state of one parameter as `torch.optim` keeps it, ``Options`` its
parameter group. A *scalar* is a Python float or a 0-dim tensor: learning rates, betas and step
counts can be either, and a tensor on a device is never read back to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = Mapping[str, Any]
Options: TypeAlias = Mapping[str, Any]
Scalar: TypeAlias = Any


def learning_rate(o: Options) -> Scalar:
    """η, ``lr``: a float or a 0-dim tensor. The fused kernels read a tensor into double."""
    lr = o["lr"]
    if not isinstance(lr, Tensor):
        return lr
    return lr.squeeze().to(widest(lr.device)) if o.get("fused") else lr.squeeze()


def decoupled_decay(o: Options) -> Scalar:
    """1 − lr·weight_decay: the factor that decoupled weight decay puts on the weights."""
    if not o.get("decoupled_weight_decay", True):
        return 1.0
    return 1.0 - learning_rate(o) * o["weight_decay"]


def no_decay(o: Options) -> Scalar:
    """1: with L2 decay or none the weights themselves are not scaled."""
    return 1.0


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def scalar(x: Any) -> Scalar:
    """A hyperparameter: tensors of one element become 0-dim, as in `torch.optim`."""
    return x.squeeze() if isinstance(x, Tensor) else x


def sign(o: Options) -> float:
    """σ: −1 when the optimizer maximises."""
    return -1.0 if o.get("maximize") else 1.0


def has_l2(o: Options) -> bool:
    """Is there an L2 penalty on the weights? A ``weight_decay`` in a tensor counts as one: reading
    it would wait for the device."""
    decay = o["weight_decay"]
    return not o.get("decoupled_weight_decay") and (isinstance(decay, Tensor) or decay != 0)


def l2(w: Tensor, g: Tensor, o: Options) -> Tensor | float:
    """ĝ₀ = weight_decay·w, the gradient of the L2 penalty, in the precision of g; 0 without one."""
    return scalar(o["weight_decay"]) * w.to(g.dtype) if has_l2(o) else 0.0


def effective_gradient(g: Tensor, w: Tensor, o: Options) -> Tensor:
    """ĝ = σg + ĝ₀: what the optimizer calls its gradient (``maximize``, L2 ``weight_decay``)."""
    return (-g if o.get("maximize") else g) + l2(w, g, o)


def average(old: Tensor | None, new: Tensor, beta: Scalar) -> Tensor:
    """β·old + (1 − β)·new; an average not yet begun is 0."""
    return (1 - beta) * new if old is None else beta * old + (1 - beta) * new


def step_count(s: State, o: Options, g: Tensor, *, in_tensor: bool | None = None) -> Scalar:
    """t: the number of the step about to be taken, ``state["step"] + 1``.

    A Python float for a count on the host, a float64 tensor for one on a device (the fused
    kernels read it into double arithmetic). ``in_tensor`` (default: ``capturable`` without
    ``fused``): the optimizer computes with the tensor itself, in float32, and so do we: its
    1 − β₂ᵗ is off by up to 5e-5 at t = 1, and the step with it.
    """
    if in_tensor is None:
        in_tensor = bool(o.get("capturable") and not o.get("fused"))
    if in_tensor:
        return running_scalar(s, "step", 0.0, g.device) + 1
    step = s.get("step", 0.0)
    if isinstance(step, Tensor) and step.device.type != "cpu":
        return step.to(widest(step.device)) + 1
    return float(step) + 1


def running_scalar(s: State, name: str, initial: Scalar, device: torch.device | str) -> Tensor:
    """A number that the optimizer keeps as a 0-dim tensor of its own precision.

    Where it is missing: its initial value, as the optimizer would keep it.
    """
    x = s.get(name)
    if isinstance(x, Tensor):
        return x
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    if isinstance(initial, Tensor):
        return initial.to(dtype)
    return torch.full((), initial, dtype=dtype, device=device)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the denominator is 0."""
    zero = denominator == 0
    return torch.where(zero, 0.0, numerator / torch.where(zero, 1.0, denominator))

"""Momentum: a step as a linear map of an average of all gradients so far.

Many optimizers keep one average b of past gradients and take a step along it:

    update = P[a],   a = own·ĝ + old·b,        then   b ← add·ĝ + keep·b,

with ĝ = σg + ĝ₀ (``maximize``, L2 decay). P divides each coordinate by its size (Adam's √v̂ + ε), or
multiplies the matrix from one side (Muon). It is made of the gradients, too, but here it counts as
fixed: then each gradient of the past has a share of the step, and the shares add up to the whole
step. ``estimator="carry"`` (scoring/carry.py) credits these shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from inrun.optimizers.common import Options, State

LinearMap = Callable[[Tensor], Tensor]


class Share(NamedTuple):
    """The four numbers of one step, for one parameter."""

    own: float  # of ĝ in the step
    old: float  # of b in the step
    add: float  # of ĝ in the new b
    keep: float  # of b in the new b


@dataclass(frozen=True)
class Momentum:
    """How a rule's steps depend on past gradients.

    Args:
        buffer: the name of b in the optimizer's state.
        share: the numbers of the step about to be taken, from state and options.
        map: v ↦ σPᵀv, so that ⟨map(v), own·g⟩ is what g itself does to the step along v.
        keep: how much of b each step keeps, from the options alone.
        unsupported: why these options of a parameter group do not fit, or None.
    """

    buffer: str
    share: Callable[[State, Options], Share]
    map: Callable[[Tensor, Tensor, State, Options], LinearMap]
    keep: Callable[[Options], float]
    unsupported: Callable[[Options], str | None] = lambda o: None


def average_share(s: State, o: Options) -> Share:
    """Of b ← β₁b + (1−β₁)ĝ with a step along the new b."""
    beta1 = beta1_of(o)
    return Share(1 - beta1, beta1, 1 - beta1, beta1)


def beta1_of(o: Options) -> float:
    return float(o["betas"][0])


def betas_on_device(o: Options) -> str | None:
    """Why these betas do not fit: reading a number on a device would wait for it."""
    if any(isinstance(x, Tensor) and x.device.type != "cpu" for x in o["betas"]):
        return "its betas are tensors on a device; pass plain numbers"
    return None

"""What optimizers of other libraries have in common. They are matched by package and class name
(``"lion_pytorch.Lion"``), so that none of them has to be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from inrun.optimizers.common import Options, Scalar, learning_rate, ratio


def refuses(
    *switches: str, instead: str = "Leave it at its default"
) -> Callable[[Optimizer], str | None]:
    """A check: none of these switches of the optimizer, or of its parameter groups, may be on."""

    def why(optimizer: Optimizer) -> str | None:
        places: list[Any] = [*optimizer.param_groups, vars(optimizer), optimizer.defaults]
        for name in switches:
            on = next((place[name] for place in places if place.get(name)), None)
            if on is not None:
                return f"its rule does not know the option {name}={on!r}. {instead}"
        return None

    return why


# of every optimizer in pytorch_optimizer, where they change what is done with the gradient
PYTORCH_OPTIMIZER = ("maximize", "use_gc", "adanorm", "cautious", "stable_adamw", "adam_debias")


def library_decay(o: Options) -> Scalar:
    """The factor of pytorch_optimizer's decoupled weight decay: ``fixed_decay`` leaves lr out."""
    if not o["weight_decouple"]:
        return 1.0
    return 1.0 - o["weight_decay"] * (1.0 if o["fixed_decay"] else learning_rate(o))


def library_gradient(g: Tensor, w: Tensor, o: Options) -> Tensor:
    """ĝ: with pytorch_optimizer's L2 weight decay added."""
    if o["weight_decouple"] or o["weight_decay"] == 0:
        return g
    return g + o["weight_decay"] * w.to(g.dtype)


def step_of_group(o: Options) -> int:
    """t of libraries that count the steps in the parameter group."""
    return int(o.get("step", 0)) + 1


def moments(
    end: Tensor, v: Tensor | None, beta2: float, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """√b₀, √b and ρ = (√b − √b₀)/ĝ for b = β₂v + weight·ĝ²: what ``adam.quotient`` takes."""
    b0 = torch.zeros_like(end) if v is None else beta2 * v
    r0, r = b0.sqrt(), (b0 + weight * end * end).sqrt()
    return r0, r, ratio(weight * end, r + r0)

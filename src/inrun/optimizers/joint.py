"""Several optimizers of one model that step together, seen as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer


class Joint:
    """Optimizers whose steps make one step of the model, such as Muon for the matrices and AdamW
    for the rest. ``param_groups`` are those of all of them, in the order of the list."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for o in self.members for group in o.param_groups]

    @property
    def grad_scale(self) -> Tensor | None:
        """The loss scale that a GradScaler has handed to a fused member, if it has to one."""
        found = (getattr(o, "grad_scale", None) for o in self.members)
        return next((scale for scale in found if scale is not None), None)


Optimizers: TypeAlias = Optimizer | Joint


def members_of(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    return optimizer.members if isinstance(optimizer, Joint) else (optimizer,)


def name_of(optimizer: Optimizers) -> str:
    """``AdamW``, or ``Muon + AdamW`` for several."""
    return " + ".join(type(o).__name__ for o in members_of(optimizer))


def has_gradient(optimizer: Optimizer) -> bool:
    """Will its step move anything? A parameter without a gradient is left alone."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])

"""Which rank computes which part of the validation gradient.

A target's loss is a mean over its batches (``per_step``) and, where rows are processed in chunks,
over these: the parts. Either every rank computes all of them, or each computes some and the
gradients are summed over ranks. Both give the same direction on all ranks. A batch is never cut for
this: its loss need not be a mean over rows.

Splitting saves passes and costs one sum of all parameters' gradients. Both are measured on rank 0
in the second pass, and rank 0 decides, once.

Where FSDP spreads the parameters, every rank takes part in every pass and gradients are summed over
ranks in any case: the parts are always shared out (``shared_out``).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from inrun.ranks.world import World
from inrun.torch_compat import tree_leaves

T = TypeVar("T")
MEASURED = 1  # the pass that is measured; the one before it compiles and allocates


class Split:
    """Shares the parts of a validation pass among ranks, if that is faster."""

    def __init__(self, world: World) -> None:
        self.world = world
        always = world.alone or world.shards is not None
        self.chosen: bool | None = False if always else None
        self._passes = 0

    @property
    def on(self) -> bool:
        return self.chosen is True

    def own(self, parts: Sequence[T]) -> list[T]:
        """The parts that this rank computes."""
        return list(parts[self.world.rank :: self.world.size]) if self.on else list(parts)

    def summed(self, loss: Tensor, grads: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Loss and gradients of all parts, from those of this rank's."""
        if not self.on:
            return loss, grads
        found = [loss.clone(), *(g.clone() for g in grads)]
        self.world.total_(found)
        return found[0], found[1:]

    def measured(
        self, parts: int, compute: Callable[[], tuple[Tensor, list[Tensor]]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns what ``compute`` does for ``parts`` parts; the second time, chooses."""
        if self.chosen is not None or parts < 2:
            return compute()
        start = _now()
        loss, grads = compute()
        passed = _now() - start
        if self._passes == MEASURED:
            start = _now()
            self.world.total_([g.clone() for g in grads])
            saved = passed * (1 - -(-parts // self.world.size) / parts)
            self.chosen = self.world.agree(saved > _now() - start)
        self._passes += 1
        return loss, grads


def shared_out(world: World, parts: Sequence[tuple[float, T]]) -> list[tuple[float, T]]:
    """The parts of this rank, with their weights; as many on each: where there is none left, the
    first one with weight 0."""
    rounds = -(-len(parts) // world.size)
    own = list(parts[world.rank :: world.size])
    return own + [(0.0, parts[0][1])] * (rounds - len(own))


def digest(batches: Any) -> str:
    """A key of the numbers and texts in validation batches: equal on ranks that have the same."""
    found = hashlib.blake2b()
    for x in tree_leaves(batches):
        if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested:
            found.update(str((tuple(x.shape), x.dtype)).encode())
            found.update(x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, (str, bytes, int, float)):
            found.update(repr(x).encode())
    return found.hexdigest()


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()

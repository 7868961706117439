"""The rule of operations on pairs: similarities of every example with every other (outputs.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inrun.gradients import Call, Record
from inrun.gradients.records import Replay


def halves(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """The rule of operations on pairs: the operation's own derivative, half of it for either
    example of a pair."""
    for leaf, node in enumerate(call.nodes):
        if node is not None:
            held = tuple(x for x in call.leaves if isinstance(x, Tensor))
            yield node, Replay(
                apply=lambda W, leaf=leaf: call.run(leaf, W),  # type: ignore[misc]
                split=_both, delta=_both(delta) / 2, value=call.leaves[leaf], held=held,
            )  # fmt: skip


def _both(x: Tensor) -> Tensor:
    """[B, B] as [B, 2, B]: the numbers that an example has a part in, by row and by column."""
    return torch.stack([x, x.t()], 1)

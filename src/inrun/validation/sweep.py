"""Many targets in one pass: their batches side by side, their gradients told apart by the capture.

Q targets cost about as much as Q more examples in the batch. The records of products are kept in
ghost form, and the gradient of a parameter for each target is formed from them when the parameter
is scored, so Q gradients of the whole model never exist at once.

This is right only if, at all weights, the loss of the joined batch is a mean over its rows of the
same terms whose means are the targets' own losses, and if rows of one target do not influence those
of another. The loss is the user's, so neither is known in advance, and equal loss values prove
nothing: with a head of zeros every row has the same loss. joining.py measures whether it is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inrun.capture.capture import Capture
from inrun.capture.micro_batch import MicroBatch
from inrun.gradients.embedding import Lookup
from inrun.gradients.nodes import pull_back
from inrun.gradients.records import wide
from inrun.torch_compat import tree_map
from inrun.validation.targets import copy_batch


@dataclass(frozen=True)
class Gradients:
    """The loss of a group of targets (their mean) and their gradients, parameter by parameter."""

    loss: Tensor
    # of(names, targets): gradients [targets, *W] by name, perhaps views of memory used again
    of: Callable[[Sequence[str], slice], dict[str, Tensor]]
    scale: Tensor | None = None  # [targets]: factors that ``of`` does not include yet
    single: Mapping[str, Tensor] | None = None  # [*W] by name, of the only target


class Sweep:
    """Runs the joined pass."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._watched: tuple[tuple[str, int], ...] = ()
        self._capture: Capture | None = None

    def close(self) -> None:
        if self._capture is not None:
            self._capture.close()

    def run(
        self, loss: Callable[[], Tensor], sizes: Sequence[int], params: Mapping[str, Tensor]
    ) -> Gradients:
        watched = tuple((k, id(p)) for k, p in params.items())
        if self._capture is None:
            self._capture = Capture(
                self.model, params, form="grouped", probe=True, directions=len(sizes)
            )
        elif self._watched != watched:
            self._capture.watch(params)
        self._watched = watched
        capture = self._capture
        with torch.enable_grad(), capture.batch(sum(sizes)) as micro:
            value = loss()
            torch.autograd.grad(value, [capture.trigger], allow_unused=True)
        scale = torch.tensor([sum(sizes) / n for n in sizes], dtype=torch.float64)
        at = {k: p.detach() for k, p in params.items()}  # the weights of the point
        return Gradients(
            value.detach(),
            lambda names, qs: {k: _gradient(micro, sizes, k, qs, at) for k in names},
            scale.to(value.device, non_blocking=True),
        )


def _gradient(
    micro: MicroBatch, sizes: Sequence[int], name: str, qs: slice, at: Mapping[str, Tensor]
) -> Tensor:
    """Returns ∇ℓ_q of one parameter for a range of targets: [targets, *W], without the scale."""
    offsets = [0, *itertools.accumulate(sizes)]
    first, last = offsets[qs.start], offsets[qs.stop]
    chosen = sizes[qs]
    total: Tensor | None = None
    found = [(node, record) for node, records in micro.nodes([name]) for record in records]
    for node, record in sorted(found, key=lambda x: isinstance(x[1], Lookup)):  # these last
        if isinstance(record, Lookup) and node.param is not None and total is not None:
            total = record.map(lambda t: t[first:last]).add_groups(total, chosen)
            continue
        part = pull_back(node, record.some_groups(first, chosen), at)[name]
        total = part if total is None else total + part
    if total is None:
        like = at[name]
        return torch.zeros((len(chosen), *like.shape), dtype=wide(like).dtype, device=like.device)
    return total


def joined(batches: Sequence[Any]) -> Any:
    """Returns batches of one kind as one batch, in memory of its own."""

    def one(*xs: Any) -> Any:
        return torch.cat(xs) if isinstance(xs[0], Tensor) and xs[0].ndim else copy_batch(xs[0])

    return tree_map(one, *batches)

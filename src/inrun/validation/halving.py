"""Two halves of the validation rows of a step: how much of the values is due to these rows?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from inrun.torch_compat import tree_map
from inrun.validation.targets import rows_in

Drawn: TypeAlias = list[list[Any]]  # the batches of each target


def in_two(drawn: Sequence[Sequence[Any]], batch_dim: int) -> tuple[Drawn, Drawn] | str:
    """Both halves of the batches of each target, or why there are none.

    Of an even number of batches every other one: their losses are averaged in any case. Otherwise
    every other row of each batch, which is right for a loss that is a mean over rows.
    """
    first, second = Drawn(), Drawn()
    for batches in drawn:
        if len(batches) % 2 == 0:
            first.append(list(batches[::2]))
            second.append(list(batches[1::2]))
            continue
        if batch_dim:
            return f"with batch_dim={batch_dim} a step needs an even number of validation batches"
        sizes = [rows_in(batch) for batch in batches]
        if None in sizes:
            return "a validation batch cannot be cut: its tensors have no rows in common"
        if min(n for n in sizes if n is not None) < 2:
            return "a step sees a validation batch of one row"
        first.append([every_other(batch, 0) for batch in batches])
        second.append([every_other(batch, 1) for batch in batches])
    return first, second


def every_other(batch: Any, first: int) -> Any:
    """Every other row of each of its tensors."""
    return tree_map(lambda x: x[first::2] if isinstance(x, Tensor) and x.ndim else x, batch)


def keeps_order(source: Any) -> bool:
    """Does it give the same batches in the same order each time? Then the halves of different
    steps are halves of the same rows."""
    if isinstance(source, DataLoader):
        return isinstance(source.sampler, SequentialSampler)
    return isinstance(source, (list, tuple))

"""What all ranks of a step agree on: one small sum over them, after ``optimizer.step()``.

Each rank scores its own examples with the same direction u. Whether the step counts depends on all
of them: do the values of all ranks add up to ⟨u, G⟩, is every flag down on every rank, did all
ranks use the same direction? Each gets the same numbers here, so a step is void on all or on none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from inrun.ranks.world import World

if TYPE_CHECKING:
    from inrun.scoring.conclude import Columns

SEE_THERE = "The warning of that rank says why"
OTHER_DIRECTION = "the ranks scored their examples with different directions"
SAME_EVERYWHERE = (
    "Every rank needs the same validation data in the same order (pass the whole set to watch on "
    "each rank, without a DistributedSampler), the same seed, the same weights and the same "
    "gradient, averaged over ranks"
)


@dataclass(frozen=True)
class Agreed:
    """Numbers of all ranks of a step: [E, Q] each."""

    sums: np.ndarray  # of the values, nobody's part included
    sizes: np.ndarray  # sum of their absolute values
    nobody: np.ndarray  # what belongs to no example
    expected: np.ndarray  # ⟨u, G⟩, the mean over ranks
    spread: np.ndarray  # standard deviation of ⟨u, G⟩ over the ranks
    void: bool = False  # on some rank

    @staticmethod
    def alone(own: np.ndarray, expected: np.ndarray) -> Agreed:
        """Of one process: its values by example, nobody's last [E, Q, B + 1]."""
        sizes = np.abs(own).sum(2)
        return Agreed(own.sum(2), sizes, own[..., -1], expected, np.zeros_like(expected))

    @staticmethod
    def of(flat: np.ndarray, expected: np.ndarray) -> Agreed:
        """From the sum over ranks of what ``summary`` gives."""
        ranks, void = flat[-2:]
        sums, sizes, nobody, first, second = flat[:-2].reshape(5, *expected.shape)
        mean = first / ranks
        spread = np.sqrt(np.maximum(second / ranks - mean**2, 0.0))
        return Agreed(sums, sizes, nobody, mean, spread, bool(void))

    def same_direction(self, tolerance: float) -> bool:
        """Did all ranks find the same ⟨u, G⟩, up to rounding?"""
        rounding = 4 * np.sqrt(np.finfo(np.float64).eps) * np.abs(self.expected)  # of a variance
        allowed = np.maximum(tolerance * (self.sizes + np.abs(self.expected)), rounding)
        return not (self.spread > allowed).any()


def agreed(
    world: World, numbers: Mapping[str, Tensor], columns: Columns, flags: Tensor | None = None
) -> dict[str, Tensor]:
    """For the numbers of a step: what ``Agreed.of`` reads; nothing in one process."""
    if world.alone:
        return {}
    own = by_example(columns, numbers["values"])
    expected = numbers["expected"]
    bad = ~numbers["finite"].bool() | ~numbers["losses"].isfinite().all()
    bad = bad | ~own.isfinite().all()
    if flags is not None:
        bad = bad | flags.bool().any()
    nobody = best(own, numbers.get("sampled"))[..., -1]
    parts = [own.sum(-1), own.abs().sum(-1), nobody, expected, expected.square()]
    last = torch.stack([torch.ones_like(bad), bad]).to(expected)
    flat = torch.cat([*(x.flatten() for x in parts), last])
    return {"agreed": world.total(flat.nan_to_num()).to(expected.device)}


def best(values: Tensor, sampled: Tensor | None) -> Tensor:
    """The values [E, Q, B + 1] by example, from sampled orders where there are such."""
    return values if sampled is None else torch.where(sampled.isnan(), values, sampled)


def by_example(columns: Columns, values: Tensor) -> Tensor:
    """Values [..., C] added up by example, nobody's last: [..., B + 1]. Stays on the device."""
    example = torch.as_tensor(columns.example).to(values.device, non_blocking=True).long()
    place = torch.where(example < 0, columns.B, example)
    total = values.new_zeros(*values.shape[:-1], columns.B + 1)
    return total.index_add_(-1, place, values)

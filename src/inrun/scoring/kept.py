"""Directions of influence that stay for a few steps.

Where the curvature is not observed at every step (curvature/curvature.py), u = (F + λ)⁻¹∇ℓ of the
last observed step is used until the next one: with a validation set that does not change, ∇ℓ and F
hardly do from one step to the next, and neither a validation pass nor a rotation is needed. The
values of such a step are products with its own examples' gradients, as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.scoring.clipping import Clipping
from inrun.scoring.contraction import Products
from inrun.scoring.uses import Direction

LARGEST = 2**28  # numbers of the directions of all targets that are kept


@dataclass(frozen=True)
class Part:
    """Of the targets ``qs``: their directions by parameter, and factors on their values."""

    qs: slice
    directions: dict[str, Direction]
    scale: Tensor | None


@dataclass
class Kept:
    """Of one estimator, from one step. ``unit`` is what its directions were divided by: the factor
    of clipping that values are multiplied with, of the linear part (maps.py)."""

    unit: float
    parts: list[Part] = field(default_factory=list)

    @staticmethod
    def of(clipping: Clipping) -> Kept:
        return Kept(_unit(clipping))

    def add(self, qs: slice, directions: Mapping[str, Direction], scale: Tensor | None) -> None:
        """Copies: the next validation pass may write where these are."""
        own = {k: Direction(d.full.clone()) for k, d in directions.items()}
        for d in own.values():
            assert len(d.full) == qs.stop - qs.start  # u is known from now on
        self.parts.append(Part(qs, own, scale))

    def fits(self, names: Mapping[str, Tensor]) -> bool:
        """Are these its parameters?"""
        return all(part.directions.keys() == names.keys() for part in self.parts)

    def products(
        self, G: Mapping[str, Tensor], micros: Sequence[MicroBatch], clipping: Clipping,
        contract: Callable[..., Products],
    ) -> list[tuple[slice, Products]]:  # fmt: skip
        """⟨u_q, g_i⟩ and ⟨u_q, G⟩ of the examples of this step, of the targets of each part."""
        factor = self.unit / _unit(clipping)
        found = []
        for part in self.parts:
            values, sums = contract(part.directions, G, micros)
            scale = factor if part.scale is None else part.scale * factor
            of_rows = scale[:, None] if isinstance(scale, Tensor) else scale
            found.append((part.qs, (values * of_rows, sums * scale)))
        return found


def fill(
    numbers: Mapping[str, Tensor], kept: Mapping[int, Kept], G: Mapping[str, Tensor],
    micros: Sequence[MicroBatch], C: Clipping, contract: Callable[..., Products],
) -> None:  # fmt: skip
    """Put in the values of estimators whose directions are those of an earlier step."""
    for e, own in kept.items():
        for qs, (inner, sums) in own.products(G, micros, C, contract):
            numbers["values"][e, qs] += C.apply(inner, sums, None)
            numbers["expected"][e, qs] += sums * C.common


def _unit(clipping: Clipping) -> float:
    return clipping.common / clipping.scale

"""From validation gradients to the values of a step, through the maps of all its estimators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from inrun.optimizers.base import LinearMap
from inrun.ranks.world import World
from inrun.scoring.clipping import Clipping
from inrun.scoring.contraction import Keep, Products, components, group_values
from inrun.scoring.estimators import MAPS, POINTS, Estimator, Place
from inrun.scoring.thinned import Linear
from inrun.validation.sweep import Gradients

if TYPE_CHECKING:
    from inrun.scoring.scorer import Step


@dataclass(eq=False)
class Credit:
    """What turns gradients of targets into values in one step.

    Args:
        maps: of each estimator, by parameter.
        together: parameters whose maps are one.
        kept: estimators without a map: directions of an earlier step are used (kept.py).
        several: are there several targets?
        clipping: by norm, for single examples; ``aligned`` is ⟨G, g_i⟩/‖G‖².
        contract: the contraction of this world.
    """

    step: Step
    estimators: Sequence[Estimator]
    maps: Sequence[Mapping[str, LinearMap]]
    together: list[list[str]]
    kept: Collection[int]
    several: bool
    clipping: Clipping
    aligned: Tensor | None
    contract: Callable[..., Products]
    world: World

    @cached_property
    def ratios(self) -> Mapping[str, Tensor] | None:
        return self.step.clipping.by_coordinate(self.step.G)

    @property
    def by_point(self) -> list[list[int]]:
        """The estimators that have maps, those with one point together."""
        found: dict[str, list[int]] = {}
        for e, estimator in enumerate(self.estimators):
            if e not in self.kept:
                found.setdefault(estimator.point, []).append(e)
        return list(found.values())

    def linear(self, e: int) -> Linear:
        """The linear map of an estimator."""
        return Linear(self.maps[e], self.ratios, self.clipping, self.aligned)

    def products(
        self, at: Mapping[Place, Gradients], Q: int, which: Sequence[int],
        names: Collection[str], keep: Mapping[int, Keep] | None = None,
    ) -> Iterator[tuple[int, Products]]:  # fmt: skip
        """Of estimators with one point: the values of a group of Q targets through their maps, and
        their expected sums, from the gradients of these parameters. ``keep`` receives their
        directions."""
        step = self.step
        G = {k: step.G[k] for k in names}
        parts = components(names, step.micros, self.together) if self.several else []
        points = [at[x] for x in POINTS[self.estimators[which[0]].point]]
        maps = [self.maps[e] for e in which]
        own = points, maps, self.ratios, G, step.micros, parts, Q, self.contract
        found = group_values(*own, [(keep or {}).get(e) for e in which])
        for e, (inner, sums) in zip(which, found, strict=True):
            split = MAPS[self.estimators[e].kind].splits_clipping
            C = self.clipping if split else step.clipping
            yield e, (C.apply(self.world.averaged(inner), sums, self.aligned), sums * C.common)

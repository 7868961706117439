"""The linear map of each parameter and estimator in a step: the optimizer's (path.py), or the
inverse of the curvature (``estimator="influence"``, curvature/)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.curvature.curvature import Curvature, Moving
from inrun.curvature.layer import Layer
from inrun.gradients.records import wide
from inrun.optimizers.base import LinearMap, Scale
from inrun.optimizers.common import sign
from inrun.ranks.world import World
from inrun.scoring.contraction import cancelling, unless
from inrun.scoring.estimators import POINTS, Estimator
from inrun.scoring.kept import LARGEST, Kept
from inrun.scoring.path import Path
from inrun.tensors.autocast import no_autocast
from inrun.validation.validator import Validator

if TYPE_CHECKING:
    from inrun.scoring.scorer import Step

ByName = dict[str, LinearMap]
_training = attrgetter("training")


class Maps:
    """Makes the maps of a step; keeps what they need of earlier steps."""

    def __init__(self, estimators: Sequence[Estimator], validator: Validator, world: World) -> None:
        self.estimators, self.validator, self.world = estimators, validator, world
        self.curvature = Curvature() if any(e.curvature for e in estimators) else None
        # by estimator, directions of an earlier step that are used in this one; scorer.py adds them
        self.kept: dict[int, Kept] = {}
        self._candidates: set[str] = set()  # vectors that may cancel
        self._looked_at: Any = None  # the state of the model when they were looked for

    def keeping(self, step: Step, targets: int) -> dict[int, Kept]:
        """Where the directions of this step are put, if there are none yet. Several ranks keep
        none: they would have to agree on it."""
        if self.kept or self.curvature is None or not self.world.alone:
            return {}
        if self.curvature.each_step(step.params):
            return {}
        if targets * sum(g.numel() for g in step.G.values()) > LARGEST:
            return {}
        return {e: Kept.of(step.clipping) for e, x in enumerate(self.estimators) if x.curvature}

    def forget(self) -> None:
        """The next step has directions of its own."""
        self.kept = {}

    def of(self, step: Step, path: Path, thorough: bool) -> list[ByName]:
        """For each estimator, the linear map of each parameter; zero if the parameter's per-example
        gradients cancel. Of those whose directions are ``kept`` there is none."""
        new = self.curvature is None or self.curvature.due(step.number, step.params)
        if new or not all(own.fits(step.G) for own in self.kept.values()):
            self.forget()
        cancelled = self._cancelling(step, thorough)
        made: dict[Any, ByName] = {}

        def of_rules(kind: str, point: str) -> ByName:
            if kind not in made:
                maps = path.maps(kind, POINTS[point][0])
                made[kind] = {k: maps[i] for k, i in zip(step.G, step.places, strict=True)}
            return made[kind]

        found = []
        for i, e in enumerate(self.estimators):
            if i in self.kept:
                own = {}
            elif self.curvature is None or not e.curvature:
                own = of_rules(e.kind, e.point)
            else:
                if self.curvature.due(step.number, step.params):
                    self._observe(self.curvature, step, of_rules("secant", e.point))
                found.append(self._inverse(self.curvature, step, e.damping, cancelled))
                continue
            found.append(own | {k: unless(f, own[k]) for k, f in cancelled.items() if own})
        return found

    @property
    def together(self) -> list[list[str]]:
        """Parameters whose maps are one."""
        known = () if self.curvature is None else self.curvature.layers.values()
        return [x.place.names for x in known]

    def _cancelling(self, step: Step, thorough: bool) -> dict[str, Tensor]:
        """By parameter (1-D ones): a flag, True if its per-example gradients cancel in this step.
        Which can cancel depends on the model, so the full scan (``thorough``) runs only at audits
        and when the model changes."""
        pairs = zip(step.G.items(), step.places, strict=True)
        G = {k: g for (k, g), i in pairs if step.moved.steps[i].rule.adaptive}
        micros = step.micros
        if all(g.ndim > 1 for g in G.values()):
            return {}
        state = list(G), list(map(_training, self.validator.modules))
        if thorough or state != self._looked_at:
            flags = cancelling(G, micros, None, self.world)
            self._candidates = {k for k, x in flags.items() if bool(x)}
            self._looked_at = state
        return cancelling(G, micros, self._candidates, self.world) if self._candidates else {}

    def _observe(self, curvature: Curvature, step: Step, secant: ByName) -> None:
        """Take the step into the curvature."""
        scale, moving = step.clipping.scale, {}
        half = _products_in(step) is not None
        with no_autocast(_device(step).type), rounded_products(half):
            for (name, G), i in zip(step.G.items(), step.places, strict=True):
                m = step.moved.steps[i]
                squares = None
                if m.rule.squares is not None:
                    squares = m.rule.squares(m.g, m.p.detach(), m.state, m.options)
                moving[name] = Moving(secant[name], m.g, scale * G, m.state, m.options, squares)
            curvature.observe(
                step.number, step.micros, self.validator.modules, step.params, moving, scale,
                self.world,
            )  # fmt: skip

    def _inverse(
        self, curvature: Curvature, step: Step, a: float, cancelled: dict[str, Tensor]
    ) -> ByName:
        """(F + a/τ)⁻¹ for the gradients of the loss as they were before clipping, which the values
        will be multiplied with: that is divided out here."""
        scale, ratios = step.clipping.scale, step.clipping.by_coordinate(step.G)
        found: ByName = {}
        dtype = _products_in(step)
        factors: dict[str, Any] = {}
        for name, i in zip(step.G, step.places, strict=True):
            factor: Any = sign(step.moved.steps[i].options) * scale / step.clipping.common
            factors[name] = factor if ratios is None else factor / ratios[name]
            if name in cancelled:
                factors[name] = torch.where(cancelled[name], 0.0, factors[name])
        for name in step.G:
            layer = curvature.known(name)
            if layer is None:  # nothing was seen of it: it moved nothing that could be undone
                found[name] = Scale(torch.zeros_like(step.G[name]))
            elif layer.matrix is None:
                assert layer.left is not None
                K = layer.left.square() / layer.divisor(a)
                found[name] = Scale(factors[name] * K)
            else:
                found[name] = Inverse(layer, a, factors, dtype)
        return found


@dataclass(frozen=True, eq=False)
class Inverse:
    """The map v ↦ factor · (F + a/τ)⁻¹ v of a weight and its bias, whose directions depend on both
    of their gradients."""

    layer: Layer
    a: float
    factors: Mapping[str, Any]  # by name
    dtype: torch.dtype | None  # of its products

    def __call__(self, v: Tensor) -> Tensor:
        raise TypeError("the curvature of a weight and its bias is one: use ``together``")

    def together(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By name of its parameters, those of several v [Q, *W]; one that is not there is 0."""
        names = self.layer.place.names
        some = [wide(v[k]) if k in v else None for k in names]
        u = self.layer.directions(some, self.a, self.dtype)
        return {k: self.factors[k] * x for k, x in zip(names, u, strict=True) if k in v}


@contextmanager
def rounded_products(on: bool) -> Iterator[None]:
    """Products of float32 matrices may round their inputs to TF32, which is several times as fast:
    what is observed is a mean over samples, and the model was trained with fewer digits."""
    before = torch.get_float32_matmul_precision()
    if not on or before != "highest":
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _device(step: Step) -> torch.device:
    return next(iter(step.G.values())).device


def _products_in(step: Step) -> torch.dtype | None:
    """On a GPU, rotate in bfloat16 where the model was trained in it: values have no more digits
    than the gradients. None: in the gradients' own type."""
    autocast = step.micros[-1].autocast
    half = autocast is not None and autocast[1] and autocast[2] == torch.bfloat16
    return torch.bfloat16 if half and _device(step).type == "cuda" else None

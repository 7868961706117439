"""The estimators: which linear map carries ∇ℓ back through the optimizer, and where ∇ℓ is taken.

An estimator is a map of ``MAPS`` and a point of ``POINTS``. To add one, add an entry here: no other
file has to know its name. (A rule may have faster ways for maps that it names: see ``Rule``.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from inrun.optimizers.base import LinearMap, Rule
from inrun.optimizers.common import Options, Scalar, State, learning_rate, sign

# Where on the path w_∅ → w_B (0 → 1) a gradient is taken; None is w_t, before the step, and
# "halfway" lies between w_t and w_B, in the middle of the whole step.
Place: TypeAlias = float | Literal["halfway"] | None
POINTS: dict[str, tuple[Place, ...]] = {
    "current": (None,),
    "midpoint": (0.5,),
    "gauss2": (0.5 - math.sqrt(3) / 6, 0.5 + math.sqrt(3) / 6),
    "halfway": ("halfway",),
}


@dataclass(frozen=True)
class Map:
    """How a validation gradient v becomes a direction u for the batch gradient, per parameter.

    Args:
        default_point: a name of ``POINTS``.
        of_rule: the map that the optimizer's rule gives, a method of ``Rule``. For an elementwise
            rule it must be diagonal.
        factor: instead of ``of_rule``: u = factor·v with one number for the whole parameter, which
            depends on the options of its parameter group alone.
        splits_clipping: clipping by norm treats the part of g_i along G and the part across it
            differently (clipping.py). False: both are multiplied by the same factor.
        curvature: instead of both: the inverse of the training loss's curvature (curvature/).
    """

    default_point: str
    of_rule: Callable[[Rule, Tensor, Tensor, State, Options], LinearMap] | None = None
    factor: Callable[[Options], Scalar] | None = None
    splits_clipping: bool = False
    curvature: bool = False


MAPS = {
    "secant": Map("midpoint", of_rule=Rule.secant, splits_clipping=True),
    "tangent": Map("current", of_rule=Rule.tangent),
    "sgd": Map("current", factor=lambda o: learning_rate(o) * sign(o)),
    "carry": Map("halfway", of_rule=Rule.carried),
    "influence": Map("midpoint", curvature=True),
}
CARRY = "carry"  # its values are complete only when momentum has forgotten the batch (carry.py)


DAMPING = 0.1  # a of λ = a/τ, chosen on other draws of the problems of benchmarks/lds

# Estimators that sample orders while the update map bends (sampling.py): the map they use.
SAMPLED = {"shapley": "secant"}
STEPS = 100  # so many steps at most


@dataclass(frozen=True)
class Estimator:
    """One estimator of a run: ``kind`` is a name of ``MAPS``, ``point`` one of ``POINTS``, and
    ``sampled`` is in how many steps, at most, orders are sampled while the update map bends.
    ``damping`` is a of the curvature's λ = a/τ."""

    name: str
    kind: str
    point: str
    sampled: int = 0
    damping: float = DAMPING

    @property
    def curvature(self) -> bool:
        return MAPS[self.kind].curvature

    @staticmethod
    def parse(text: str, point: str | None) -> Estimator:
        """``"secant"``, or with a point of its own: ``"secant+gauss2"``; ``"influence"``, or with
        a damping of its own: ``"influence:1"``; ``"shapley:1000"``: orders are sampled in so many
        steps at most."""
        name, _, own = text.partition("+")
        name, _, number = name.partition(":")
        kind = SAMPLED.get(name, name)
        if kind not in MAPS:
            known = ", ".join([*SAMPLED, *MAPS])
            raise ValueError(f"estimator {text!r} is not known: use {known}")
        usual = MAPS[kind].default_point
        point = own or (usual if kind == CARRY else point or usual)
        if point not in POINTS:
            raise ValueError(f"point {point!r} is not known: use {', '.join(POINTS)}")
        if (kind == CARRY) != (point == MAPS[CARRY].default_point):
            raise ValueError(
                f"estimator {text!r}: {CARRY!r} takes the gradient halfway between the weights "
                "before and after the step, and no other estimator does. Leave the point out"
            )
        curved = MAPS[kind].curvature
        if ":" in text and not (curved or name in SAMPLED):
            raise ValueError(
                f"estimator {text!r} is not known: only influence (its damping) and shapley (the "
                "most steps in which orders are sampled) have a number after a colon"
            )
        damping = _number(text, number, float, DAMPING) if curved else DAMPING
        most = int(_number(text, number, int, STEPS)) if name in SAMPLED else 0
        return Estimator(text, kind, point, most, damping)


def _number(text: str, number: str, kind: Callable[[str], float], usual: float) -> float:
    """The number after the colon of an estimator's name."""
    if not number and ":" not in text:
        return usual
    try:
        found = kind(number)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ValueError(
            f"estimator {text!r} is not known: after the colon stands a positive number, as in "
            '"influence:0.3" (its damping) or "shapley:1000" (steps)'
        )
    return found

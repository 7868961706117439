"""When are orders of the examples sampled (coalitions.py)? While the update map bends: measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.ranks.world import World
from inrun.scoring.agreed import by_example
from inrun.scoring.coalitions import Game
from inrun.scoring.contraction import Products
from inrun.scoring.estimators import POINTS, Estimator, Place
from inrun.scoring.path import Path
from inrun.validation.sweep import Gradients

if TYPE_CHECKING:
    from inrun.scoring.conclude import Columns
    from inrun.scoring.scorer import Step

NEAR = 0.005  # relative: what the secant may be off, in so many steps running:
RUNNING = 3


class Sampling:
    """Values by sampled orders for the estimators that ask for them, while the update map bends.

    It bends until the secant was near the values of sampled orders (*bend* is how far it is off) in
    a few steps running. That is measured again at audits, ever more rarely: the 1st, the 2nd, the
    4th after that. It is measured anew when the set of parameters changes. An update that goes on
    bending (Lion, a small β₂) is sampled in so many steps as the estimator says, and from then on
    measured only.
    """

    def __init__(self, estimators: Sequence[Estimator], world: World) -> None:
        self.estimators = [(e, x) for e, x in enumerate(estimators) if x.sampled]
        self._world = world
        self._most = max([x.sampled for _, x in self.estimators], default=0)
        self._params = list[str]()
        self._begin_again()
        self._game: Game | None = None

    def _begin_again(self) -> None:
        self._near = self._sampled = self._audits = 0

    def begin(
        self, step: Step, path: Path, others: Callable[[], Sequence[Tensor]],
        numbers: dict[str, Tensor], columns: Columns,
    ) -> None:  # fmt: skip
        """Before the values of a step: are orders sampled in it? ``others``: see ``Game``."""
        self._game = None
        if not self.estimators:
            return
        rules = [step.moved.steps[i].rule for i in step.places]
        if not any(r.elementwise and r.adaptive for r in rules):
            return
        if self._params != list(step.G):
            self._params = list(step.G)
            self._begin_again()
        if not self._wanted(step.audit):
            return
        self._columns = columns
        self._game = Game.of(step, path.packs, others(), self._world)
        E, Q, _ = numbers["values"].shape
        numbers["sampled"] = numbers["values"].new_full((E, Q, columns.B + 1), torch.nan)
        numbers["bend"] = numbers["values"].new_full((E,), torch.nan)
        self._noise = dict.fromkeys((e for e, _ in self.estimators), 0.0)

    def _wanted(self, audit: bool) -> bool:
        if self._near < RUNNING and self._sampled < self._most:
            return True
        self._audits += audit
        return audit and math.log2(self._audits).is_integer()

    def fill(
        self, numbers: Mapping[str, Tensor], qs: slice, at: Mapping[Place, Gradients], seed: int,
        products: Callable[[list[int], list[str]], Iterator[tuple[int, Products]]],
    ) -> None:  # fmt: skip
        """Put the values of a group of targets beside those of the linear maps, by example.
        ``products``: values through the linear map, for parameters whose update is not elementwise.
        """
        if self._game is None:
            return
        for e, estimator in self.estimators:
            points = [at[x] for x in POINTS[estimator.point]]
            found = self._game.values(points, qs.stop - qs.start, seed)
            own = self._game.players.by_example(found.mean)
            if self._game.left:
                ((_, (linear, _)),) = products([e], self._game.left)
                own = own + by_example(self._columns, linear)
            numbers["sampled"][e, qs] = own
            self._noise[e] += float(found.error.square().sum())

    def end(self, numbers: Mapping[str, Tensor]) -> None:
        """Compare the secant's values with the sampled ones."""
        if self._game is None:
            return
        secant, sampled = by_example(self._columns, numbers["values"]), numbers["sampled"]
        found = torch.stack([secant - sampled, sampled])  # [2, E, Q, B + 1]
        own = self._world.total(found[..., :-1].square().sum((2, 3)))
        nobody = self._world.total(found[..., -1])  # a rank has a part of it
        off, size = own + nobody.square().sum(2)
        for e, _ in self.estimators:
            apart = max(0.0, float(off[e]) - self._noise[e]) ** 0.5
            bend = apart / math.sqrt(s) if (s := float(size[e])) > 0 else math.nan
            numbers["bend"][e] = bend
        bends = numbers["bend"][[e for e, _ in self.estimators]]
        if not bool(bends.isnan().all()):  # a learning rate of 0 says nothing
            self._near = self._near + 1 if bool((bends <= NEAR).all()) else 0
            self._audits = self._audits if self._near else 0
        self._sampled += 1

    def state_dict(self) -> dict[str, Any]:
        found = {"near": self._near, "sampled": self._sampled, "audits": self._audits}
        return {**found, "params": list(self._params)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._near, self._sampled = state["near"], state["sampled"]
        self._audits, self._params = state["audits"], list(state["params"])

"""When are orders of the examples sampled (coalitions.py)? While the update map bends: measured."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.ranks.world import World
from inrun.scoring.agreed import by_example
from inrun.scoring.coalitions import SURE, Game
from inrun.scoring.contraction import Products
from inrun.scoring.estimators import POINTS, Estimator, Place
from inrun.scoring.path import Path
from inrun.scoring.thinned import Linear
from inrun.validation.sweep import Gradients

if TYPE_CHECKING:
    from inrun.scoring.conclude import Columns
    from inrun.scoring.scorer import Step

NEAR = 0.005  # relative: what the secant may be off, in so many steps running:
RUNNING = 3
ENOUGH = 0.01  # relative standard error of sampled values
EARLY = 0.03  # the same of a large model while the secant is off by more than the values are
SLOW = 10.0  # seconds of a step after which the user is told what takes them

log = logging.getLogger("inrun")


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
        self._samples = SURE  # of the last step
        self._game: Game | None = None
        self._said = False

    def _begin_again(self) -> None:
        self._near = self._sampled = self._audits = 0
        self._bend = math.inf  # of the last step

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
        self._columns, self._most_samples = columns, SURE
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
        linear: Callable[[int], Linear],
    ) -> None:  # fmt: skip
        """Put the values of a group of targets beside those of the linear maps, by example.
        ``products``: values through the linear map, for parameters whose update is not elementwise.
        ``linear``: the linear map of an estimator.
        """
        if self._game is None:
            return
        begun = time.perf_counter()
        secant = partial(_of_group, numbers["values"], qs)
        found = self.credited(at, qs.stop - qs.start, seed, products, linear, secant)
        for e, own, error, samples in found:
            numbers["sampled"][e, qs] = own
            self._noise[e] += error
            self._most_samples = max(self._most_samples, samples)
        self._tell(time.perf_counter() - begun)

    def credited(
        self, at: Mapping[Place, Gradients], Q: int, seed: int,
        products: Callable[[list[int], list[str]], Iterator[tuple[int, Products]]],
        linear: Callable[[int], Linear], secant: Callable[[int], Tensor],
    ) -> Iterator[tuple[int, Tensor, float, int]]:  # fmt: skip
        """For each estimator: its place, the values by example [Q, B + 1], the squared error of
        their sampling, and how many samples were compared with the secant; nothing in a step in
        which none are sampled. ``secant``: the linear values of an estimator [Q, C]. What later
        steps go by is not changed."""
        game = self._game
        for e, estimator in self.estimators if game is not None else ():
            assert game is not None
            points = [at[x] for x in POINTS[estimator.point]]
            error = EARLY if self._bend > 1 and game.stride > 1 else ENOUGH
            begin = max(SURE, self._samples // 2)
            found = game.values(points, Q, seed, error, linear(e), begin)
            own = game.players.by_example(found.mean)
            if found.beside:
                own = own + by_example(self._columns, secant(e))
            elif game.left:
                ((_, (rest, _)),) = products([e], game.left)
                own = own + by_example(self._columns, rest)
            yield e, own, float(found.error.square().sum()), len(found.linear)

    def _tell(self, seconds: float) -> None:
        """Once, what a slow step waits for."""
        if seconds < SLOW or self._said or self._world.rank:
            return
        self._said = True
        log.warning(
            "inrun: sampling orders of the examples took %.0f s of this step. The first steps do "
            "so until the update is nearly linear: at most %d of them, and the very "
            "first the longest. estimator='secant' does without, and its first steps are far off "
            "(docs/method.md, The first steps)",
            seconds, self._most,
        )  # fmt: skip

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
        self._samples = self._most_samples
        if not bool(bends.isnan().all()):  # a learning rate of 0 says nothing
            self._bend = float(bends.nan_to_num(nan=0.0).max())
            self._near = self._near + 1 if bool((bends <= NEAR).all()) else 0
            self._audits = self._audits if self._near else 0
        self._sampled += 1

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"near": self._near, "sampled": self._sampled}
        found |= {"audits": self._audits, "bend": self._bend, "samples": self._samples}
        return {**found, "params": list(self._params)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._near, self._sampled = state["near"], state["sampled"]
        self._audits, self._params = state["audits"], list(state["params"])
        self._bend, self._samples = state.get("bend", math.inf), state.get("samples", SURE)


def _of_group(values: Tensor, qs: slice, e: int) -> Tensor:
    return values[e, qs]

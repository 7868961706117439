"""How much of a step's values is due to the validation rows? In a sample of the steps, values by
two halves of them.

A value is linear in the validation gradient. So in one step of every so many (which one is left to
chance) the gradients are also taken for both halves of the step's validation rows, at the same
weights, and go through the same maps to the same records. The values of the step stay as they are.
ledger/steady.py makes an estimate of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from inrun.ledger.tables import HALVES
from inrun.ranks.world import World
from inrun.scoring.agreed import by_example
from inrun.scoring.credit import Credit
from inrun.scoring.estimators import CARRY, POINTS, Estimator, Place
from inrun.scoring.path import Path
from inrun.scoring.sampling import Sampling
from inrun.validation.halving import Drawn, in_two
from inrun.validation.sweep import Gradients
from inrun.validation.validator import Validator

if TYPE_CHECKING:
    from inrun.scoring.conclude import Columns

STREAM = 22  # of random numbers, beside that of ``every``


class Halving:
    """Measures values by both halves in one scored step of ``every``; 0: never."""

    def __init__(
        self, estimators: Sequence[Estimator], validator: Validator, every: int, seed: int,
        world: World,
    ) -> None:  # fmt: skip
        self.estimators, self.validator = estimators, validator
        self.every, self.seed, self._world = every, seed, world
        self._looked, self._drawn = False, (-1, -1)  # the last block, and its step
        self._why(self._left_out())

    def _left_out(self) -> str | None:
        """Why nothing is measured in this run."""
        names = [t.name for t in self.validator.targets]
        if not self.every:
            return "halves_every=0"
        if all(name.endswith(HALVES) for name in names):
            return "the targets are halves"
        if self.validator.smoothed_by:
            return "with smooth= a value mixes the rows of many steps: pass targets=inrun.halves(…)"
        if all(e.kind == CARRY for e in self.estimators):
            return (
                "a carried value is made of the validation gradients of many steps: pass "
                "targets=inrun.halves(…), or estimator=['secant', 'carry'] for the one-step values"
            )
        return None

    def _why(self, reason: str | None) -> None:
        self.off = reason is not None
        self.validator.described["halves"] = reason

    def due(self, step: int) -> bool:
        """Is it measured in this step? One of each ``every``, the same on all ranks."""
        block, place = divmod(step, self.every)
        if self._drawn[0] != block:
            coin = np.random.default_rng((self.seed, block, STREAM))
            self._drawn = block, int(coin.integers(self.every))
        return place == self._drawn[1]

    def measures(self, step: int) -> bool:
        """Will it be measured in this step, unless the rows cannot be halved?"""
        return not self.off and self.due(step)

    def measure(
        self, credit: Credit, path: Path, sampling: Sampling, numbers: dict[str, Tensor],
        columns: Columns,
    ) -> None:  # fmt: skip
        """Put values by both halves [E, 2, B + 1], means over targets, beside those of the step.

        What goes wrong here ends the measuring, not the training.
        """
        if self.off or (self._looked and not self.due(credit.step.number)):
            return
        halves = in_two(self.validator.batches, self.validator.batch_dim)
        if isinstance(halves, str):
            if not self._looked:  # the next steps may have more rows
                self.validator.described["halves"] = halves
            self._looked = True
            return
        self._looked = True
        if not self.due(credit.step.number):
            return
        try:
            found = self._world.together(
                partial(self._both, halves, credit, path, sampling, columns)
            )
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            self._why(f"a pass over half of the rows failed ({type(error).__name__}: {text})")
            return
        self.validator.described["halves"] = None
        numbers["halves"] = found

    def _both(
        self, halves: tuple[Drawn, Drawn], credit: Credit, path: Path, sampling: Sampling,
        columns: Columns,
    ) -> Tensor:  # fmt: skip
        found = [self._values(half, credit, path, sampling, columns) for half in halves]
        values = torch.stack(found, 1)
        values[[e for e, x in enumerate(self.estimators) if x.kind == CARRY]] = torch.nan
        return values

    def _values(
        self, half: Drawn, credit: Credit, path: Path, sampling: Sampling, columns: Columns
    ) -> Tensor:
        """Values by example [E, B + 1], the mean over targets, as these batches give them."""
        step, Q = credit.step, len(half)
        like = next(iter(step.G.values()))
        total = like.new_zeros((len(self.estimators), columns.B + 1), dtype=torch.float64)
        with self.validator.seeing(half) as groups:
            for group in groups:
                at = self._gradients(group, path, step.params)
                products = partial(credit.products, at, len(group))
                secant = dict[int, Tensor]()
                for which in credit.by_point:
                    if self.estimators[which[0]].kind != CARRY:  # left out
                        found = products(which, step.G)
                        secant |= {e: linear for e, (linear, _) in found}
                own = {e: by_example(columns, x) for e, x in secant.items()}
                for e, sampled, *_ in sampling.credited(
                    at, len(group), step.number, products, credit.linear, secant.__getitem__
                ):
                    own[e] = sampled
                for e, x in own.items():
                    total[e] += x.sum(0).to(total) / Q
        return total

    def _gradients(
        self, group: Sequence[int], path: Path, params: dict[str, Tensor]
    ) -> dict[Place, Gradients]:
        found: dict[Place, Gradients] = {}
        own = [e for e in self.estimators if e.kind != CARRY]
        for x in dict.fromkeys(x for e in own for x in POINTS[e.point]):
            with path.weights(x):
                found[x] = self.validator.eagerly(group, params)
        return found

"""While the update map bends: values by sampled orders of the examples.

The secant says what the step does along the straight path from "no batch" to "whole batch". In its
first steps Adam is nearly the sign of the gradient, and what an example does there depends on who
came before it. So the examples join one after the other, in sampled orders and their reverses, and
each is credited with what the update gains when it joins, coordinate by coordinate:

    value_i = mean over orders of ⟨∇ℓ, Ψ(C(g(S ∪ i))) − Ψ(C(g(S)))⟩,  S: who came before i.

This is the Shapley value of the update itself, with the validation loss linear between w_∅ and w_B.
It adds up to ⟨∇ℓ, Ψ(ḡ) − Ψ(0)⟩ as the secant does, and costs one evaluation of the update for each
example and order. A few coordinates at a time have orders of their own, so that four are enough for
a large model. Few examples have few coalitions: then all are taken, and nothing is left to chance.

Several ranks: each evaluates a part of the coordinates for the examples of all ranks, whose
gradients it is sent (deals.py, players.py). ``Sampling`` measures whether all this still matters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from inrun import kernels
from inrun.optimizers.common import widest
from inrun.ranks.stretch import Stretch
from inrun.ranks.world import World
from inrun.scoring.clipping import Clipping
from inrun.scoring.deals import Deal, deals, in_blocks, packs_of
from inrun.scoring.joining import FEW, All, Joining, Orders, block
from inrun.scoring.moved import ParamStep
from inrun.scoring.path import Pack
from inrun.scoring.players import Players
from inrun.validation.sweep import Gradients

if TYPE_CHECKING:
    from inrun.scoring.scorer import Step

ENOUGH = 0.01  # relative standard error
MOST = 32  # pairs of an order and its reverse
SURE = 8  # numbers that a standard error is measured by, at least
PIECE = {"cpu": 2**17, "cuda": 2**26}  # numbers of a piece of a parameter, for all coalitions
TRUST = 1e-3  # relative: how far the kernel's values may be off when it is first used
_TRUSTED: dict[torch.device, bool] = {}  # does the kernel work there?


@dataclass
class Sampled:
    """The mean over pairs of orders, and its standard error; both [Q, C]. One entry of ``pairs`` is
    the mean over all orders."""

    pairs: list[Tensor] = field(default_factory=list)

    @property
    def mean(self) -> Tensor:
        return torch.stack(self.pairs).mean(0)

    @property
    def error(self) -> Tensor:
        if len(self.pairs) == 1:  # by all coalitions
            return torch.zeros_like(self.pairs[0])
        return torch.stack(self.pairs).std(0) / len(self.pairs) ** 0.5

    def enough(self) -> bool:
        return bool(self.pairs) and bool(self.error.norm() <= ENOUGH * self.mean.norm())


@dataclass(eq=False)
class Game:
    """One step: what the coalitions of its players are evaluated with.

    Args:
        names: of the parameters that are scored, by their place among all of the step.
        others: gradients that are not scored but clipped together with the others; every player
            has an equal share of them.
    """

    players: Players
    packs: list[Pack]
    names: Mapping[int, str]
    clipping: Clipping
    others: Sequence[Tensor]

    @property
    def left(self) -> list[str]:
        """The scored parameters whose update is not elementwise: they are left to linear maps."""
        return [self.names[i] for p in self.packs if not p.elementwise for i in p.places]

    @staticmethod
    def of(step: Step, packs: Sequence[Pack], others: Sequence[Tensor], world: World) -> Game:
        names = dict(zip(step.places, step.G, strict=True))
        scored = packs_of(step.moved.steps, packs, names, world)
        return Game(Players(step.micros, world), scored, names, step.clipping, others)

    def values(self, points: Sequence[Gradients], Q: int, seed: int) -> Sampled:
        """Values [Q, C] of a group of Q targets by sampled orders, more of them until their
        standard error is small; by all coalitions, where these are no more than the next orders
        would visit. ``seed``: of the orders."""
        C, device = self.players.all, self.packs[0].members[0].g.device
        generator = torch.Generator(device)
        gram = self._gram() if self.clipping.norm is not None else None
        found = Sampled()
        while not found.enough():
            least = 2 if Q * C >= SURE else 4
            pairs = len(found.pairs) or (1 if C < 2 else least)  # so many as there are already
            orders = Orders(C, pairs, generator)
            reseed = partial(_reseed, generator, seed, len(found.pairs))
            visited = orders.rows if pairs < MOST else 2 * orders.rows
            if min(visited, FEW) >= 2**C:
                return Sampled(list(self._by(All(C, device), points, Q, gram, reseed)))
            if pairs >= MOST:
                break
            found.pairs += list(self._by(orders, points, Q, gram, reseed))
        return found

    def _by(
        self, joining: Joining, points: Sequence[Gradients], Q: int, gram: Tensor | None,
        reseed: Callable[..., object],
    ) -> Tensor:  # fmt: skip
        """Samples of values [samples, Q, C]."""
        like, world, C = self.packs[0].members[0].g, self.players.world, self.players.all
        shape, device = (joining.samples, Q, C), like.device
        total = torch.zeros(shape, dtype=widest(device), device=device)
        for deal in deals(self.packs, self.names, world):
            names, step = list(deal.shapes), deal.step
            at = [p.of(names, slice(0, Q)) for p in points]
            means = [torch.stack([a[k] for a in at]).mean(0) for k in names]
            v = torch.cat([x.reshape(Q, math.prod(x.shape[1:])) for x in means], 1)
            size = block(step.g.device)
            for cut, slab, together in deal.slabs(C):
                reseed(deal.place, slab.start)
                drawn = joining.draw(-(-together // size), step.g.device)
                for part, rows in self._rows(deal, cut, slab):
                    for a, b, first in in_blocks(part, deal.begins, size):
                        own = slice(part.own + a, part.own + b)
                        some = rows[:, a:b].contiguous(), v[:, own], joining, gram, drawn, first
                        total += self._of_rows(_piece(step, own), *some).to(total)
        total = world.total(total).to(device)
        scale = points[0].scale
        return total if scale is None else total * scale[:, None]

    def _rows(self, deal: Deal, cut: slice | None, slab: slice) -> Iterator[tuple[Stretch, Tensor]]:
        """The gradients of all players for the stretches of a slab that this rank evaluates."""
        world = self.players.world
        dealt = deal.by_rank(slab, world)
        rows = self.players.rows(deal.shapes, deal.step.g, cut, dealt)
        at = 0
        for part in dealt[world.rank]:
            yield part, rows[:, at : at + part.n]
            at += part.n

    def _of_rows(
        self, step: ParamStep, rows: Tensor, v: Tensor, joining: Joining, gram: Tensor | None,
        drawn: object, first: int,
    ) -> Tensor:  # fmt: skip
        """The values that some coordinates bring, for each sample: [samples, Q, C]. A kernel is
        used on a device once it has given there what torch's operations give."""
        device, found = rows.device, None
        trusted = _TRUSTED.get(device)
        if isinstance(joining, Orders) and trusted is not False:
            try:
                found = self._by_kernel(step, rows, v, joining, gram, drawn, first)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                if trusted:
                    raise
                _distrust(device, f"{type(error).__name__}: {error}")
        if found is not None and trusted:
            return found
        expected = self._by_torch(step, rows, v, joining, gram, drawn, first)
        if found is not None:
            off = float((found - expected).norm()) / (float(expected.norm()) or 1.0)
            if off <= TRUST:
                _TRUSTED[device] = True
            else:  # NaN is off
                _distrust(device, f"its values are off by {off:.1e}")
        return expected

    def _by_torch(
        self, step: ParamStep, rows: Tensor, v: Tensor, joining: Joining, gram: Tensor | None,
        drawn: object, first: int,
    ) -> Tensor:  # fmt: skip
        """The same by torch's operations."""
        size, Q, C = block(rows.device), len(v), len(rows)
        beside = Q if gram is None else Q + C  # numbers for each block
        limit = PIECE.get(rows.device.type, PIECE["cpu"])
        each = max(1, limit // (joining.rows * (size + beside))) * size
        total = torch.zeros(joining.samples, Q, C, dtype=widest(rows.device), device=rows.device)
        whole = rows.shape[1] // size * size
        parts = [slice(i, min(i + each, whole)) for i in range(0, whole, each)]
        if whole < rows.shape[1]:
            parts.append(slice(whole, rows.shape[1]))
        for part in parts:
            own, at = _piece(step, part), first + part.start // size
            g, sizes = joining.coalitions(rows[:, part].contiguous(), gram, drawn, at)
            gained = self._gained(own, g, sizes, joining)
            total += joining.values(v[:, part].to(gained).contiguous(), gained, drawn, at)
        return total

    def _by_kernel(
        self, step: ParamStep, rows: Tensor, v: Tensor, joining: Orders, gram: Tensor | None,
        drawn: object, first: int,
    ) -> Tensor | None:  # fmt: skip
        """The same by the rule's GPU kernel; None where it does not apply."""
        clipping, size = self.clipping, block(rows.device)
        if step.rule.gained is None or clipping.bound is not None or not kernels.usable([rows]):
            return None
        assert isinstance(drawn, Tensor)
        orders = joining.orders(drawn, first, -(-rows.shape[1] // size))
        factor: Tensor | float = clipping.common
        if gram is not None:
            factor = self._factors(joining.sizes(gram, orders))
        w = step.p.detach()
        own = rows, v.float().contiguous(), orders, size, factor
        gains = step.rule.gained(step.g, w, step.state, step.options, *own)
        return None if gains is None else joining.credited(gains, orders)

    def _factors(self, sizes: Tensor) -> Tensor:
        """What coalitions whose gradients have these squared norms are scaled by."""
        clipping = self.clipping
        assert clipping.norm is not None
        size = sizes.clamp(min=0).sqrt() * clipping.scale
        return clipping.scale * (clipping.norm / (size + 1e-6)).clamp(max=1.0)

    def _gained(self, step: ParamStep, g: Tensor, sizes: Tensor | None, joining: Joining) -> Tensor:
        """Ψ(C(g(S))) − Ψ(0) of coalitions [M, N], those that all have joined to the bit."""
        clipping = self.clipping
        if sizes is not None:
            factor = self._factors(sizes)
            M, n = factor.shape
            g.view(M, n, -1).mul_(factor.to(g)[..., None])
        elif clipping.bound is not None:
            g.mul_(clipping.scale).clamp_(-clipping.bound, clipping.bound)
        elif clipping.common != 1.0:
            g.mul_(clipping.common)
        joining.whole(g)[:] = step.g
        w = step.p.detach()
        without = step.rule.update(torch.zeros_like(step.g), w, step.state, step.options)
        return step.rule.update(g, w, step.state, step.options).sub_(without)

    def _gram(self) -> Tensor:
        """⟨g_i, g_j⟩ over all parameters [C, C]."""
        like = self.packs[0].members[0].g
        C = self.players.all
        total = torch.zeros(C, C, dtype=widest(like.device), device=like.device)
        world = self.players.world
        for deal in deals(self.packs, self.names, world):
            for cut, slab, _ in deal.slabs(C):
                for _, rows in self._rows(deal, cut, slab):
                    total += (rows @ rows.T).to(total)
        left = sum((g.double().square().sum() for g in self.others), torch.zeros(()))
        return world.total(total).to(total.device) + world.of_whole(left).to(total.device) / C**2


def _reseed(generator: torch.Generator, *numbers: int) -> None:
    """So that the orders of a pack do not depend on when it is its turn."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    generator.manual_seed(int(state[0]) >> 1)


def _distrust(device: torch.device, why: str) -> None:
    _TRUSTED[device] = False
    warnings.warn(
        f"the kernel for sampled orders does not work on {device} and is not used ({why[:200]}): "
        "values are right without it, and the first steps take longer",
        stacklevel=2,
    )


def _piece(step: ParamStep, part: slice) -> ParamStep:
    """Some coordinates of a parameter, flat."""

    def cut(x: object) -> object:
        same = isinstance(x, Tensor) and x.shape == step.p.shape
        return x.flatten()[part] if isinstance(x, Tensor) and same else x

    state = {k: cut(x) for k, x in step.state.items()}
    p, g = step.p.detach().flatten()[part], step.g.flatten()[part]
    return ParamStep(p, g, step.rule, state, step.options)

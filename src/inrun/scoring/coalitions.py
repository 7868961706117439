"""While the update map bends: values by sampled orders of the examples.

The secant says what the step does along the straight path from "no batch" to "whole batch". In its
first steps Adam is nearly the sign of the gradient, and what an example does there depends on who
came before it. So the examples join one after the other, in sampled orders and their reverses, and
each is credited with what the update gains when it joins, coordinate by coordinate:

    value_i = mean over orders of ⟨∇ℓ, Ψ(C(g(S ∪ i))) − Ψ(C(g(S)))⟩,  S: who came before i.

This is the Shapley value of the update itself, with the validation loss linear between w_∅ and w_B.
It adds up to ⟨∇ℓ, Ψ(ḡ) − Ψ(0)⟩ as the secant does, and costs one evaluation of the update for each
example and order. A few coordinates at a time have orders of their own, so that four are enough for
a model of some size, and of a large one a part of the coordinates (thinned.py). Few examples have
few coalitions: then all are taken, and nothing is left to chance.

Several ranks: each evaluates a part of the coordinates for the examples of all ranks, whose
gradients it is sent (deals.py, players.py). ``Sampling`` measures whether all this still matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
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
from inrun.scoring.packs import Pack
from inrun.scoring.players import Players, rows_of
from inrun.scoring.thinned import LARGE, Linear, pieces, stride_of
from inrun.validation.sweep import Gradients

if TYPE_CHECKING:
    from inrun.scoring.scorer import Step

MOST = 32  # pairs of an order and its reverse
SURE = 8  # numbers that a standard error is measured by, at least; of thinned ones, samples
PIECE = {"cpu": 2**17, "cuda": 2**26}  # numbers of a piece of a parameter, for all coalitions
_KERNEL = kernels.Trust("sampled orders", 1e-3, "the first steps take longer")


@dataclass
class Sampled:
    """The mean over pairs of orders, and its standard error; both [Q, C]. One entry of ``pairs`` is
    the mean over all orders. ``linear``: what the secant says of the coordinates of each pair,
    where these are a part of all."""

    pairs: list[Tensor] = field(default_factory=list)
    linear: list[Tensor] = field(default_factory=list)

    @property
    def beside(self) -> bool:
        """Is ``mean`` what must be added to the values of the secant?"""
        return bool(self.linear) and bool(_error(self._apart).norm() < _error(self.pairs).norm())

    @property
    def _apart(self) -> list[Tensor]:
        return [x - y for x, y in zip(self.pairs, self.linear, strict=True)]

    @property
    def _own(self) -> list[Tensor]:
        return self._apart if self.beside else self.pairs

    @property
    def mean(self) -> Tensor:
        return torch.stack(self._own).mean(0)

    @property
    def error(self) -> Tensor:
        return _error(self._own)

    def enough(self, error: float) -> bool:
        """Is the relative standard error no larger?"""
        if not self.pairs:
            return False
        size = torch.stack(self.pairs).mean(0).norm()
        return bool(self.error.norm() <= error * size)


def _error(samples: Sequence[Tensor]) -> Tensor:
    if len(samples) == 1:  # by all coalitions
        return torch.zeros_like(samples[0])
    return torch.stack([*samples]).std(0) / len(samples) ** 0.5


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

    @cached_property
    def stride(self) -> int:
        """Orders are sampled of one in so many coordinates of large parameters. Of all on a GPU,
        and where several ranks have dealt them out."""
        own = [m for p in self.packs if p.elementwise for m in p.members]
        if not (self.players.world.alone and all(m.p.is_cpu for m in own)):
            return 1
        return stride_of(m.p.numel() for m in own)

    def values(
        self, points: Sequence[Gradients], Q: int, seed: int, error: float, linear: Linear,
        begin: int = SURE,
    ) -> Sampled:  # fmt: skip
        """Values [Q, C] of a group of Q targets by sampled orders, more of them until their
        relative standard error is small; by all coalitions, where these are no more than the next
        orders would visit.

        Args:
            seed: of the orders.
            linear: the secant.
            begin: samples of a large model to begin with.
        """
        C, device = self.players.all, self.packs[0].members[0].g.device
        generator = torch.Generator(device)
        gram = self._gram() if self.clipping.norm is not None else None
        found = Sampled()
        while self.stride > 1 and C > 1 and not found.enough(error):
            n = len(found.pairs)
            if n >= MOST * self.stride:
                return found
            samples = range(n, 2 * n or begin)
            own = self._thinned(samples, points, Q, gram, generator, seed, linear)
            found.pairs += list(own[0])
            found.linear += list(own[1])
        while not found.enough(error):
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
            step = deal.step
            v = _flat(_gradients(points, deal, Q))
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

    def _thinned(
        self, samples: range, points: Sequence[Gradients], Q: int, gram: Tensor | None,
        generator: torch.Generator, seed: int, linear: Linear,
    ) -> Tensor:  # fmt: skip
        """These samples of a part of the coordinates: what orders bring, and what the secant brings
        [2, samples, Q, C]."""
        C, players = self.players.all, self.players
        total = torch.zeros(2, len(samples), Q, C, dtype=torch.float64)
        size = block(total.device)
        for deal in deals(self.packs, self.names, players.world):
            step, own = deal.step, _gradients(points, deal, Q)
            v, u = _flat(own), linear.directions(own)
            reseed = partial(_reseed, generator, seed, deal.place)
            if len(deal.shapes) > 1 or deal.size < LARGE:
                reseed(0, samples.start)
                rows = rows_of(deal.shapes, players.micros, step.g)
                joining = Orders(C, len(samples), generator)
                drawn = joining.draw(-(-deal.size // size), step.g.device)
                flat = _piece(step, slice(None))
                total[0] += self._of_rows(flat, rows, v, joining, gram, drawn, 0)
                total[1] += linear.values(u, rows, players)
                continue
            reseed(1, samples.start)
            own_orders = Orders(C, 1, generator)
            permutation = partial(_permutation, seed, deal.place)
            for x in pieces(deal, players, self.stride, samples, permutation):
                drawn = own_orders.draw(-(-len(x.at) // size), step.g.device)
                one = _piece(step, x.at), x.rows, v[:, x.at], own_orders, gram, drawn, 0
                i = x.sample - samples.start
                total[0, i] += x.weight * self._of_rows(*one)[0]
                total[1, i] += x.weight * linear.values(u[:, x.at], x.rows, players)
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
        """The values that some coordinates bring, for each sample: [samples, Q, C]."""
        given = step, rows, v, joining, gram, drawn, first
        if not isinstance(joining, Orders):
            return self._by_torch(*given)
        by_kernel = partial(self._by_kernel, step, rows, v, joining, gram, drawn, first)
        return _KERNEL.result(rows.device, by_kernel, partial(self._by_torch, *given))

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
            if _still(own.g, rows[:, part], v[:, part]):
                continue
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


def _permutation(seed: int, place: int, n: int, turn: int) -> Tensor:
    """Of the rows of a parameter, for a turn of the samples."""
    rng = np.random.default_rng((seed, place, turn))
    return torch.from_numpy(rng.permutation(n))


def _still(g: Tensor, rows: Tensor, v: Tensor) -> bool:
    """Does nothing of it count: no example moves these coordinates, or no target depends on them?
    So it is with most rows of a table. A GPU would have to be waited for, and is not asked."""
    return rows.is_cpu and not (v.any() and (rows.any() or g.any()))


def _gradients(points: Sequence[Gradients], deal: Deal, Q: int) -> dict[str, Tensor]:
    """∇ℓ_q of the parameters of a deal, the mean over points: [Q, *W] each."""
    at = [p.of(list(deal.shapes), slice(0, Q)) for p in points]
    return {k: torch.stack([a[k] for a in at]).mean(0) for k in deal.shapes}


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Side by side: [Q, N]."""
    return torch.cat([x.reshape(len(x), math.prod(x.shape[1:])) for x in tensors.values()], 1)


def _piece(step: ParamStep, part: slice | Tensor) -> ParamStep:
    """Some coordinates of a parameter, flat."""

    def cut(x: object) -> object:
        same = isinstance(x, Tensor) and x.shape == step.p.shape
        return x.flatten()[part] if isinstance(x, Tensor) and same else x

    state = {k: cut(x) for k, x in step.state.items()}
    p, g = step.p.detach().flatten()[part], step.g.flatten()[part]
    return ParamStep(p, g, step.rule, state, step.options)

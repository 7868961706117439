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
gradients it is sent. ``Sampling`` measures whether all this still matters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inrun import kernels
from inrun.capture.micro_batch import MicroBatch
from inrun.gradients import Record
from inrun.gradients.nodes import Node, pull_back
from inrun.optimizers.common import widest
from inrun.ranks.world import World
from inrun.scoring.clipping import Clipping
from inrun.scoring.joining import FEW, All, Joining, Orders, block
from inrun.scoring.moved import ParamStep
from inrun.scoring.path import Pack
from inrun.validation.sweep import Gradients

if TYPE_CHECKING:
    from inrun.scoring.scorer import Step

ENOUGH = 0.01  # relative standard error
MOST = 32  # pairs of an order and its reverse
SURE = 8  # numbers that a standard error is measured by, at least
PIECE = {"cpu": 2**17, "cuda": 2**26}  # numbers of a piece of a parameter, for all coalitions
SLAB = {"cpu": 2**26, "cuda": 2**30}  # numbers of all examples' gradients that are held at a time

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
class Players:
    """The examples of a step as players of one game: those of this rank among those of all, one
    micro-batch after the other and in each one rank after the other, as one process would have
    them.

    Nobody's part is a player, too. With ``tokens=True`` players are examples, not positions.
    """

    micros: Sequence[MicroBatch]
    world: World

    def __post_init__(self) -> None:
        counts = self.world.gather([players(m) for m in self.micros])
        places = [(m, r, i) for r, own in enumerate(counts) for m, n in enumerate(own)
                  for i in range(n)]  # fmt: skip
        self.counts = [sum(own) for own in counts]  # by rank
        self.order = sorted(range(len(places)), key=places.__getitem__)  # as they are received
        self.own = [p for p, x in enumerate(self.order) if places[x][1] == self.world.rank]

    @property
    def all(self) -> int:
        return len(self.order)

    def by_example(self, values: Tensor) -> Tensor:
        """From all players' values [..., C] to those of this rank's examples, nobody's last."""
        values = values[..., self.own]
        found = values.new_zeros(*values.shape[:-1], sum(m.B for m in self.micros) + 1)
        at, place = 0, 0
        for m in self.micros:
            n = players(m)
            found[..., place : place + m.B] = values[..., at : at + m.B]
            found[..., -1] += values[..., at + m.B : at + n].sum(-1)
            at, place = at + n, place + m.B
        return found

    def rows(
        self, shapes: Mapping[str, Sequence[int]], like: Tensor, cut: slice | None = None
    ) -> tuple[Tensor, slice]:
        """The gradients of all players for this rank's part of some coordinates [C, n], and which
        part of them that is: whole blocks. In one process: all."""
        own = rows_of(shapes, self.micros, like, cut)
        if self.world.alone:
            return own, slice(0, own.shape[1])
        N, size = own.shape[1], block(like.device)
        each = -(-N // (size * self.world.size)) * size
        edges = [min(N, r * each) for r in range(self.world.size + 1)]
        part = slice(edges[self.world.rank], edges[self.world.rank + 1])
        parts = [own[:, a:b] * self.world.share for a, b in pairwise(edges)]
        found = self.world.exchange(parts, self.counts).to(like.device)
        return found[torch.tensor(self.order, device=like.device)], part


def players(micro: MicroBatch) -> int:
    """The examples of a micro-batch, and nobody if anything is nobody's."""
    nobody = micro.nobody or (micro.slots is not None and bool((micro.slots < 0).any()))
    return micro.B + nobody


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
        scored = []
        for pack in packs:
            pairs = zip(pack.members, pack.places, strict=True)
            if own := [(m, i) for m, i in pairs if i in names]:
                scored.append(Pack([m for m, _ in own], [i for _, i in own]))
        return Game(Players(step.micros, world), scored, names, step.clipping, others)

    def values(self, points: Sequence[Gradients], Q: int, seed: int) -> Sampled:
        """Values [Q, C] of a group of Q targets by sampled orders, more of them until their
        standard error is small; by all coalitions, where these are no more than the next orders
        would visit. ``seed``: of the orders."""
        C, device = self.players.all, self.packs[0].members[0].g.device
        generator = torch.Generator(device).manual_seed(seed)
        gram = self._gram() if self.clipping.norm is not None else None
        found = Sampled()
        while not found.enough():
            least = 2 if Q * C >= SURE else 4
            pairs = len(found.pairs) or (1 if C < 2 else least)  # so many as there are already
            orders = Orders(C, pairs, generator)
            visited = orders.rows if pairs < MOST else 2 * orders.rows
            if min(visited, FEW) >= 2**C:
                return Sampled(list(self._by(All(C, device), points, Q, gram)))
            if pairs >= MOST:
                break
            found.pairs += list(self._by(orders, points, Q, gram))
        return found

    def _by(
        self, joining: Joining, points: Sequence[Gradients], Q: int, gram: Tensor | None
    ) -> Tensor:
        """Samples of values [samples, Q, C]."""
        found: list[Tensor] = []
        for pack in self.packs:
            if not pack.elementwise:
                continue
            names = self._shapes(pack)
            at = [p.of(list(names), slice(0, Q)) for p in points]
            means = [torch.stack([a[k] for a in at]).mean(0) for k in names]
            v = torch.cat([x.reshape(Q, -1) for x in means], 1)
            step = pack.joined()
            for cut, slab in self._slabs(pack):
                drawn = joining.draw(-(-(slab.stop - slab.start) // block(v.device)), v.device)
                rows, part = self.players.rows(names, step.g, cut)
                own = slice(slab.start + part.start, slab.start + part.stop)
                first = part.start // block(v.device)
                some = joining, gram, drawn, first
                found.append(self._of_rows(_piece(step, own), rows, v[:, own], *some))
        total = self.players.world.total(torch.stack(found).sum(0))
        total = total.to(found[0].device)
        scale = points[0].scale
        return total if scale is None else total * scale[:, None]

    def _shapes(self, pack: Pack) -> dict[str, Sequence[int]]:
        pairs = zip(pack.places, pack.members, strict=True)
        return {self.names[i]: m.p.shape for i, m in pairs}

    def _slabs(self, pack: Pack) -> Iterator[tuple[slice | None, slice]]:
        """The coordinates of a pack: all, or of a large parameter some of its first dimension at a
        time (this part of it, and of its flat coordinates)."""
        p = pack.members[0].p
        N, C = sum(m.p.numel() for m in pack.members), self.players.all
        limit = SLAB.get(p.device.type, SLAB["cpu"])
        if len(pack.members) > 1 or p.ndim < 2 or limit >= C * N:
            yield None, slice(0, N)
            return
        inner = N // len(p)
        some = max(1, limit // (C * inner))
        for start in range(0, len(p), some):
            stop = min(start + some, len(p))
            yield slice(start, stop), slice(start * inner, stop * inner)

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
        samples = len(drawn) if isinstance(drawn, Tensor) else 1
        total = torch.zeros(samples, Q, C, dtype=widest(rows.device), device=rows.device)
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
        for pack in self.packs:
            names = self._shapes(pack)
            for cut, _ in self._slabs(pack):
                rows = self.players.rows(names, pack.members[0].g, cut)[0]
                total += (rows @ rows.T).to(total)
        total = self.players.world.total(total).to(total.device)
        return total + sum(float(g.double().square().sum()) for g in self.others) / C**2


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


def rows_of(
    shapes: Mapping[str, Sequence[int]], micros: Sequence[MicroBatch], like: Tensor,
    cut: slice | None = None,
) -> Tensor:  # fmt: skip
    """The per-example gradients of these parameters over all micro-batches of a step, side by side,
    nobody's part as one more row of its micro-batch: [C, N]. ``cut``: of one parameter, this part
    of its first dimension."""
    C = sum(map(players, micros))
    found = {k: like.new_zeros((C, *W)) for k, W in shapes.items()}
    if cut is not None:
        found = {k: like.new_zeros((C, cut.stop - cut.start, *W[1:])) for k, W in shapes.items()}
    start = 0
    for micro in micros:
        for node, records in micro.by_example(list(shapes), derived=True):
            for record in records:
                for k, g in _rows(node, record.to(like.device), cut).items():
                    if k in found:  # with tokens=True perhaps a row for nobody who has nothing
                        own = g[: players(micro)].to(like)
                        found[k][start : start + len(own)] += own
        start += players(micro)
    return torch.cat([x.reshape(C, math.prod(x.shape[1:])) for x in found.values()], 1)


def _rows(node: Node, record: Record, cut: slice | None) -> dict[str, Tensor]:
    """The per-example gradients of the parameters that a node is made of."""
    if node.param is not None:
        return {node.name: record.rows() if cut is None else record.part(cut)}
    found = pull_back(node, record.rows())
    return found if cut is None else {k: x[:, cut] for k, x in found.items()}

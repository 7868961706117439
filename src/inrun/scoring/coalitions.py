"""While the update map bends: values by sampled orders of the examples.

The secant says what the step does along the straight path from "no batch" to "whole batch". In its
first steps Adam is nearly the sign of the gradient, and what an example does there depends on who
came before it. So the examples join one after the other, in sampled orders and their reverses, and
each is credited with what the update gains when it joins, coordinate by coordinate:

    value_i = mean over orders of ⟨∇ℓ, Ψ(C(g(S ∪ i))) − Ψ(C(g(S)))⟩,  S: who came before i.

This is the Shapley value of the update itself, with the validation loss linear between w_∅ and w_B.
It adds up to ⟨∇ℓ, Ψ(ḡ) − Ψ(0)⟩ as the secant does, and costs one evaluation of the update for each
example and order. Few examples have few coalitions: then all of them are taken, and nothing is left
to chance. ``Sampling`` measures whether that still matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.gradients.nodes import pull_back
from inrun.optimizers.base import Rule
from inrun.optimizers.common import widest
from inrun.scoring.clipping import Clipping
from inrun.scoring.estimators import POINTS, Estimator, Place
from inrun.scoring.moved import ParamStep
from inrun.scoring.path import Pack
from inrun.validation.sweep import Gradients

ENOUGH = 0.01  # relative standard error
NEAR = 0.005  # relative: what the secant may be off, in so many steps running:
RUNNING = 3
MOST = 64  # pairs of an order and its reverse
LEAST = 4
FEW = 2**12  # coalitions, to take all of them
MEMORY = 2**24  # numbers of a piece of a parameter, for all coalitions
PIECE = {"cpu": 2**11, "cuda": 2**17}  # coordinates that share their orders


class Sampling:
    """Values by sampled orders for the estimators that ask for them, while the update map bends.

    It bends until the secant was near the Shapley value of the update in a few steps running. That
    is measured again at every audit, and when the set of parameters changes.
    """

    def __init__(self, estimators: Sequence[Estimator], rules: Sequence[Rule], alone: bool) -> None:
        self.estimators = [(e, x) for e, x in enumerate(estimators) if x.sampled]
        bends = all(r.elementwise for r in rules) and any(r.adaptive for r in rules)
        self._bends = alone and bends  # the examples of other ranks are not at hand
        self._near, self._params = 0, list[str]()

    def wanted(self, params: list[str], micros: Sequence[MicroBatch], audit: bool) -> bool:
        """Are orders sampled in this step?"""
        if not self.estimators or not self._bends or any(m.slots is not None for m in micros):
            return False
        if self._params != params:
            self._near, self._params = 0, params
        return audit or self._near < RUNNING

    def fill(
        self, numbers: dict[str, Tensor], qs: slice, at: Mapping[Place, Gradients],
        packs: Sequence[Pack], names: Mapping[int, str], micros: Sequence[MicroBatch],
        clipping: Clipping, others: Sequence[Tensor], seed: int,
    ) -> None:  # fmt: skip
        """Put the values of a group of targets beside those of the linear maps."""
        values = numbers["values"]
        sampled = numbers.setdefault("sampled", torch.full_like(values, torch.nan))
        for e, estimator in self.estimators:
            points = [at[x] for x in POINTS[estimator.point]]
            Q = qs.stop - qs.start
            found = sampled_values(points, packs, names, micros, clipping, others, Q, seed)
            sampled[e, qs] = found.mean
            self._note(values[e, qs], found)

    def _note(self, secant: Tensor, found: Sampled) -> None:
        """Compare the secant's values [Q, C] with the sampled ones."""
        noise = found.error.square().sum()
        off = ((found.mean - secant).square().sum() - noise).clamp(min=0).sqrt()
        self._near = self._near + 1 if bool(off <= NEAR * found.mean.norm()) else 0


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
        if len(self.pairs) < LEAST:
            return False
        return bool(self.error.norm() <= ENOUGH * self.mean.norm())


class Joining(Protocol):
    """Which coalitions are evaluated, and how values follow from them."""

    @property
    def rows(self) -> int:
        """How many coalitions each piece of the model is evaluated for."""

    def coalitions(self, rows: Tensor, gram: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        """Gradients g(S) of the coalitions [rows, n], their squared norms over all parameters
        [rows] where ``gram`` is given, and what ``values`` needs to know."""

    def values(self, worth: Tensor, drawn: Any) -> Tensor:
        """From ⟨∇ℓ, Ψ(S) − Ψ(∅)⟩ of the coalitions [Q, rows] to values [samples, Q, C]."""


@dataclass(eq=False)
class Orders:
    """Pairs of an order and its reverse."""

    players: int
    pairs: int
    generator: torch.Generator

    @property
    def rows(self) -> int:
        return 2 * self.pairs * self.players

    def coalitions(self, rows: Tensor, gram: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        drawn = [torch.randperm(self.players, generator=self.generator) for _ in range(self.pairs)]
        orders = torch.stack([o for p in drawn for o in (p, p.flip(0))]).to(rows.device)
        sizes = None
        if gram is not None:
            own = gram[orders[:, :, None], orders[:, None, :]].cumsum(1).cumsum(2)
            sizes = own.diagonal(dim1=1, dim2=2).flatten()
        return rows[orders].cumsum(1).flatten(0, 1), sizes, orders

    def values(self, worth: Tensor, drawn: Any) -> Tensor:
        worth = worth.view(len(worth), *drawn.shape)  # [Q, orders, C]
        gains = worth.diff(dim=2, prepend=torch.zeros_like(worth[:, :, :1]))
        found = torch.empty_like(gains).scatter_(2, drawn.expand_as(gains), gains)
        return found.view(len(worth), self.pairs, 2, self.players).mean(2).transpose(0, 1)


class All:
    """Every coalition of few players: nothing is left to chance."""

    def __init__(self, players: int, device: torch.device) -> None:
        self.players, self.rows = players, 2**players
        masks = torch.arange(self.rows)[:, None] >> torch.arange(players) & 1  # [rows, C]
        size, weights = masks.sum(1, keepdim=True), list[float]()
        for k in range(players):  # of joining k others
            weights.append(1 / (players * math.comb(players - 1, k)))
        table = torch.tensor([*weights, 0.0], dtype=torch.float64)
        inside = torch.where(size > 0, table[(size - 1).clamp(min=0)], 0.0)
        share = torch.where(masks > 0, inside, -table[size])
        self.masks, self.share = masks.to(device), share.to(device, widest(device))

    def coalitions(self, rows: Tensor, gram: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        masks = self.masks.to(rows)
        sizes = None
        if gram is not None:
            own = self.masks.to(gram)
            sizes = (own @ gram * own).sum(1)
        return masks @ rows, sizes, None

    def values(self, worth: Tensor, drawn: Any) -> Tensor:
        return (worth @ self.share.to(worth))[None]


def sampled_values(
    points: Sequence[Gradients],
    packs: Sequence[Pack],
    names: Mapping[int, str],
    micros: Sequence[MicroBatch],
    clipping: Clipping,
    others: Sequence[Tensor],
    Q: int,
    seed: int,
) -> Sampled:
    """Values [Q, C] of a group of Q targets by sampled orders, more of them until their standard
    error is small; by all coalitions, where these are no more than the next orders would visit.

    Args:
        packs: the parameters of the step; ``names`` of those that are scored, by their place.
        others: gradients that are not scored but clipped together with the others; every player
            has an equal share of them.
        seed: of the orders.
    """
    generator = torch.Generator().manual_seed(seed)
    C = sum(m.columns for m in micros)
    gram = _gram(packs, names, micros, others) if clipping.norm is not None else None
    found = Sampled()

    def by(joining: Joining) -> Tensor:
        total: Tensor | float = 0.0
        for pack in packs:
            if any(i in names for i in pack.places):
                total = total + _of_pack(pack, names, points, micros, joining, clipping, gram, Q)
        assert isinstance(total, Tensor)
        scale = points[0].scale
        return total if scale is None else total * scale[:, None]

    while not found.enough():
        pairs = LEAST if not found.pairs else len(found.pairs)  # so often as there are already
        orders = Orders(C, pairs, generator)
        if min(orders.rows, FEW) >= 2**C:
            return Sampled(list(by(All(C, packs[0].members[0].g.device))))
        if pairs >= MOST:
            break
        found.pairs += list(by(orders))
    return found


def _of_pack(
    pack: Pack, names: Mapping[int, str], points: Sequence[Gradients], micros: Sequence[MicroBatch],
    joining: Joining, clipping: Clipping, gram: Tensor | None, Q: int,
) -> Tensor:  # fmt: skip
    """The values that the parameters of a pack bring, for each sample: [samples, Q, C]. Each piece
    of them has orders of its own, so that their noise averages out."""
    step = pack.joined()
    own = [names[i] for i in pack.places]
    at = [p.of(own, slice(0, Q)) for p in points]
    v = torch.cat([torch.stack([a[k] for a in at]).mean(0).flatten(1) for k in own], 1)  # [Q, N]
    rows = torch.cat([g.flatten(1) for g in rows_of(own, micros, step.g)], 1)  # [C, N]
    total: Tensor | float = 0.0
    for part in _parts(rows, joining.rows):
        worth, drawn = _worth(
            _piece(step, part), rows[:, part], v[:, part], joining, clipping, gram
        )
        total = total + joining.values(worth, drawn)
    assert isinstance(total, Tensor)
    return total


def _worth(
    piece: ParamStep, rows: Tensor, v: Tensor, joining: Joining, clipping: Clipping,
    gram: Tensor | None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """⟨∇ℓ, Ψ(C(g(S))) − Ψ(0)⟩ of coalitions [Q, rows], the last of each sample whole."""
    g, sizes, drawn = joining.coalitions(rows, gram)
    if clipping.norm is not None and sizes is not None:
        size = sizes.clamp(min=0).sqrt() * clipping.scale
        g *= (clipping.scale * (clipping.norm / (size + 1e-6)).clamp(max=1.0))[:, None].to(g)
    elif clipping.bound is not None:
        g = (g * clipping.scale).clamp_(-clipping.bound, clipping.bound)
    else:
        g *= clipping.common
    C = len(rows)
    whole = slice(C - 1, None, C) if isinstance(joining, Orders) else slice(-1, None)
    g[whole] = piece.g  # all have joined: what the optimizer receives, to the bit
    w = piece.p.detach()
    after = piece.rule.update(g, w, piece.state, piece.options)
    after = after - piece.rule.update(torch.zeros_like(piece.g), w, piece.state, piece.options)
    return (v.to(after) @ after.T).to(widest(rows.device)), drawn


def _parts(rows: Tensor, each: int) -> Iterator[slice]:
    """A parameter's gradients [C, N] cut into pieces; ``each`` is how many numbers a coordinate
    takes."""
    limit = PIECE.get(rows.device.type, PIECE["cpu"])
    most, N = max(1, min(limit, MEMORY // each)), rows.shape[1]
    return (slice(start, min(start + most, N)) for start in range(0, N, most))


def _piece(step: ParamStep, part: slice) -> ParamStep:
    """Some coordinates of a parameter, flat."""

    def cut(x: object) -> object:
        same = isinstance(x, Tensor) and x.shape == step.p.shape
        return x.flatten()[part] if isinstance(x, Tensor) and same else x

    state = {k: cut(x) for k, x in step.state.items()}
    p, g = step.p.detach().flatten()[part], step.g.flatten()[part]
    return ParamStep(p, g, step.rule, state, step.options)


def rows_of(names: Sequence[str], micros: Sequence[MicroBatch], like: Tensor) -> list[Tensor]:
    """The per-example gradients of these parameters over all micro-batches of a step, nobody's part
    as one more row of its micro-batch: [C, *W] each."""
    C = sum(m.columns for m in micros)
    found: dict[str, Tensor] = {}
    start = 0
    for micro in micros:
        assert micro.records  # those of uses are made now
        for node, records in micro.nodes(names):
            for record in records:
                for k, g in pull_back(node, record.to(like.device).rows()).items():
                    if k in names:
                        if k not in found:
                            found[k] = like.new_zeros((C, *g.shape[1:]))
                        found[k][start : start + len(g)] += g.to(like)
        start += micro.columns
    return [found[k] for k in names]


def _gram(
    packs: Sequence[Pack], names: Mapping[int, str], micros: Sequence[MicroBatch],
    others: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """⟨g_i, g_j⟩ over all parameters [C, C]."""
    total: Tensor | float = 0.0
    for pack in packs:
        for m, i in zip(pack.members, pack.places, strict=True):
            if i in names:
                rows = rows_of([names[i]], micros, m.g)[0].flatten(1)
                total = total + (rows @ rows.T).double()
    assert isinstance(total, Tensor)
    rest = sum(float(g.double().square().sum()) for g in others)
    return total + rest / len(total) ** 2

"""While the update map bends: values by sampled orders of the examples.

The secant says what the step does along the straight path from "no batch" to "whole batch". In its
first steps Adam is nearly the sign of the gradient, and what an example does there depends on who
came before it. So the examples join one after the other, in sampled orders and their reverses, and
each is credited with what the update gains when it joins, coordinate by coordinate:

    value_i = mean over orders of ⟨∇ℓ, Ψ(C(g(S ∪ i))) − Ψ(C(g(S)))⟩,  S: who came before i.

This is the Shapley value of the update itself, with the validation loss linear between w_∅ and w_B.
It adds up to ⟨∇ℓ, Ψ(ḡ) − Ψ(0)⟩ as the secant does, and costs one evaluation of the update for each
example and order. ``Sampling`` measures whether that still matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
MEMORY = 2**24  # numbers of a piece of a parameter, for all examples


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
    """The mean over pairs of orders, and its standard error; both [Q, C]."""

    pairs: list[Tensor] = field(default_factory=list)

    @property
    def mean(self) -> Tensor:
        return torch.stack(self.pairs).mean(0)

    @property
    def error(self) -> Tensor:
        return torch.stack(self.pairs).std(0) / len(self.pairs) ** 0.5

    def enough(self) -> bool:
        if len(self.pairs) < LEAST:
            return False
        return len(self.pairs) >= MOST or bool(self.error.norm() <= ENOUGH * self.mean.norm())


@dataclass(eq=False)
class Orders:
    """What all pieces of the model share: who joins when, and how a coalition is clipped."""

    orders: list[Tensor]  # of players [C] each: an order, its reverse, ...
    clipping: Clipping
    gram: Tensor | None  # ⟨g_i, g_j⟩ over all parameters [C, C], for clipping by norm

    def factors(self, order: Tensor) -> Tensor | float:
        """The factor on the gradient of the first 1, 2, … players of an order [C]."""
        C = self.clipping
        if C.norm is None or self.gram is None:
            return C.scale if C.bound is not None else C.common
        gram = self.gram[order][:, order]
        size = gram.cumsum(0).cumsum(1).diagonal().clamp(min=0).sqrt() * C.scale
        return C.scale * (C.norm / (size + 1e-6)).clamp(max=1.0)


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
    error is small.

    Args:
        packs: the parameters of the step; ``names`` of those that are scored, by their place.
        others: gradients that are not scored but clipped together with the others; every player
            has an equal share of them.
        seed: of the orders.
    """
    generator = torch.Generator().manual_seed(seed)
    C = sum(m.columns for m in micros)
    gram = _gram(packs, names, micros, others) if clipping.norm is not None else None
    scale, found = points[0].scale, Sampled()
    while not found.enough():
        pairs = LEAST if not found.pairs else len(found.pairs)  # so often as there are already
        drawn = [torch.randperm(C, generator=generator) for _ in range(min(pairs, MOST))]
        shared = Orders([o for p in drawn for o in (p, p.flip(0))], clipping, gram)
        total: Tensor | float = 0.0
        for pack in packs:
            members = [i for i in pack.places if i in names]
            if members:
                total = total + _of_pack(pack, names, points, micros, shared, Q)
        assert isinstance(total, Tensor)
        values = total.reshape(len(drawn), 2, Q, C).mean(1)
        values = values if scale is None else values * scale[:, None]
        found.pairs += list(values)
    return found


def _of_pack(
    pack: Pack, names: Mapping[int, str], points: Sequence[Gradients], micros: Sequence[MicroBatch],
    shared: Orders, Q: int,
) -> Tensor:  # fmt: skip
    """The values that the parameters of a pack bring, for each order: [orders, Q, C]."""
    step = pack.joined()
    own = [names[i] for i in pack.places]
    at = [p.of(own, slice(0, Q)) for p in points]
    v = torch.cat([torch.stack([a[k] for a in at]).mean(0).flatten(1) for k in own], 1)  # [Q, N]
    rows = torch.cat([g.flatten(1) for g in rows_of(own, micros, step.g)], 1)  # [C, N]
    C, N = rows.shape
    total = rows.new_zeros((len(shared.orders), Q, C), dtype=widest(rows.device))
    for part in _parts(step, N, max(1, MEMORY // C)):
        piece = _piece(step, part)
        for o, order in enumerate(shared.orders):
            gains = _gains(piece, rows[:, part], order.to(rows.device), shared)
            total[o][:, order] = (v[:, part].to(gains) @ gains.T).to(total)
    return total


def _gains(piece: ParamStep, rows: Tensor, order: Tensor, shared: Orders) -> Tensor:
    """What the update gains when each player joins, in their order: [C, n]."""
    prefix = rows[order].cumsum(0)
    factor = shared.factors(order.cpu() if shared.gram is None else order)
    prefix = prefix * (factor[:, None].to(prefix) if isinstance(factor, Tensor) else factor)
    if shared.clipping.bound is not None:
        prefix = prefix.clamp(-shared.clipping.bound, shared.clipping.bound)
    prefix[-1] = piece.g  # all have joined: what the optimizer receives, to the bit
    w = piece.p.detach()
    after = piece.rule.update(prefix, w, piece.state, piece.options)
    before = piece.rule.update(torch.zeros_like(piece.g), w, piece.state, piece.options)
    return torch.cat([after[:1] - before, after[1:] - after[:-1]])


def _parts(step: ParamStep, N: int, most: int) -> Iterator[slice]:
    """A parameter cut into pieces of at most ``most`` numbers."""
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

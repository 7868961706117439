"""The examples of a step as players of a game (coalitions.py): their gradients for the coordinates
that this rank evaluates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.gradients import Record
from inrun.gradients.nodes import Node, pull_back
from inrun.ranks.stretch import Stretch
from inrun.ranks.world import World

NONE = Stretch(0, 0, 0)


@dataclass(eq=False)
class Players:
    """The examples of a step as players of one game: those of this rank among those of all, one
    micro-batch after the other and in each one rank after the other, as one process would have
    them.

    Nobody's part of a micro-batch is a player, too, the same one on all ranks. With ``tokens=True``
    players are examples, not positions.
    """

    micros: Sequence[MicroBatch]
    world: World

    def __post_init__(self) -> None:
        sizes = self.world.gather([(m.B, players(m)) for m in self.micros])
        self.counts = [sum(n for _, n in own) for own in sizes]  # by rank: what it sends
        received = [(m, 0, r, i) if i < B else (m, 1, 0, 0) for r, own in enumerate(sizes)
                    for m, (B, n) in enumerate(own) for i in range(n)]  # fmt: skip
        place = {who: p for p, who in enumerate(sorted({*received}))}
        self.all, self.places = len(place), [place[who] for who in received]
        first = sum(self.counts[: self.world.rank])
        self.own = self.places[first : first + self.counts[self.world.rank]]
        self.shares = [1 / self.places.count(p) for p in self.own]

    def by_example(self, values: Tensor) -> Tensor:
        """From all players' values [..., C] to those of this rank's examples and last its share of
        nobody's."""
        values = values[..., self.own] * values.new_tensor(self.shares)
        found = values.new_zeros(*values.shape[:-1], sum(m.B for m in self.micros) + 1)
        at, place = 0, 0
        for m in self.micros:
            n = players(m)
            found[..., place : place + m.B] = values[..., at : at + m.B]
            found[..., -1] += values[..., at + m.B : at + n].sum(-1)
            at, place = at + n, place + m.B
        return found

    def rows(
        self, shapes: Mapping[str, Sequence[int]], like: Tensor, cut: slice | None,
        dealt: Sequence[Sequence[Stretch]],
    ) -> Tensor:  # fmt: skip
        """The gradients of all players for this rank's part of some coordinates [C, n]. ``dealt``:
        the part of each rank."""
        own = rows_of(shapes, self.micros, like, cut)
        if self.world.alone:
            return own
        parts = [torch.cat([own[:, x.at : x.at + x.n] for x in (*part, NONE)], 1) for part in dealt]
        parts = [part * self.world.share for part in parts]
        found = self.world.exchange(parts, self.counts).to(like.device)
        places = torch.tensor(self.places, device=like.device)
        return found.new_zeros(self.all, found.shape[1]).index_add_(0, places, found)


def players(micro: MicroBatch) -> int:
    """The examples of a micro-batch, and nobody if anything is nobody's."""
    nobody = micro.nobody or (micro.slots is not None and bool((micro.slots < 0).any()))
    return micro.B + nobody


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

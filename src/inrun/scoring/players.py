"""The examples of a step as players of a game (coalitions.py): their gradients for the coordinates
that this rank evaluates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.gradients import Record
from inrun.gradients.embedding import Lookup
from inrun.gradients.nodes import Node, pull_back
from inrun.gradients.records import Cut
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

    def of_columns(self, values: Tensor) -> Tensor:
        """From values by column [..., columns] of one process (conclude.py) to those of players."""
        at, start = list[Tensor](), 0
        for m in self.micros:
            own = torch.arange(m.B, device="cpu") if m.slots is None else m.slots.cpu()
            at.append(torch.where(own < 0, m.B, own) + start)
            at.append(torch.full((int(m.nobody),), m.B + start, device="cpu"))
            start += players(m)
        found = values.new_zeros(*values.shape[:-1], self.all)
        return found.index_add_(-1, torch.cat(at).to(values.device), values)

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


def touched(micros: Sequence[MicroBatch], name: str) -> Tensor | None:
    """Which rows of a table the batch looks up; None of a parameter that is used otherwise."""
    ids = []
    for node, records in (x for m in micros for x in m.by_example([name], derived=True)):
        for record in records:
            if node.param is None or not isinstance(record, Lookup):
                return None
            ids.append(record.ids.flatten())
    return torch.cat(ids).unique() if ids else None


def rows_of(
    shapes: Mapping[str, Sequence[int]], micros: Sequence[MicroBatch], like: Tensor,
    cut: Cut | None = None,
) -> Tensor:  # fmt: skip
    """The per-example gradients of these parameters over all micro-batches of a step, side by side,
    nobody's part as one more row of its micro-batch: [C, N]. ``cut``: of one parameter, this part
    of its first dimension."""
    C, found, start = sum(map(players, micros)), dict[str, Tensor](), 0
    borrowed = set[str]()  # names whose numbers may be a record's own
    for micro in micros:
        for node, records in micro.by_example(list(shapes), derived=True):
            for record in records:
                for k, g in _rows(node, record.to(like.device), cut, shapes).items():
                    own = g[: players(micro)].to(like)
                    if k not in found and len(own) == C:
                        found[k] = own
                        borrowed.add(k)
                        continue
                    if k not in found:
                        found[k] = like.new_zeros((C, *own.shape[1:]))
                    elif k in borrowed:
                        found[k] = found[k].clone()
                        borrowed.remove(k)
                    # with tokens=True perhaps a row for nobody who has nothing
                    found[k][start : start + len(own)] += own
        start += players(micro)
    rows = [found[k].reshape(C, -1) if k in found else _nothing(C, W, like, cut)
            for k, W in shapes.items()]  # fmt: skip
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def _nothing(C: int, W: Sequence[int], like: Tensor, cut: Cut | None) -> Tensor:
    """The gradients of a parameter that met no example."""
    sizes = [*W]
    if cut is not None:
        sizes[0] = len(cut) if isinstance(cut, Tensor) else cut.stop - cut.start
    return like.new_zeros(C, math.prod(sizes))


def _rows(
    node: Node, record: Record, cut: Cut | None, names: Collection[str]
) -> dict[str, Tensor]:  # fmt: skip
    """The per-example gradients of these among the parameters that a node is made of."""
    if node.param is not None:
        return {node.name: record.rows() if cut is None else record.part(cut)}
    found = {k: x for k, x in pull_back(node, record.rows()).items() if k in names}
    return found if cut is None else {k: x[:, cut] for k, x in found.items()}

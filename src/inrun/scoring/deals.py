"""Who evaluates which coordinates of a step: in one process all, one pack after the other.

Several ranks with whole parameters deal the blocks of each pack out among them. Where parameters
are in shards, each rank evaluates the coordinates that it has, one parameter after the other: while
FSDP's group of it is gathered, so that examples can be asked for its gradients.

Coordinates are counted in the pack as one process would have it, so that every coordinate has the
same orders whoever evaluates it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Size

from inrun.ranks.shards import whole
from inrun.ranks.stretch import Stretch
from inrun.ranks.world import World
from inrun.scoring.joining import block
from inrun.scoring.moved import ParamStep
from inrun.scoring.packs import Pack, packed

SLAB = {"cpu": 2**26, "cuda": 2**30}  # numbers of all examples' gradients that are held at a time


@dataclass(eq=False)
class Deal:
    """Some coordinates that all ranks evaluate together.

    Args:
        step: what this rank has of them, flat or not.
        shapes: of whole parameters, by name.
        place: of their pack among all.
        begins: where they begin in it.
        size: how many coordinates the pack has.
        shards: those that each rank has; None: each has all.
    """

    step: ParamStep
    shapes: Mapping[str, Size]
    place: int
    begins: int
    size: int
    shards: list[list[Stretch]] | None = None

    def slabs(self, C: int) -> Iterator[tuple[slice | None, slice, int]]:
        """The coordinates, for C players: all, or of a large parameter some of its first dimension
        at a time (this part of it, and of its flat coordinates). And how many have orders that are
        drawn at once: those of the pack, or of this part."""
        N = sum(map(math.prod, self.shapes.values()))
        shape = next(iter(self.shapes.values()))
        limit = SLAB.get(self.step.p.device.type, SLAB["cpu"])
        if self.size > math.prod(shape) or len(shape) < 2 or limit >= C * N:
            yield None, slice(0, N), self.size
            return
        inner = N // shape[0]
        some = max(1, limit // (C * inner))
        for start in range(0, shape[0], some):
            stop = min(start + some, shape[0])
            yield slice(start, stop), slice(start * inner, stop * inner), (stop - start) * inner

    def by_rank(self, slab: slice, world: World) -> list[list[Stretch]]:
        """The part of each rank; ``at`` counts from the slab."""
        if self.shards is not None:
            return [[x.between(slab.start, slab.stop) for x in own] for own in self.shards]
        N, size = slab.stop - slab.start, block(self.step.p.device)
        each = -(-N // (size * world.size)) * size
        edges = [min(N, r * each) for r in range(world.size + 1)]
        return [[Stretch(a, slab.start + a, b - a)] for a, b in pairwise(edges)]


def in_blocks(part: Stretch, begins: int, size: int) -> Iterator[tuple[int, int, int]]:
    """A stretch cut at the first border of a block, since others may evaluate the block before:
    where a piece begins in it, where it ends, and its first block."""
    head = min(-(begins + part.at) % size, part.n)
    for start, stop in ((0, head), (head, part.n)):
        if start < stop:
            yield start, stop, (begins + part.at + start) // size


def deals(packs: Sequence[Pack], names: Mapping[int, str], world: World) -> Iterator[Deal]:
    """All coordinates whose update is elementwise. All ranks ask for them in the same order."""
    shards, found = world.shards, dict[str, Deal]()
    for place, pack in enumerate(packs):
        if not pack.elementwise:
            continue
        members = [(names[i], m) for i, m in zip(pack.places, pack.members, strict=True)]
        shapes = {k: whole(m.p).shape for k, m in members}
        size, begins = sum(map(math.prod, shapes.values())), 0
        if shards is None:
            yield Deal(pack.joined(), shapes, place, 0, size)
            continue
        for k, m in members:
            found[k] = Deal(m, {k: shapes[k]}, place, begins, size)
            begins += math.prod(shapes[k])
    if shards is None:
        return
    for raws in shards.in_turn(found):
        for k, raw in raws.items():
            found[k].shards = shards.stretches(raw)
            yield found[k]


def packs_of(
    steps: Sequence[ParamStep], kept: Sequence[Pack], names: Mapping[int, str], world: World
) -> list[Pack]:
    """The packs of the scored parameters as one process would have them: shards differ in size from
    rank to rank, so those that are ``kept`` will not do."""
    if world.shards is not None:
        kept = packed(steps, [whole(m.p).numel() for m in steps])
    found = []
    for pack in kept:
        pairs = zip(pack.members, pack.places, strict=True)
        if own := [(m, i) for m, i in pairs if i in names]:
            found.append(Pack([m for m, _ in own], [i for _, i in own]))
    return found

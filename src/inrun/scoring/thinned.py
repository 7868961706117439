"""Large models: sampled orders of a random part of the coordinates (coalitions.py).

Values are sums over millions of coordinates, so a part of them tells the sum. A *sample* is a pair
of orders of one in ``stride`` of a large parameter's rows, counted so many times; small parameters
are in every sample. Samples follow each other without coming back to a row before all had their
turn. Of a table only the rows count that the batch looks up, in blocks of coordinates.

What the secant says of the same coordinates is known for all of them. So it serves as a control
variate: where samples differ less from the secant's part than from each other,

    value = the secant's value + mean over samples of (orders' part − the secant's part),

and the more linear the update, the fewer samples are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.optimizers.base import LinearMap
from inrun.scoring.clipping import Clipping
from inrun.scoring.contraction import directions_through
from inrun.scoring.deals import SLAB, Deal
from inrun.scoring.joining import block
from inrun.scoring.players import Players, rows_of, touched

LARGE = 2**14  # numbers of a parameter that is thinned
SAMPLE = 2**15  # numbers of a sample, about
SPARSEST = 256  # the largest stride


def stride_of(sizes: Iterable[int]) -> int:
    """For parameters of these sizes: a power of two; 1 if none is large."""
    numbers = sum(n for n in sizes if n >= LARGE)
    stride = 1
    while stride < SPARSEST and 2 * stride * SAMPLE <= numbers:
        stride *= 2
    return stride


@dataclass(frozen=True, eq=False)
class Linear:
    """The linear map that the values of all coordinates came from.

    Args:
        maps: by parameter.
        ratios: clipping by value (contraction.py).
        clipping: by norm; ``aligned`` is ⟨G, g_i⟩/‖G‖² by column, where it needs that.
    """

    maps: Mapping[str, LinearMap]
    ratios: Mapping[str, Tensor] | None
    clipping: Clipping
    aligned: Tensor | None

    def directions(self, v: Mapping[str, Tensor]) -> Tensor:
        """∇ℓ_q of some parameters through the map, side by side [Q, N]."""
        found = directions_through(self.maps, v, self.ratios)
        return torch.cat([found[k].full.reshape(len(x), -1) for k, x in v.items()], 1)

    def values(self, u: Tensor, rows: Tensor, players: Players) -> Tensor:
        """What coordinates with the directions u [Q, n] bring to players whose gradients are
        ``rows`` [C, n]: [Q, C]."""
        found = (u.to(rows) @ rows.T).double()
        aligned = None if self.aligned is None else players.of_columns(self.aligned)
        return self.clipping.apply(found, found.sum(1), aligned)


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a large parameter's coordinates, for one sample."""

    sample: int
    at: Tensor  # [n] flat
    rows: Tensor  # [C, n]
    weight: float


def pieces(
    deal: Deal, players: Players, stride: int, samples: Sequence[int],
    permutation: Callable[[int, int], Tensor],
) -> Iterator[Piece]:  # fmt: skip
    """The parts of a large parameter that these samples visit. ``permutation(n, k)``: of n, for
    the k-th turn."""
    ((name, shape),) = deal.shapes.items()
    inner = math.prod(shape[1:])
    limit = max(1, SLAB.get(deal.step.p.device.type, SLAB["cpu"]) // players.all)
    known = touched(players.micros, name)
    looked_up = None if known is None else _table(deal, players, known, limit // max(1, inner))
    size = block(deal.step.p.device)
    units = shape[0] if known is None else -(-len(known) * inner // size)
    turns = min(stride, units)
    for sample in samples if units else ():
        own = permutation(units, sample // turns)[sample % turns :: turns]
        weight = units / len(own)
        if looked_up is None:
            for some in own.split(max(1, limit // inner)):
                rows = rows_of(deal.shapes, players.micros, deal.step.g, some)
                yield Piece(sample, _coordinates(some, inner), rows, weight)
            continue
        flat, rows = looked_up
        at = (own[:, None] * size + torch.arange(size)).flatten()
        at = at[at < len(flat)]
        yield Piece(sample, flat[at], rows[:, at], weight)


def _table(
    deal: Deal, players: Players, known: Tensor, some: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The coordinates of the rows that are looked up, and the players' gradients there."""
    ((_, shape),) = deal.shapes.items()
    found = [
        rows_of(deal.shapes, players.micros, deal.step.g, x) for x in known.split(max(1, some))
    ]
    return _coordinates(known, math.prod(shape[1:])), torch.cat(found, 1)


def _coordinates(units: Tensor, inner: int) -> Tensor:
    """Where the numbers of these rows are in the flat parameter."""
    return (units[:, None] * inner + torch.arange(inner)).flatten()

"""Per-example gradients where an example has no row of its own.

A rule sees the positions of an operation's output (tokens of packed rows, tokens sent to an expert,
rows in another order) as if each were an example: its records have one row per position. Here the
positions of an example are added up: g_i = Σ_{j: owner(j) = i} g_j. A position may belong to
nobody; the gradients of all those are one more row at the end, so that no part of the batch's
gradient is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inrun.gradients.records import Dense, Pair, Record, wide


@dataclass(frozen=True)
class Positions:
    """Whose the positions of an operation's output are.

    ``owner`` [N] holds a row for each position, less than ``rows``. The last row may be nobody's.
    """

    owner: Tensor
    rows: int

    @staticmethod
    def of(owner: Tensor, examples: int, device: torch.device) -> Positions:
        """From a flat owner map, in which negative numbers mean nobody."""
        if owner.is_cpu and not bool((owner < 0).any()):
            return Positions(owner.to(device, non_blocking=True), examples)
        owner = owner.to(device, non_blocking=True)
        return Positions(torch.where(owner < 0, examples, owner), examples + 1)

    def added(self, x: Tensor) -> Tensor:
        """[N, …] added up by owner: [rows, …], in at least float32."""
        x = wide(x)
        return x.new_zeros(self.rows, *x.shape[1:]).index_add_(0, self.owner, x)


@dataclass(eq=False)
class Owned(Record):
    """A record whose rows are positions, added up by their owners."""

    record: Record  # with N rows
    positions: Positions

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    def dot(self, u: Tensor) -> Tensor:
        return self.positions.added(self.record.dot(u))

    def dots(self, u: Tensor) -> Tensor:
        return self.positions.added(self.record.dots(u).T).T

    def rows(self) -> Tensor:
        return self._by_row(self.positions)

    def groups(self, sizes: Sequence[int]) -> Tensor:
        return self.some_groups(0, sizes)

    def some_groups(self, first: int, sizes: Sequence[int]) -> Tensor:
        """Positions of examples outside the groups, and nobody's, are left out."""
        group = torch.full((self.positions.rows,), len(sizes), device="cpu")
        start = first
        for k, n in enumerate(sizes):
            group[start : start + n] = k
            start += n
        owner = group.to(self.positions.owner.device, non_blocking=True)[self.positions.owner]
        return self._by_row(Positions(owner, len(sizes) + 1))[:-1]

    def _by_row(self, positions: Positions) -> Tensor:
        """The sum of the positions of each row: one product per row, of the other positions
        nothing is taken."""
        field = next((k for k in ("delta", "scale") if hasattr(self.record, k)), None)
        if field is None:
            return positions.added(self.record.rows())
        if isinstance(self.record, Pair) and positions.owner.is_cpu:
            return _segments(self.record, positions)
        N, found, delta = len(positions.owner), [], getattr(self.record, field)
        for k in range(positions.rows):
            mine = (positions.owner == k).view(-1, *[1] * (delta.ndim - 1))
            record: Record = replace(self.record, **{field: delta * mine})
            found.append(record.some_groups(0, [N])[0])
        return torch.stack(found)

    def cut(self, first: int, last: int) -> Record:
        return Dense(self.rows()[first:last])

    def like(self) -> Tensor:
        return self.record.like()

    def map(self, f: Callable[[Tensor], Tensor]) -> Any:
        moved = Positions(f(self.positions.owner), self.positions.rows)
        return Owned(self.record.map(f), moved)

    def tensors(self) -> list[Tensor]:
        return [self.positions.owner, *self.record.tensors()]


def _segments(pair: Pair, positions: Positions) -> Tensor:
    """Gradients of a product for each row: positions sorted by owner, one product per row."""
    order = positions.owner.argsort(stable=True)
    sizes = positions.owner.bincount(minlength=positions.rows).tolist()
    parts = [t[order].split(sizes) for t in (pair.a, pair.delta)]
    found = [
        replace(pair, a=a.flatten(0, 1)[None], delta=d.flatten(0, 1)[None]).rows()[0]
        for a, d in zip(*parts, strict=True)
    ]
    return torch.stack(found)


def by_owner(record: Record, positions: Positions, materialise: bool) -> Record:
    """A record with a row per position as one with a row per example."""
    if isinstance(record, Dense):
        return Dense(positions.added(record.grads), own=True)
    owned = Owned(record, positions)
    return Dense(owned.rows(), own=True) if materialise else owned

"""From directions and records to values: ⟨u_q, g_i⟩ for every target q and example i."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inrun import kernels
from inrun.capture.micro_batch import MicroBatch
from inrun.gradients import Dense, Record
from inrun.gradients.nodes import Node, directions
from inrun.gradients.records import Lookup, wide


@dataclass(eq=False)
class Direction:
    """u_q of one parameter for Q targets: K ⊙ v_q, or v_q where there is no factor K."""

    v: Tensor  # [Q, *W]
    K: Tensor | None = None
    _full: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def full(self) -> Tensor:
        if self._full is None:
            self._full = wide(self.v) if self.K is None else self.K * self.v
        return self._full


def contract(
    u: Mapping[str, Direction], G: Mapping[str, Tensor], micros: Sequence[MicroBatch]
) -> tuple[Tensor, Tensor]:
    """⟨u_q, g_i⟩ of every example of the step [Q, B], and ⟨u_q, G⟩ [Q], in float64."""
    some = next(iter(u.values())).v
    Q, device = len(some), some.device
    values, covered = [], set[str]()
    expected = torch.zeros(Q, dtype=torch.float64, device=device)
    for micro in micros:
        total = torch.zeros(Q, micro.B, dtype=torch.float64, device=device)
        dense: dict[Any, list[tuple[str, Tensor]]] = {}
        for node, records in micro.nodes(u.keys()):
            for record in records:
                if type(record) is Dense and node.param is not None:
                    k, rows = node.name, record.grads
                    rows = rows if rows.device == device else rows.to(device)
                    kind = kernels.usable_rows(rows), rows.dtype, u[k].v.dtype, G[k].dtype
                    dense.setdefault(kind, []).append((k, rows))
                else:
                    total += _plain(node, record.to(device), u)
        for (by_kernel, *_), pairs in dense.items():
            names = [k for k, _ in pairs]
            whole = covered.isdisjoint(names)
            if by_kernel:
                whole = whole and kernels.usable([G[k] for k in names])
            total_g = (_fused if by_kernel else _joined)(pairs, u, G if whole else None)
            total += total_g[:, :-1]
            if whole:
                expected += total_g[:, -1]
                covered.update(names)
        values.append(total)
    for k, d in u.items():
        if k not in covered:
            full = _side_by_side([d.full])
            expected += (full @ _row([G[k]], full.dtype)).double()
    return torch.cat(values, dim=1), expected


def _plain(node: Node, record: Record, u: Mapping[str, Direction]) -> Tensor:
    if node.param is not None:
        d = u[node.name]
        if isinstance(record, Lookup) and d.K is not None:  # few rows of a large table
            return record.dots(d.v, d.K).double()
        return record.dots(d.full).double()
    moving = {k: u[k].full for k in node.roots if k in u}
    some = max(1, _AT_ONCE // math.prod(record.shape))
    found = [
        record.dots(directions(node, {k: x[q : q + some] for k, x in moving.items()}))
        for q in range(0, len(next(iter(moving.values()))), some)
    ]
    return torch.cat(found).double()


def _fused(
    rows: Sequence[tuple[str, Tensor]], u: Mapping[str, Direction], G: Mapping[str, Tensor] | None
) -> Tensor:
    names = [k for k, _ in rows]
    factors = [kernels.in_order(x) for k in names if (x := u[k].K) is not None]
    K = factors if len(factors) == len(names) else None
    v = [kernels.rows_in_order(u[k].v if K is not None else u[k].full) for k in names]
    own = None if G is None else [G[k] for k in names]
    return kernels.contract([g for _, g in rows], K, v, own)


def _joined(
    rows: Sequence[tuple[str, Tensor]], u: Mapping[str, Direction], G: Mapping[str, Tensor] | None
) -> Tensor:
    """The same without a kernel: small tensors (the many vectors of a model) in one product."""
    groups = [[x] for x in rows if x[1].numel() > _SMALL]
    small = [x for x in rows if x[1].numel() <= _SMALL]
    found, own = [], []
    for group in [*groups, small] if small else groups:
        d = _directions([u[k] for k, _ in group])
        found.append(d @ _side_by_side([wide(x) for _, x in group]).T)
        if G is not None:
            own.append(d @ _row([G[k] for k, _ in group], d.dtype))
    total = torch.stack(found).sum(0, dtype=torch.float64)
    last = torch.stack(own).sum(0, dtype=torch.float64) if own else total.new_zeros(len(total))
    return torch.cat([total, last[:, None]], dim=1)


def _directions(group: Sequence[Direction]) -> Tensor:
    """K ⊙ v of all of them, side by side."""
    if len(group) == 1 or any(d.K is None for d in group):
        return _side_by_side([d.full for d in group])
    factors = [d.K[None] for d in group if d.K is not None]
    return _side_by_side(factors) * _side_by_side([d.v for d in group])


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """[n, *W] each, as rows [n, numbers]."""
    flat = [t if t.ndim == 2 else t.flatten(1) if t.ndim > 2 else t[:, None] for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _row(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The numbers of all of them."""
    flat = [t if t.ndim == 1 else t.flatten() for t in tensors]
    row = flat[0] if len(flat) == 1 else torch.cat(flat)
    return row if row.dtype == dtype else row.to(dtype)


def components(names: Iterable[str], micros: Sequence[MicroBatch]) -> list[list[str]]:
    """Parameters that must be scored together because one tensor is made of several of them."""
    group = {k: {k} for k in names}
    for micro in micros:
        for node in micro.records:
            joined = set().union(*(group[k] for k in node.roots if k in group))
            for k in joined:
                group[k] = joined
    seen: set[str] = set()
    found = []
    for k, members in group.items():
        if k not in seen:
            seen |= members
            found.append(sorted(members))
    return found


def cancelling(
    G: Mapping[str, Tensor], micros: Sequence[MicroBatch], among: Collection[str] | None = None
) -> dict[str, Tensor]:
    """For each 1-D parameter (or those ``among``), a flag on its device: is its gradient zero up to
    rounding although the per-example gradients are not? Example: a bias before BatchNorm. The batch
    does not move it, but an adaptive optimizer's slope at zero is of the order lr/eps, which would
    give examples meaningless values.

    The norm of the whole vector decides, because single coordinates may be small by chance. For the
    same reason the rounding of half precision is allowed for only in longer vectors.
    """
    sizes: dict[str, Tensor] = {}
    coarse = 0.0
    for micro in micros:
        if micro.autocast is not None and micro.autocast[1]:
            coarse = max(coarse, torch.finfo(micro.autocast[2]).eps)
        for node, records in micro.records.items():
            k = node.name
            if node.param is None or k not in G or G[k].ndim > 1 or (among and k not in among):
                continue
            for record in records:
                size = record.to(G[k].device).rows().square().sum()
                sizes[k] = sizes[k] + size if k in sizes else size
    found = {}
    for k, size in sizes.items():
        limit = math.sqrt(torch.finfo(size.dtype).eps)
        limit = max(limit, 4 * coarse) if G[k].numel() >= _LONG else limit
        own, whole = G[k].norm(), size.sqrt()  # of the same order by chance, however many examples
        found[k] = (own <= limit * whole) & (whole > 0) & own.isfinite()
    return found


_LONG = 4  # numbers: so many are below four times bfloat16's rounding once in a million times
_AT_ONCE = 2**26  # numbers of the directions of a tensor that is made of parameters
_SMALL = 2**14  # numbers: so few are copied sooner than multiplied on their own

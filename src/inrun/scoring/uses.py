"""⟨u, g_i⟩ of uses that were only remembered (gradients/use.py): their operations run again along
the directions, and all products with δ are summed by example together, on a GPU in one launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inrun import kernels
from inrun.gradients.nodes import Node, directions
from inrun.gradients.records import wide
from inrun.gradients.use import Use
from inrun.scoring import contraction_kernel

MEMORY = 2**28  # bytes of results that wait for their sums
_SMALL = 2**14  # numbers: so few are copied sooner than summed on their own


@dataclass(eq=False)
class Direction:
    """u_q of one parameter for Q targets: K ⊙ v_q, or v_q where there is no factor K."""

    v: Tensor  # [Q, *W]
    K: Tensor | None = None
    _full: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def full(self) -> Tensor:
        """u itself, computed when it is first asked for [Q, *W]."""
        if self._full is None:
            self._full = wide(self.v) if self.K is None else self.K * self.v
        return self._full

    @staticmethod
    def fill(some: Iterable[Direction]) -> None:
        """Compute u of all these together, for one target."""
        left = [d for d in some if d._full is None and d.K is not None]
        if len(left) > 1 and len(left[0].v) == 1:
            K = [d.K for d in left if d.K is not None]
            made = torch._foreach_mul(K, [d.v[0] for d in left])
            for d, x in zip(left, made, strict=True):
                d._full = x[None]


def add_uses(total: Tensor, uses: Sequence[Use], u: Mapping[str, Direction]) -> None:
    """Add ⟨u_q, g_i⟩ of these uses to ``total`` [Q, columns]."""
    moved = {n: not n.roots.isdisjoint(u) for use in uses for _, n in use.linear.operands}
    own = [use for use in uses if any(moved[n] for _, n in use.linear.operands)]
    if not own:
        return
    for use in own:
        use.check()
    for q, row in enumerate(total):
        moving = _moving(own, [n for n, yes in moved.items() if yes], u, q)
        waiting: list[tuple[Use, Tensor]] = []
        size = 0
        for use in own:
            y = use.along(moving[use.dtype])
            waiting.append((use, y))
            size += y.nbytes
            if size > MEMORY:
                _add_dots(row, waiting)
                waiting, size = [], 0
        _add_dots(row, waiting)


def _moving(
    uses: Sequence[Use], nodes: Sequence[Node], u: Mapping[str, Direction], q: int
) -> dict[torch.dtype, dict[Node, Tensor]]:
    """The directions of the nodes, in the type of the uses that want them."""
    Direction.fill(u[k] for k in dict.fromkeys(k for n in nodes for k in n.roots if k in u))
    full = {node: _direction(node, u, q) for node in nodes}
    found: dict[torch.dtype, dict[Node, Tensor]] = {}
    for use in uses:
        of_type = found.setdefault(use.dtype, {})
        of_type.update((n, full[n]) for _, n in use.linear.operands if n in full)
    for dtype, own in found.items():
        other = [n for n, x in own.items() if x.dtype != dtype]
        if other:
            given = [own[n] for n in other]
            cast = kernels.alike(given, dtype)
            torch._foreach_copy_(cast, given)
            own.update(zip(other, cast, strict=True))
    return found


def _direction(node: Node, u: Mapping[str, Direction], q: int) -> Tensor:
    if node.param is not None:
        return u[node.name].full[q]
    moving = {k: u[k].full[q : q + 1] for k in node.roots if k in u}
    return directions(node, moving)[0]


def _add_dots(row: Tensor, waiting: Sequence[tuple[Use, Tensor]]) -> None:
    """Add Σ δ ⊙ y by example to ``row``, for all pairs of a use and its y."""
    kinds: dict[tuple[int, torch.dtype, bool], list[tuple[Tensor, Tensor]]] = {}
    others: dict[int, list[Tensor]] = {}
    for use, y in waiting:
        delta = use.delta
        if use.in_rows() and y.is_contiguous():
            kind = use.call.B, delta.dtype, kernels.usable([delta, y])
            kinds.setdefault(kind, []).append((y, delta))
        else:
            found = use.dots(y)
            others.setdefault(len(found), []).append(found)
    for (B, _, kernel), pairs in kinds.items():
        row[:B] += (contraction_kernel.row_dots if kernel else joined_row_dots)(pairs, B)
    for n, parts in others.items():
        row[:n] += torch.stack(parts).sum(0, dtype=torch.float64)


def joined_row_dots(pairs: Sequence[tuple[Tensor, Tensor]], B: int) -> Tensor:
    """Σ over pairs of ⟨y_i, δ_i⟩ for each example i [B], in float64. Both tensors of a pair hold
    the numbers of each of the B examples one after the other. Writes to y."""
    y, delta = [wide(y) for y, _ in pairs], [wide(d) for _, d in pairs]
    torch._foreach_mul_(y, delta)
    small = [x.view(B, -1) for x in y if x.numel() <= _SMALL]
    sums = [x.view(B, -1).sum(1) for x in y if x.numel() > _SMALL]
    if small:
        sums.append(torch.cat(small, dim=1).sum(1))
    return torch.stack(sums).sum(0, dtype=torch.float64)

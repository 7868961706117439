"""The values of a group of targets: a few parameters and a few targets at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from inrun.capture.tap import MicroBatch
from inrun.gradients.cost import TOGETHER
from inrun.gradients.records import wide
from inrun.kernels import rows_in_order
from inrun.optimizers.base import LinearMap, Scale
from inrun.scoring.clipping import Clipping
from inrun.scoring.contraction import Direction, contract
from inrun.validation.sweep import Gradients

_AT_ONCE = 2**28  # numbers of the directions of several targets
Found = tuple[Tensor, Tensor]  # ⟨u_q, g_i⟩ [Q, B] and ⟨u_q, G⟩ [Q]


def group_values(
    points: Sequence[Gradients], through: Sequence[tuple[Mapping[str, LinearMap], Clipping]],
    G: Mapping[str, Tensor], micros: Sequence[MicroBatch], parts: Sequence[Sequence[str]], Q: int,
) -> list[Found]:  # fmt: skip
    """The values of a group of Q targets, through the maps (and the clipping) of each estimator.

    One target: the whole model at once. Several: a few parameters at a time, and no more targets
    at a time than fit the memory; their gradients are formed once for all estimators.
    """

    def some(names: Sequence[str], qs: slice) -> list[Found]:
        v = _mean([p.of(names, qs) for p in points])
        if next(iter(v.values())).is_cuda:  # once, for all kernels that will read them
            v = {k: rows_in_order(x) for k, x in v.items()}
        own, found = {k: G[k] for k in names}, []
        for maps, carry in through:
            u = carry.carry({k: _direction(maps[k], x) for k, x in v.items()}, G)
            found.append(contract(u, own, micros))
        return found

    if Q == 1:
        return some(list(G), slice(0, 1))
    small, large = _fitting(next(iter(G.values())).device)
    pieces = []
    for names in _pieces(parts, G, small // Q):
        n = _targets_at_once(Q, large // sum(G[k].numel() for k in names))
        pieces.append([some(names, slice(q, min(q + n, Q))) for q in range(0, Q, n)])
    scale = points[0].scale
    found = []
    for e in range(len(through)):
        whole = [[torch.cat(x) for x in zip(*(f[e] for f in p), strict=True)] for p in pieces]
        values, sums = (sum(x[1:], x[0]) for x in zip(*whole, strict=True))
        if scale is not None:
            values, sums = values * scale[:, None], sums * scale
        found.append((values, sums))
    return found


def _direction(f: LinearMap, v: Tensor) -> Direction:
    return Direction(v, f.K) if isinstance(f, Scale) else Direction(_each(f, wide(v)))


def _fitting(device: torch.device) -> tuple[int, int]:
    """Numbers of the directions of several targets: of small parameters together, and of a large
    one. A GPU has memory for more, each piece costs the host some launches, and of a large
    parameter all examples' gradients are read again for every few targets."""
    if device.type != "cuda":
        return _AT_ONCE, _AT_ONCE
    free, memory = torch.cuda.mem_get_info(device)
    small = max(_AT_ONCE, memory // 256)
    return small, max(small, min(memory // 64, free // 16))


def _targets_at_once(Q: int, fit: int) -> int:
    """How many targets to contract at a time: at most ``fit``, in multiples of TOGETHER."""
    n = max(1, min(Q, fit))
    return n if n == Q or n < TOGETHER else n // TOGETHER * TOGETHER


def _pieces(
    parts: Sequence[Sequence[str]], G: Mapping[str, Tensor], size: int
) -> Iterator[list[str]]:
    """Joins parts up to ``size`` numbers; a larger part is a piece of its own."""
    piece: list[str] = []
    held = 0
    for names in parts:
        more = sum(G[k].numel() for k in names)
        if piece and held + more > size:
            yield piece
            piece, held = [], 0
        piece += names
        held += more
    yield piece


def _mean(points: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over the points of each gradient."""
    if len(points) == 1:
        return points[0]
    return {k: torch.stack([gradients[k] for gradients in points]).mean(0) for k in points[0]}


def _each(f: LinearMap, v: Tensor) -> Tensor:
    return torch.stack([f(x) for x in v])

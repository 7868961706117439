"""From a validation gradient to a direction for the batch gradient, through the optimizer.

For one step the update of every parameter is known as a function of the gradient (optimizers/). The
weights move on a straight path from w_∅, where momentum and decay alone would take them, to w_B,
where the batch takes them; an estimator is a linear map and the points of that path at which the
validation gradient is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from inrun import kernels
from inrun.optimizers.base import LinearMap, Rule, Scale, learning_rate
from inrun.optimizers.common import sign
from inrun.torch_compat import foreach_add_, foreach_copy_, foreach_zero_

Found = TypeVar("Found")
# Where on the path w_∅ → w_B (0 → 1) the gradient is taken; None is w_t, before the step.
POINTS: dict[str, tuple[float | None, ...]] = {
    "current": (None,),
    "midpoint": (0.5,),
    "gauss2": (0.5 - math.sqrt(3) / 6, 0.5 + math.sqrt(3) / 6),
}
DEFAULT_POINT = {"secant": "midpoint", "tangent": "current", "sgd": "current"}


@dataclass(frozen=True)
class Estimator:
    """``kind`` is secant, tangent or sgd; ``point`` where the validation gradient is taken."""

    name: str
    kind: str
    point: str

    @staticmethod
    def parse(text: str, point: str | None) -> Estimator:
        """``"secant"``, or with a point of its own: ``"secant+gauss2"``."""
        kind, _, own = text.partition("+")
        if kind not in DEFAULT_POINT:
            raise ValueError(f"estimator {text!r} is not known: use {', '.join(DEFAULT_POINT)}")
        point = own or point or DEFAULT_POINT[kind]
        if point not in POINTS:
            raise ValueError(f"point {point!r} is not known: use {', '.join(POINTS)}")
        return Estimator(text, kind, point)


@dataclass(eq=False)  # not frozen: one is made for each parameter in each step
class Moved:
    """One parameter of a step: weights, the gradient the optimizer receives, state and options."""

    p: Tensor
    g: Tensor
    rule: Rule
    state: Mapping[str, Any]
    options: Mapping[str, Any]

    @staticmethod
    def of(p: Tensor, g: Tensor, rule: Rule, state: Mapping[str, Any], options: Any) -> Moved:
        """Half precision is computed in float32: a secant of rounded numbers would be noise."""
        if p.dtype in (torch.float16, torch.bfloat16):
            state = {k: _single(x) if k != "step" else x for k, x in state.items()}
        return Moved(p, _single(g), rule, state, options)

    def at(self, x: float) -> Tensor:
        """The weights at a point of the path, 0 without the batch, 1 with it."""
        args = (self.p.detach(), self.state, self.options)
        with_batch = self.rule.update(self.g, *args) if x else 0.0
        without = self.rule.update(torch.zeros_like(self.g), *args) if x != 1 else 0.0
        w = self.rule.decay(self.options) * _single(self.p.detach())
        w = w - ((1 - x) * without + x * with_batch)
        return w.to(self.p.dtype)

    def map(self, kind: str) -> LinearMap:
        """The linear map of the secant or the tangent for this parameter."""
        make = self.rule.secant if kind == "secant" else self.rule.tangent
        return make(self.g, self.p.detach(), self.state, self.options)


def _single(x: Any) -> Any:
    half = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if half else x


class Static:
    """Buffers for shifted weights, one set per point of the path, at fixed addresses: a CUDA graph
    of the validation pass reads them there in every step."""

    def __init__(self) -> None:
        self._kept: dict[float, list[Tensor]] = {}

    def like(self, params: Sequence[Tensor], x: float) -> list[Tensor]:
        kept = self._kept.get(x, [])
        own = [(p.shape, p.dtype, p.device) for p in params]
        if [(t.shape, t.dtype, t.device) for t in kept] != own:
            kept = self._kept[x] = kernels.alike(params, params[0].dtype)
        return kept


class Path:
    """The way from the weights without the batch to those with it, for one step."""

    def __init__(self, moved: Sequence[Moved], static: Static | None = None) -> None:
        self.moved, self._static = moved, static
        self._points: dict[float, list[Tensor]] = {}  # cache: every target needs them
        self._fused = _fused(moved)
        self._rows = _rows(moved) if self._fused is None else []

    def maps(self, kind: str, x: float | None) -> list[LinearMap]:
        """The linear maps of an estimator that needs the point ``x`` next (one pass for both)."""
        if kind == "sgd":
            return _proxy(self.moved)
        if self._fused is None:
            found = [row.work(kind, None if x in self._points else x) for row in self._rows]
            if x is not None and x not in self._points:
                self._points[x] = self._kept(x, self._in_order([w for _, w in found]))
            return self._in_order([maps for maps, _ in found])
        weights, factors = kernels.shift(self._fused, x, kind, self._memory(x))
        if x is not None and weights is not None:
            self._points[x] = weights
        assert factors is not None
        return [Scale(K) for K in factors]

    def _at(self, x: float) -> list[Tensor]:
        if self._fused is None:
            return self._kept(x, self._in_order([row.at(x) for row in self._rows]))
        weights, _ = kernels.shift(self._fused, x, None, self._memory(x))
        assert weights is not None
        return weights

    def _in_order(self, by_row: Sequence[Sequence[Found]]) -> list[Found]:
        """The results of all rows in the order of the parameters."""
        places = [i for row in self._rows for i in row.places]
        found = dict(zip(places, itertools.chain(*by_row), strict=True))
        return [found[i] for i in range(len(places))]

    def _kept(self, x: float, weights: list[Tensor]) -> list[Tensor]:
        """The weights; on a GPU copied to buffers at fixed addresses."""
        kinds = {(m.p.device, m.p.dtype) for m in self.moved}
        memory = self._memory(x) if weights[0].is_cuda and len(kinds) == 1 else None
        if memory is None:
            return weights
        foreach_copy_(memory, weights)
        return memory

    def _memory(self, x: float | None) -> list[Tensor] | None:
        """Buffers for the weights at a point. None for the ends of the path, which only audits
        need."""
        if self._static is None or x in (None, 0.0, 1.0):
            return None
        return self._static.like([m.p for m in self.moved], x)

    def point(self, x: float) -> list[Tensor]:
        """The weights at a point of the path."""
        if x not in self._points:
            with torch.no_grad():
                self._points[x] = self._at(x)
        return self._points[x]

    @contextmanager
    def weights(self, x: float | None) -> Iterator[None]:
        """Context in which the model has the weights of a point of the path; restores its own.

        None is w_t: nothing changes.
        """
        if x is None:
            yield
            return
        own = [m.p.data for m in self.moved]
        try:
            for m, w in zip(self.moved, self.point(x), strict=True):
                m.p.data = w
            yield
        finally:
            for m, data in zip(self.moved, own, strict=True):
                m.p.data = data


def _fused(moved: Sequence[Moved]) -> kernels.AdamStep | None:
    """The arguments of the fused kernel for the whole model; None where it does not apply."""
    if not moved or not moved[0].p.is_cuda or moved[0].rule.fused is None:
        return None
    known: dict[int, int] = {}  # parameter groups
    groups: list[Any] = []
    for m in moved:
        if id(m.options) not in known:
            known[id(m.options)] = len(groups)
            groups.append(moved[0].rule.fused(m.options))
    if None in groups or any("exp_avg" not in m.state for m in moved):
        return None
    step = kernels.AdamStep(
        [m.p for m in moved], [m.g for m in moved], [m.state["exp_avg"] for m in moved],
        [m.state["exp_avg_sq"] for m in moved], [m.state["step"] for m in moved], groups,
        tuple(known[id(m.options)] for m in moved),
    )  # fmt: skip
    return step if step.usable() else None


def _proxy(moved: Sequence[Moved]) -> list[LinearMap]:
    """The maps of the SGD proxy: K is the learning rate. Filled group by group: a model has many
    parameters, and each fill is a launch."""
    factors = [torch.empty(m.g.shape, dtype=m.g.dtype, device=m.g.device) for m in moved]
    groups: dict[int, list[int]] = {}
    for i, m in enumerate(moved):
        groups.setdefault(id(m.options), []).append(i)
    for members in groups.values():
        options, own = moved[members[0]].options, [factors[i] for i in members]
        lr = learning_rate(options) * sign(options)
        if isinstance(lr, Tensor):
            for K in own:
                K.fill_(lr)
        else:
            foreach_zero_(own)
            foreach_add_(own, lr)
    return [Scale(K) for K in factors]


@dataclass(eq=False)
class Row:
    """Small parameters whose updates are computed together, concatenated: an elementwise update
    does not depend on where a parameter ends, and one call is cheaper than many."""

    members: list[Moved]
    places: list[int]  # among all parameters of the step

    def whole(self) -> Moved:
        """All of them as one parameter, flat; a single one as it is."""
        first = self.members[0]
        if len(self.members) == 1:
            return first

        def flat(tensors: Iterable[Tensor]) -> Tensor:
            return torch.cat([t if t.ndim == 1 else t.flatten() for t in tensors])

        state = {
            k: flat(m.state[k] for m in self.members) if _of_each(x, first.p) else x
            for k, x in first.state.items()
        }
        p, g = flat(m.p for m in self.members), flat(m.g for m in self.members)
        return Moved(p, g, first.rule, state, first.options)

    def split(self, flat: Tensor) -> list[Tensor]:
        if len(self.members) == 1:
            return [flat]
        parts = flat.split([m.p.numel() for m in self.members])
        return [
            x if m.p.ndim == 1 else x.view(m.p.shape)
            for x, m in zip(parts, self.members, strict=True)
        ]

    def at(self, x: float) -> list[Tensor]:
        """The weights of each member at a point."""
        return self.split(self.whole().at(x))

    def work(self, kind: str, x: float | None) -> tuple[list[LinearMap], list[Tensor]]:
        """The map of each member and, with ``x``, its weights there."""
        m = self.whole()
        if kind == "secant" and x is not None and m.rule.shift is not None:
            found = m.rule.shift(m.g, m.p.detach(), m.state, m.options, x)
            if found is not None:
                w, K = found
                return [Scale(k) for k in self.split(K)], self.split(w.to(m.p.dtype))
        f = m.map(kind)
        weights = [] if x is None else self.split(m.at(x))
        if len(self.members) == 1:
            return [f], weights
        K = f.K if isinstance(f, Scale) else f(torch.ones_like(m.g))  # J is diagonal
        return [Scale(k) for k in self.split(K.expand_as(m.g))], weights


def _of_each(x: Any, p: Tensor) -> bool:
    """Whether this state entry has one number per coordinate of the parameter."""
    return isinstance(x, Tensor) and x.shape == p.shape


# Numbers in a row: on a GPU launches are what costs, on a host dispatch until caches overflow.
_PIECE = {"cpu": 2**15, "cuda": 2**23}


def _rows(moved: Sequence[Moved]) -> list[Row]:
    """Small parameters of one kind in rows, large ones alone. Every member begins at a multiple of
    8 numbers: kernels want their tensors aligned."""
    rows: list[Row] = []
    begun: dict[Any, tuple[Row, int]] = {}  # by kind: its last row, numbers in it
    for i, m in enumerate(moved):
        n, limit = m.p.numel(), _PIECE.get(m.p.device.type, _PIECE["cpu"])
        kind = None if 2 * n >= limit else _kind(m)
        row, size = begun.get(kind, (None, limit))
        if kind is None:
            rows.append(Row([m], [i]))
        elif row is None or size % 8 or size + n > limit:
            rows.append(Row([m], [i]))
            begun[kind] = rows[-1], n
        else:
            row.members.append(m)
            row.places.append(i)
            begun[kind] = row, size + n
    return rows


def _kind(m: Moved) -> tuple[Any, ...] | None:
    """Parameters of equal kind can be concatenated; None: this one is computed alone."""
    if not m.rule.elementwise or m.p.ndim == 0:
        return None
    kind: list[Any] = [id(m.options), m.p.dtype, m.g.dtype, m.p.device]
    for k, x in m.state.items():
        if _of_each(x, m.p):
            kind.append((k, x.dtype))
        elif isinstance(x, Tensor) and x.numel() == 1 and x.device.type == "cpu":
            kind.append((k, float(x)))
        elif x is None or isinstance(x, (bool, int, float)):
            kind.append((k, x))
        else:  # for example a scalar on a GPU: comparing it would synchronise
            return None
    return tuple(kind)

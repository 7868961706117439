"""From a validation gradient to a direction for the batch gradient, through the optimizer.

For one step the update of every parameter is known as a function of the gradient (rules/). The
weights move on a straight path from w_∅, where momentum and decay alone would take them, to w_B,
where the batch takes them; an estimator is a linear map and the points of that path at which the
validation gradient is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun import kernels
from inrun.rules.base import LinearMap, Rule, Scale, learning_rate

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
        """The estimator's linear map for this parameter."""
        if kind == "sgd":
            lr = learning_rate(self.options)
            lr = -lr if self.options.get("maximize") else lr
            return Scale(lr * torch.ones(self.g.shape, dtype=self.g.dtype, device=self.g.device))
        make = self.rule.secant if kind == "secant" else self.rule.tangent
        return make(self.g, self.p.detach(), self.state, self.options)


def _single(x: Any) -> Any:
    half = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if half else x


class Static:
    """Memory for shifted weights that stays where it is, so that a recorded validation pass (a
    CUDA graph) finds them again: for each point of the path its own."""

    def __init__(self) -> None:
        self._kept: dict[float, list[Tensor]] = {}

    def like(self, params: Sequence[Tensor], x: float) -> list[Tensor]:
        kept = self._kept.get(x, [])
        if [(t.shape, t.dtype) for t in kept] != [(p.shape, p.dtype) for p in params]:
            kept = self._kept[x] = kernels.alike(params, params[0].dtype)
        return kept


class Path:
    """The way from the weights without the batch to those with it, for one step."""

    def __init__(self, moved: Sequence[Moved], static: Static | None = None) -> None:
        self.moved, self._static = moved, static
        self._points: dict[float, list[Tensor]] = {}  # kept: every target comes back to them
        self._fused = _fused(moved)

    def maps(self, kind: str, x: float | None) -> list[LinearMap]:
        """The linear maps of an estimator that needs the point ``x`` next (one pass for both)."""
        if self._fused is None:
            if kind == "secant" and x is not None and _quick(self.moved):
                self._points[x], made = _shift(self.moved, x)
                return [Scale(K) for K in made]
            return [m.map(kind) for m in self.moved]
        if kind == "sgd":
            return [m.map(kind) for m in self.moved]
        weights, factors = kernels.shift(self._fused, x, kind, self._memory(x))
        if x is not None and weights is not None:
            self._points[x] = weights
        assert factors is not None
        return [Scale(K) for K in factors]

    def _at(self, x: float) -> list[Tensor]:
        if self._fused is None:
            return [m.at(x) for m in self.moved]
        weights, _ = kernels.shift(self._fused, x, None, self._memory(x))
        assert weights is not None
        return weights

    def _memory(self, x: float | None) -> list[Tensor] | None:
        """For the weights at a point, the same in every step. (Its ends are for audits, now and
        then.)"""
        if self._static is None or x in (None, 0.0, 1.0):
            return None
        return self._static.like([m.p for m in self.moved], x)

    @contextmanager
    def weights(self, x: float | None) -> Iterator[None]:
        """The model with the weights of a point of the path; then its own, the very same memory.

        None is w_t: nothing changes.
        """
        if x is None:
            yield
            return
        own = [m.p.data for m in self.moved]
        try:
            if x not in self._points:
                with torch.no_grad():
                    self._points[x] = self._at(x)
            for m, w in zip(self.moved, self._points[x], strict=True):
                m.p.data = w
            yield
        finally:
            for m, data in zip(self.moved, own, strict=True):
                m.p.data = data


def _fused(moved: Sequence[Moved]) -> kernels.AdamStep | None:
    """The step as the whole-model kernel takes it, where it can."""
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


def _quick(moved: Sequence[Moved]) -> bool:
    """Has the rule a quick way, on the host, for all parameters of the step?"""
    first = moved[0]
    if first.p.is_cuda or first.rule.shift is None or first.rule.fused is None:
        return False
    groups = {id(m.options): m.options for m in moved}
    plain = all(
        (numbers := first.rule.fused(o)) is not None and not any(map(torch.is_tensor, numbers))
        for o in groups.values()
    )
    return plain and all("exp_avg" in m.state for m in moved)


_PIECE = 2**19  # numbers that are put in a row before they are shifted: dispatch is what costs


def _shift(moved: Sequence[Moved], x: float) -> tuple[list[Tensor], list[Tensor]]:
    weights: list[Tensor] = []
    factors: list[Tensor] = []
    for row in _rows(moved):
        first = row[0]
        assert first.rule.shift is not None
        state: dict[str, Any] = {"step": first.state["step"]}
        for k in ("exp_avg", "exp_avg_sq"):
            state[k] = _flat([m.state[k] for m in row])
        g, p = _flat([m.g for m in row]), _flat([m.p.detach() for m in row])
        w, K = first.rule.shift(g, p, state, first.options, x)
        sizes = [m.p.numel() for m in row]
        for m, a, b in zip(row, w.split(sizes), K.split(sizes), strict=True):
            weights.append(a.view(m.p.shape).to(m.p.dtype))
            factors.append(b.view(m.p.shape))
    return weights, factors


def _rows(moved: Sequence[Moved]) -> Iterator[list[Moved]]:
    """Neighbours of one kind, up to a size."""
    row: list[Moved] = []
    kind: Any = None
    size = 0
    for m in moved:
        own, more = (id(m.options), float(m.state["step"]), m.g.dtype, m.p.dtype), m.p.numel()
        if row and (own != kind or size + more > _PIECE):
            yield row
            row, size = [], 0
        row.append(m)
        kind, size = own, size + more
    if row:
        yield row


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].flatten() if len(tensors) == 1 else torch.cat([t.flatten() for t in tensors])

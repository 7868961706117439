"""The update map of a step: for each parameter a linear map, and the weights on the path.

For one step the update of every parameter is known as a function of the gradient (optimizers/). The
weights move on a straight path from w_∅, where momentum and decay alone would take them, to w_B,
where the batch takes them. An estimator (estimators.py) needs a linear map of each parameter and
the weights at points of that path, at which the validation gradient is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from inrun import kernels
from inrun.optimizers.base import LinearMap, Rule, Scale, WholeModel, widen
from inrun.optimizers.common import Options, Scalar, State
from inrun.scoring.estimators import MAPS
from inrun.torch_compat import foreach_add_, foreach_copy_, foreach_zero_

HALF = (torch.float16, torch.bfloat16)
Found = TypeVar("Found")


@dataclass(eq=False)  # not frozen: one is made for each parameter in each step
class ParamStep:
    """One parameter in a step: weights, the gradient the optimizer receives, state and options.

    Parameters of equal ``kind`` have the same formula with the same numbers, so that they can be
    computed concatenated. None: this one must be computed alone. Numbers of the state that are on
    a device are not compared, because reading them would wait for it: ``numbers_on_device``.
    """

    p: Tensor
    g: Tensor
    rule: Rule
    state: State
    options: Options
    kind: tuple[Any, ...] | None = None
    numbers_on_device: bool = False

    @staticmethod
    def of(p: Tensor, g: Tensor, rule: Rule, state: State, options: Options) -> ParamStep:
        """Half precision is computed in float32: a secant of rounded numbers would be noise."""
        if g.dtype in HALF:
            g = g.float()
        if p.dtype in HALF:
            _, state = widen(g, state, torch.float32)
        made = ParamStep(p, g, rule, state, options)
        if not rule.elementwise or p.ndim == 0:
            return made
        kind: list[Any] = [id(options), p.dtype, g.dtype, p.device]
        for k, x in state.items():
            if not isinstance(x, Tensor):
                if x is not None and not isinstance(x, (bool, int, float)):
                    return made
                kind.append((k, x))
            elif x.shape == p.shape:  # a number for each coordinate
                kind.append((k, x.dtype))
            elif x.numel() != 1:
                return made
            elif x.device.type == "cpu":
                kind.append((k, x.dtype, x.item()))
            else:
                made.numbers_on_device = True
                kind.append((k, x.dtype, x.device))
        made.kind = tuple(kind)
        return made

    def weights_at(self, x: float) -> Tensor:
        """The weights at a point of the path, 0 without the batch, 1 with it."""
        w = self.p.detach()
        args = (w, self.state, self.options)
        with_batch = self.rule.update(self.g, *args) if x else 0.0
        without = self.rule.update(torch.zeros_like(self.g), *args) if x != 1 else 0.0
        decayed = self.rule.decay(self.options) * (w.float() if w.dtype in HALF else w)
        return (decayed - ((1 - x) * without + x * with_batch)).to(w.dtype)

    def map(self, kind: str) -> LinearMap:
        """The linear map of this name (estimators.py), where it comes from the rule."""
        of_rule = MAPS[kind].of_rule
        if of_rule is None:
            raise ValueError(f"the map {kind!r} does not come from the optimizer's rule")
        return of_rule(self.rule, self.g, self.p.detach(), self.state, self.options)


def param_steps(optimizer: Optimizer, rule: Rule) -> list[ParamStep]:
    """All parameters that the optimizer is about to move."""
    scale = getattr(optimizer, "grad_scale", None)  # set by a GradScaler for a fused optimizer
    return [
        ParamStep.of(
            p, p.grad if scale is None else p.grad / scale, rule, optimizer.state.get(p, {}), group
        )
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]


def missed(scored: list[ParamStep], like: Tensor) -> Tensor:
    """The largest part of a parameter's update that its secant does not carry."""
    found = [
        m.rule.completeness(m.g, m.p.detach(), m.state, m.options).to(like)
        for m in scored
        if not m.rule.coordinatewise
    ]
    return torch.stack(found).max() if found else like.new_zeros(())


class PathBuffers:
    """Memory for weights on the path, one set per point, at fixed addresses: a CUDA graph of the
    validation pass reads them there in every step."""

    def __init__(self) -> None:
        self._kept: dict[float, list[Tensor]] = {}

    def like(self, params: Sequence[Tensor], x: float) -> list[Tensor]:
        kept = self._kept.get(x, [])
        own = [(p.shape, p.dtype, p.device) for p in params]
        if [(t.shape, t.dtype, t.device) for t in kept] != own:
            kept = self._kept[x] = kernels.alike(params, params[0].dtype)
        return kept


class Path:
    """The way from the weights without the batch to those with it, for one step.

    On a GPU the rule may have a kernel for the whole model; otherwise small parameters are computed
    together in packs.
    """

    def __init__(self, moved: Sequence[ParamStep], buffers: PathBuffers | None = None) -> None:
        self.moved, self._weights_memory = moved, buffers
        self._points: dict[float, list[Tensor]] = {}  # cache: every target needs them
        self._whole_model = _whole_model(moved)

    @cached_property
    def packs(self) -> list[Pack]:
        return packed(self.moved)

    def maps(self, kind: str, x: float | None) -> list[LinearMap]:
        """The linear map of each parameter. If the weights at ``x`` are needed next, they are
        computed in the same pass; None: they are not."""
        factor = MAPS[kind].factor
        if factor is not None:
            return _filled(self.moved, factor)
        x = None if x in self._points else x
        if self._whole_model is not None and kind in self._whole_model.maps:
            weights, factors = self._whole_model.weights_and_factors(x, kind, self._memory(x))
            assert factors is not None
            maps: list[LinearMap] = [Scale(K) for K in factors]
        else:
            found = [pack.maps_and_weights(kind, x) for pack in self.packs]
            maps = self._in_order([own for own, _ in found])
            weights = None
            if x is not None:
                weights = self._buffered(x, self._in_order([own for _, own in found]))
        if x is not None and weights is not None:
            self._points[x] = weights
        return maps

    def point(self, x: float) -> list[Tensor]:
        """The weights at a point of the path."""
        if x not in self._points:
            with torch.no_grad():
                self._points[x] = self._weights_at(x)
        return self._points[x]

    def _weights_at(self, x: float) -> list[Tensor]:
        if self._whole_model is None:
            found = [pack.split(pack.joined().weights_at(x)) for pack in self.packs]
            return self._buffered(x, self._in_order(found))
        weights, _ = self._whole_model.weights_and_factors(x, None, self._memory(x))
        assert weights is not None
        return weights

    def _in_order(self, by_pack: Sequence[Sequence[Found]]) -> list[Found]:
        """The results of all packs in the order of the parameters."""
        found: dict[int, Found] = {}
        for pack, results in zip(self.packs, by_pack, strict=True):
            found.update(zip(pack.places, results, strict=True))
        return [found[i] for i in range(len(found))]

    def _buffered(self, x: float, weights: list[Tensor]) -> list[Tensor]:
        """The weights; on a GPU copied to buffers at fixed addresses."""
        if not weights[0].is_cuda or len({(m.p.device, m.p.dtype) for m in self.moved}) > 1:
            return weights
        memory = self._memory(x)
        if memory is None:
            return weights
        foreach_copy_(memory, weights)
        return memory

    def _memory(self, x: float | None) -> list[Tensor] | None:
        """Buffers for the weights at a point. None for the ends of the path, which only audits
        need."""
        if self._weights_memory is None or x is None or x in (0.0, 1.0):
            return None
        return self._weights_memory.like([m.p for m in self.moved], x)

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


def _whole_model(moved: Sequence[ParamStep]) -> WholeModel | None:
    """The step of all parameters for the rule's GPU kernel; None where there is none."""
    if not moved or not moved[0].p.is_cuda or moved[0].rule.whole_model is None:
        return None
    if any(m.rule is not moved[0].rule for m in moved):  # of several optimizers
        return None
    return moved[0].rule.whole_model(
        [m.g for m in moved], [m.p for m in moved],
        [m.state for m in moved], [m.options for m in moved],
    )  # fmt: skip


def _filled(moved: Sequence[ParamStep], factor: Callable[[Options], Scalar]) -> list[LinearMap]:
    """Maps that multiply by one number per parameter group. They are filled group by group: a model
    has many parameters, and each fill is a launch."""
    factors = [torch.empty(m.g.shape, dtype=m.g.dtype, device=m.g.device) for m in moved]
    groups: dict[int, list[int]] = {}
    for i, m in enumerate(moved):
        groups.setdefault(id(m.options), []).append(i)
    for members in groups.values():
        number, own = factor(moved[members[0]].options), [factors[i] for i in members]
        if isinstance(number, Tensor):
            for K in own:
                K.fill_(number)
        else:
            foreach_zero_(own)
            foreach_add_(own, number)
    return [Scale(K) for K in factors]


@dataclass(eq=False)
class Pack:
    """Small parameters whose updates are computed together, concatenated: an elementwise update
    does not depend on where a parameter ends, and one call is cheaper than many."""

    members: list[ParamStep]
    places: list[int]  # among all parameters of the step

    def joined(self) -> ParamStep:
        """All members as one parameter, flat; a single one as it is."""
        first, members = self.members[0], self.members
        if len(members) == 1:
            return first
        state = {
            k: _flat([m.state[k] for m in members])
            if isinstance(x, Tensor) and x.shape == first.p.shape  # a number for each coordinate
            else x
            for k, x in first.state.items()
        }
        p, g = _flat([m.p for m in members]), _flat([m.g for m in members])
        return ParamStep(p, g, first.rule, state, first.options)

    def split(self, flat: Tensor) -> list[Tensor]:
        """The part of each member, in its shape."""
        if len(self.members) == 1:
            return [flat]
        parts = flat.split([m.p.numel() for m in self.members])
        return [
            x if m.p.ndim == 1 else x.view(m.p.shape)
            for x, m in zip(parts, self.members, strict=True)
        ]

    def maps_and_weights(
        self, kind: str, x: float | None
    ) -> tuple[Sequence[LinearMap], list[Tensor]]:
        """The map of each member and, with ``x``, its weights there."""
        m = self.joined()
        one_pass = m.rule.one_pass.get(kind) if x is not None else None
        if x is not None and one_pass is not None:
            found = one_pass(m.g, m.p.detach(), m.state, m.options, x)
            if found is not None:
                K, w = found
                return [Scale(k) for k in self.split(K)], self.split(w.to(m.p.dtype))
        f = m.map(kind)
        weights = [] if x is None else self.split(m.weights_at(x))
        if len(self.members) == 1:
            return [f], weights
        K = f.K if isinstance(f, Scale) else f(torch.ones_like(m.g))  # the map is diagonal
        return [Scale(k) for k in self.split(K.expand_as(m.g))], weights


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t if t.ndim == 1 else t.flatten() for t in tensors])


# Numbers in a pack: on a GPU launches are what costs, on a host dispatch until caches overflow.
PACK_SIZE = {"cpu": 2**15, "cuda": 2**23}


def packed(moved: Sequence[ParamStep]) -> list[Pack]:
    """Small parameters of one kind in packs, large ones alone. Every member begins at a multiple of
    8 numbers: kernels want their tensors aligned."""
    packs: list[Pack] = []
    begun: dict[Any, tuple[Pack, int]] = {}  # by kind: its last pack, numbers in it
    for i, m in enumerate(moved):
        n, limit = m.p.numel(), PACK_SIZE.get(m.p.device.type, PACK_SIZE["cpu"])
        kind = None if 2 * n >= limit or m.numbers_on_device else m.kind
        pack, size = begun.get(kind, (None, limit))
        if kind is None:
            packs.append(Pack([m], [i]))
        elif pack is None or size % 8 or size + n > limit:
            packs.append(Pack([m], [i]))
            begun[kind] = packs[-1], n
        else:
            pack.members.append(m)
            pack.places.append(i)
            begun[kind] = pack, size + n
    return packs

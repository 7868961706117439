"""The update map of a step: for each parameter a linear map, and the weights on the path.

For one step the update of every parameter is known as a function of the gradient (optimizers/). The
weights move on a straight path from w_∅, where momentum and decay alone would take them, to w_B,
where the batch takes them. An estimator (estimators.py) needs a linear map of each parameter and
the weights at points of that path, at which the validation gradient is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Literal, TypeVar

import torch
from torch import Tensor

from inrun import kernels
from inrun.optimizers.base import LinearMap, Scale, WholeModel
from inrun.optimizers.common import Options, Scalar
from inrun.ranks.shards import placed
from inrun.scoring.estimators import MAPS, Place
from inrun.scoring.moved import Moved, ParamStep
from inrun.scoring.packs import Pack, all_packs, flat_gradients
from inrun.scoring.samples import SAMPLED, table
from inrun.torch_compat import foreach_add_, foreach_copy_, foreach_zero_

Found = TypeVar("Found")


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
        self._kept: dict[Place, list[Tensor]] = {}

    def like(self, params: Sequence[Tensor], x: Place) -> list[Tensor]:
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

    def __init__(
        self, moved: Moved | Sequence[ParamStep], buffers: PathBuffers | None = None
    ) -> None:
        self._kept = moved if isinstance(moved, Moved) else Moved(moved)
        self.moved, self._weights_memory = self._kept.steps, buffers
        self._points: dict[Place, list[Tensor]] = {}  # cache: every target needs them
        self._joined: list[ParamStep] | None = None
        self._whole_model = self._at_once()

    def _at_once(self) -> WholeModel | None:
        """The step of all parameters for the rule's GPU kernel; None where there is none."""
        kept = self._kept.once("whole model", partial(_whole_model, self.moved))
        return None if kept is None else kept.again([m.g for m in self.moved])

    def finite(self, places: Sequence[int]) -> Tensor | None:
        """Whether the gradients of these parameters are finite, as a flag on the device, if a
        kernel has looked at them on its way; else None."""
        bad = None if self._whole_model is None else self._whole_model.bad
        if bad is None:
            return None
        every = len(places) == len(self.moved)
        return ~(bad if every else bad[kernels.integers(tuple(places), bad.device)]).any()

    def sampled(self) -> Tensor | None:
        """The weights now, without and with the batch at sampled entries of each parameter
        [3, parameters, SAMPLED], if a kernel can read them."""
        if self._whole_model is None:
            return None
        where = self._kept.once("where entries are", partial(_entries, self.moved))
        return None if where is None else self._whole_model.sampled(where, SAMPLED)

    @property
    def packs(self) -> list[Pack]:
        return all_packs(self._kept)

    @property
    def on_host(self) -> bool:
        return self._kept.on_host

    def joined(self) -> Iterable[ParamStep]:
        """Each pack as one parameter. On a host they are kept for the step: the copies are small,
        and maps and prediction read them."""
        if not self.on_host:
            return (pack.joined() for pack in self.packs)
        if self._joined is None:
            own = zip(self.packs, flat_gradients(self._kept), strict=True)
            self._joined = [pack.joined(g) for pack, g in own]
        return self._joined

    def maps(self, kind: str, x: Place) -> list[LinearMap]:
        """The linear map of each parameter. If the weights at ``x`` are needed next, they are
        computed in the same pass; None: they are not."""
        factor = MAPS[kind].factor
        if factor is not None:
            return _filled(self.moved, factor)
        x = None if x in self._points or x == "halfway" else x
        if self._whole_model is not None and kind in self._whole_model.maps:
            weights, factors = self._whole_model.weights_and_factors(x, kind, self._memory(x))
            assert factors is not None
            maps: list[LinearMap] = [Scale(K) for K in factors]
        else:
            packs, memory = zip(self.packs, self.joined(), strict=True), self._kept_in_packs(x)
            found = [pack.maps_and_weights(m, kind, x, memory) for pack, m in packs]
            maps = self._in_order([own for own, _ in found])
            weights = None
            if x is not None:
                weights = self._buffered(x, self._in_order([own for _, own in found]))
        if x is not None and weights is not None:
            self._points[x] = weights
        return maps

    def point(self, x: float | Literal["halfway"]) -> list[Tensor]:
        """The weights at a point of the path, or halfway between those before and after the
        step."""
        if x not in self._points:
            with torch.no_grad():
                self._points[x] = self._weights_at(x)
        return self._points[x]

    def forget(self, points: Iterable[Place]) -> None:
        """Free the weights at these points."""
        for x in points:
            self._points.pop(x, None)

    def _weights_at(self, x: float | Literal["halfway"]) -> list[Tensor]:
        if x == "halfway":
            ends = zip(self.moved, self.point(1.0), strict=True)
            return self._buffered(x, [torch.lerp(m.p.detach(), w, 0.5) for m, w in ends])
        if self._whole_model is None:
            packs, memory = zip(self.packs, self.joined(), strict=True), self._kept_in_packs(x)
            found = [pack.split(m.weights_at(x), memory) for pack, m in packs]
            return self._buffered(x, self._in_order(found))
        weights, _ = self._whole_model.weights_and_factors(x, None, self._memory(x))
        assert weights is not None
        return weights

    def _in_order(self, by_pack: Sequence[Sequence[Found]]) -> list[Found]:
        """The results of all packs in the order of the parameters."""
        found = list(chain.from_iterable(by_pack))
        order = self._kept.once("order", partial(_order, self.packs))
        return found if order is None else [found[i] for i in order]

    def _buffered(self, x: Place, weights: list[Tensor]) -> list[Tensor]:
        """The weights; on a GPU copied to buffers at fixed addresses."""
        if not weights[0].is_cuda or len({(m.p.device, m.p.dtype) for m in self.moved}) > 1:
            return weights
        memory = self._memory(x)
        if memory is None:
            return weights
        foreach_copy_(memory, weights)
        return memory

    def _memory(self, x: Place) -> list[Tensor] | None:
        """Buffers for the weights at a point. None for the ends of the path, which only audits
        need."""
        if self._weights_memory is None or x is None or x in (0.0, 1.0):
            return None
        return self._weights_memory.like([m.p for m in self.moved], x)

    def _kept_in_packs(self, x: Place) -> Place:
        """The point, if packs have memory for the weights there: on a host."""
        kept = self._weights_memory is not None and self.on_host and x not in (0.0, 1.0)
        return x if kept else None

    @contextmanager
    def weights(self, x: Place) -> Iterator[None]:
        """Context in which the model has the weights of a point of the path; restores its own.

        None is w_t: nothing changes.
        """
        if x is None:
            yield
            return
        with placed([m.p for m in self.moved], self.point(x)):
            yield


def _order(packs: Sequence[Pack]) -> list[int] | None:
    """Where each parameter is among the members of all packs; None: in the same order."""
    places = [i for pack in packs for i in pack.places]
    order = sorted(range(len(places)), key=places.__getitem__)
    return None if places == sorted(places) else order


def _entries(moved: Sequence[ParamStep]) -> Tensor | None:
    """Where the sampled entries are; None of parameters that are empty or not in float32."""
    sizes = tuple([m.p.numel() for m in moved])
    if not all(sizes) or any(m.p.dtype != torch.float32 for m in moved):
        return None
    return table(sizes, moved[0].p.device)


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

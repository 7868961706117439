"""Small parameters whose updates are computed together, concatenated: an elementwise update does
not depend on where a parameter ends, and one call is cheaper than many.

Packs last as long as ``Moved`` does, for as many steps as the same tensors are at the same places.
What does not change from step to step is kept with them: views of the weights and of the state,
and, on a host, memory for the weights on the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from inrun.optimizers.base import Factors, LinearMap, Scale
from inrun.scoring.estimators import Place
from inrun.scoring.moved import Moved, ParamStep
from inrun.scoring.samples import Pieces
from inrun.torch_compat import flatten_dense_tensors, unflatten_dense_tensors
from inrun.validation.identity import same


@dataclass(eq=False)
class Pack:
    """Parameters that are computed as one. ``lasting``: their tensors stay as long as the pack."""

    members: list[ParamStep]
    places: list[int]  # among all parameters of the step
    lasting: bool = False
    _views: dict[str | None, list[Tensor]] = field(default_factory=dict)  # flat; None: weights
    _memory: dict[Any, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)  # by point

    @property
    def elementwise(self) -> bool:
        return self.members[0].rule.elementwise

    def joined(self, g: Tensor | None = None) -> ParamStep:
        """All members as one parameter, flat; a single one as it is. ``g``: their gradients, where
        these are joined already."""
        first = self.members[0]
        if len(self.members) == 1:
            return first
        state = {
            k: self._flat(k)
            if isinstance(x, Tensor) and x.shape == first.p.shape  # a number for each coordinate
            else x
            for k, x in first.state.items()
        }
        g = self.gradient() if g is None else g
        return ParamStep(self._flat(None), g, first.rule, state, first.options)

    def gradient(self) -> Tensor:
        """The gradients of all members, flat; of a single one as it is."""
        own = [m.g for m in self.members]
        return own[0] if len(own) == 1 else flatten_dense_tensors(own)

    def _flat(self, name: str | None) -> Tensor:
        """Their weights (None) or what the state has under this name. Views last as long as the
        members have the same tensors at the same addresses, and so does a lasting pack."""
        views = self._views.get(name)
        if views is None:
            own = [m.p.detach() if name is None else m.state[name] for m in self.members]
            if not self.lasting or not all(map(Tensor.is_contiguous, own)):
                return flatten_dense_tensors(own)
            views = self._views[name] = [t.detach().view(-1) for t in own]
        return torch.cat(views)

    def split(self, flat: Tensor, point: Place | Literal["directions"] = None) -> list[Tensor]:
        """The part of each member, in its shape. ``point``: in memory that is used again, for each
        step's weights at this point of the path, or for directions of one contraction."""
        if len(self.members) == 1:
            return [flat]
        if point is None or not self.lasting:
            return list(unflatten_dense_tensors(flat, [m.p for m in self.members]))
        kept = self._memory.get(point)
        if kept is None or kept[0].dtype != flat.dtype:
            own = torch.empty_like(flat)
            parts = list(unflatten_dense_tensors(own, [m.p for m in self.members]))
            kept = self._memory[point] = own, parts
        kept[0].copy_(flat)
        return kept[1]

    def maps_and_weights(
        self, m: ParamStep, kind: str, x: float | None, memory: Place = None
    ) -> tuple[Sequence[LinearMap], list[Tensor]]:
        """The map of each member and, with ``x``, its weights there; ``m`` is the pack joined.
        ``memory``: the point, if they are put into memory that is used again."""
        one_pass = m.rule.one_pass.get(kind) if x is not None else None
        if x is not None and one_pass is not None:
            found = one_pass(m.g, m.p.detach(), m.state, m.options, x)
            if found is not None:
                K, w = found
                return self._scales(K, m.g), self.split(w.to(m.p.dtype), memory)
        f = m.map(kind)
        weights = [] if x is None else self.split(m.weights_at(x), memory)
        if len(self.members) == 1:
            return [f], weights
        K = f.K if isinstance(f, Scale) else f(torch.ones_like(m.g))  # the map is diagonal
        return self._scales(K.expand_as(m.g), m.g), weights

    def _scales(self, K: Tensor, g: Tensor) -> Sequence[Scale]:
        """The maps of the members, from the factors and gradients of all."""
        if len(self.members) == 1:
            return [Scale(K)]
        if not g.is_cpu:  # the flat gradient would take memory, and nobody asks for it
            return Factors(K, [m.g for m in self.members]).scales()
        return Factors(K, [m.g for m in self.members], g, self._place).scales()

    def _place(self, flat: Tensor) -> list[Tensor]:
        return self.split(flat, "directions")


# Numbers in a pack: on a GPU launches are what costs, on a host dispatch until caches overflow.
PACK_SIZE = {"cpu": 2**15, "cuda": 2**23}


def packed(moved: Sequence[ParamStep], sizes: Sequence[int] | None = None) -> list[Pack]:
    """Small parameters of one kind in packs, large ones alone. Every member begins at a multiple of
    8 numbers: kernels want their tensors aligned. ``sizes``: of whole parameters, where a rank has
    shards of them."""
    packs: list[Pack] = []
    begun: dict[Any, tuple[Pack, int]] = {}  # by kind: its last pack, numbers in it
    for i, m in enumerate(moved):
        n = m.p.numel() if sizes is None else sizes[i]
        limit = PACK_SIZE.get(m.p.device.type, PACK_SIZE["cpu"])
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


def all_packs(moved: Moved) -> list[Pack]:
    """The packs of all parameters that move, kept as long as these are."""

    def make() -> list[Pack]:
        found = packed(moved.steps)
        for pack in found:
            pack.lasting = moved.lasting
        return found

    return moved.once("packs", make)


def flat_gradients(moved: Moved) -> list[Tensor]:
    """The gradients of each pack in this step, flat."""
    return moved.in_step("gradients", lambda: [pack.gradient() for pack in all_packs(moved)])


def in_packs(moved: Moved, some: Sequence[ParamStep]) -> Pieces:
    """Where some of the parameters are among the flat ones of all packs."""
    where: dict[int, tuple[int, int, int]] = {}
    for i, pack in enumerate(all_packs(moved)):
        start = 0
        for m in pack.members:
            where[id(m)] = i, start, m.p.numel()
            start += m.p.numel()
    return Pieces([where[id(m)] for m in some])


def sampled_gradients(
    moved: Moved, places: Sequence[int], grads: Sequence[Tensor]
) -> Tensor | None:
    """The sampled entries of these gradients, of the parameters at these places, from the flat
    ones; None where they are not what is in there."""
    steps = [moved.steps[i] for i in places]
    if not same([m.g for m in steps], grads) or not all(map(Tensor.numel, grads)):
        return None
    pieces = moved.once(("in packs", *places), lambda: in_packs(moved, steps))
    return pieces.read(dict(enumerate(flat_gradients(moved))))

"""Gradients of a few examples of a step, for the curvature: formed, or as products of a and δ.

A sample has n gradients g [O, I] of single examples and answers three questions, each a mean over
the examples: g gᵀ, gᵀ g, and the squares of U_Sᵀ g U_A. For a product with few tokens none of them
needs g itself. A bias is one more column (or row) of g. Of several ranks the mean is over all
their samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.curvature.places import Place
from inrun.gradients.nodes import Node, pull_back
from inrun.gradients.records import Pair, Record, in_one_type, wide

Uses = Sequence[tuple[Node, Record]]


class Sample(Protocol):
    """Gradients of single examples by one parameter, with its bias."""

    def left(self) -> Tensor:
        """E[g gᵀ] [O, O]."""

    def right(self) -> Tensor:
        """E[gᵀ g] [I, I]."""

    def squares(self, U_S: Tensor | None, U_A: Tensor | None) -> Tensor:
        """E[(U_Sᵀ g U_A)²] [O, I]; None is the basis of the coordinates. Of a vector: [numbers]."""

    def scaled(self, left: Tensor, right: Tensor | None) -> Sample:
        """Of diag(left) g diag(right); of a vector: left ⊙ g."""


@dataclass(eq=False)
class Formed:
    """The gradients themselves."""

    g: Tensor  # [n, *W]

    @property
    def _matrices(self) -> Tensor:
        return self.g.flatten(2) if self.g.ndim > 3 else self.g

    def left(self) -> Tensor:
        g = self._matrices
        flat = g.transpose(0, 1).reshape(g.shape[1], -1)
        return flat @ flat.mT / len(g)

    def right(self) -> Tensor:
        g = self._matrices
        flat = g.reshape(-1, g.shape[2])
        return flat.mT @ flat / len(g)

    def squares(self, U_S: Tensor | None, U_A: Tensor | None) -> Tensor:
        g = self.g if self.g.ndim < 3 else self._matrices
        if U_S is not None:
            g = U_S.mT @ g
        if U_A is not None:
            g = g @ U_A
        return g.square().mean(0)

    def scaled(self, left: Tensor, right: Tensor | None) -> Formed:
        if right is None:
            return Formed(self.g * left)
        return Formed(self._matrices * left[:, None] * right)


@dataclass(eq=False)
class Product:
    """g_i = Σ_t δ_it ⊗ a_it, not formed."""

    a: Tensor  # [n, T, I]
    delta: Tensor  # [n, T, O]

    def left(self) -> Tensor:
        return _gram(self.delta, self.a)

    def right(self) -> Tensor:
        return _gram(self.a, self.delta)

    def squares(self, U_S: Tensor | None, U_A: Tensor | None) -> Tensor:
        delta = self.delta if U_S is None else self.delta @ U_S
        a = self.a if U_A is None else self.a @ U_A
        if a.shape[1] == 1:
            return delta[:, 0].square().mT @ a[:, 0].square() / len(a)
        return (delta.mT @ a).square().mean(0)

    def scaled(self, left: Tensor, right: Tensor | None) -> Product:
        assert right is not None
        return Product(self.a * right, self.delta * left)


@dataclass(eq=False)
class Shared:
    """What all ranks know together. Each asks the same questions in the same order.

    Args:
        own: the gradients of this rank's examples.
        total: the sum over ranks.
        share: of this rank in the mean.
    """

    own: Sample
    total: Callable[[Tensor], Tensor]
    share: Tensor

    def left(self) -> Tensor:
        return self.total(self.own.left() * self.share)

    def right(self) -> Tensor:
        return self.total(self.own.right() * self.share)

    def squares(self, U_S: Tensor | None, U_A: Tensor | None) -> Tensor:
        return self.total(self.own.squares(U_S, U_A) * self.share)

    def scaled(self, left: Tensor, right: Tensor | None) -> Shared:
        return replace(self, own=self.own.scaled(left, right))


def _gram(x: Tensor, other: Tensor) -> Tensor:
    """E[Σ_ts x_t (other_t · other_s) x_sᵀ]."""
    if x.shape[1] == 1:
        flat = x[:, 0] * other[:, 0].norm(dim=1, keepdim=True)
        return flat.mT @ flat / len(x)
    weighted = other @ other.mT @ x  # [n, T, ·]
    return x.flatten(0, 1).mT @ weighted.flatten(0, 1) / len(x)


def samples(
    micro: MicroBatch, places: Mapping[str, Place], params: Mapping[str, Tensor], first: int,
    n: int, factor: Any,
) -> Iterator[tuple[str, Sample]]:  # fmt: skip
    """The gradients, times ``factor`` (a number, or one for each), of examples ``first`` to
    ``first + n`` of a micro-batch, by the name of the place; 0 of places that it did not meet, and
    of one example if n is 0."""
    met: dict[str, list[tuple[Node, Record]]] = {}
    for node, records in micro.by_example():
        for root in node.roots & params.keys():
            met.setdefault(root, []).extend((node, r) for r in records)
    for name, place in places.items():
        uses = [met.get(k, []) for k in place.names] if n else [[] for _ in place.names]
        yield name, _sample(place, uses, params, first, max(n, 1), factor)


def _sample(
    place: Place, uses: Sequence[Uses], params: Mapping[str, Tensor], first: int, n: int,
    factor: Any,
) -> Sample:  # fmt: skip
    weight = params[place.name]
    if all(len(own) == 1 for own in uses):
        (node, record) = uses[0][0]
        if node.param is not None and isinstance(record, Pair):
            _, T, I = record.a.shape  # noqa: E741
            O = record.delta.shape[-1]  # noqa: E741
            if _unformed(T, O, I) and not record.a.is_complex():
                return _product(place, record.cut(first, first + n), weight, factor)
    rows = [
        _rows(k, own, params[k], first, n, factor) for k, own in zip(place.names, uses, strict=True)
    ]
    return Formed(joined(place, rows, weight))


def _unformed(T: int, O: int, I: int) -> bool:  # noqa: E741
    """Do the three questions take less arithmetic if the gradients are not formed? Multiplications
    of one example with T tokens: squares, left and right."""
    product = (
        T * (O * O + I * I + O * I) + T * (T * I + T * O + O * O) + T * (T * O + T * I + I * I)
    )
    return product < T * O * I + 2 * O * I * (O + I)


def _product(place: Place, record: Record, weight: Tensor, factor: Any) -> Product:
    record = record.to(weight.device)
    assert isinstance(record, Pair)
    a, delta = (wide(x) for x in in_one_type(record.a, record.delta))
    a, delta = a.to(_type(weight)), _times(delta.to(_type(weight)), factor)
    if place.bias is not None:
        a = torch.nn.functional.pad(a, (0, 1), value=1.0)
    return Product(delta, a) if record.transposed else Product(a, delta)


def _rows(name: str, uses: Uses, param: Tensor, first: int, n: int, factor: Any) -> Tensor:
    """The gradients by one parameter [n, *W]."""
    total: Tensor | None = None
    for node, record in uses:
        rows = record.to(param.device).some_groups(first, [1] * n)
        own = wide(pull_back(node, rows)[name]).to(_type(param))
        total = own if total is None else total + own
    if total is None:
        return torch.zeros((n, *param.shape), dtype=_type(param), device=param.device)
    return _times(total, factor)


def _times(x: Tensor, factor: Any) -> Tensor:
    """x [n, …] times a number, or times one for each [n]."""
    if isinstance(factor, Tensor) and factor.ndim:
        factor = factor.to(x).view(-1, *[1] * (x.ndim - 1))
    return x * factor


def joined(place: Place, rows: Sequence[Tensor | None], weight: Tensor) -> Tensor:
    """Rows [n, *W] of a weight and [n, O] of its bias as one matrix each, [n, O, I + 1] (or
    [n, I + 1, O]). None stands for zeros."""
    n, like = next((len(x), x) for x in rows if x is not None)
    own = like.new_zeros((n, *weight.shape)) if rows[0] is None else rows[0]
    if place.bias is None:
        return own
    matrix, (bias,) = own.flatten(2), rows[1:]
    if bias is None:
        bias = like.new_zeros((n, matrix.shape[2 if place.transposed else 1]))
    along = 1 if place.transposed else 2
    return torch.cat([matrix, bias.unsqueeze(along)], dim=along)


def apart(place: Place, x: Tensor, weight: Tensor) -> list[Tensor]:
    """``joined`` turned around: [n, *W] and [n, O]."""
    if place.bias is None:
        return [x.reshape(len(x), *weight.shape)]
    along = 1 if place.transposed else 2
    matrix = x.narrow(along, 0, x.shape[along] - 1)
    return [matrix.reshape(len(x), *weight.shape), x.select(along, -1)]


def _type(param: Tensor) -> torch.dtype:
    return wide(param.detach()[:0] if param.ndim else param.detach()).dtype

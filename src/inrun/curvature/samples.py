"""Gradients of a few examples of a step, for the curvature: formed, or as products of a and δ.

A sample has n gradients g [O, I] of single examples and answers three questions, each a mean over
the examples: g gᵀ, gᵀ g, and the squares of U_Sᵀ g U_A. For a product with few tokens none of them
needs g itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.gradients.nodes import Node, pull_back
from inrun.gradients.records import Pair, Record, in_one_type, wide


class Sample(Protocol):
    """Gradients of single examples by one parameter."""

    def left(self) -> Tensor:
        """E[g gᵀ] [O, O]."""

    def right(self) -> Tensor:
        """E[gᵀ g] [I, I]."""

    def squares(self, U_S: Tensor | None, U_A: Tensor | None) -> Tensor:
        """E[(U_Sᵀ g U_A)²] [O, I]; None is the basis of the coordinates. Of a vector: [numbers]."""


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


def _gram(x: Tensor, other: Tensor) -> Tensor:
    """E[Σ_ts x_t (other_t · other_s) x_sᵀ]."""
    if x.shape[1] == 1:
        flat = x[:, 0] * other[:, 0].norm(dim=1, keepdim=True)
        return flat.mT @ flat / len(x)
    weighted = other @ other.mT @ x  # [n, T, ·]
    return x.flatten(0, 1).mT @ weighted.flatten(0, 1) / len(x)


def samples(
    micro: MicroBatch, params: Mapping[str, Tensor], first: int, n: int, factor: float
) -> Iterator[tuple[str, Sample]]:
    """The gradients, times ``factor``, of examples ``first`` to ``first + n`` of a micro-batch, by
    parameter; of parameters that it did not meet, nothing."""
    met: dict[str, list[tuple[Node, Record]]] = {}
    for node, records in micro.by_example():
        for root in node.roots & params.keys():
            met.setdefault(root, []).extend((node, r) for r in records)
    for name, uses in met.items():
        if uses:
            yield name, _sample(name, uses, params[name], first, n, factor)


def _sample(
    name: str, uses: Sequence[tuple[Node, Record]], param: Tensor, first: int, n: int, factor: float
) -> Sample:
    (node, record), *more = uses
    if not more and node.param is not None and isinstance(record, Pair):
        _, T, I = record.a.shape  # noqa: E741
        O = record.delta.shape[-1]  # noqa: E741
        if min(I, O) > 2 * T and not record.a.is_complex():
            part = record.cut(first, first + n).to(param.device)
            assert isinstance(part, Pair)
            a, delta = (wide(x) for x in in_one_type(part.a, part.delta))
            a, delta = a.to(_type(param)), delta.to(_type(param)) * factor
            return Product(delta, a) if part.transposed else Product(a, delta)
    total: Tensor | None = None
    for node, record in uses:
        rows = record.to(param.device).some_groups(first, [1] * n)
        own = wide(pull_back(node, rows)[name]).to(_type(param))
        total = own if total is None else total + own
    assert total is not None
    return Formed(total * factor)


def _type(param: Tensor) -> torch.dtype:
    return wide(param.detach()[:0] if param.ndim else param.detach()).dtype

"""Element-wise operations with a broadcast operand, and concatenation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from inrun.gradients.arguments import present
from inrun.gradients.call import Affine, Call, reduce_to, register_op, replay, replay_leaf, together
from inrun.gradients.records import Aligned, Record, Replay
from inrun.tensors.layout import Spread


@register_op("add", "sub", "rsub")
def add(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """x ± alpha·W."""
    alpha = call.value(2, "alpha", 1)
    signs = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[call.name]
    for position, keyword, sign in ((0, "input", signs[0]), (1, "other", signs[1])):
        leaf = call.at(position, keyword)
        if leaf is not None and call.nodes[leaf] is not None:
            full = delta if sign == 1 else delta * _conjugate(sign)
            yield call.nodes[leaf], reduce_to(call, full, leaf) or _expanded(call, leaf, full)


def _expanded(call: Call, leaf: int, full: Tensor) -> Record:
    """An operand that spans merged examples: its gradient is δ itself, in their layout."""
    return Replay(
        apply=lambda W: W.to(full.dtype).expand(full.shape), split=call.split,
        delta=call.split(full), value=call.leaves[leaf].contiguous(), linear=True,
    )  # fmt: skip


def _conjugate(x: Any) -> Any:
    """A factor, as its product's derivative has it: of complex numbers the conjugate."""
    if isinstance(x, Tensor):
        return x.conj() if x.is_complex() else x
    return x.conjugate() if isinstance(x, complex) else x


def _factor(call: Call) -> tuple[int, ...]:
    """The parametric factor, of two tensors."""
    found = together((0, "input"), (1, "other"))(call)
    return present(call.nodes) if len(found) == 2 and len(present(call.nodes)) == 1 else ()


def _scaled(call: Call) -> Affine | None:
    """A vector times the last dimension of the other factor."""
    first, second = call.at(0, "input"), call.at(1, "other")
    if first is None or second is None:
        return None
    weight, x = (first, second) if call.nodes[first] is not None else (second, first)
    shape = call.leaves[x].shape
    if len(shape) < 2 or call.leaves[weight].shape != shape[-1:]:
        return None
    return Affine(x, weight, matrix=False)


def _stacked(call: Call) -> Tensor:
    """Several products of two tensors at once [n, …]: dimensions are aligned from the last one."""
    factors = call.value(0, "input"), call.value(1, "other")
    rank = max(t.ndim for t in factors)
    a, b = (t.view(len(t), *[1] * (rank - t.ndim), *t.shape[1:]) for t in factors)
    return a * b


@register_op("mul", "multiply", linear=_factor, stacked=_stacked, affine=_scaled)
def mul(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """x · W: the gradient of one factor is δ times the other."""
    first, second = call.at(0, "input"), call.at(1, "other")
    assert first is not None and second is not None
    for leaf, other in ((first, second), (second, first)):
        if call.nodes[leaf] is not None:
            full = delta * _conjugate(call.leaves[other])
            yield call.nodes[leaf], reduce_to(call, full, leaf) or replay_leaf(call, leaf, delta)


@register_op("cat", "concat", "concatenate")
def cat(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """Each operand's gradient is its part of δ."""
    parts = call.value(0, "tensors")
    places = call.places(0, "tensors")
    dim = call.value(1, "dim", 0) % delta.ndim
    layout = call.layout
    if isinstance(layout, Spread) or (layout.outer, layout.inner) != (1, 1):
        yield from replay(call, delta)
        return
    start = 0
    for leaf, part in zip(places, parts, strict=True):
        size = part.shape[dim]
        if call.nodes[leaf] is not None:
            own = delta.narrow(dim, start, size).movedim(layout.dim, 0)
            own = own if part.is_complex() or not own.is_complex() else own.real
            yield call.nodes[leaf], Aligned(own.contiguous(), layout.dim)
        start += size

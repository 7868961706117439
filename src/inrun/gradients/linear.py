"""y = x Wᵀ + b in its spellings: F.linear, addmm (Hugging Face's Conv1D), matmul."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.gradients.call import (
    Affine,
    Call,
    Sizes,
    reduce_to,
    register_op,
    replay,
    replay_leaf,
    together,
)
from inrun.gradients.records import Dense, Pair, Record, wide_type


def _weight(call: Call, x: tuple[int, str], node: Any, d: Tensor, transposed: bool) -> Any:
    """``d`` is δ as [B, T, O]."""
    given = call.value(*x)
    a = given[None, None] if given.ndim == 1 else call.tokens(call.rows(*x))
    if a.dtype != d.dtype:  # under autocast the operation saw a in δ's type
        a = a.to(d.dtype)
    pair = Pair(a, d, transposed)
    if call.form != "materialise" or call.positions is not None:
        return node, pair  # positions are added up by owner first (owned.py)
    return node, pair.materialised(call.blocks)


def padded(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, missing: int) -> Tensor:
    """F.linear with ``missing`` more outputs, which are nothing but zeros. Its rule takes the δ of
    this longer output, too."""
    if bias is not None:
        bias = F.pad(bias, (0, missing))
    return F.linear(input, F.pad(weight, (0, 0, 0, missing)), bias)


def _unscaled(call: Call) -> bool:
    """Not ``addmm`` with ``alpha`` or ``beta``."""
    return call.name != "addmm" or call.value(3, "beta", 1) == 1 == call.value(4, "alpha", 1)


def _sizes(x: tuple[int, str], W: tuple[int, str]) -> Any:
    """Numbers kept per example: T(I + O) in ghost form, I·O materialised."""

    def sizes(call: Call) -> Sizes | None:
        if not call.batched(*x) or call.value(*W).ndim != 2 or not _unscaled(call):
            return None
        inputs, weight = call.value(*x), call.value(*W)
        n_in, n_out = inputs.shape[-1], weight.numel() // inputs.shape[-1]
        T = inputs.numel() // (call.B * n_in)
        return Sizes(T * (n_in + n_out), n_in * n_out, (T, n_in, n_out))

    return sizes


def _of_rows(x: tuple[int, str], *arguments: tuple[int, str]) -> Any:
    """The leaves of the arguments, unless x is the features of one example alone."""
    leaves = together(*arguments)
    return lambda call: leaves(call) if call.value(*x).ndim > 1 else ()


def _stacked(
    x: tuple[int, str], W: tuple[int, str], b: tuple[int, str] | None, transposed: bool
) -> Callable[[Call], Tensor]:
    """Several products x W + b at once: x [n, …, I], W [n, I, O] (``transposed``) or [n, O, I],
    b [n, O]."""

    def run(call: Call) -> Tensor:
        a, weight, bias = call.value(*x), call.value(*W), None if b is None else call.value(*b)
        rows = a.flatten(1, -2)
        weight = weight if transposed else weight.mT
        if bias is None:
            y = torch.bmm(rows, weight)
        else:
            y = torch.baddbmm(bias.unsqueeze(1), rows, weight)
        return y.view(*a.shape[:-1], y.shape[-1])

    return run


def _affine(
    x: tuple[int, str], W: tuple[int, str], b: tuple[int, str] | None, transposed: bool
) -> Callable[[Call], Affine | None]:
    def found(call: Call) -> Affine | None:
        inputs, weight, bias = call.at(*x), call.at(*W), None if b is None else call.at(*b)
        if inputs is None or weight is None or call.spec.nested is not None:
            return None
        if bias is not None and call.leaves[bias] is None:
            bias = None
        outputs = call.leaves[weight].shape[1 if transposed else 0]
        if bias is not None and call.leaves[bias].shape != (outputs,):  # broadcast
            return None
        return Affine(inputs, weight, bias, transposed)

    return found


@register_op(
    "linear", weight=(1, "weight"), vectors=((2, "bias"),),
    sizes=_sizes((0, "input"), (1, "weight")),
    linear=_of_rows((0, "input"), (1, "weight"), (2, "bias")),
    stacked=_stacked((0, "input"), (1, "weight"), (2, "bias"), transposed=False),
    affine=_affine((0, "input"), (1, "weight"), (2, "bias"), transposed=False),
)  # fmt: skip
def linear(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """g_W = Σ_t δ_t ⊗ a_t, g_b = Σ_t δ_t."""
    weight = call.value(1, "weight")
    if weight.ndim != 2:  # a vector: one output, which has no dimension of its own
        yield from replay(call, delta)
        return
    single = call.value(0, "input").ndim == 1  # the features of one example
    d, outputs = delta[None, None] if single else call.tokens(call.split(delta)), weight.shape[0]
    whole = d.shape[2] == outputs  # δ may have more: ``padded``
    if (W := call.node(1, "weight")) is not None:
        node, record = _weight(call, (0, "input"), W, d, transposed=False)
        yield node, record if whole else _without_padding(record, outputs)
    if (b := call.node(2, "bias")) is not None:
        rows = d.sum(1, dtype=wide_type(d.dtype))
        yield b, Dense(rows if whole else rows[:, :outputs])


def _without_padding(record: Record, outputs: int) -> Record:
    if isinstance(record, Pair):
        return Pair(record.a, record.delta[..., :outputs])
    return Dense(record.rows()[:, :outputs])


@register_op(
    "addmm", weight=(2, "mat2"), vectors=((0, "input"),), sizes=_sizes((1, "mat1"), (2, "mat2")),
    linear=_of_rows((1, "mat1"), (2, "mat2"), (0, "input")),
    stacked=_stacked((1, "mat1"), (2, "mat2"), (0, "input"), transposed=True),
    affine=_affine((1, "mat1"), (2, "mat2"), (0, "input"), transposed=True),
)  # fmt: skip
def addmm(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """b + x W with W of shape [I, O]."""
    if not _unscaled(call) or not call.batched(1, "mat1"):
        yield from replay(call, delta)
        return
    if (W := call.node(2, "mat2")) is not None:
        d = call.tokens(call.split(delta))
        yield _weight(call, (1, "mat1"), W, d, transposed=True)
    if call.node(0, "input") is not None:
        leaf = call.at(0, "input")
        assert leaf is not None
        yield call.nodes[leaf], reduce_to(call, delta, leaf) or replay_leaf(call, leaf, delta)


@register_op(
    "matmul", "mm", weight=(1, "other"), sizes=_sizes((0, "input"), (1, "other")),
    linear=_of_rows((0, "input"), (1, "other")),
    stacked=_stacked((0, "input"), (1, "other"), None, transposed=True),
    affine=_affine((0, "input"), (1, "other"), None, transposed=True),
)  # fmt: skip
def matmul(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """x W with a matrix W on the right; anything else is replayed."""
    W = call.node(1, "other")
    if W is None or not call.batched(0, "input") or call.value(1, "other").ndim != 2:
        yield from replay(call, delta)
    else:
        single = call.value(0, "input").ndim == 1
        d = delta[None, None] if single else call.tokens(call.split(delta))
        yield _weight(call, (0, "input"), W, d, transposed=True)


@register_op("grouped_mm", "grouped_mm_fallback")
def grouped_mm(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """x [N, I] times W [E, I, O], rows sorted by the matrix that each takes (experts): linear in
    W, so the operation itself is the derivative."""
    first, weight, *rest = call.nodes
    if weight is None or any(node is not None for node in (first, *rest)):
        raise NotImplementedError("a parameter is not its second argument")
    yield weight, replay_leaf(call, 1, delta, linear=True)

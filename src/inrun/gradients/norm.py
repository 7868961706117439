"""Normalisations with an affine part: y = x̂ · w + b. Only x̂ differs between them.

With BatchNorm the rows interact through x̂; the gradient of w_i, the copy that row i uses, is
still Σ δ_i x̂_i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.gradients.call import Affine, Call, reduce_to, register_op, replay_leaf, together
from inrun.gradients.records import Aligned, Dense, Record, wide_type
from inrun.tensors.layout import Layout, Spread
from inrun.torch_compat import LAYER_NORM_STATISTICS

Arg = tuple[int, str]


def _affine(
    call: Call, delta: Tensor, xhat: Callable[[], Tensor], w: Arg, b: Arg | None, channels: bool
) -> Iterator[tuple[Any, Record]]:
    for where, full in ((w, lambda: _times(xhat(), delta)), (b, lambda: delta)):
        leaf = None if where is None else call.at(*where)
        if leaf is not None and call.nodes[leaf] is not None:
            yield call.nodes[leaf], _reduce(call, delta, full(), leaf, channels)


def _times(fresh: Tensor, other: Tensor) -> Tensor:
    """Their product, in the memory of the first where it fits."""
    return fresh.mul_(other) if fresh.dtype == other.dtype else fresh * other


def _reduce(call: Call, delta: Tensor, full: Tensor, leaf: int, channels: bool) -> Record:
    if not channels:
        return reduce_to(call, full, leaf) or replay_leaf(call, leaf, delta)
    if isinstance(call.layout, Spread):
        return replay_leaf(call, leaf, delta)
    if call.layout.dim != 1:
        return Dense(call.channels(full))
    if (call.layout.outer, call.layout.inner) != (1, 1):
        raise NotImplementedError("its channels are examples together with something else")
    return Aligned(call.split(full).flatten(1).sum(1, dtype=wide_type(full.dtype)), 0)


_LINEAR = together((2, "weight"), (3, "bias"))


def _linear(call: Call) -> tuple[int, ...]:
    """Of ``rms_norm`` without ``eps`` the type decides it, and it may run again in another."""
    if call.name != "rms_norm":
        return _LINEAR(call)
    return () if call.value(3, "eps") is None else together((2, "weight"))(call)


def _stacked(call: Call) -> Tensor:
    """Several normalisations over the same dimensions at once: x [n, …, *W], weights [n, *W]."""
    x, shape, w = call.value(0, "input"), call.value(1, "normalized_shape"), call.value(2, "weight")
    if call.name == "rms_norm":
        y, b = F.rms_norm(x, shape, None, call.value(3, "eps")), None
    else:
        y, b = F.layer_norm(x, shape, None, None, call.value(4, "eps", 1e-5)), call.value(3, "bias")
    each = len(x), *[1] * (x.ndim - 1 - len(shape)), *shape
    y = y if w is None else y * w.view(each)
    return y if b is None else y + b.view(each)


def _one_dimension(call: Call) -> Affine | None:
    """Over the last dimension alone, with a weight."""
    weight, b = call.at(2, "weight"), None if call.name == "rms_norm" else call.at(3, "bias")
    x, eps = call.at(0, "input"), 3 if call.name == "rms_norm" else 4
    if x is None or weight is None or call.leaves[weight] is None:
        return None
    if len(call.value(1, "normalized_shape")) != 1:
        return None
    bias = b if b is not None and call.leaves[b] is not None else None
    eps = call.value(eps, "eps", 1e-5)
    return Affine(x, weight, bias, matrix=False, norm=call.name, eps=eps)


@register_op(
    "layer_norm", "rms_norm", vectors=((2, "weight"), (3, "bias")),
    kept=LAYER_NORM_STATISTICS, linear=_linear, stacked=_stacked, affine=_one_dimension,
)  # fmt: skip
def last_dimensions(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """Over the last dimensions, which the weight has the shape of."""
    x, shape = call.value(0, "input"), call.value(1, "normalized_shape")
    if call.name == "rms_norm":
        eps = call.value(3, "eps")
        yield from _affine(
            call, delta, lambda: F.rms_norm(x, shape, None, eps), (2, "weight"), None, False
        )
    elif _statistics_serve(call, x, delta, shape):
        yield from _by_statistics(call, x, delta)
    else:
        eps = call.value(4, "eps", 1e-5)
        yield from _affine(
            call, delta, lambda: F.layer_norm(x, shape, None, None, eps),
            (2, "weight"), (3, "bias"), False,
        )  # fmt: skip


def _statistics_serve(call: Call, x: Tensor, delta: Tensor, shape: Any) -> bool:
    """Are mean and deviation of the forward pass at hand (on a host), for tokens [B, T, N]?"""
    if not call.kept or x.ndim != 3 or len(shape) != 1 or call.layout != Layout(0):
        return False
    return x.dtype == delta.dtype == call.kept[0].dtype == wide_type(x.dtype)


def _by_statistics(call: Call, x: Tensor, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """Σ_t δ x̂ as a product with the deviations; (x − mean) δ lives in memory that is used again."""
    assert call.blocks is not None
    if (w := call.node(2, "weight")) is not None:
        mean, rstd = call.kept
        full = torch.sub(x, mean, out=call.blocks.scratch(x)).mul_(delta)
        yield w, Dense((rstd.mT @ full).squeeze(1))
    if (b := call.node(3, "bias")) is not None:
        yield b, Dense(delta.sum(1))


@register_op("group_norm", vectors=((2, "weight"), (3, "bias")), linear=_LINEAR)
def group_norm(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    x, groups, eps = call.value(0, "input"), call.value(1, "num_groups"), call.value(4, "eps", 1e-5)
    yield from _affine(
        call, delta, lambda: F.group_norm(x, groups, None, None, eps),
        (2, "weight"), (3, "bias"), True,
    )  # fmt: skip


def _running(
    call: Call, mean: Arg, var: Arg, training: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Running statistics where they are used; none where the batch's own are, so none change."""
    return (None, None) if training else (call.value(*mean), call.value(*var))


@register_op(F.batch_norm, vectors=((3, "weight"), (4, "bias")))
def batch_norm(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """``F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)``."""
    yield from _batch_norm(call, delta, mean=1, var=2, w=3, b=4)


@register_op(torch.batch_norm, vectors=((1, "weight"), (2, "bias")))
def torch_batch_norm(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """``torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, cudnn)``."""
    yield from _batch_norm(call, delta, mean=3, var=4, w=1, b=2)


def _batch_norm(call: Call, delta: Tensor, mean: int, var: int, w: int, b: int) -> Any:
    x, training = call.value(0, "input"), call.value(5, "training", False)
    eps = call.value(7, "eps", 1e-5)
    m, v = _running(call, (mean, "running_mean"), (var, "running_var"), training)
    yield from _affine(
        call, delta, lambda: F.batch_norm(x, m, v, None, None, training or m is None, 0.0, eps),
        (w, "weight"), (b, "bias"), True,
    )  # fmt: skip


@register_op(F.instance_norm, vectors=((3, "weight"), (4, "bias")))
def instance_norm(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """``F.instance_norm(x, mean, var, weight, bias, use_input_stats, momentum, eps)``."""
    x, own, eps = (
        call.value(0, "input"),
        call.value(5, "use_input_stats", True),
        call.value(7, "eps", 1e-5),
    )
    m, v = _running(call, (1, "running_mean"), (2, "running_var"), own)
    yield from _affine(
        call, delta, lambda: F.instance_norm(x, m, v, None, None, own, 0.0, eps),
        (3, "weight"), (4, "bias"), True,
    )  # fmt: skip

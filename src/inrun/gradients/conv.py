"""Convolutions: linear in the weight, so ⟨u, g_i⟩ = ⟨conv(x_i, u), δ_i⟩ in ghost form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inrun.gradients.call import Call, Sizes, register_op, replay_leaf, together
from inrun.gradients.records import Dense, Record
from inrun.tensors.layout import Layout

_ARGS = ((3, "stride", 1), (5, "dilation", 1))


def _sizes(call: Call) -> Sizes | None:
    """Ghost keeps input and error; the error is about as large as the input."""
    leaf = call.at(0, "input")
    if leaf is None or call.layouts[leaf] != Layout(0) or call.leaves[leaf].is_complex():
        return None
    ghost = 2 * call.value(0, "input").numel() // call.B
    return Sizes(ghost, call.value(1, "weight").numel(), again=True)


@register_op(
    "conv1d", "conv2d", "conv3d", weight=(1, "weight"), vectors=((2, "bias"),), sizes=_sizes,
    linear=together((1, "weight"), (2, "bias")),
)  # fmt: skip
def conv(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """``convNd(x, weight, bias, stride, padding, dilation, groups)``."""
    leaf = call.at(1, "weight")
    assert leaf is not None
    if call.nodes[leaf] is not None:
        if call.form == "materialise":
            yield call.nodes[leaf], Dense(_weight_gradients(call, delta))
        else:
            bias = call.at(2, "bias")
            bare = call if bias is None else _without(call, bias)
            yield call.nodes[leaf], replay_leaf(bare, leaf, delta, linear=True)
    if (b := call.node(2, "bias")) is not None:
        yield b, Dense(call.channels(delta))


def _without(call: Call, leaf: int) -> Call:
    leaves = tuple(None if i == leaf else x for i, x in enumerate(call.leaves))
    return replace(call, leaves=leaves)


def _weight_gradients(call: Call, delta: Tensor) -> Tensor:
    """All examples as groups of one convolution: its weight gradient is theirs, side by side."""
    x, W = call.split(call.value(0, "input")), call.value(1, "weight")
    d = call.split(delta)
    x = x.to(d.dtype)
    n = W.ndim - 2
    groups = call.value(6, "groups", 1)
    stride, dilation = (_tuple(call.value(*a), n) for a in _ARGS)
    padding = call.value(4, "padding", 0)
    if isinstance(padding, str):
        total = [
            0 if padding == "valid" else s * (k - 1)
            for s, k in zip(dilation, W.shape[2:], strict=True)
        ]
        if any(t % 2 for t in total):  # 'same' with an even kernel pads one more at the end
            x = torch.nn.functional.pad(x, [p for t in reversed(total) for p in (0, t % 2)])
        padding = [t // 2 for t in total]
    B = call.B
    _, grad, _ = torch.ops.aten.convolution_backward(
        d.reshape(1, -1, *d.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        W.to(d.dtype).expand(B, *W.shape).reshape(-1, *W.shape[1:]),
        None, stride, _tuple(padding, n), dilation, False, [0] * n, B * groups,
        [False, True, False],
    )  # fmt: skip
    return grad.reshape(B, *W.shape)


def _tuple(x: Any, n: int) -> list[int]:
    return [x] * n if isinstance(x, int) else list(x) if len(x) == n else list(x) * n

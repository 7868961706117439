"""The two commonest operations, each one node of the graph together with its tap.

A linear layer of a sequence is a product between two views, and with a tap five nodes of the graph.
On a host a node costs as much as a small product. So once a call is known, ``training="fast"``
runs the operation, its tap and the gradient of its input in one autograd function; the records are
those of the operation's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.capture.tap import Tapped, applied, refuse_again
from inrun.gradients import Call
from inrun.tensors.arguments import present
from inrun.tensors.autocast import no_autocast
from inrun.torch_compat import DisableTorchFunction, unsafe_view


@dataclass(frozen=True)
class Operation:
    """``forward`` gives the output and what is kept for the rule (``OpRule.kept``), ``backward``
    the gradient of the input. ``names`` are the arguments; the last ``optional`` may be missing."""

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[[Call, Tensor], Tensor]
    names: tuple[str, ...]
    optional: int = 0


def _linear(x: Tensor, W: Tensor, b: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
    flat = x.reshape(-1, x.shape[-1])
    out = flat @ W.t() if b is None else torch.addmm(b, flat, W.t())
    shape = (*x.shape[:-1], W.shape[0])
    return unsafe_view(out, shape), ()  # no view: it may be written to


def _linear_backward(call: Call, delta: Tensor) -> Tensor:
    x, W = call.leaves[:2]
    return (delta.reshape(-1, W.shape[0]) @ W).view(x.shape)


def _layer_norm(
    x: Tensor, shape: Any, w: Tensor | None, b: Tensor | None, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out, mean, deviation = torch.native_layer_norm(x, shape, w, b, eps)
    return out, (mean, deviation)


def _layer_norm_backward(call: Call, delta: Tensor) -> Tensor:
    x, shape, w, b, _ = call.leaves
    mask = [True, False, False]
    return torch.ops.aten.native_layer_norm_backward(delta, x, shape, *call.kept, w, b, mask)[0]


_OPERATIONS = {
    F.linear: Operation(_linear, _linear_backward, ("input", "weight", "bias"), optional=1),
    F.layer_norm: Operation(
        _layer_norm, _layer_norm_backward, ("input", "normalized_shape", "weight", "bias", "eps")
    ),
}


def whole(call: Call, func: Any, summed: tuple[int, ...]) -> Operation | None:
    """The operation to run so: on a host, its arguments in their order, the input alone belongs to
    the examples, and the gradients of all its parameters are sums."""
    found, leaves = _OPERATIONS.get(func), call.leaves
    if found is None or not summed or present(call.layouts) != (0,) or not leaves[0].is_cpu:
        return None
    if leaves[0].is_complex():
        return None
    complete = len(leaves) >= len(found.names) - found.optional
    in_order = all(call.at(i, found.names[i]) == i for i in range(len(leaves)))
    return found if complete and in_order and set(summed) == set(present(call.nodes)) else None


class Whole(torch.autograd.Function):
    """An operation with its tap; ``params`` are the leaves that the tap sums."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, call: Call, tap: Tapped, operation: Operation, *params: Tensor
    ) -> Tensor:
        out, kept = operation.forward(*call.leaves)
        ctx.save_for_backward(x, *params, *kept)
        leaves = list(call.leaves)
        for i in (0, *tap.summed):
            leaves[i] = None
        ctx.tap, ctx.operation, ctx.loose = tap, operation, () if x.requires_grad else (0,)
        ctx.call, ctx.leaves = call.with_(leaves=()), leaves
        return out

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        saved = ctx.saved_tensors
        with DisableTorchFunction():
            return _backward(ctx, saved, delta)


def _backward(ctx: Any, saved: Sequence[Tensor], delta: Tensor) -> Any:
    tap, leaves = ctx.tap, ctx.leaves.copy()
    places = (0, *tap.summed)
    for i, t in zip(places, saved, strict=False):
        leaves[i] = t.detach()
    call = ctx.call.with_(leaves=leaves, kept=saved[len(places) :])
    refuse_again(call, delta)
    with no_autocast("cpu"):
        totals = tap.receive(tap, call, delta, ctx.loose)
        dx = ctx.operation.backward(call, delta) if ctx.needs_input_grad[0] else None
    given = zip(totals, tap.summed, strict=True)
    return dx, None, None, None, *[g.to(leaves[i].dtype) for g, i in given]


run_whole = applied(Whole)

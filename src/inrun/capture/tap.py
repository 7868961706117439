"""The autograd functions that hand δ to the capture: the tap, and fused ops.

A tap is an identity on the output of an operation. The operation itself and its backward kernels
run unchanged.

A fused op is the operation and its tap in one autograd function. A linear layer of a sequence is a
product between two views, and with a tap five nodes of the graph; on a CPU a node costs as much as
a small product. So with ``training="fast"``, linear layers and LayerNorm become one node once their
call is known. The records are those of the operation's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.errors import overwritten, refusal
from inrun.gradients import Call
from inrun.gradients.arguments import present
from inrun.gradients.use import Linear, Use
from inrun.tensors.autocast import no_autocast
from inrun.torch_compat import (
    SAVES_OUTPUT,
    DisableTorchFunction,
    base_of,
    functorch_transforms_active,
    unsafe_view,
)

if TYPE_CHECKING:
    from inrun.capture.site import Site

# (site, call, δ, loose leaves) → gradients of the tap's extras. δ is a tuple for several outputs.
# An ``Awaited`` names itself as well: there are no gradients to answer then.
Receive: TypeAlias = "Callable[..., Sequence[Tensor]]"


class Tap(torch.autograd.Function):
    """The identity; its backward hands δ to ``receive``.

    Inputs that belong to the examples are saved the way autograd saves its own, so activation
    checkpointing drops and recomputes them like the rest. ``extras`` are inputs that take no part
    in the forward pass; the answer of ``receive`` is their gradients. ``trigger`` puts the tap into
    the graph where nothing else would (a probe, whose parameters are detached); it gets none.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, call: Call, site: Site, receive: Receive,
        trigger: Tensor | None, *extras: Tensor,
    ) -> Tensor:  # fmt: skip
        _hold(ctx, call, site, receive)
        ctx.dtypes = [x.dtype for x in extras]
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        saved = ctx.saved_tensors  # may be recomputed here
        with DisableTorchFunction():
            return delta, None, None, None, None, *_received(ctx, saved, delta)


def _hold(ctx: Any, call: Call, site: Site, receive: Receive) -> None:
    """Keep what the backward pass needs."""
    leaves = list(call.leaves)
    ctx.save_for_backward(*[leaves[i] for i in site.batched])
    ctx.loose = _not_computed(leaves, call.nodes)
    for i in site.batched:
        leaves[i] = None
    ctx.site, ctx.receive, ctx.call, ctx.leaves = site, receive, call.with_(leaves=()), leaves


def _held(ctx: Any, saved: Sequence[Tensor]) -> Call:
    """The call again, with its leaves."""
    leaves = ctx.leaves.copy()
    for i, x in zip(ctx.site.batched, saved, strict=True):
        leaves[i] = x.detach()
    return ctx.call.with_(leaves=leaves)


def _received(ctx: Any, saved: Sequence[Tensor], delta: Tensor) -> list[Tensor]:
    """Hand δ to the capture; returns the gradients of the tap's extras."""
    call = _held(ctx, saved)
    refuse_again(call, delta)
    with no_autocast(device_of(delta)):
        shaped = delta if delta.shape == call.shape else delta.reshape(call.shape)
        given = ctx.receive(ctx.site, call, shaped, ctx.loose)
    types = zip(given, ctx.dtypes, strict=True)
    return [g if g.dtype == t else g.to(t) for g, t in types]


class TapSeveral(torch.autograd.Function):
    """The identity on several outputs (those of ``lstm``, say); its backward hands a tuple to
    ``receive``: δ of each output, None where the loss does not depend on one.

    The outputs are copied, because the operation's own nodes may have saved them or others.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, site: Site, receive: Receive, trigger: Tensor | None, *outs: Tensor
    ) -> tuple[Tensor, ...]:
        _hold(ctx, call, site, receive)
        ctx.set_materialize_grads(False)
        return tuple(out.clone() for out in outs)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor | None) -> Any:
        given = [d for d in deltas if d is not None]
        if not given:
            return (None,) * (4 + len(deltas))
        saved = ctx.saved_tensors  # may be recomputed here
        with DisableTorchFunction():
            call = _held(ctx, saved)
            refuse_again(call, *given)
            with no_autocast(device_of(given[0])):
                ctx.receive(ctx.site, call, deltas, ctx.loose)
        return None, None, None, None, *deltas


def _not_computed(leaves: Sequence[Any], nodes: Sequence[Any]) -> list[int]:
    """Indices of leaves that are data or constants: the loop may write to them in place."""
    return [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor) and nodes[i] is None and not x.requires_grad
    ]


def refuse_again(call: Call, *deltas: Tensor) -> None:
    """A backward pass that is to be differentiated itself is refused."""
    if torch.is_grad_enabled():
        why = "its gradient is differentiated again (create_graph=True)"
        raise refusal(call, deltas, why)


def _apply(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """``function.apply`` without its support for torch.func where no transform is active."""
    bare: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Tensor:
        return function.apply(*args) if functorch_transforms_active() else bare(*args)

    return apply


apply_tap = _apply(Tap)
apply_tap_of_several: Any = _apply(TapSeveral)


def tapped(
    apply: Callable[..., Tensor], out: Tensor, call: Call, site: Site, receive: Receive,
    trigger: Tensor | None, extras: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """The output with a tap.

    The tap marks its input as written to. A node that saved its own output needs a copy; what is
    only another shape of a fresh tensor (``F.linear`` of a sequence) is tapped there.
    """
    base = base_of(out)
    if base is not None and _same_numbers(out, base) and not _saves_output(base):
        return unsafe_view(apply(base, call, site, receive, trigger, *extras), out.shape)
    fresh = base is None and not _saves_output(out)
    return apply(out if fresh else out.clone(), call, site, receive, trigger, *extras)


def _same_numbers(out: Tensor, base: Tensor) -> bool:
    """Is ``out`` all of ``base``, in the same order, in another shape?"""
    complete = out.numel() == base.numel() and out.dtype == base.dtype
    return complete and out.is_contiguous() and base.is_contiguous() and base.grad_fn is not None


def _saves_output(out: Tensor) -> bool:
    """Does the autograd node behind this tensor keep it for its backward pass?"""
    kind = type(out.grad_fn)
    if kind not in _SAVES_OUTPUT:
        _SAVES_OUTPUT[kind] = any(hasattr(kind, name) for name in SAVES_OUTPUT)
    return _SAVES_OUTPUT[kind]


_SAVES_OUTPUT: dict[type, bool] = {}


def device_of(t: Tensor) -> str:
    """``t.device.type``, faster for CPU tensors."""
    return "cpu" if t.is_cpu else t.device.type


# Remembering


class Awaited:
    """Before the node of an operation runs in the backward pass, its δ is handed over. Nothing is
    added to the graph.

    The inputs are held here, not by autograd: ``Keeper`` has them dropped when the step is over,
    whoever keeps the graph.
    """

    __slots__ = ("call", "loose", "output", "receive", "site", "versions")

    def __init__(self, call: Call, site: Site, receive: Receive, output: int) -> None:
        assert site.linear is not None
        leaves, self.loose = list(call.leaves), []
        for i in site.linear.others:
            x = leaves[i]
            if x.requires_grad:
                leaves[i] = x.detach()
            else:
                self.loose.append(i)
        self.call, self.site, self.receive = call.with_(leaves=leaves), site, receive
        self.versions, self.output = site.linear.versions(leaves), output

    def __call__(self, deltas: tuple[Tensor | None, ...]) -> None:
        delta = deltas[self.output]
        if delta is not None:
            with DisableTorchFunction(), no_autocast(device_of(delta)):
                refuse_again(self.call, delta)
                if delta.shape != self.call.shape:
                    delta = delta.reshape(self.call.shape)
                self.receive(self.site, self.call, delta, self.loose, self)

    def use(self, delta: Tensor) -> Use:
        """What is remembered: ``loose`` leaves are copied, the loop may write to them."""
        site, call, versions = self.site, self.call, self.versions
        assert site.linear is not None
        if self.loose:
            leaves = list(call.leaves)
            versions = copy_loose(call, site.linear, leaves, self.loose, versions)
            call = call.with_(leaves=leaves)
        return Use.of(call, site.linear, delta, versions, site.records)

    def drop(self) -> None:
        """Let go of the inputs."""
        self.call = self.call.with_(leaves=())


def copy_loose(
    call: Call, linear: Linear, leaves: list[Any], loose: Sequence[int], versions: list[int]
) -> list[int]:
    """Copy the ``loose`` ones among the leaves of a call, which the loop may write to after the
    backward pass; returns the versions of its inputs. Refuses those written to before."""
    if linear.versions(leaves) != versions:
        raise overwritten(call.with_(leaves=leaves))
    for i in loose:
        leaves[i] = leaves[i].clone()
    return linear.versions(leaves)


def awaited(out: Tensor, call: Call, site: Site, receive: Receive) -> Tensor | None:
    """The output of an operation that has run, whose δ will be handed over; None if only a tap can
    do that.

    Every gradient must pass the node, also if the output is written to later: what is only another
    shape of a fresh tensor is awaited there, and is no view from then on, as with a tap.
    """
    base = base_of(out)
    if base is None:
        source = out
    elif _same_numbers(out, base) and not _saves_output(base):
        source, out = base, unsafe_view(base, out.shape)
    else:
        return None
    assert source.grad_fn is not None
    source.grad_fn.register_prehook(Awaited(call, site, receive, source.output_nr))
    return out


# Fused ops


@dataclass(frozen=True)
class FusedOp:
    """``forward`` gives the output and what is kept for the rule (``OpRule.kept``), ``backward``
    the gradient of the input. ``names`` are the arguments; the last ``optional`` may be missing."""

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[[Call, Tensor], Tensor]
    names: tuple[str, ...]
    optional: int = 0


def _linear(x: Tensor, W: Tensor, b: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
    flat = x.reshape(-1, x.shape[-1])  # [B·T, I]
    out = flat @ W.t() if b is None else torch.addmm(b, flat, W.t())  # [B·T, O]
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


_FUSED_OPS = {
    F.linear: FusedOp(_linear, _linear_backward, ("input", "weight", "bias"), optional=1),
    F.layer_norm: FusedOp(
        _layer_norm, _layer_norm_backward, ("input", "normalized_shape", "weight", "bias", "eps")
    ),
}


def fused_op(call: Call, func: Any, summed: tuple[int, ...]) -> FusedOp | None:
    """The fused op for a call: on a CPU, arguments in their order, only the input belongs to the
    examples, and the gradients of all other tensors are sums. None where one is untrue."""
    found, leaves = _FUSED_OPS.get(func), call.leaves
    if found is None or not summed or present(call.layouts) != (0,) or not leaves[0].is_cpu:
        return None
    if leaves[0].is_complex():
        return None
    complete = len(leaves) >= len(found.names) - found.optional
    in_order = all(call.at(i, found.names[i]) == i for i in range(len(leaves)))
    given = {i for i, x in enumerate(leaves) if isinstance(x, Tensor)} - {0}
    every = set(summed) == set(present(call.nodes)) == given  # others would get no gradient
    return found if complete and in_order and every else None


class Fused(torch.autograd.Function):
    """An operation with its tap; ``params`` are the leaves that the tap sums."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, call: Call, site: Site, receive: Receive, *params: Tensor
    ) -> Tensor:
        assert site.fused is not None
        out, kept = site.fused.forward(*call.leaves)
        ctx.save_for_backward(x, *params, *kept)
        leaves = list(call.leaves)
        for i in (0, *site.summed):
            leaves[i] = None
        ctx.site, ctx.receive, ctx.loose = site, receive, () if x.requires_grad else (0,)
        ctx.call, ctx.leaves = call.with_(leaves=()), leaves
        return out

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        saved = ctx.saved_tensors
        with DisableTorchFunction():
            return _fused_backward(ctx, saved, delta)


def _fused_backward(ctx: Any, saved: Sequence[Tensor], delta: Tensor) -> Any:
    """Hand δ to the capture; returns the gradients of the input and of the parameters."""
    site, leaves = ctx.site, ctx.leaves.copy()
    places = (0, *site.summed)
    for i, t in zip(places, saved, strict=False):
        leaves[i] = t.detach()
    call = ctx.call.with_(leaves=leaves, kept=saved[len(places) :])
    refuse_again(call, delta)
    with no_autocast("cpu"):
        totals = ctx.receive(site, call, delta, ctx.loose)
        dx = site.fused.backward(call, delta) if ctx.needs_input_grad[0] else None
    given = zip(totals, site.summed, strict=True)
    return dx, None, None, None, *[g.to(leaves[i].dtype) for g, i in given]


run_fused = _apply(Fused)

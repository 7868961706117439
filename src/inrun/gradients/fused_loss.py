"""Losses fused with the product before them: logits z = a Wᵀ + b that are never held all at once.

With a vocabulary of 150,000 the logits are most of the memory of a training step, so TRL, Liger and
torch compute head and cross-entropy in one function, a tile at a time. Such a function is described
by a :class:`LinearLoss`: its operands, and what it makes of the logits of a token. The records
compute the logits again, some tokens at a time: δ_t = s_t · ∂value_t/∂z_t and g_i = Σ_t δ_t ⊗ a_t,
where s_t is the gradient of the training loss by the value of token t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.gradients.call import Call, OpRule, Sizes, register_rule
from inrun.gradients.records import Dense, Record, merged, wide, wide_type
from inrun.tensors.autocast import no_autocast
from inrun.tensors.follow import register_layout
from inrun.tensors.layout import Find, Layout, Spread, to_rows

_LOGITS = 2**25  # numbers that are computed at a time

# (logits [N, V], targets [N, …]) → the value of each token [N]
Values: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LinearLoss:
    """What a fused function computes of its arguments.

    Args:
        input: what the head is applied to, [..., I]. It holds the examples.
        weight: the head, [V, I].
        targets: what the logits are compared with, [...] or [..., K], a token each like ``input``.
        values: for each output of the function that has a gradient (the others come after them), a
            plain function of torch ``values(logits [N, V], targets [N]) -> [N]``: what the output
            has for each of these tokens or, if the output is a single number, what each token adds
            to it (so a mean is divided by the number of all tokens).
        bias: of the head, [V].
    """

    input: Tensor
    weight: Tensor
    targets: Tensor
    values: Sequence[Values]
    bias: Tensor | None = None


Describe: TypeAlias = Callable[..., LinearLoss]  # takes the function's own arguments


@dataclass(frozen=True, eq=False)
class Head:
    """What all tokens share. ``dtype`` is the type of the product."""

    weight: Tensor
    bias: Tensor | None
    values: Values
    dtype: torch.dtype


@dataclass(eq=False)
class Recomputed(Record):
    """Ghost form: ⟨u, g_i⟩ = Σ_t ⟨δ_it u, a_it⟩, with δ computed again some tokens at a time."""

    a: Tensor  # [B, T, I]
    targets: Tensor  # [B, T, …]
    scale: Tensor  # [B, T]: s
    head: Head  # the operand is its weight; stays on its device

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.head.weight.shape)

    def like(self) -> Tensor:
        return self.a

    def dot(self, u: Tensor) -> Tensor:
        return self.dots(u[None])[0]

    def dots(self, u: Tensor) -> Tensor:
        found = self.scale.new_zeros(len(u), len(self.a), dtype=wide_type(self.head.dtype))
        for examples, a, delta in self.pieces():
            y = delta.flatten(0, 1) @ u.to(delta.dtype)  # [Q, N, I]
            y = wide(y).view(len(u), *a.shape) * wide(a)
            found[:, examples] += y.flatten(2).sum(2)
        return found

    def rows(self) -> Tensor:
        found = self.a.new_zeros(len(self.a), *self.shape, dtype=wide_type(self.head.dtype))
        for examples, a, delta in self.pieces():
            found[examples] += delta.mT @ a
        return found

    def sums(self) -> Tensor:
        """Σ_t δ_it, the gradient of the bias: [B, V]."""
        found = self.a.new_zeros(len(self.a), self.shape[0], dtype=wide_type(self.head.dtype))
        for examples, _, delta in self.pieces():
            found[examples] += delta.sum(1, dtype=found.dtype)
        return found

    def groups(self, sizes: Sequence[int]) -> Tensor:
        return merged(self, sizes)

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some tokens at a time: which examples they are of, a [b, t, I] and δ [b, t, V]."""
        head, (B, T) = self.head, self.scale.shape
        with no_autocast(self.a.device.type):
            W = head.weight.to(head.dtype)
            b = None if head.bias is None else head.bias.to(head.dtype)
            for examples, tokens in _slices(B, T, max(1, _LOGITS // len(W))):
                at = examples, tokens
                a, scale = self.a[at].to(head.dtype), self.scale[at]
                z = wide(F.linear(a.flatten(0, 1), W, b))
                delta = _slopes(z, self.targets[at].flatten(0, 1), scale.flatten(), head.values)
                if head.dtype == torch.float16:  # its range is too small for sums of products
                    a = a.float()
                yield examples, a, delta.to(a.dtype).view(*scale.shape, -1)


def _slices(B: int, T: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Examples and tokens, at most ``tokens`` at a time (and at least one)."""
    if tokens >= T:
        some = tokens // max(1, T)
        yield from ((slice(i, i + some), slice(0, T)) for i in range(0, B, some))
    else:
        for i in range(B):
            yield from ((slice(i, i + 1), slice(t, t + tokens)) for t in range(0, T, tokens))


def _slopes(z: Tensor, targets: Tensor, scale: Tensor, values: Values) -> Tensor:
    """s_t · ∂value_t/∂z_t of logits [N, V]."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        found = values(z, targets)
        (delta,) = torch.autograd.grad(found, z, scale.to(found.dtype))
    return delta


def fused_loss(describe: Describe) -> OpRule:
    """The rule of a function that ``describe`` describes."""

    def place(call: Call) -> tuple[Layout | Spread | None, int]:
        loss, leaf = _described(describe, call)
        return call.layouts[leaf], len(loss.values)

    def sizes(call: Call) -> Sizes | None:
        try:
            loss, _ = _described(describe, call)
        except NotImplementedError:  # ``place`` says why
            return None
        V, I = loss.weight.shape  # noqa: E741
        T = loss.input.numel() // (I * call.B)
        return Sizes(T * (I + 2), V * I, (T, I, V), again=True)

    def records(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
        loss, leaf = _described(describe, call)
        record = _record(call, loss, call.layouts[leaf], delta)
        for i, node in enumerate(call.nodes):
            if node is not None and call.leaves[i] is loss.weight:
                dense = call.form == "materialise" and call.positions is None
                yield node, Dense(record.rows()) if dense else record
            elif node is not None:
                yield node, Dense(record.sums())

    return OpRule(records, sizes=sizes, place=place)


def _described(describe: Describe, call: Call) -> tuple[LinearLoss, int]:
    """What the function computes, and the leaf that is its input."""
    args, kwargs = call.spec.unflatten(call.leaves)
    loss = describe(*args, **kwargs)
    at = {id(x): i for i, x in enumerate(call.leaves)}
    own = {id(loss.weight), id(loss.bias)}
    if any(id(x) not in own for x, n in zip(call.leaves, call.nodes, strict=True) if n is not None):
        raise NotImplementedError("a parameter other than the head's weight and bias is in it")
    if any(call.layouts[at[i]] is not None for i in own if i in at):
        raise NotImplementedError("its head is not the same for all examples")
    x, targets = loss.input, loss.targets
    if id(x) not in at:
        raise NotImplementedError("its description changes the input: give the argument itself")
    if loss.weight.ndim != 2 or targets.shape[: x.ndim - 1] != x.shape[:-1]:
        raise NotImplementedError(
            f"its head {tuple(loss.weight.shape)} is no matrix, or its targets "
            f"{tuple(targets.shape)} are not one for each token of its input {tuple(x.shape)}"
        )
    return loss, at[id(x)]


def _record(
    call: Call, loss: LinearLoss, layout: Layout | Spread | None, delta: Tensor
) -> Recomputed:
    x, B = loss.input, call.B
    lead = x.shape[:-1]
    last = max(layout.dims) if isinstance(layout, Spread) else layout.dim if layout else len(lead)
    if layout is None or last >= len(lead):
        raise NotImplementedError("the examples cannot be told apart in its input")
    if delta.ndim == 0:
        scale = delta.expand(lead)
    elif delta.numel() == lead.numel():
        scale = delta.reshape(lead)
    else:
        raise NotImplementedError("its output is neither one number nor one for each token")

    def tokens(t: Tensor) -> Tensor:
        """[B, T, …]"""
        return to_rows(t, layout, B).reshape(B, lead.numel() // B, *t.shape[len(lead) :])

    dtype = call.autocast[2] if call.autocast is not None and call.autocast[1] else x.dtype
    head = Head(loss.weight, loss.bias, loss.values[call.part], dtype)
    return Recomputed(tokens(x), tokens(loss.targets), tokens(scale), head)


def register_fused(func: Any, describe: Describe) -> None:
    """Teach the capture a function that computes what ``describe`` says; ``func`` may be a name."""

    def layout(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
        """The examples of an output that has a number for each token are those of the input."""
        x = describe(*args, **kwargs).input
        return find(x) if out.shape == x.shape[:-1] else None

    register_rule(func, fused_loss(describe))
    register_layout(func, layout)

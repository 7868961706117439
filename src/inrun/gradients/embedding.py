"""Table look-ups: g_i has δ_it in the row of token t and zeros elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.gradients.call import Call, Sizes, register_op
from inrun.gradients.records import (
    Aligned,
    Cut,
    Dense,
    Record,
    inner,
    merged,
    real,
    wide,
    wide_type,
)
from inrun.tensors.layout import Spread

_CHOSEN = 2**26  # numbers


@dataclass(eq=False)
class Lookup(Record):
    """Ghost form of an embedding: g_i has δ_it added to row ids_it."""

    ids: Tensor  # [B, T]
    delta: Tensor  # [B, T, O]; zero where the id is the padding's
    size: int  # V

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size, self.delta.shape[-1]

    def dot(self, u: Tensor, K: Tensor | None = None) -> Tensor:
        """With ``K``, of K ⊙ u."""
        return self.dots(u[None], K)[0]

    def dots(self, u: Tensor, K: Tensor | None = None) -> Tensor:
        delta = wide(self.delta)
        if K is not None and len(u) * self.size <= self.ids.numel():  # rather than look up both
            u, K = K * u, None
        if K is not None:
            delta = delta * K[self.ids]
        # the chosen rows of so many directions at a time
        some = max(1, _CHOSEN // max(1, delta.numel()))
        found = [(real(v[:, self.ids]) * real(delta)).flatten(2).sum(2) for v in u.split(some)]
        return torch.cat(found)

    def rows(self) -> Tensor:
        B, T, O = self.delta.shape  # noqa: E741
        out = self.delta.new_zeros(B * self.size, O)
        at = self.ids + torch.arange(B, device=self.ids.device)[:, None] * self.size
        return out.index_add_(0, at.flatten(), self.delta.reshape(B * T, O)).view(B, self.size, O)

    def part(self, cut: Cut) -> Tensor:
        if isinstance(cut, Tensor):
            place = self.ids.new_full((self.size,), -1)
            place[cut] = torch.arange(len(cut), device=cut.device)
            ids = place[self.ids]
            return Lookup(ids.clamp(min=0), self.delta * (ids >= 0)[..., None], len(cut)).rows()
        inside = (self.ids >= cut.start) & (self.ids < cut.stop)
        ids = torch.where(inside, self.ids - cut.start, 0)
        return Lookup(ids, self.delta * inside[..., None], cut.stop - cut.start).rows()

    def energy(self) -> Tensor:
        """Exact: the tokens of an example that look up the same row are added first."""
        B, T, O = self.delta.shape  # noqa: E741
        rows = self.ids + torch.arange(B, device=self.ids.device)[:, None] * self.size
        found, order = rows.flatten().sort()
        new = torch.ones_like(found)
        new[1:] = found[1:] != found[:-1]
        delta = wide(self.delta).reshape(B * T, O)[order]
        sums = torch.zeros_like(delta).index_add_(0, new.cumsum(0) - 1, delta)
        return real(sums).square().sum()

    def joins(self, other: Record) -> bool:
        """Are the table's gradients formed anyway (it is the head's weight, too), so that g_i can
        be added to them?"""
        B, T = self.ids.shape
        return (
            isinstance(other, Dense) and other.own and len(other.grads) == B
            and B * T * T <= _CHOSEN
        )  # fmt: skip

    def add_to(self, rows: Tensor) -> None:
        """Add g_i to ``rows`` [B, V, O], in place; each number is rounded once (but for products
        in TF32, where these are allowed)."""
        delta = wide(self.delta)
        same = self.ids[:, :, None] == self.ids[:, None, :]  # [B, T, T]
        sums = same.to(delta.dtype) @ delta  # whatever this row receives, from every token
        at = torch.arange(len(rows), device=rows.device)[:, None], self.ids
        rows[at] = (rows[at] + sums).to(rows.dtype)

    def groups(self, sizes: Sequence[int]) -> Tensor:
        return merged(self, sizes)

    def add_groups(self, total: Tensor, sizes: Sequence[int]) -> Tensor:
        """``total + groups(sizes)``, added in place where ``total`` has its rows in order."""
        Q, V, O = total.shape  # noqa: E741
        apart = total.stride(0)
        if apart % O or apart < V * O or total.stride()[1:] != (O, 1):
            total = total.clone(memory_format=torch.contiguous_format)
        apart = total.stride(0) // O  # rows from one group to the next: some may lie between
        own = torch.tensor([apart * q for q, n in enumerate(sizes) for _ in range(n)])
        at = self.ids + own.to(self.ids.device, non_blocking=True)[:, None]
        rows = total.as_strided(((Q - 1) * apart + V, O), (O, 1))
        rows.index_add_(0, at.flatten(), self.delta.flatten(0, 1).to(total.dtype))
        return total


def _sizes(call: Call) -> Sizes:
    a, b = call.value(0, "input"), call.value(1, "weight")
    ids, W = (b, a) if a.is_floating_point() else (a, b)
    return Sizes(ids.numel() // call.B * W.shape[1], W.numel())


class Options(NamedTuple):
    """What a look-up does beside looking up."""

    max_norm: float | None  # it changes the table
    padding: int | None  # a row without a gradient
    by_frequency: bool  # gradients are divided by how often a row occurs
    sparse: bool


def options(functional: bool, value: Callable[..., Any]) -> Options:
    """Of ``F.embedding`` (``functional``) or ``torch.embedding``; ``value(position, keyword,
    default)`` is an argument."""
    padding = value(2, "padding_idx", None)
    if not functional:
        padding = None if padding == -1 else padding
        return Options(
            None, padding, value(3, "scale_grad_by_freq", False), value(4, "sparse", False)
        )
    by_frequency, sparse = value(5, "scale_grad_by_freq", False), value(6, "sparse", False)
    return Options(value(3, "max_norm", None), padding, by_frequency, sparse)


@register_op("embedding", sizes=_sizes)
def embedding(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """``F.embedding(ids, weight)`` and ``torch.embedding(weight, ids)``."""
    functional = not call.value(0, "input").is_floating_point()
    ids, weight = ((0, "input"), (1, "weight")) if functional else ((1, "indices"), (0, "weight"))
    asked = options(functional, call.value)
    if asked.max_norm is not None:
        raise NotImplementedError("max_norm rewrites the table during the forward pass")
    if asked.by_frequency:
        raise NotImplementedError("scale_grad_by_freq mixes the examples' gradients")
    if asked.sparse:
        raise NotImplementedError("its gradient is sparse; make the embedding with sparse=False")
    W = call.value(*weight)
    rows = call.rows(*ids).reshape(call.B, -1)
    d = call.tokens(call.split(delta))
    if asked.padding is not None:
        d = d.masked_fill((rows == asked.padding % W.shape[0])[..., None], 0.0)
    record = Lookup(rows, d, W.shape[0])
    yield call.node(*weight), Dense(record.rows()) if call.form == "materialise" else record


# Bags: each output row is the sum, mean or maximum of several rows of the table


@dataclass(eq=False)
class Bags(Record):
    """Ghost form of look-ups in one list for all examples: row ids_r of g_i has δ_r added to it for
    each r that belongs to i."""

    ids: Tensor  # [R]
    owner: Tensor  # [R]
    delta: Tensor  # [R, O]; zero where an id is no example's
    size: int  # V
    B: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size, self.delta.shape[-1]

    def dot(self, u: Tensor) -> Tensor:
        found = inner(u[self.ids], self.delta)
        return found.new_zeros(self.B).index_add_(0, self.owner, found)

    def rows(self) -> Tensor:
        out = self.delta.new_zeros(self.B * self.size, self.delta.shape[-1])
        at = self.owner * self.size + self.ids
        return out.index_add_(0, at, self.delta).view(self.B, *self.shape)

    def cut(self, first: int, last: int) -> Record:
        mine = (self.owner >= first) & (self.owner < last)
        owner = torch.where(mine, self.owner - first, 0)
        delta = self.delta * mine[:, None].to(self.delta.dtype)
        return replace(self, owner=owner, delta=delta, B=last - first)

    def groups(self, sizes: Sequence[int]) -> Tensor:
        group = torch.tensor([k for k, n in enumerate(sizes) for _ in range(n)])
        owner = group.to(self.owner.device, non_blocking=True)[self.owner]
        return replace(self, owner=owner, B=len(sizes)).rows()


def _bag_sizes(call: Call) -> Sizes:
    ids, W = call.value(0, "input"), call.value(1, "weight")
    kept = W.numel() if call.value(6, "mode", "mean") == "max" else ids.numel() // call.B
    return Sizes(kept * W.shape[1], W.numel())


def _refuse_bags(call: Call) -> None:
    if call.value(0, "input").is_floating_point():
        raise NotImplementedError("it is called with (weight, input); give it (input, weight)")
    if call.value(3, "max_norm") is not None:
        raise NotImplementedError("max_norm rewrites the table during the forward pass")
    if call.value(5, "scale_grad_by_freq", False):
        raise NotImplementedError("scale_grad_by_freq mixes the examples' gradients")
    if call.value(7, "sparse", False):
        raise NotImplementedError("its gradient is sparse; make the bags with sparse=False")


class _Tokens(NamedTuple):
    """The ids of all bags one after the other."""

    ids: Tensor  # [R]
    bag: Tensor  # [R]
    factor: Tensor  # [R]: of the row in its bag, 0 for padding


def _tokens(call: Call, bags: int, like: Tensor) -> _Tokens:
    ids, offsets = call.value(0, "input"), call.value(2, "offsets")
    at = torch.arange(ids.numel(), device=ids.device)
    if ids.ndim == 2:
        bag = at // ids.shape[1]
    else:
        bag = torch.searchsorted(offsets.to(at.dtype), at, right=True) - 1
    ids = ids.reshape(-1)
    factor = torch.ones(len(ids), dtype=like.dtype, device=ids.device)
    if (padding := call.value(10, "padding_idx")) is not None:
        factor = factor.masked_fill(ids == padding % len(call.value(1, "weight")), 0.0)
    factor = factor.masked_fill(bag >= bags, 0.0)  # behind the last offset
    bag = bag.clamp(max=bags - 1)
    if call.value(6, "mode", "mean") == "mean":
        counts = factor.new_zeros(bags).index_add_(0, bag, factor)
        factor = factor / counts.clamp(min=1)[bag]
    return _Tokens(ids, bag, factor)


@register_op(F.embedding_bag, sizes=_bag_sizes)
def embedding_bag(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """``F.embedding_bag(ids, weight)``: [bags, T], or [R] with ``offsets``. The δ of a bag belongs
    to each of its tokens."""
    _refuse_bags(call)
    if isinstance(call.layout, Spread):
        raise NotImplementedError("its examples lie in several dimensions")
    weighted, table = call.node(8, "per_sample_weights"), call.node(1, "weight")
    if call.value(6, "mode", "mean") == "max":
        yield table, _chosen(call, delta)
        return
    tokens = _tokens(call, len(delta), delta)
    d = delta[tokens.bag]  # [R, O]
    if weighted is not None:
        yield weighted, _of_weights(call, tokens, d)
    if table is not None:
        given = call.value(8, "per_sample_weights")
        factor = tokens.factor if given is None else tokens.factor * given.detach().reshape(-1)
        record = _looked_up(call, tokens, d * factor[:, None].to(d.dtype))
        yield table, Dense(record.rows()) if call.form == "materialise" else record


def _looked_up(call: Call, tokens: _Tokens, d: Tensor) -> Record:
    V = call.value(1, "weight").shape[0]
    if call.B == 1:
        return Lookup(tokens.ids[None], d[None], V)
    if call.value(0, "input").ndim == 2:
        bags = call.shape[0]
        ids = call.split(tokens.ids.view(bags, -1)).reshape(call.B, -1)
        return Lookup(ids, call.tokens(call.split(d.view(bags, -1, d.shape[-1]))), V)
    assert not isinstance(call.layout, Spread)
    return Bags(tokens.ids, tokens.bag // call.layout.inner % call.B, d, V, call.B)


def _of_weights(call: Call, tokens: _Tokens, d: Tensor) -> Record:
    """Of ``per_sample_weights``, made of parameters: ⟨δ of the bag, row of the table⟩."""
    W, x = call.value(1, "weight").detach(), call.value(8, "per_sample_weights")
    grads = (inner(W[tokens.ids], d) * tokens.factor).view(x.shape).to(wide_type(x.dtype))
    if call.B == 1:
        return Dense(grads[None])
    assert not isinstance(call.layout, Spread)
    if x.ndim != 2 or call.layout.outer * call.layout.inner != 1:
        raise NotImplementedError("its per_sample_weights are made of parameters alone")
    return Aligned(grads, 0)


def _chosen(call: Call, delta: Tensor) -> Record:
    """Of the maximum: δ of each number goes to the row that it came from."""
    ids, W = call.value(0, "input"), call.value(1, "weight").detach()
    offsets, last = call.value(2, "offsets"), call.value(9, "include_last_offset", False)
    if ids.ndim == 2:
        offsets = torch.arange(0, ids.numel(), ids.shape[1], device=ids.device).to(ids.dtype)
    padding = call.value(10, "padding_idx")
    _, _, sizes, rows = torch.embedding_bag(
        W, ids.reshape(-1), offsets, False, 2, False, None, last, padding
    )
    d = delta.masked_fill((sizes == 0)[:, None], 0.0)
    rows, d = (call.split(t).reshape(call.B, -1, W.shape[1]) for t in (rows.clamp(min=0), d))
    return Dense(d.new_zeros(call.B, *W.shape).scatter_add_(1, rows.long(), d))

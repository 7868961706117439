"""What is kept of one use of a parameter until the optimizer steps.

A record knows the per-example gradients g_i of one operand, of shape W, in one of several forms,
and answers two questions: ``dot(u)``, the contraction ⟨u, g_i⟩ with a direction u of W's shape,
and ``rows()``, the gradients themselves.

Legend, for all files of this folder: B examples, T tokens (or positions) per example, I inputs,
O outputs, V vocabulary, W the operand's own shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from inrun.gradients.blocks import Blocks
from inrun.tensors.derivative import jvp

R = TypeVar("R", bound="Record")
Cut: TypeAlias = slice | Tensor  # a part of a dimension, or these of its places


@dataclass(eq=False)
class Record:
    """Base of all forms."""

    def dot(self, u: Tensor) -> Tensor:
        """⟨u, g_i⟩ for each example: [B]."""
        raise NotImplementedError

    def dots(self, u: Tensor) -> Tensor:
        """⟨u_q, g_i⟩ for several directions [Q, *W]: [Q, B]."""
        return torch.stack([self.dot(x) for x in u])

    def rows(self) -> Tensor:
        """g_i for each example: [B, *W]."""
        raise NotImplementedError

    def part(self, cut: Cut) -> Tensor:
        """g_i for each example, of a part of W's first dimension: [B, n, …]."""
        return self.rows()[:, cut]

    def cut(self, first: int, last: int) -> Record:
        """The record of some of the examples."""
        return self.map(lambda t: t[first:last])

    def some_groups(self, first: int, sizes: Sequence[int]) -> Tensor:
        """The same for groups that begin at example ``first``."""
        return self.cut(first, first + sum(sizes)).groups(sizes)

    def groups(self, sizes: Sequence[int]) -> Tensor:
        """Sums of g_i over consecutive groups of examples of these sizes: [groups, *W]."""
        return torch.stack([part.sum(0) for part in self.rows().split(list(sizes))])

    @property
    def shape(self) -> tuple[int, ...]:
        """W."""
        raise NotImplementedError

    def energy(self) -> Tensor:
        """Σ_i ‖g_i‖². Where the gradients are not formed: estimated, without bias, from their
        products with one direction of random signs."""
        like = self.like()
        shape = (*self.shape, 2) if like.is_complex() else self.shape
        generator = torch.Generator(like.device).manual_seed(0)
        signs = torch.randint(0, 2, shape, generator=generator, device=like.device) * 2.0 - 1.0
        signs = torch.view_as_complex(signs) if like.is_complex() else signs
        return self.dot(signs.to(wide(like).dtype)).square().sum()

    def like(self) -> Tensor:
        """A tensor of the gradients' type."""
        return self.tensors()[-1]

    def map(self: R, f: Callable[[Tensor], Tensor]) -> R:
        """The same record with ``f`` applied to its tensors (moved to another device, say)."""
        return replace(self, **{k: f(v) for k, v in vars(self).items() if isinstance(v, Tensor)})

    def to(self: R, device: torch.device) -> R:
        """On this device."""
        return self.map(lambda t: t.to(device)) if self.tensors()[0].device != device else self

    def tensors(self) -> list[Tensor]:
        return [v for v in vars(self).values() if isinstance(v, Tensor)]

    @property
    def bytes(self) -> int:
        return sum([t.nbytes for t in self.tensors()])


@dataclass(eq=False)
class Dense(Record):
    """Materialised: the per-example gradients themselves."""

    grads: Tensor  # [B, *W]
    own: bool = False  # is this memory nobody else's?

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.grads.shape[1:])

    def tensors(self) -> list[Tensor]:
        return [self.grads]

    @property
    def bytes(self) -> int:
        return self.grads.nbytes

    def energy(self) -> Tensor:
        return real(self.grads).square().sum()

    def groups(self, sizes: Sequence[int]) -> Tensor:
        if len(set(sizes)) > 1:
            return super().groups(sizes)
        if sizes[0] == 1:
            return self.grads.clone()  # the caller may add to it
        return self.grads.reshape(len(sizes), sizes[0], *self.grads.shape[1:]).sum(1)

    def dot(self, u: Tensor) -> Tensor:
        return real(self.grads).reshape(len(self.grads), -1) @ real(u).flatten()

    def dots(self, u: Tensor) -> Tensor:
        return real(u).reshape(len(u), -1) @ real(self.grads).reshape(len(self.grads), -1).T

    def rows(self) -> Tensor:
        return self.grads

    def __add__(self, other: Dense) -> Dense:
        return Dense(self.grads + other.grads, own=True)


@dataclass(eq=False)
class Aligned(Record):
    """The operand has one slice per example (an expanded class token): row i uses slice i."""

    grads: Tensor  # [B, *W without its example dimension]
    dim: int  # the example dimension of W

    @property
    def shape(self) -> tuple[int, ...]:
        B, *rest = self.grads.shape
        return (*rest[: self.dim], B, *rest[self.dim :])

    def energy(self) -> Tensor:
        return real(self.grads).square().sum()

    def dot(self, u: Tensor) -> Tensor:
        return inner(u.movedim(self.dim, 0), self.grads)

    def cut(self, first: int, last: int) -> Record:
        return Dense(self.rows()[first:last])

    def rows(self) -> Tensor:
        return torch.stack(
            [_only(i, g, len(self.grads), self.dim) for i, g in enumerate(self.grads)]
        )


def _only(i: int, g: Tensor, B: int, dim: int) -> Tensor:
    out = g.new_zeros((B, *g.shape))
    out[i] = g
    return out.movedim(0, dim)


@dataclass(eq=False)
class Pair(Record):
    """Ghost form of y = x Wᵀ: ⟨u, g_i⟩ = Σ_t δ_itᵀ u a_it; g_i = Σ_t δ_it ⊗ a_it is not formed.

    Of complex numbers a_it is conjugate in g_i.
    """

    a: Tensor  # [B, T, I]
    delta: Tensor  # [B, T, O]
    transposed: bool = False  # W is [I, O] instead of [O, I]

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = self.delta.shape[-1], self.a.shape[-1]
        return sizes[::-1] if self.transposed else sizes

    def dot(self, u: Tensor) -> Tensor:
        a, delta = in_one_type(self.a, self.delta)
        u = u.to(a.dtype)
        y = a @ (u if self.transposed else u.mT)
        return inner(y, delta)

    def rows(self) -> Tensor:
        left, right = self._factors()
        n, m = left.shape[-1], right.shape[-1]
        g = aligned(left).mT @ aligned(right)
        return g if g.shape[1:] == (n, m) else g[:, :n, :m]

    def part(self, cut: Cut) -> Tensor:
        if self.transposed:
            return replace(self, a=self.a[..., cut]).rows()
        return replace(self, delta=self.delta[..., cut]).rows()

    def _factors(self) -> tuple[Tensor, Tensor]:
        a, delta = in_one_type(self.a, self.delta)
        a = a.conj().resolve_conj() if a.is_complex() else a
        return (a, delta) if self.transposed else (delta, a)

    def materialised(self, blocks: Blocks | None) -> Dense:
        """The gradients, written to memory that is there already where possible."""
        if blocks is None:
            return Dense(self.rows(), own=True)
        left, right = self._factors()
        place = blocks.take((left.shape[0], *self.shape), left)
        rows = left.mT @ right if place is None else torch.bmm(left.mT, right, out=place)
        return Dense(rows, own=True)

    def energy(self) -> Tensor:
        if self.a.shape[1] > 1:
            return super().energy()
        sizes = [real(x).flatten(1).square().sum(1) for x in (self.a, self.delta)]
        return (sizes[0] * sizes[1]).sum()  # of one token: ‖δ ⊗ a‖ = ‖δ‖‖a‖

    def groups(self, sizes: Sequence[int]) -> Tensor:
        return merged(self, sizes)


@dataclass(eq=False)
class Replay(Record):
    """Any operation: ⟨u, g_i⟩ = ⟨δ_i, (∂f/∂W · u)_i⟩, the operation's own derivative along u.

    ``apply(W)`` runs the operation with everything but the operand fixed; ``split`` puts the
    examples of its output in front.
    """

    apply: Callable[[Tensor], Tensor]
    split: Callable[[Tensor], Tensor]
    delta: Tensor  # [B, ...]
    value: Tensor  # the operand, W
    linear: bool = False  # f(W + u) = f(W) + f(u): applying it to u is the derivative
    held: tuple[Tensor, ...] = ()  # what ``apply`` keeps alive, for the memory account

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def like(self) -> Tensor:
        return self.value

    def dot(self, u: Tensor) -> Tensor:
        if self.linear:
            tangent = self.apply(u.to(self.value.dtype))
        else:
            tangent = jvp(self.apply, [self.value], [u])
        return inner(self.split(tangent), self.delta)

    def rows(self) -> Tensor:
        with torch.enable_grad():
            W = self.value.detach().clone().requires_grad_()
            y = self.split(self.apply(W))
            return torch.stack([_gradient(y[i], W, d) for i, d in enumerate(self.delta)])

    def some_groups(self, first: int, sizes: Sequence[int]) -> Tensor:
        found = []
        with torch.enable_grad():
            W = self.value.detach().clone().requires_grad_()
            y = self.split(self.apply(W))
            for n in sizes:
                rows = slice(first, first + n)
                found.append(_gradient(y[rows], W, self.delta[rows]))
                first += n
        return torch.stack(found)

    def map(self: R, f: Callable[[Tensor], Tensor]) -> R:
        return self  # its operation is bound to the device it ran on

    def tensors(self) -> list[Tensor]:
        return [*self.held, self.delta]


def merged(record: Record, sizes: Sequence[int]) -> Tensor:
    """Gradients of whole groups, whose examples count as more tokens of one."""
    if len(set(sizes)) == 1:
        r = sizes[0]
        return record.map(lambda t: t.reshape(len(sizes), r * t.shape[1], *t.shape[2:])).rows()
    starts = itertools.accumulate(sizes, initial=0)
    cuts = [slice(a, a + n) for a, n in zip(starts, sizes, strict=False)]
    return torch.cat([record.cut(c.start, c.stop).groups([c.stop - c.start]) for c in cuts])


def _gradient(y: Tensor, W: Tensor, delta: Tensor) -> Tensor:
    if not y.requires_grad:  # ``x.type_as(W)``: takes part and has no influence
        return torch.zeros_like(W)
    (g,) = torch.autograd.grad(y, W, delta.to(y.dtype), retain_graph=True, allow_unused=True)
    return torch.zeros_like(W) if g is None else g


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """At least float32: sums over many products do not fit half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def wide(x: Tensor) -> Tensor:
    dtype = wide_type(x.dtype)
    return x if x.dtype == dtype else x.to(dtype)


def real(x: Tensor) -> Tensor:
    """In at least float32; complex numbers [...] as pairs [..., 2]. Gradients of complex tensors
    are ∂L/∂Re + i ∂L/∂Im, so what they say of a direction is the product of such pairs."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else wide(x)


def inner(u: Tensor, g: Tensor) -> Tensor:
    """⟨u_i, g_i⟩ of tensors [B, …] for each i: [B]."""
    return (real(u) * real(g)).reshape(len(g), -1).sum(1)


def aligned(x: Tensor) -> Tensor:
    """Padded with zeros to as many features as its products want."""
    missing = short_by(x.shape[-1], x.dtype, x.device.type)
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def short_by(features: int, dtype: torch.dtype, device: str) -> int:
    """How many features are missing to a multiple of 8, which half-precision products on a GPU
    must have to run at full speed (a vocabulary of 50,257 makes them four times slower)."""
    if features < 1024 or device != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return 0
    return -features % 8


def in_one_type(a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one type for a product: float32 if either is float16, whose range is too small."""
    if a.dtype == delta.dtype != torch.float16:
        return a, delta
    if torch.float16 in (a.dtype, delta.dtype):
        return a.float(), delta.float()
    dtype = torch.promote_types(a.dtype, delta.dtype)
    return a.to(dtype), delta.to(dtype)

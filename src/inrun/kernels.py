"""Whole-model kernels for GPUs, in Triton: one launch for all parameters instead of one each.

Tensors are found through a table of their addresses, one row per tensor; a program of the grid
works on one chunk of one tensor. Both kernels are bound by memory, so each number is read once:

* ``shift``: from weights, gradient and Adam's state to the weights at a point of the path
  w_∅ → w_B and the secant (or tangent) factor, the formulas of optimizers/adam.py;
* ``contract``: ⟨K ⊙ v, g_i⟩ of every example for several directions v, and ⟨K ⊙ v, G⟩.

Where Triton is missing or a tensor is of another kind the plain code serves: see ``usable``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from inrun.torch_compat import unflatten_dense_tensors

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK = 4096  # numbers of a tensor per program
_EXAMPLES = 64  # rows that fit a tile


def usable(tensors: Sequence[Tensor]) -> bool:
    """Can the kernels work on these: on one GPU, dense, aligned, of a type they know?"""
    return triton is not None and all(
        t.is_cuda and t.is_contiguous() and t.data_ptr() % 16 == 0 and t.dtype in _TYPES
        for t in tensors
    )


def usable_rows(grads: Tensor) -> bool:
    """The same for per-example gradients [B, *W], which may have gaps between examples."""
    known = triton is not None and grads.is_cuda and grads.dtype in _TYPES
    return known and _rows_in_order(grads)


def _rows_in_order(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and (x.is_contiguous() or x[0].is_contiguous())


def in_order(x: Tensor) -> Tensor:
    """As the kernels read it: number after number from an aligned address."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def rows_in_order(x: Tensor) -> Tensor:
    """The same for each row; there may be gaps between them."""
    return x if _rows_in_order(x) else x.clone(memory_format=torch.contiguous_format)


Numbers = tuple[Any, Any, float, Any, Any]  # β₁, β₂, ε, η, decay of a parameter group


@dataclass(frozen=True)
class AdamStep:
    """A whole step of Adam (optimizers/adam.py): its tensors, and numbers by parameter group."""

    p: list[Tensor]
    g: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    t: list[Any]  # steps so far: numbers or 0-dim tensors
    groups: list[Numbers]
    group: tuple[int, ...]  # of each tensor

    def usable(self) -> bool:
        kinds = [{t.dtype for t in column} for column in (self.p, self.g, self.m, self.v)]
        one = all(len(kind) == 1 for kind in kinds) and kinds[2] == kinds[3]
        return one and usable([*self.p, *self.g, *self.m, *self.v])


def shift(
    step: AdamStep, x: float | None, kind: str | None, into: list[Tensor] | None = None
) -> tuple[list[Tensor] | None, list[Tensor] | None]:
    """The weights at ``x`` on the path (None: not wanted), perhaps ``into`` tensors that are there
    already, and the factor of ``kind``."""
    device = step.p[0].device
    weights = None
    if x is not None:
        weights = into or alike(step.p, step.p[0].dtype)
    factors = None if kind is None else alike(step.p, torch.float32)
    columns = [step.p, step.g, step.m, step.v, weights or [], factors or []]
    sizes = tuple(p.numel() for p in step.p)
    table, scalars = _addresses(columns, device), _scalars(step, 0.0 if x is None else x, device)
    for even, tensors, starts in _chunks(sizes, device):
        _shift[(len(tensors),)](
            table, _sizes(sizes, device), scalars, tensors, starts,
            _type(step.p[0]), _type(step.g[0]), _type(step.m[0]),
            POINT=x is not None, KIND={None: 0, "secant": 1, "tangent": 2}[kind],
            CHUNK=_CHUNK, BLOCK=1024, EVEN=even,
        )  # fmt: skip
    return weights, factors


def contract(
    rows: Sequence[Tensor],
    K: Sequence[Tensor] | None,
    v: Sequence[Tensor],
    G: Sequence[Tensor] | None,
) -> Tensor:
    """Σ over tensors of ⟨K ⊙ v_q, g_i⟩, and in the last column ⟨K ⊙ v_q, G⟩: [Q, B + 1].

    ``rows`` are [B, *W], ``v`` [Q, *W], perhaps with gaps between rows; K (None: 1) and G have the
    shape W.
    """
    B, Q, device = len(rows[0]), len(v[0]), rows[0].device
    sizes = tuple(x.numel() // Q for x in v)
    strides = tuple(x.stride(0) for x in rows), tuple(x.stride(0) for x in v)
    table = _addresses([list(rows), list(K or []), list(v), list(G or [])], device)
    types = _type(rows[0]), _type(v[0]), _type(G[0]) if G else tl.float32
    total = torch.zeros((Q, B + 1), dtype=torch.float64, device=device)
    for even, tensors, starts in _chunks(sizes, device, *strides):
        partial = torch.empty((len(tensors), Q, B + 1), dtype=torch.float32, device=device)
        given = (table, _sizes(sizes, device), _sizes(strides[0], device), tensors, starts, partial)
        how = {"B": B, "WITH_K": K is not None, "WITH_G": G is not None, "CHUNK": _CHUNK}
        if Q > 1:
            BP, QP = (max(16, min(triton.next_power_of_2(n), _EXAMPLES)) for n in (B, Q))
            half = rows[0].dtype == torch.bfloat16
            _contract_many[(len(tensors), -(-B // BP), -(-Q // QP))](
                *given, _sizes(strides[1], device), *types, BP=BP, Q=Q, QP=QP, HALF=half,
                EVEN=even, EXACT=_exact(device), **_tiles(BP * QP, half), **how,
            )  # fmt: skip
        else:
            BP = min(triton.next_power_of_2(B), _EXAMPLES)
            BLOCK = max(_CHUNK // BP, 64)
            _contract[(len(tensors),)](*given, *types, BP=BP, BLOCK=BLOCK, EVEN=even, **how)
        total += partial.sum(0, dtype=torch.float64)
    return total


def _tiles(results: int, half: bool) -> dict[str, int]:
    """How many numbers of a row at a time, and how many warps: the quickest that were tried on an
    H200. For 16 directions and 16 examples in bfloat16 one warp takes 0.51 ms where the usual four
    take 1.3 and the reading alone 0.34."""
    if results <= 256:
        return {"BLOCK": 128 if half else 32, "num_warps": 1}
    return {"BLOCK": 128 if half and results <= 1024 else 64, "num_warps": 4}


@lru_cache(maxsize=8)
def _exact(device: torch.device) -> str:
    """How float32 is multiplied: in three products of TF32, which keep its precision, where the
    device has tensor cores for them."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if torch.cuda.get_device_capability(device) >= (8, 0) else "ieee"


def alike(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New tensors of these shapes, in one piece of memory."""
    sizes = [-(-t.numel() // 8) * 8 for t in tensors]  # each aligned
    flat = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    if all(n == t.numel() for n, t in zip(sizes, tensors, strict=True)):
        return list(unflatten_dense_tensors(flat, tensors))  # in one call
    parts = zip(flat.split(sizes), sizes, tensors, strict=True)
    return [(x if n == t.numel() else x[: t.numel()]).view(t.shape) for x, n, t in parts]


def _addresses(columns: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """[tensors, columns] addresses; 0 where a column is empty."""
    n = max(len(c) for c in columns)
    table = [[c[i].data_ptr() if c else 0 for c in columns] for i in range(n)]
    return _upload(torch.tensor(table, dtype=torch.int64, device="cpu"), device)


def _upload(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host to the device, without waiting for it."""
    return (t.pin_memory() if device.type == "cuda" else t).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _sizes(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _chunks(
    sizes: tuple[int, ...], device: torch.device, *strides: tuple[int, ...]
) -> list[tuple[bool, Tensor, Tensor]]:
    """For each program: its tensor, and where in it the chunk begins. First those of tensors all of
    whose sizes and strides are multiples of 16 (True), which need not be read number by number."""
    counts = torch.tensor([-(-n // _CHUNK) for n in sizes], device="cpu")
    tensors = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    starts = (torch.arange(len(tensors), device="cpu") - first) * _CHUNK
    uneven = (torch.tensor([sizes, *strides], device="cpu") % 16).sum(0)
    found = []
    for even in (True, False):
        own = (uneven[tensors] == 0) == even
        if bool(own.any()):
            found.append((even, tensors[own].int().to(device), starts[own].to(device)))
    return found


def _scalars(step: AdamStep, x: float, device: torch.device) -> Tensor:
    """[tensors, 7]: β₁, β₂, ε, η/c₁, c₂, decay, x in float64. What is on the device stays there."""
    rows = [_on(numbers, device) for numbers in step.groups]
    table = rows[0].expand(len(step.p), -1) if len(rows) == 1 else None
    if table is None:
        table = torch.stack(rows)[_sizes(step.group, device)]
    beta1, beta2, eps, lr, decay = table.unbind(1)
    t = _on(step.t, device) + 1
    size, c2 = lr / (1 - beta1**t), 1 - beta2**t
    return torch.stack([beta1, beta2, eps, size, c2, decay, torch.full_like(t, x)], dim=1)


def _on(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers, some perhaps on the device already, as one float64 tensor there."""
    if all(isinstance(n, Tensor) and n.ndim == 0 and n.device == device for n in numbers):
        return torch.stack(list(numbers)).double()  # the steps of a fused optimizer
    if any(isinstance(n, Tensor) and n.device.type != "cpu" for n in numbers):
        parts = [torch.as_tensor(n, device=device) for n in numbers]
        return torch.stack([p.reshape(()) for p in parts]).double()
    host = torch.tensor([float(n) for n in numbers], dtype=torch.float64, device="cpu")
    return _upload(host, device)


def _type(t: Tensor) -> Any:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        t.dtype
    ]


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _at(  # type: ignore[no-untyped-def]
        table, row, column, columns: tl.constexpr, dtype: tl.constexpr
    ):
        address = tl.load(table + row * columns + column)
        return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)

    @triton.jit  # type: ignore[untyped-decorator]
    def _number(at, even: tl.constexpr):  # type: ignore[no-untyped-def]
        """A size or a stride. Told that it is a multiple of 16, the compiler reads and writes 16
        bytes at once, otherwise number by number."""
        n = tl.load(at)
        if even:
            n = tl.multiple_of(n, 16)
        return n

    @triton.jit  # type: ignore[untyped-decorator]
    def _shift(  # type: ignore[no-untyped-def]
        table, sizes, scalars, tensors, starts,
        P: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
        POINT: tl.constexpr, KIND: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
        EVEN: tl.constexpr,
    ):  # fmt: skip
        pid = tl.program_id(0)
        t = tl.load(tensors + pid)
        start = tl.multiple_of(tl.load(starts + pid), 16)
        n = _number(sizes + t, EVEN)
        beta1, one1 = tl.load(scalars + t * 7), 1.0 - tl.load(scalars + t * 7)
        beta2, one2 = tl.load(scalars + t * 7 + 1), 1.0 - tl.load(scalars + t * 7 + 1)
        c2 = tl.load(scalars + t * 7 + 4)
        x = tl.load(scalars + t * 7 + 6).to(tl.float32)
        eps = tl.load(scalars + t * 7 + 2).to(tl.float32)
        size = tl.load(scalars + t * 7 + 3).to(tl.float32)
        decay = tl.load(scalars + t * 7 + 5).to(tl.float32)
        b1, a1 = beta1.to(tl.float32), one1.to(tl.float32)
        b2, a2 = (beta2 / c2).to(tl.float32), (one2 / c2).to(tl.float32)  # with the correction

        of_p, of_g = _at(table, t, 0, 6, P), _at(table, t, 1, 6, G)
        of_m, of_v = _at(table, t, 2, 6, M), _at(table, t, 3, 6, M)
        of_w, of_k = _at(table, t, 4, 6, P), _at(table, t, 5, 6, tl.float32)
        for offset in range(0, CHUNK, BLOCK):
            at = start + offset + tl.arange(0, BLOCK)
            inside = at < n
            g = tl.load(of_g + at, mask=inside, other=0.0).to(tl.float32)
            m = tl.load(of_m + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(of_v + at, mask=inside, other=0.0).to(tl.float32)
            r0 = tl.sqrt(b2 * v)
            r = tl.sqrt(b2 * v + a2 * g * g)
            if POINT:
                p = tl.load(of_p + at, mask=inside, other=0.0).to(tl.float32)
                with_batch = (b1 * m + a1 * g) / (r + eps)
                without = b1 * m / (r0 + eps)
                w = decay * p - size * ((1.0 - x) * without + x * with_batch)
                tl.store(of_w + at, w, mask=inside)
            if KIND > 0:
                touched = r + r0 > 0.0
                if KIND == 1:
                    rho = tl.where(touched, a2 * g / tl.where(touched, r + r0, 1.0), 0.0)
                    K = (a1 - rho * b1 * m / (r0 + eps)) / (r + eps)
                else:
                    slope = a1 * (b2 * v + eps * r) - b1 * a2 * m * g
                    K = slope / tl.where(touched, r, 1.0) / ((r + eps) * (r + eps))
                K = tl.where(touched, size * K, 0.0)
                tl.store(of_k + at, K, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _contract(  # type: ignore[no-untyped-def]
        table, sizes, strides, tensors, starts, partial,
        R: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
        B: tl.constexpr, BP: tl.constexpr, WITH_K: tl.constexpr, WITH_G: tl.constexpr,
        CHUNK: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    ):  # fmt: skip
        """One direction: bound by the reading of the per-example gradients."""
        pid = tl.program_id(0)
        t = tl.load(tensors + pid)
        start = tl.multiple_of(tl.load(starts + pid), 16)
        n, stride = _number(sizes + t, EVEN), _number(strides + t, EVEN)
        of_g, of_k = _at(table, t, 0, 4, R), _at(table, t, 1, 4, tl.float32)
        of_v, of_own = _at(table, t, 2, 4, V), _at(table, t, 3, 4, G)
        out = partial + pid.to(tl.int64) * (B + 1)
        for first in range(0, B, BP):
            b = first + tl.arange(0, BP)
            total = tl.zeros((BP, BLOCK), dtype=tl.float32)
            summed = tl.zeros((BLOCK,), dtype=tl.float32)
            for offset in range(0, CHUNK, BLOCK):
                at = start + offset + tl.arange(0, BLOCK)
                inside = at < n
                u = tl.load(of_v + at, mask=inside, other=0.0).to(tl.float32)
                if WITH_K:
                    u *= tl.load(of_k + at, mask=inside, other=0.0)
                where = b[:, None].to(tl.int64) * stride + at[None, :]
                mask = (b[:, None] < B) & inside[None, :]
                g = tl.load(of_g + where, mask=mask, other=0.0).to(tl.float32)
                total += g * u[None, :]
                if WITH_G:
                    own = tl.load(of_own + at, mask=inside, other=0.0)
                    summed += own.to(tl.float32) * u
            tl.store(out + b, tl.sum(total, axis=1), mask=b < B)
            tl.store(out + B, tl.sum(summed))

    @triton.jit  # type: ignore[untyped-decorator]
    def _contract_many(  # type: ignore[no-untyped-def]
        table, sizes, strides, tensors, starts, partial, v_strides,
        R: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
        B: tl.constexpr, BP: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr,
        WITH_K: tl.constexpr, WITH_G: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
        HALF: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Several directions: a matrix product. Against bfloat16 gradients a direction goes in two
        bfloat16 parts, which keeps 16 bits of it."""
        pid = tl.program_id(0)
        t = tl.load(tensors + pid)
        start = tl.multiple_of(tl.load(starts + pid), 16)
        n, stride = _number(sizes + t, EVEN), _number(strides + t, EVEN)
        v_stride = _number(v_strides + t, EVEN)
        of_g, of_k = _at(table, t, 0, 4, R), _at(table, t, 1, 4, tl.float32)
        of_v, of_own = _at(table, t, 2, 4, V), _at(table, t, 3, 4, G)
        b = tl.program_id(1) * BP + tl.arange(0, BP)
        q = tl.program_id(2) * QP + tl.arange(0, QP)
        total = tl.zeros((QP, BP), dtype=tl.float32)
        summed = tl.zeros((QP,), dtype=tl.float32)
        for offset in range(0, CHUNK, BLOCK):
            at = start + offset + tl.arange(0, BLOCK)
            inside = at < n
            where = q[:, None].to(tl.int64) * v_stride + at[None, :]
            mask = (q[:, None] < Q) & inside[None, :]
            u = tl.load(of_v + where, mask=mask, other=0.0).to(tl.float32)
            if WITH_K:
                K = tl.load(of_k + at, mask=inside, other=0.0)
                u *= K[None, :]
            where = b[:, None].to(tl.int64) * stride + at[None, :]
            mask = (b[:, None] < B) & inside[None, :]
            g = tl.load(of_g + where, mask=mask, other=0.0)
            if HALF:
                high = u.to(tl.bfloat16)
                low = (u - high.to(tl.float32)).to(tl.bfloat16)
                total = tl.dot(high, tl.trans(g), total)
                total = tl.dot(low, tl.trans(g), total)
            else:
                total = tl.dot(u, tl.trans(g.to(tl.float32)), total, input_precision=EXACT)
            if WITH_G:
                own = tl.load(of_own + at, mask=inside, other=0.0)
                summed += tl.sum(own.to(tl.float32)[None, :] * u, axis=1)
        out = partial + pid.to(tl.int64) * Q * (B + 1)
        where = q[:, None] * (B + 1) + b[None, :]
        tl.store(out + where, total, mask=(q[:, None] < Q) & (b[None, :] < B))
        tl.store(out + q * (B + 1) + B, summed, mask=(q < Q) & (tl.program_id(1) == 0))

"""⟨u, g_i⟩ of materialised gradients of a whole model in one launch: Triton kernels for GPUs.

They compute what `contraction.joined_products` does with torch; tests/scoring/test_kernels.py
compares both. How a kernel finds its tensors: kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from inrun import kernels

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

    from inrun.kernels import read_length, tensor_at

_EXAMPLES = 64  # rows that fit a tile


def usable_rows(grads: Sequence[Tensor]) -> list[bool]:
    """Which of these per-example gradients [B, *W] the kernels can read: dense and aligned on a
    GPU. There may be gaps between examples."""
    if not kernels.AVAILABLE:
        return [False] * len(grads)
    return [g.is_cuda and g.dtype in kernels.TYPES and _rows_in_order(g) for g in grads]


def _rows_in_order(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and (x.is_contiguous() or x[0].is_contiguous())


def in_order(x: Tensor) -> Tensor:
    """The tensor as the kernels read it, number after number from an aligned address; perhaps a
    copy."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def rows_in_order(x: Tensor) -> Tensor:
    """The same for each row; there may be gaps between them."""
    return x if _rows_in_order(x) else x.clone(memory_format=torch.contiguous_format)


def all_rows_in_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same of several."""
    contiguous = all(map(Tensor.is_contiguous, tensors))
    if contiguous and not any(address % 16 for address in map(Tensor.data_ptr, tensors)):
        return list(tensors)
    return list(map(rows_in_order, tensors))


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
    table = kernels.addresses([list(rows), list(K or []), list(v), list(G or [])], device)
    types = (
        kernels.type_of(rows[0]), kernels.type_of(v[0]),
        kernels.type_of(G[0]) if G else tl.float32,
    )  # fmt: skip
    total = torch.zeros((Q, B + 1), dtype=torch.float64, device=device)
    for even, tensors, starts in kernels.chunks(sizes, device, *strides):
        partial = torch.empty((len(tensors), Q, B + 1), dtype=torch.float32, device=device)
        given = (
            table, kernels.integers(sizes, device), kernels.integers(strides[0], device),
            tensors, starts, partial,
        )  # fmt: skip
        how = {"B": B, "WITH_K": K is not None, "WITH_G": G is not None, "CHUNK": kernels.CHUNK}
        if Q > 1:
            BP, QP = (max(16, min(triton.next_power_of_2(n), _EXAMPLES)) for n in (B, Q))
            half = rows[0].dtype == torch.bfloat16
            _contract_many[(len(tensors), -(-B // BP), -(-Q // QP))](
                *given, kernels.integers(strides[1], device), *types, BP=BP, Q=Q, QP=QP, HALF=half,
                EVEN=even, EXACT=exact(device), **_tiles(BP * QP, half), **how,
            )  # fmt: skip
        else:
            BP = min(triton.next_power_of_2(B), _EXAMPLES)
            BLOCK = max(kernels.CHUNK // BP, 64)
            _contract[(len(tensors),)](*given, *types, BP=BP, BLOCK=BLOCK, EVEN=even, **how)
        total += partial.sum(0, dtype=torch.float64)
    return total


def row_dots(pairs: Sequence[tuple[Tensor, Tensor]], B: int) -> Tensor:
    """Σ over pairs of ⟨y_i, δ_i⟩ for each example i: [B].

    Both tensors of a pair have the same number of elements, those of each of the B examples one
    after the other. All y are of one type, all δ too.
    """
    y, delta = [y for y, _ in pairs], [d for _, d in pairs]
    device, sizes = y[0].device, tuple(x.numel() // B for x in y)
    table = kernels.addresses([y, delta], device)
    types = kernels.type_of(y[0]), kernels.type_of(delta[0])
    total = torch.zeros((B,), dtype=torch.float64, device=device)
    BP = min(triton.next_power_of_2(B), _EXAMPLES)
    for even, tensors, starts in kernels.chunks(sizes, device):
        partial = torch.empty((len(tensors), B), dtype=torch.float32, device=device)
        _row_dots[(len(tensors),)](
            table, kernels.integers(sizes, device), tensors, starts, partial, *types,
            B=B, BP=BP, CHUNK=kernels.CHUNK, BLOCK=max(kernels.CHUNK // BP, 64), EVEN=even,
        )  # fmt: skip
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
def exact(device: torch.device) -> str:
    """How float32 is multiplied: in three products of TF32, which keep its precision, where the
    device has tensor cores for them."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if torch.cuda.get_device_capability(device) >= (8, 0) else "ieee"


if kernels.AVAILABLE:

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
        n, stride = read_length(sizes + t, EVEN), read_length(strides + t, EVEN)
        of_g, of_k = tensor_at(table, t, 0, 4, R), tensor_at(table, t, 1, 4, tl.float32)
        of_v, of_own = tensor_at(table, t, 2, 4, V), tensor_at(table, t, 3, 4, G)
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
        n, stride = read_length(sizes + t, EVEN), read_length(strides + t, EVEN)
        v_stride = read_length(v_strides + t, EVEN)
        of_g, of_k = tensor_at(table, t, 0, 4, R), tensor_at(table, t, 1, 4, tl.float32)
        of_v, of_own = tensor_at(table, t, 2, 4, V), tensor_at(table, t, 3, 4, G)
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

    @triton.jit  # type: ignore[untyped-decorator]
    def _row_dots(  # type: ignore[no-untyped-def]
        table, sizes, tensors, starts, partial, Y: tl.constexpr, D: tl.constexpr,
        B: tl.constexpr, BP: tl.constexpr,
        CHUNK: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    ):  # fmt: skip
        """As ``_contract``, with a direction for each example."""
        pid = tl.program_id(0)
        t = tl.load(tensors + pid)
        start = tl.multiple_of(tl.load(starts + pid), 16)
        n = read_length(sizes + t, EVEN)
        of_y, of_d = tensor_at(table, t, 0, 2, Y), tensor_at(table, t, 1, 2, D)
        out = partial + pid.to(tl.int64) * B
        for first in range(0, B, BP):
            b = first + tl.arange(0, BP)
            total = tl.zeros((BP, BLOCK), dtype=tl.float32)
            for offset in range(0, CHUNK, BLOCK):
                at = start + offset + tl.arange(0, BLOCK)
                where = b[:, None].to(tl.int64) * n + at[None, :]
                mask = (b[:, None] < B) & (at < n)[None, :]
                y = tl.load(of_y + where, mask=mask, other=0.0).to(tl.float32)
                d = tl.load(of_d + where, mask=mask, other=0.0).to(tl.float32)
                total += y * d
            tl.store(out + b, tl.sum(total, axis=1), mask=b < B)

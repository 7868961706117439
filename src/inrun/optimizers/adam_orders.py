"""What Adam's update gains when examples join in sampled orders: a Triton kernel for GPUs.

Legend: C examples, N coordinates in n blocks of BLOCK, R orders of each block, Q directions. In
each block and order r the examples come as ``orders[r, :, block]`` says; x is the sum of the
gradients of those who have joined, and the update there (adam.py)

    Ψ(x) = (η/c₁) (β₁m + (1−β₁)x) / (√((β₂v + (1−β₂)x²)/c₂) + ε).

Written is ⟨v_q, Ψ(x) − Ψ(x before)⟩ over the block, by place in the order. A program computes
``ROWS`` blocks. Each gradient is read once for each order, and nothing of that size is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inrun import kernels

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

BLOCKS = 16  # of a program


def gains(
    whole: Tensor, m: Tensor, v: Tensor, numbers: tuple[Any, ...], rows: Tensor, directions: Tensor,
    orders: Tensor, block: int, factor: Tensor | float,
) -> Tensor | None:  # fmt: skip
    """The gains [Q, R, C, n]; None for tensors that the kernel cannot read.

    Args:
        whole: the gradient [N] that the optimizer receives: what x is when all have joined, to the
            bit.
        numbers: β₁, 1 − β₁, β₂/c₂, (1 − β₂)/c₂, η/c₁ and ε.
        rows: per-example gradients [C, N]; ``directions`` v_q [Q, N].
        orders: [R, C, n].
        factor: of x, by clipping: one number, or one by order, place and block [R, C, n].
    """
    tensors = [whole, m, v, rows, directions]
    if not kernels.usable(tensors) or any(t.dtype != torch.float32 for t in tensors):
        return None
    (Q, N), (R, C, n) = directions.shape, orders.shape
    found = torch.empty((Q, R, C, n), dtype=torch.float32, device=rows.device)
    one = 1.0 if isinstance(factor, Tensor) else factor
    factors = factor.float().contiguous() if isinstance(factor, Tensor) else found
    device = [torch.as_tensor(x, dtype=torch.float32, device=rows.device) for x in numbers]
    _gains[(-(-n // BLOCKS),)](
        whole, m, v, torch.stack(device), rows, directions, orders.int().contiguous(), factors,
        one, found, N, n, Q, R, C, ONE=not isinstance(factor, Tensor), ROWS=BLOCKS, BLOCK=block,
    )  # fmt: skip
    return found


if kernels.AVAILABLE:

    @triton.jit  # type: ignore[untyped-decorator]
    def _gains(  # type: ignore[no-untyped-def]
        whole, m, v, numbers, rows, directions, orders, factors, factor, found, N, n, Q, R, C,
        ONE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        there = block < n
        at = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = at < N
        b1, a1 = tl.load(numbers), tl.load(numbers + 1)
        b2, a2 = tl.load(numbers + 2), tl.load(numbers + 3)
        size, eps = tl.load(numbers + 4), tl.load(numbers + 5)
        top = b1 * tl.load(m + at, mask=inside, other=0.0)
        low = b2 * tl.load(v + at, mask=inside, other=0.0)
        received = tl.load(whole + at, mask=inside, other=0.0)
        without = size * top / (tl.sqrt(low) + eps)
        zero = tl.zeros([], dtype=tl.int64)
        for r in range(R):
            x = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
            before = without
            for c in range(C):
                place = (r * C + c) * n + block
                i = tl.load(orders + place, mask=there, other=0).to(tl.int64)[:, None]
                x += tl.load(rows + i * N + at, mask=inside, other=0.0)
                if ONE:
                    y = x * factor
                else:
                    y = x * tl.load(factors + place, mask=there, other=0.0)[:, None]
                y = tl.where(c == C - 1, received, y)
                after = size * (top + a1 * y) / (tl.sqrt(low + a2 * y * y) + eps)
                gain = tl.where(inside, after - before, 0.0)
                before = after
                for q in range(Q):
                    far = zero + q  # of large sizes
                    d = tl.load(directions + far * N + at, mask=inside, other=0.0)
                    own = found + far * R * C * n + place
                    tl.store(own, tl.sum(gain * d, axis=1), mask=there)

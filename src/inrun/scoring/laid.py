"""Directions of a whole model, side by side in memory: a Triton kernel for GPUs.

A launch for each type reads K, v and G of all parameters, writes u = K ⊙ v in the type in which
operations will run along it, and adds up ⟨u, G⟩ on the way. tests/scoring/test_uses_kernel.py
compares it with the plain formula. How a kernel finds its tensors: kernels.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from inrun import kernels
from inrun.scoring import contraction_kernel
from inrun.scoring.uses import Direction

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

    from inrun.kernels import read_length, tensor_at

Wanted = tuple[str, torch.dtype]  # a parameter's direction, in a type
ALIGNED = 16  # numbers: where directions begin


@dataclass(eq=False)
class Laid:
    """Directions [Q, numbers] by type, and where in them each one begins."""

    flat: Mapping[torch.dtype, Tensor]
    at: Mapping[Wanted, int]
    sums: Tensor | None  # ⟨u_q, G⟩ [Q] of all parameters


class _Part(NamedTuple):
    """What one launch reads, and what it writes: ``store`` is None where only the sum is wanted."""

    store: torch.dtype | None
    counted: bool  # in the sum; a parameter that is wanted in two types is counted once
    places: tuple[int, ...]  # among the parameters
    sizes: tuple[int, ...]
    starts: tuple[int, ...]  # in the memory that is written


class _Plan(NamedTuple):
    parts: list[_Part]
    lengths: dict[torch.dtype, int]
    at: dict[Wanted, int]


@lru_cache(maxsize=64)
def _plan(names: tuple[str, ...], sizes: tuple[int, ...], wanted: tuple[Wanted, ...]) -> _Plan:
    at: dict[Wanted, int] = {}
    lengths: dict[torch.dtype, int] = {}
    entries: dict[tuple[torch.dtype | None, bool], list[tuple[int, int]]] = {}
    place = {k: i for i, k in enumerate(names)}
    counted: set[str] = set()
    for name, dtype in wanted:
        at[name, dtype] = start = lengths.get(dtype, 0)
        lengths[dtype] = start + -(-sizes[place[name]] // ALIGNED) * ALIGNED
        entries.setdefault((dtype, name not in counted), []).append((place[name], start))
        counted.add(name)
    left = [(i, 0) for k, i in place.items() if k not in counted]
    if left:
        entries[None, True] = left
    parts = [
        _Part(store, first, tuple([i for i, _ in own]), tuple([sizes[i] for i, _ in own]),
              tuple([start for _, start in own]))
        for (store, first), own in entries.items()
    ]  # fmt: skip
    return _Plan(parts, lengths, at)


def lay(
    u: Mapping[str, Direction], G: Mapping[str, Tensor] | None, wanted: Sequence[Wanted]
) -> Laid | None:
    """The ``wanted`` directions side by side, and the sums with G where it is given; None where the
    kernel cannot read these tensors."""
    own = list(u.values())
    v, K = contraction_kernel.all_rows_in_order([d.v for d in own]), [d.K for d in own]
    factors = [k for k in K if k is not None]
    g = None if G is None else [G[k] for k in u]
    if len(factors) not in (0, len(K)) or any(k.dtype != torch.float32 for k in factors):
        return None
    if any(len({t.dtype for t in some}) > 1 for some in (v, g or v)):
        return None
    if not kernels.usable([*factors, *(g or ())]) or v[0].dtype not in kernels.TYPES:
        return None
    Q, device = len(v[0]), v[0].device
    sizes = tuple([d.v.numel() // Q for d in own])
    strides = sizes if Q == 1 else tuple([x.stride(0) for x in v])
    plan = _plan(tuple(u), sizes, tuple(wanted))
    flat = {t: torch.empty((Q, n), dtype=t, device=device) for t, n in plan.lengths.items()}
    table = kernels.pointers([*(factors or v), *v, *(g or v)])  # a row of addresses for each
    types = kernels.type_of(v[0]), kernels.type_of((g or v)[0])
    sums = torch.zeros(Q, dtype=torch.float64, device=device)
    for part in plan.parts:
        counted = part.counted and g is not None
        if counted or part.store is not None:
            out = v[0] if part.store is None else flat[part.store]
            steps = tuple([strides[i] for i in part.places])
            found = _launch(part, table, out, steps, types, bool(factors), counted, len(own), Q)
            sums += found if counted else 0
    return Laid(flat, plan.at, None if g is None else sums)


def _launch(
    part: _Part, table: Tensor, out: Tensor, strides: tuple[int, ...], types: tuple[object, object],
    with_K: bool, with_G: bool, count: int, Q: int,
) -> Tensor:  # fmt: skip
    """Write the directions of a part; returns their sums with G [Q]."""
    device, sums = out.device, []
    places, sizes, starts, steps = (
        kernels.integers(x, device) for x in (part.places, part.sizes, part.starts, strides)
    )
    for even, entries, begins in kernels.chunks(part.sizes, device, strides):
        partial = torch.zeros((Q, len(entries)), device=device)
        _lay[(len(entries), Q)](
            table, places, sizes, starts, steps, entries, begins, out, partial, count,
            out.stride(0), *types, kernels.type_of(out), WITH_K=with_K, WITH_G=with_G,
            STORE=part.store is not None, CHUNK=kernels.CHUNK, BLOCK=1024, EVEN=even,
        )  # fmt: skip
        sums.append(partial.sum(1, dtype=torch.float64))
    return torch.stack(sums).sum(0)


if kernels.AVAILABLE:

    @triton.jit  # type: ignore[untyped-decorator]
    def _lay(  # type: ignore[no-untyped-def]
        table, places, sizes, starts, strides, entries, begins, out, partial, count, out_stride,
        V: tl.constexpr, G: tl.constexpr, U: tl.constexpr, WITH_K: tl.constexpr,
        WITH_G: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
        EVEN: tl.constexpr,
    ):  # fmt: skip
        pid, q = tl.program_id(0), tl.program_id(1).to(tl.int64)
        entry = tl.load(entries + pid)
        begin = tl.multiple_of(tl.load(begins + pid), 16)
        n, stride = read_length(sizes + entry, EVEN), read_length(strides + entry, EVEN)
        t = tl.load(places + entry)
        of_k = tensor_at(table, t, 0, 1, tl.float32)
        of_v = tensor_at(table, count + t, 0, 1, V) + q * stride
        of_g = tensor_at(table, 2 * count + t, 0, 1, G)
        to = out + q * out_stride + tl.multiple_of(tl.load(starts + entry), 16)
        summed = tl.zeros((BLOCK,), dtype=tl.float32)
        for offset in range(0, CHUNK, BLOCK):
            at = begin + offset + tl.arange(0, BLOCK)
            inside = at < n
            u = tl.load(of_v + at, mask=inside, other=0.0).to(tl.float32)
            if WITH_K:
                u *= tl.load(of_k + at, mask=inside, other=0.0)
            if STORE:
                tl.store(to + at, u.to(U), mask=inside)
            if WITH_G:
                summed += tl.load(of_g + at, mask=inside, other=0.0).to(tl.float32) * u
        if WITH_G:
            tl.store(partial + q * tl.num_programs(0) + pid, tl.sum(summed))

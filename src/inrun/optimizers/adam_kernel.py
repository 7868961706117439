"""Adam's update map for all parameters of a model in one launch: a Triton kernel for GPUs.

It computes K, J and the weights on the path by the formulas at the top of adam.py, in float32, and
tells which gradients are not finite. From step to step the tables of addresses stay on the GPU;
tests/optimizers/test_adam_kernel.py compares both. How a kernel finds its tensors: kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from inrun import kernels

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

    from inrun.kernels import entry, read_length, tensor_at

Numbers = tuple[Any, Any, float, Any, Any]  # β₁, β₂, ε, η, decay of a parameter group


@dataclass(eq=False)
class AdamStep:
    """One step of Adam for all parameters. It is kept from step to step: see ``again``."""

    p: list[Tensor]
    g: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    t: list[Any]  # steps so far: numbers or 0-dim tensors
    read: Callable[[], list[Numbers] | None]  # numbers by parameter group; None: another formula
    group: tuple[int, ...]  # of each tensor
    groups: list[Numbers] = field(default_factory=list)
    bad: Tensor | None = None  # of each tensor: not 0 if its gradient is not finite
    _tables: dict[float | None, tuple[list[Tensor], Tensor]] = field(default_factory=dict)
    _gradients: Any = None  # addresses

    @property
    def maps(self) -> Collection[str]:
        """The names of the maps whose factors the kernel computes."""
        return _KINDS.keys()

    def usable(self) -> bool:
        """Whether the kernel can work on these tensors."""
        kinds = [{t.dtype for t in column} for column in (self.p, self.m, self.v)]
        one = all(len(kind) == 1 for kind in kinds) and kinds[1] == kinds[2]
        return one and kernels.usable([*self.p, *self.m, *self.v])

    def again(self, g: list[Tensor]) -> AdamStep | None:
        """This step with other gradients, and with the numbers of the parameter groups as they are
        now; None if the kernel cannot compute that. The other tensors must be the same, at the same
        addresses."""
        groups = self.read()
        if groups is None or not kernels.usable(g) or len({x.dtype for x in g}) > 1:
            return None
        self.g, self.groups, self.bad = g, groups, None
        self._gradients = kernels.pointers(g)
        return self

    def weights_and_factors(
        self, x: float | None, kind: str | None, into: list[Tensor] | None = None
    ) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """The weights at ``x`` on the path, written to the tensors ``into`` where these are given,
        and the factors of the map ``kind``. None for what was not asked for."""
        device = self.p[0].device
        weights = None
        if x is not None:
            weights = into or kernels.alike(self.p, self.p[0].dtype)
        factors = None if kind is None else kernels.alike(self.p, torch.float32)
        sizes = self._sizes
        steps, there = self._steps(device)
        table = self._table(x, weights or self.p, kept=weights is None or into is not None)
        K = self._gradients if factors is None else kernels.pointers(factors)
        if self.bad is None:
            self.bad = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        numbers, group = self._numbers(device), kernels.integers(self.group, device)
        for even, tensors, starts in kernels.chunks(sizes, device):
            _shift[(len(tensors),)](
                table, self._gradients, K, kernels.integers(sizes, device), numbers, group, steps,
                self.bad, tensors, starts, len(sizes), 0.0 if x is None else float(x),
                kernels.type_of(self.p[0]), kernels.type_of(self.g[0]), kernels.type_of(self.m[0]),
                there, POINT=x is not None, KIND=0 if kind is None else _KINDS[kind],
                CHUNK=kernels.CHUNK, BLOCK=1024, EVEN=even,
            )  # fmt: skip
        return weights, factors

    def sampled(self, table: Tensor, entries: int) -> Tensor:
        """The weights now, w_∅ and w_B at sampled entries [3, parameters, entries]."""
        device, count = self.p[0].device, len(self.p)
        steps, there = self._steps(device)
        found = torch.empty((3, count, entries), device=device)
        _sampled[(count,)](
            self._table(None, self.p, kept=True), self._gradients, self._numbers(device),
            kernels.integers(self.group, device), steps, table, found, count,
            kernels.type_of(self.p[0]), kernels.type_of(self.g[0]), kernels.type_of(self.m[0]),
            there, ENTRIES=entries,
        )  # fmt: skip
        return found

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple([p.numel() for p in self.p])

    def _table(self, x: float | None, weights: list[Tensor], kept: bool) -> Tensor:
        """The addresses of p, m, v and of the weights to write, one after the other. Those of
        weights in fixed memory (``kept``) are looked up once."""
        known = self._tables.get(x)
        if known is not None and known[0] is weights:
            return known[1]
        table = kernels.pointers([*self.p, *self.m, *self.v, *weights])
        if kept:
            self._tables[x] = weights, table
        return table

    def _numbers(self, device: torch.device) -> Tensor:
        """[groups, 5] in float64. What is on the device stays there."""
        if any(
            isinstance(n, Tensor) and n.device.type != "cpu" for own in self.groups for n in own
        ):
            return torch.stack([_on(own, device) for own in self.groups])
        numbers = tuple([float(n) for own in self.groups for n in own])
        return kernels.uploaded(numbers, torch.float64, device)

    def _steps(self, device: torch.device) -> tuple[Tensor, Any]:
        """The steps so far: their addresses and the type to read there, or the numbers and None."""
        t = self.t
        here = all(isinstance(n, Tensor) and n.ndim == 0 and n.device == device for n in t)
        if here and kernels.readable(t):  # of a fused optimizer
            return kernels.pointers(t), kernels.READABLE[t[0].dtype]
        return _on(t, device), None


_KINDS = {"secant": 1, "tangent": 2}  # KIND of the kernel; 0: no factors


def _on(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers, some perhaps on the device already, as one float64 tensor there."""
    if any(isinstance(n, Tensor) and n.device.type != "cpu" for n in numbers):
        parts = [torch.as_tensor(n, device=device) for n in numbers]
        return torch.stack([p.reshape(()) for p in parts]).double()
    host = torch.tensor([float(n) for n in numbers], dtype=torch.float64, device="cpu")
    return kernels.upload(host, device)


if kernels.AVAILABLE:

    @triton.jit  # type: ignore[untyped-decorator]
    def _scalars(  # type: ignore[no-untyped-def]
        numbers, group, steps, t, T: tl.constexpr
    ):
        """β₁, 1 − β₁, β₂/c₂, (1 − β₂)/c₂, η/c₁, ε and the decay of a tensor."""
        of_group = numbers + tl.load(group + t) * 5  # β₁, β₂, ε, η, decay
        beta1, beta2 = tl.load(of_group), tl.load(of_group + 1)
        eps = tl.load(of_group + 2).to(tl.float32)
        decay = tl.load(of_group + 4).to(tl.float32)
        if T is None:
            step = tl.load(steps + t) + 1.0
        else:
            step = tl.load(tl.load(steps + t).to(tl.pointer_type(T))).to(tl.float64) + 1.0
        c1, c2 = 1.0 - tl.exp(step * tl.log(beta1)), 1.0 - tl.exp(step * tl.log(beta2))
        size = (tl.load(of_group + 3) / c1).to(tl.float32)
        b1, a1 = beta1.to(tl.float32), (1.0 - beta1).to(tl.float32)
        b2, a2 = (beta2 / c2).to(tl.float32), ((1.0 - beta2) / c2).to(tl.float32)
        return b1, a1, b2, a2, size, eps, decay

    @triton.jit  # type: ignore[untyped-decorator]
    def _shift(  # type: ignore[no-untyped-def]
        table, gradients, factors, sizes, numbers, group, steps, bad, tensors, starts, count, x,
        P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
        POINT: tl.constexpr, KIND: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
        EVEN: tl.constexpr,
    ):  # fmt: skip
        pid = tl.program_id(0)
        t = tl.load(tensors + pid)
        start = tl.multiple_of(tl.load(starts + pid), 16)
        n = read_length(sizes + t, EVEN)
        b1, a1, b2, a2, size, eps, decay = _scalars(numbers, group, steps, t, T)
        of_p, of_m = tensor_at(table, t, 0, 1, P), tensor_at(table, count + t, 0, 1, M)
        of_v = tensor_at(table, 2 * count + t, 0, 1, M)
        of_w = tensor_at(table, 3 * count + t, 0, 1, P)
        of_g, of_k = tensor_at(gradients, t, 0, 1, G), tensor_at(factors, t, 0, 1, tl.float32)
        unusual = tl.zeros([BLOCK], dtype=tl.int32)
        for offset in range(0, CHUNK, BLOCK):
            at = start + offset + tl.arange(0, BLOCK)
            inside = at < n
            g = tl.load(of_g + at, mask=inside, other=0.0).to(tl.float32)
            m = tl.load(of_m + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(of_v + at, mask=inside, other=0.0).to(tl.float32)
            unusual += tl.where(tl.abs(g) < float("inf"), 0, 1)  # NaN is not below
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
        if tl.sum(unusual) > 0:
            tl.store(bad + t, 1)

    @triton.jit  # type: ignore[untyped-decorator]
    def _sampled(  # type: ignore[no-untyped-def]
        table, gradients, numbers, group, steps, places, found, count,
        P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, T: tl.constexpr, ENTRIES: tl.constexpr,
    ):  # fmt: skip
        t, i = tl.program_id(0), tl.arange(0, ENTRIES)
        at = entry(places, t, i)
        b1, a1, b2, a2, size, eps, decay = _scalars(numbers, group, steps, t, T)
        p = tl.load(tensor_at(table, t, 0, 1, P) + at).to(tl.float32)
        m = tl.load(tensor_at(table, count + t, 0, 1, M) + at).to(tl.float32)
        v = tl.load(tensor_at(table, 2 * count + t, 0, 1, M) + at).to(tl.float32)
        g = tl.load(tensor_at(gradients, t, 0, 1, G) + at).to(tl.float32)
        without = b1 * m / (tl.sqrt(b2 * v) + eps)
        with_batch = (b1 * m + a1 * g) / (tl.sqrt(b2 * v + a2 * g * g) + eps)
        to = found + t * ENTRIES + i
        tl.store(to, p)
        tl.store(to + count * ENTRIES, decay * p - size * without)
        tl.store(to + 2 * count * ENTRIES, decay * p - size * with_batch)

"""Adam's update map for all parameters of a model in one launch: a Triton kernel for GPUs.

It computes K, J and the weights on the path by the formulas at the top of adam.py, in float32;
tests/optimizers/test_adam_kernel.py compares both. How a kernel finds its tensors: kernels.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun import kernels

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

    from inrun.kernels import read_length, tensor_at

Numbers = tuple[Any, Any, float, Any, Any]  # β₁, β₂, ε, η, decay of a parameter group


@dataclass(frozen=True)
class AdamStep:
    """One step of Adam for all parameters: their tensors, and numbers by parameter group."""

    p: list[Tensor]
    g: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    t: list[Any]  # steps so far: numbers or 0-dim tensors
    groups: list[Numbers]
    group: tuple[int, ...]  # of each tensor

    @property
    def maps(self) -> Collection[str]:
        """The names of the maps whose factors the kernel computes."""
        return _KINDS.keys()

    def usable(self) -> bool:
        """Whether the kernel can work on these tensors."""
        kinds = [{t.dtype for t in column} for column in (self.p, self.g, self.m, self.v)]
        one = all(len(kind) == 1 for kind in kinds) and kinds[2] == kinds[3]
        return one and kernels.usable([*self.p, *self.g, *self.m, *self.v])

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
        columns = [self.p, self.g, self.m, self.v, weights or [], factors or []]
        sizes = tuple(p.numel() for p in self.p)
        table = kernels.addresses(columns, device)
        scalars = _scalars(self, 0.0 if x is None else x, device)
        for even, tensors, starts in kernels.chunks(sizes, device):
            _shift[(len(tensors),)](
                table, kernels.integers(sizes, device), scalars, tensors, starts,
                kernels.type_of(self.p[0]), kernels.type_of(self.g[0]), kernels.type_of(self.m[0]),
                POINT=x is not None, KIND=0 if kind is None else _KINDS[kind],
                CHUNK=kernels.CHUNK, BLOCK=1024, EVEN=even,
            )  # fmt: skip
        return weights, factors


_KINDS = {"secant": 1, "tangent": 2}  # KIND of the kernel; 0: no factors


def _scalars(step: AdamStep, x: float, device: torch.device) -> Tensor:
    """[tensors, 7]: β₁, β₂, ε, η/c₁, c₂, decay, x in float64. What is on the device stays there."""
    rows = [_on(numbers, device) for numbers in step.groups]
    table = rows[0].expand(len(step.p), -1) if len(rows) == 1 else None
    if table is None:
        table = torch.stack(rows)[kernels.integers(step.group, device)]
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
    return kernels.upload(host, device)


if kernels.AVAILABLE:

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
        n = read_length(sizes + t, EVEN)
        beta1, one1 = tl.load(scalars + t * 7), 1.0 - tl.load(scalars + t * 7)
        beta2, one2 = tl.load(scalars + t * 7 + 1), 1.0 - tl.load(scalars + t * 7 + 1)
        c2 = tl.load(scalars + t * 7 + 4)
        x = tl.load(scalars + t * 7 + 6).to(tl.float32)
        eps = tl.load(scalars + t * 7 + 2).to(tl.float32)
        size = tl.load(scalars + t * 7 + 3).to(tl.float32)
        decay = tl.load(scalars + t * 7 + 5).to(tl.float32)
        b1, a1 = beta1.to(tl.float32), one1.to(tl.float32)
        b2, a2 = (beta2 / c2).to(tl.float32), (one2 / c2).to(tl.float32)  # with the correction

        of_p, of_g = tensor_at(table, t, 0, 6, P), tensor_at(table, t, 1, 6, G)
        of_m, of_v = tensor_at(table, t, 2, 6, M), tensor_at(table, t, 3, 6, M)
        of_w, of_k = tensor_at(table, t, 4, 6, P), tensor_at(table, t, 5, 6, tl.float32)
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

"""The derivative of a function along a direction."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Rows = Callable[..., tuple[Tensor, ...]]  # of one row of each tensor
MANY = 5  # rows: fewer are done sooner one by one than vmap begins


def along(
    f: Callable[[Sequence[Tensor]], Tensor], at: Sequence[Tensor], u: Sequence[Tensor]
) -> Tensor:
    """(d/ds) f(at + s·u) at s = 0: forward mode, or twice backward where torch has no such rule."""
    at = [x.detach().contiguous() for x in at]  # an expanded one takes expanded directions only
    u = [d.to(x.dtype) for x, d in zip(at, u, strict=True)]
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has neither
        try:
            with torch.no_grad(), fwd.dual_level():
                out = f([fwd.make_dual(x, d) for x, d in zip(at, u, strict=True)])
                tangent = fwd.unpack_dual(out).tangent
                return torch.zeros_like(out) if tangent is None else tangent
        except NotImplementedError:
            return backward_twice(f, at, u)


def each(f: Rows, rows: Sequence[Tensor], one: Rows) -> tuple[Tensor, ...]:
    """What ``f`` makes of every row of these tensors, at once by vmap. Where that cannot be (an
    operation that vmap does not know) or does not pay, ``one`` is asked row by row."""
    if len(rows[0]) >= MANY:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")
                found = torch.func.vmap(f)(*rows)
            if all(x.stride(0) for x in found):  # else all rows are one piece of memory
                return found
        except (RuntimeError, ValueError):
            pass
    single = [one(*row) for row in zip(*rows, strict=True)]
    return tuple(torch.stack(x) for x in zip(*single, strict=True))


def backward_twice(
    f: Callable[[Sequence[Tensor]], Tensor], at: Sequence[Tensor], u: Sequence[Tensor]
) -> Tensor:
    """Jᵀw is linear in w; its derivative with respect to w along u is Ju."""
    with torch.enable_grad():
        at = [x.clone().requires_grad_() for x in at]
        out = f(at)
        w = torch.zeros_like(out, requires_grad=True)
        back = torch.autograd.grad(out, at, w, create_graph=True, allow_unused=True)
        pairs = [(b, d) for b, d in zip(back, u, strict=True) if b is not None and b.requires_grad]
        if not pairs:
            return torch.zeros_like(out)
        (forward,) = torch.autograd.grad([b for b, _ in pairs], w, [d for _, d in pairs])
    return forward.detach()

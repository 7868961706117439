"""The derivative of a function along a direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def along(
    f: Callable[[Sequence[Tensor]], Tensor], at: Sequence[Tensor], u: Sequence[Tensor]
) -> Tensor:
    """(d/ds) f(at + s·u) at s = 0: forward mode, or twice backward where torch has no such rule."""
    at, u = [x.detach() for x in at], [d.to(x.dtype) for x, d in zip(at, u, strict=True)]
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has neither
        try:
            with torch.no_grad(), fwd.dual_level():
                out = f([fwd.make_dual(x, d) for x, d in zip(at, u, strict=True)])
                tangent = fwd.unpack_dual(out).tangent
                return torch.zeros_like(out) if tangent is None else tangent
        except NotImplementedError:
            return _backward_twice(f, at, u)


def _backward_twice(
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

"""Derivatives along directions (Jacobian-vector products), for all rooms.

``jvp`` is (d/ds) f(at + s·u) at s = 0, ``jvps`` the same for several directions at once, and
``each`` runs any function on every row of its arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Function = Callable[..., Tensor]  # of the tensors ``at``
Rows = Callable[..., tuple[Tensor, ...]]  # of one row of each tensor
VMAP_PAYS = 5  # rows: fewer are done sooner one by one than vmap begins


def jvp(f: Function, at: Sequence[Tensor], u: Sequence[Tensor]) -> Tensor:
    """Along one direction: forward mode, or twice backward where torch has no such rule."""
    at = [x.detach().contiguous() for x in at]  # an expanded one takes expanded directions only
    u = [d.to(x.dtype) for x, d in zip(at, u, strict=True)]
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has neither
        try:
            with torch.no_grad(), fwd.dual_level():
                out = f(*[fwd.make_dual(x, d) for x, d in zip(at, u, strict=True)])
                tangent = fwd.unpack_dual(out).tangent
                return torch.zeros_like(out) if tangent is None else tangent
        except NotImplementedError:
            return backward_twice(f, at, u)


def jvps(f: Function, at: Sequence[Tensor], us: Sequence[Tensor]) -> Tensor:
    """Along Q directions, ``us`` [Q, *W] for each tensor of ``at``: [Q, *output]."""

    def forward(*u: Tensor) -> tuple[Tensor]:  # vmap knows torch.func.jvp, and no dual tensors
        return (torch.func.jvp(f, tuple(at), u)[1],)

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return each(forward, us, lambda *u: (jvp(f, at, u),))[0]


def backward_twice(f: Function, at: Sequence[Tensor], u: Sequence[Tensor]) -> Tensor:
    """``jvp`` by backward passes alone: Jᵀw is linear in w; its derivative with respect to w along
    u is Ju."""
    with torch.enable_grad():
        at = [x.clone().requires_grad_() for x in at]
        out = f(*at)
        w = torch.zeros_like(out, requires_grad=True)
        back = torch.autograd.grad(out, at, w, create_graph=True, allow_unused=True)
        pairs = [(b, d) for b, d in zip(back, u, strict=True) if b is not None and b.requires_grad]
        if not pairs:
            return torch.zeros_like(out)
        (forward,) = torch.autograd.grad([b for b, _ in pairs], w, [d for _, d in pairs])
    return forward.detach()


def each(f: Rows, rows: Sequence[Tensor], one: Rows) -> tuple[Tensor, ...]:
    """What ``f`` makes of every row of these tensors, at once by vmap. Where that cannot be (an
    operation that vmap does not know) or does not pay, ``one`` is asked row by row."""
    if len(rows[0]) >= VMAP_PAYS:
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

"""C: what happened to the gradient between ``backward()`` and ``optimizer.step()``.

The batch accumulated G; the optimizer receives ḡ = C(G). Unscaling and averaging are linear.
Clipping by value acts on each coordinate: its divided difference is ḡ/G. Clipping by norm,
ḡ = cG with c = max_norm/‖G‖, is a function of the whole gradient; along the path from nothing to
the whole batch its derivative averages to

    c·I + c·ln(1/c)·(I − ĜĜᵀ),        Ĝ = G/‖G‖,

that is, the part of g_i along G counts c times and the part across it c(1 + ln 1/c) times. The
sum over examples is cG either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clipping:
    """How ḡ came from G. ``ratio`` is the factor on all coordinates, or a list of tensors.

    ``norm`` is set where the factor is due to clipping by norm: the norm it clips to, after
    ``scale``, the linear part of the factor (1/loss scale).
    """

    ratio: float | list[Tensor]
    scale: float = 1.0
    norm: float | None = None
    bound: float | None = None  # clipping by value: the largest |ḡ|

    @property
    def identity(self) -> bool:
        return self.ratio == 1.0

    def carry(self, u: Sequence[Tensor], G: Sequence[Tensor], path: bool) -> list[Tensor]:
        """A direction for ḡ as a direction for G. ``path`` counts norm clipping along the path;
        otherwise its coefficient counts as fixed."""
        if isinstance(self.ratio, list):
            return [r * x for r, x in zip(self.ratio, u, strict=True)]
        if self.norm is None or not path:
            return list(u) if self.identity else [self.ratio * x for x in u]
        c = self.ratio / self.scale
        across = 1 - math.log(c)
        along = sum(float((x * g).sum()) for x, g in zip(u, G, strict=True)) * math.log(c)
        along /= sum(float(g.double().square().sum()) for g in G)
        return [self.ratio * (across * x + along * g) for x, g in zip(u, G, strict=True)]

    def function(self) -> Callable[[list[Tensor | None]], list[Tensor | None]]:
        """C itself, for the gradient of any coalition."""

        def clip(gradients: list[Tensor | None]) -> list[Tensor | None]:
            some = [g for g in gradients if g is not None]
            factor = self.scale
            if self.norm is not None:
                size = math.sqrt(sum(float(g.double().square().sum()) for g in some)) * factor
                factor *= min(1.0, self.norm / (size + 1e-6))
            bound = self.bound
            return [
                None
                if g is None
                else (g * factor if bound is None else (g * factor).clamp(-bound, bound))
                for g in gradients
            ]

        return clip


class ClippingWatch:
    """Recognises C from G and ḡ.

    A common factor may be a loss scale (given, or a power of two), clipping by norm (the norm of
    ḡ is the same each time) or something else linear. ``max_norm`` settles it.
    """

    def __init__(self, max_norm: float | None) -> None:
        self.max_norm = max_norm
        self._seen: float | None = None

    def recognise(
        self, G: Sequence[Tensor], g: Sequence[Tensor], scale: float | None = None
    ) -> Clipping:
        """``scale``: the linear part of the factor, where it is known."""
        GG = sum(float(x.double().square().sum()) for x in G)
        gG = sum(float((x.double() * y.double()).sum()) for x, y in zip(g, G, strict=True))
        gg = sum(float(x.double().square().sum()) for x in g)
        if GG == 0 or not math.isfinite(GG + gg):
            return Clipping(1.0)
        c = gG / GG
        off = max(gg - c * gG, 0.0)  # ‖ḡ − cG‖²
        eps = max(torch.finfo(x.dtype).eps for x in G)
        if off <= max((64 * eps) ** 2, 1e-12) * gg:
            return self._factor(c, math.sqrt(gg), scale, eps)
        known = 1.0 if scale is None else scale
        bound = max(float(x.abs().max()) for x in g if x.numel())
        ratio = [
            torch.where(y == 0, torch.full_like(y, known), x / torch.where(y == 0, 1.0, y))
            for x, y in zip(g, G, strict=True)
        ]
        return Clipping(ratio, known, bound=bound)

    def _factor(self, c: float, size: float, scale: float | None, eps: float) -> Clipping:
        if scale is None:
            power = 2.0 ** round(math.log2(c)) if c > 0 else c
            scale = power if abs(c - power) <= 64 * eps * c else 1.0
        if abs(c - scale) <= 64 * eps * abs(scale):
            return Clipping(1.0 if c == 1.0 else scale, scale)
        clipped = 0 < c < scale
        known = self.max_norm if self.max_norm is not None else self._seen
        self._seen = size
        # A factor below 1/500 is more likely a loss scale than a clip: it counts as fixed.
        if clipped and c > 0.002 * scale and known is not None and abs(size / known - 1) <= 1e-3:
            return Clipping(c, scale, norm=known)
        return Clipping(c, c)

"""C: what happened to the gradient between ``backward()`` and ``optimizer.step()``.

The batch accumulated G; the optimizer receives ḡ = C(G). Unscaling and averaging are linear.
Clipping by value acts on each coordinate: its divided difference is ḡ/G. Clipping by norm,
ḡ = cG with c = max_norm/‖G‖, turns on the whole gradient: the part of g_i along G counts c times
(so the sum is cG), the part across it as often as a coalition is scaled on average,

    ∫₀¹ min(1, max_norm / √(α²‖G‖² + α(1−α) Σ‖g_i‖²)) dα,

where the root is the expected norm of the gradient of a random coalition that each example joins
with probability α. (Leaving the second term out, as along the straight path to G, gives
c(1 + ln 1/c); it overstates the part across G where single examples are clipped already.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Clipping:
    """How ḡ came from G. ``ratio`` is the factor on all coordinates, or a list of tensors.

    ``norm`` is set where the factor is due to clipping by norm: the norm it clips to, after
    ``scale``, the linear part of the factor (1/loss scale). Without ``across`` the factor counts
    as fixed for every example.
    """

    ratio: float | list[Tensor]
    scale: float = 1.0
    norm: float | None = None
    bound: float | None = None  # clipping by value: the largest |ḡ|
    across: float | None = None  # clipping by norm: the factor of the part across G

    @property
    def identity(self) -> bool:
        return self.ratio == 1.0

    def spread(self, G: Sequence[Tensor], energy: float) -> Clipping:
        """With the factor for the part across G; ``energy`` is Σ‖g_i‖²."""
        if self.norm is None:
            return self
        GG = sum(float(g.double().square().sum()) for g in G)
        alpha = (np.arange(1000) + 0.5) / 1000
        size = self.scale * np.sqrt(alpha**2 * GG + alpha * (1 - alpha) * energy)
        return replace(self, across=float(np.minimum(1.0, self.norm / size).mean()))

    def carry(self, u: Sequence[Tensor], G: Sequence[Tensor]) -> list[Tensor]:
        """A direction for ḡ as a direction for G."""
        if isinstance(self.ratio, list):
            return [r * x for r, x in zip(self.ratio, u, strict=True)]
        if self.across is None:
            return list(u) if self.identity else [self.ratio * x for x in u]
        across = self.scale * self.across
        along = (self.ratio - across) * sum(
            float((x.double() * g.double()).sum()) for x, g in zip(u, G, strict=True)
        )
        along /= sum(float(g.double().square().sum()) for g in G)
        return [across * x + along * g.to(x.dtype) for x, g in zip(u, G, strict=True)]

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

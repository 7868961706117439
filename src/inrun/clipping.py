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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inrun.contraction import Direction


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

    @property
    def common(self) -> float:
        """The factor on all coordinates."""
        return 1.0 if isinstance(self.ratio, list) else self.ratio

    def spread(self, G: Sequence[Tensor], energy: float) -> Clipping:
        """With the factor for the part across G; ``energy`` is Σ‖g_i‖²."""
        if self.norm is None:
            return self
        GG = sum(float(g.double().square().sum()) for g in G)
        alpha = (np.arange(1000) + 0.5) / 1000
        size = self.scale * np.sqrt(alpha**2 * GG + alpha * (1 - alpha) * energy)
        return replace(self, across=float(np.minimum(1.0, self.norm / size).mean()))

    def carry(self, u: Mapping[str, Direction], names: Iterable[str]) -> Mapping[str, Direction]:
        """Directions for ḡ as directions for G, where that is a matter of coordinates. ``names``
        has the order of the ratios."""
        if not isinstance(self.ratio, list):
            return u
        ratios = dict(zip(names, self.ratio, strict=True))
        return {k: _times(ratios[k], d) for k, d in u.items()}

    def apply(self, values: Tensor, expected: Tensor, aligned: Tensor | None) -> Tensor:
        """The same for a common factor, on ⟨u, g_i⟩ [Q, B]: ``expected`` is ⟨u, G⟩ and ``aligned``
        ⟨G, g_i⟩/‖G‖², needed where ``across`` is set."""
        if isinstance(self.ratio, list) or self.identity:
            return values
        if self.across is None:
            return self.ratio * values
        assert aligned is not None
        across = self.scale * self.across
        return across * values + (self.ratio - across) * expected[:, None] * aligned

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


def _times(ratio: Tensor, d: Direction) -> Direction:
    return replace(d, K=ratio * d.K) if d.K is not None else replace(d, v=ratio * d.v)


class Accumulated:
    """G: the gradient as the batch left it, and whether anything happened to it since.

    Copies are kept until a step has shown that nothing does. From then on torch's version counters
    tell, and, since unscaling by a GradScaler leaves them alone, a sample of small parameters,
    compared on the device so that nothing waits for it.
    """

    def __init__(self) -> None:
        self.whole = True
        self._held: dict[str, tuple[Tensor, int]] = {}
        self._copies: dict[str, Tensor] = {}
        self._names: list[str] = []
        self._sample: list[str] = []  # of these, the smallest

    def note(self, params: Mapping[str, Tensor]) -> None:
        """After a batch."""
        grads = {k: p.grad for k, p in params.items() if p.grad is not None}
        self._held = {k: (g, g._version) for k, g in grads.items()}
        if (names := list(grads)) != self._names:
            self._names = names
            self._sample = sorted(names, key=lambda k: grads[k].numel())[:_SAMPLE]
        chosen = grads if self.whole else self._sample
        self._copies = {k: grads[k].detach().clone() for k in chosen}

    def forget(self) -> None:
        self._held, self._copies = {}, {}

    def compare(self, grads: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """G, and a flag on the device that it is not what is thought; None: it is known."""
        touched = any(
            k not in self._held or self._held[k][0] is not g or self._held[k][1] != g._version
            for k, g in grads.items()
        )
        some = {k: g for k, g in self._copies.items() if k in grads}
        flags = [(g != grads[k]).any() for k, g in some.items()]
        differ = torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool)
        if self.whole or touched:
            if not bool(differ):
                self.whole = False
                return dict(grads), None
            G = {k: some.get(k, g) for k, g in grads.items()}
            if not self.whole:  # the first time: one factor for all, as the sample has it
                c = _projection([grads[k] for k in some], list(some.values()))
                G = {k: some[k] if k in some else g / c for k, g in grads.items()}
                self.whole = True
            return G, None
        return dict(grads), differ


_SAMPLE = 2  # parameters, the smallest


def _projection(g: Sequence[Tensor], G: Sequence[Tensor]) -> float:
    """⟨g, G⟩ / ⟨G, G⟩."""
    both = sum(float((x.double() * y.double()).sum()) for x, y in zip(g, G, strict=True))
    size = sum(float(y.double().square().sum()) for y in G)
    return both / size if size and both else 1.0


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

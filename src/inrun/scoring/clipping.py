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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inrun.ranks.world import ALONE, World
from inrun.torch_compat import foreach_mul, foreach_norm, foreach_sub


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

    def spread(self, G: Sequence[Tensor], energy: float, world: World = ALONE) -> Clipping:
        """This clipping with ``across``, its factor for the part across G. ``energy``: Σ‖g_i‖²."""
        if self.norm is None:
            return self
        GG = sum(x * x for x in _norms(G, world))
        alpha = (np.arange(1000) + 0.5) / 1000
        size = self.scale * np.sqrt(alpha**2 * GG + alpha * (1 - alpha) * energy)
        return replace(self, across=float(np.minimum(1.0, self.norm / size).mean()))

    def by_coordinate(self, names: Iterable[str]) -> dict[str, Tensor] | None:
        """ḡ/G of each parameter, if each coordinate has its own ratio; otherwise None. ``names``
        are the parameters in the order of the ratios."""
        if not isinstance(self.ratio, list):
            return None
        return dict(zip(names, self.ratio, strict=True))

    def apply(self, values: Tensor, expected: Tensor, aligned: Tensor | None) -> Tensor:
        """⟨u, g_i⟩ [Q, B] times the factor on all coordinates; unchanged if each has its own ratio.
        ``expected`` is ⟨u, G⟩ and ``aligned`` ⟨G, g_i⟩/‖G‖², needed where ``across`` is set."""
        if isinstance(self.ratio, list) or self.identity:
            return values
        if self.across is None:
            return self.ratio * values
        assert aligned is not None
        across = self.scale * self.across
        return across * values + (self.ratio - across) * expected[:, None] * aligned

    def function(
        self, world: World = ALONE
    ) -> Callable[[list[Tensor | None]], list[Tensor | None]]:
        """C itself, for the gradient of any coalition; where gradients are shards, all ranks call
        it together."""

        def clip(gradients: list[Tensor | None]) -> list[Tensor | None]:
            some = [g for g in gradients if g is not None]
            factor = self.scale
            if self.norm is not None:
                size = math.hypot(*_norms(some, world)) * factor
                factor *= min(1.0, self.norm / (size + 1e-6))
            bound = self.bound
            return [
                None
                if g is None
                else (g * factor if bound is None else (g * factor).clamp(-bound, bound))
                for g in gradients
            ]

        return clip


@dataclass(frozen=True)
class Unrecognised:
    """ḡ is no known function of G: the reason, and what a user can do about it."""

    void: str
    advice: str


_HINT = (
    "scaled by one factor for all parameters, clipped by norm (max_norm=, scaler=) or clipped by "
    "value"
)
AMBIGUOUS = Unrecognised(
    "the gradient was scaled between backward() and step(): a constant, or clipping by norm?",
    "Pass watch(..., max_norm=...) if gradients are clipped, scaler=... if there is a GradScaler. "
    "Otherwise the next steps show which it is, if the factor or the norm stays the same",
)
LOSS_SCALE = Unrecognised(
    "the gradient was clipped by norm and perhaps unscaled: the loss scale is not known",
    "Pass the GradScaler to watch(..., scaler=...), or max_norm= if there is none",
)
DIFFERENT_FACTORS = Unrecognised(
    "parameters' gradients were scaled by different factors between backward() and step()",
    "Likely causes: clipping each parameter or group on its own; several optimizers of which a "
    "GradScaler unscales each at its own step (call scaler.unscale_ for all before the first). "
    f"Known is what is {_HINT}",
)
ZEROED = Unrecognised(
    "part of the gradient was set to zero between backward() and step()",
    "Freeze parameters (requires_grad=False), or leave them out with ignore=[...] instead",
)
ADDED = Unrecognised(
    "the gradient was changed between backward() and step() by something unknown",
    "Likely causes: a second loss whose backward() ran outside run.batch(ids), added noise, a "
    f"hand-written all_reduce, gradient centralisation. Known is what is {_HINT}",
)
_ROUNDINGS = 4  # roundings of a number on its way from G to ḡ: unscaling, averaging, clipping


class ClippingWatch:
    """Recognises C from G and ḡ: all numbers of both, so that nothing passes by chance.

    A common factor may be a constant (a loss scale, a division by the number of batches) or
    clipping by norm. What tells them apart: ``max_norm`` and the scaler's scale where they are
    given; else the factor or the norm of ḡ that stays the same from step to step; in the first
    such step that constants are simple (1/k, a power of two, two decimal digits) and so are norms.
    Where gradients are shards, all ranks call it and find the same.
    """

    def __init__(self, max_norm: float | None, world: World = ALONE) -> None:
        self.max_norm, self._world = max_norm, world
        self._last: tuple[float, list[float]] | None = None  # factor, norms of the last such step
        self._scale = 1.0  # the last loss scale seen without clipping
        self._consistent = True  # no step has contradicted the first evidence yet

    def recognise(
        self,
        G: Sequence[Tensor],
        g: Sequence[Tensor],
        scale: float | None = None,
        others: Sequence[Tensor] = (),
        half: bool = False,
    ) -> Clipping | Unrecognised:
        """The function C with ḡ = C(G), or why it is not known. ``g`` is ḡ.

        ``scale``: the linear part of the factor, where it is known. ``others``: gradients that
        were clipped together with these and are not scored. ``half``: trained in float16.
        """
        world = self._world
        size, total = _norms(g, world), _norms(G, world)
        if not math.isfinite(sum(size) + sum(total)):
            return Clipping(1.0)  # a step that is void for another reason
        norm, before = math.hypot(*size), math.hypot(*total)
        if norm == 0 or before == 0:
            return Clipping(1.0) if norm == before else (ADDED if norm else ZEROED)
        for c in (norm / before, -norm / before):
            if _is_multiple(g, G, c, size, world):
                norms = [norm, math.hypot(norm, *_norms(others, world))] if others else [norm]
                return self._factor(c, norms, scale, _epsilon(G), half)
        return _clamped(g, G, size, scale, world) or _cause(g, G, world)

    def _factor(
        self, c: float, norms: list[float], scale: float | None, eps: float, half: bool
    ) -> Clipping | Unrecognised:
        """The clipping that a common factor ``c`` stands for. ``norms``: the norm of ḡ, and of ḡ
        together with the other gradients."""
        exact = _ROUNDINGS * eps
        if scale is None and abs(c - 1) <= exact:
            return Clipping(1.0)
        if scale is not None and abs(c / scale - 1) <= exact:
            return Clipping(scale, scale)
        known = self._scale if scale is None else scale
        targets = [x + 1e-6 * abs(c / known) for x in norms]  # clip_grad_norm_: ‖G‖ + 1e-6
        kind = self._kind(c, targets, known, eps)
        before, self._last = self._last, (c, targets)
        self._consistent = self._consistent and (kind is not None or before is None)
        if kind == "constant":
            if scale is None and _power_of_two(c, exact):
                self._scale = c
            return Clipping(c, c)
        if kind != "norm":
            return AMBIGUOUS
        # A factor below 1/500 is more likely a loss scale than a clip.
        unsure = scale is None and self._scale == 1.0 and c < 1 / 500
        if unsure and (half or self.max_norm is None):
            return LOSS_SCALE
        return Clipping(c, known, norm=norms[0])

    def _kind(self, c: float, targets: list[float], scale: float, eps: float) -> str | None:
        """What the factor is due to: "constant" or "norm"; None where that cannot be told."""
        close = max(1e-4, 2 * eps)  # norms: c is rounded as gradients are
        clipped = 0 < c < scale
        if self.max_norm is not None:
            if clipped and any(abs(x / self.max_norm - 1) <= close for x in targets):
                return "norm"
            return "constant" if _simple(c, eps) or self._same_factor(c, targets, eps) else None
        if self._same_factor(c, targets, eps):
            return "constant"
        if self._last is not None and abs(c / self._last[0] - 1) > 4 * close:
            pairs = zip(targets, self._last[1], strict=False)
            if clipped and any(abs(x / y - 1) <= close for x, y in pairs):
                return "norm"
        if not self._consistent:
            return None
        constant = _simple(c, eps)
        norm = clipped and eps < 1e-4 and any(_decimal(x, 2e-5) for x in targets)
        if constant == norm:
            return None
        return "constant" if constant else "norm"

    def _same_factor(self, c: float, targets: list[float], eps: float) -> bool:
        """Is the factor that of the last such step, while the norm is another?"""
        if self._last is None:
            return False
        same = abs(c / self._last[0] - 1) <= _ROUNDINGS * eps
        return same and abs(targets[0] / self._last[1][0] - 1) > 4 * max(1e-4, 2 * eps)


def _simple(c: float, eps: float) -> bool:
    """Is it 1/k for an integer k, a power of two, or a decimal of two digits? False in half
    precision, where too many numbers are."""
    if eps > 1e-4:
        return False
    exact = _ROUNDINGS * eps
    inverse = abs(1 / c)
    integer = inverse < 2**15 and abs(inverse - round(inverse)) <= exact * inverse
    return integer or _power_of_two(c, exact) or _decimal(c, exact)


def _power_of_two(c: float, exact: float) -> bool:
    return abs(abs(c) / 2.0 ** round(math.log2(abs(c))) - 1) <= exact


def _decimal(x: float, within: float) -> bool:
    """Is it a number of at most two decimal digits, such as 0.5 or 25?"""
    return abs(x / float(f"{x:.1e}") - 1) <= within


def _epsilon(tensors: Sequence[Tensor]) -> float:
    """The machine epsilon of the coarsest type, at least 1e-12: norms of float64 numbers are not
    summed to their last digits."""
    return max(max(torch.finfo(t.dtype).eps, 1e-12) for t in tensors)


def _norms(tensors: Sequence[Tensor], world: World) -> list[float]:
    """The norm of each tensor, in double precision, with one transfer from a device. Of shards:
    those of the whole tensors, the same on all ranks."""
    if not tensors:
        return []
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    found = foreach_norm(real, 2, dtype=torch.float64)
    norms = torch.stack([x.to(found[0].device) for x in found])
    if world.shards is not None:
        norms = world.of_whole(norms.square()).sqrt()
    return norms.tolist()


_PIECE = 2**25  # numbers for which temporaries are made at a time
_LARGEST = 2**40  # numbers: no parameter has more


def _pieces(
    g: Sequence[Tensor], G: Sequence[Tensor], world: World
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Both lists in pieces of at most _PIECE numbers; G in the type of ḡ. Of shards
    eight at a time, on all ranks alike."""
    held, some = 0, ([], [])  # type: tuple[int, tuple[list[Tensor], list[Tensor]]]
    alike = world.shards is not None
    for x, y in zip(g, G, strict=True):
        n = _PIECE // 8 if alike else x.numel()
        if held and held + n > _PIECE:
            yield some
            held, some = 0, ([], [])
        some[0].append(x)
        some[1].append(y.to(x.dtype))
        held += n
    yield some


def _all_within(
    g: Sequence[Tensor], expected: Sequence[Tensor], size: Sequence[float], eps: Sequence[float],
    world: World,
) -> bool:  # fmt: skip
    """Is each parameter as expected, up to rounding by ``eps``? The norm of the difference is
    compared with ``size``, the norm of the parameter."""
    off = _norms(foreach_sub(list(g), list(expected)), world)
    tiny = [torch.finfo(t.dtype).smallest_normal * math.sqrt(_LARGEST) for t in g]
    return all(
        x <= _ROUNDINGS * e * (s + least)
        for x, s, e, least in zip(off, size, eps, tiny, strict=True)
    )


def _is_multiple(
    g: Sequence[Tensor], G: Sequence[Tensor], c: float, size: list[float], world: World
) -> bool:
    return _equals(g, G, size, lambda own: list(foreach_mul(own, c)), world)


def _equals(
    g: Sequence[Tensor], G: Sequence[Tensor], size: list[float],
    function: Callable[[list[Tensor]], list[Tensor]], world: World,
) -> bool:  # fmt: skip
    """Is ḡ = function(G) everywhere, up to rounding?"""
    at = 0
    eps = [_epsilon(pair) for pair in zip(g, G, strict=True)]  # ḡ may have been converted since
    for some, own in _pieces(g, G, world):
        here, at = slice(at, at + len(some)), at + len(some)
        if not _all_within(some, function(own), size[here], eps[here], world):
            return False
    return True


def _clamped(
    g: Sequence[Tensor], G: Sequence[Tensor], size: list[float], scale: float | None, world: World
) -> Clipping | None:
    """Clipping by value, if ḡ = clamp(sG, −b, b) everywhere with b the largest |ḡ|; else None."""
    largest = foreach_norm([x for x in g if x.numel()] or [g[0].new_zeros(1)], math.inf)
    found = torch.stack([x.double().to(largest[0].device) for x in largest]).max()
    bound = world.largest(found).item()
    eps = _epsilon(G)
    exact = _ROUNDINGS * eps
    sums = torch.zeros(2, dtype=torch.float64, device=g[0].device)
    for x, y in zip(g, G, strict=True):  # s, from the numbers below the bound
        below = (x.abs() < bound * (1 - 2 * eps)) * y
        sums += torch.stack([(x * below).double().sum(), (y * below).double().sum()]).to(sums)
    both, own = world.of_whole(sums).tolist()
    s = both / own if own else (1.0 if scale is None else scale)
    if scale is not None and abs(s / scale - 1) <= exact:
        s = scale
    elif abs(s - 1) <= exact:
        s = 1.0
    elif s <= 0 or scale is not None or not _simple(s, eps):
        return None

    def clamp(own: list[Tensor]) -> list[Tensor]:
        return [(y * s).clamp(-bound, bound) for y in own]

    if not _equals(g, G, size, clamp, world):
        return None
    ratio = [
        torch.where(y == 0, torch.full_like(x, s), x / torch.where(y == 0, 1.0, y))
        for x, y in zip(g, G, strict=True)
    ]
    return Clipping(ratio, s, bound=bound)


def _cause(g: Sequence[Tensor], G: Sequence[Tensor], world: World) -> Unrecognised:
    """The likely cause of a change that is no scaling and no clipping."""
    size, total = _norms(g, world), _norms(G, world)
    each = [
        _is_multiple([x], [y], s / t, [s], world) if t else s == 0
        for x, y, s, t in zip(g, G, size, total, strict=True)
    ]
    zeroed = [
        bool(((x == 0) | ((x - y).abs() <= 8 * _epsilon([x, y]) * y.abs())).all())
        for x, y in zip(g, G, strict=True)
    ]
    if all(zeroed):
        return ZEROED
    return DIFFERENT_FACTORS if all(each) else ADDED

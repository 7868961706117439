"""The curvature of one parameter: a Fisher matrix in Kronecker eigenbases, and its damped inverse.

With g_i the gradient of one example's loss by a weight and its bias [O, I], the Fisher matrix
F = E[g gᵀ] (g as a vector) stands for the Hessian of the training loss. It is kept as in EK-FAC
(George et al. 2018), of gradients in the optimizer's own scale, κ ⊙ g:

    κ = (v̂_o v̂_i / v̄)^(−1/4)                       v̂: Adam's mean square, over rows and columns
    S = E[κg (κg)ᵀ] [O, O],  A = E[(κg)ᵀ κg] [I, I]  two factors (κg as a matrix)
    S = U_S (…) U_Sᵀ,        A = U_A (…) U_Aᵀ        their eigenbases, renewed now and then
    Λ = E[(U_Sᵀ κg U_A)²] [O, I]                     the diagonal of F in the basis U_S ⊗ U_A

and the direction of a validation gradient v is

    u = κ ⊙ (F + λ)⁻¹(κ ⊙ v) = κ ⊙ U_S [(U_Sᵀ (κ⊙v) U_A) / (Λ + λ)] U_Aᵀ,   λ = a/τ.

Why κ: Adam is gradient descent on w/κ, and τ is the learning rate that it has had in all, Σ_t η.
Gradient descent for a time τ has moved a direction of curvature h the part 1 − e^{−τh} of the way
to where it is going, and 1/(h + 1/τ) is nearly (1 − e^{−τh})/h. So what training had no time for is
not credited. An optimizer without a mean square has κ = 1.

Departures from K-FAC: the factors come from per-example gradients, not from single tokens' a and δ
(materialised gradients have none; for one token per example they differ by the weights ‖a‖², ‖δ‖²
only). A convolution is the matrix [O, I·k·k], a bias one more column. A side longer than ``WIDEST``
keeps its own coordinates, U = 1; vectors, and tables that are looked up in, are diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inrun.curvature.places import Place
from inrun.curvature.samples import Sample, apart, joined

WIDEST = 4096  # numbers of a side that gets an eigenbasis
LATER = 4.0  # weights of the running means grow with step^(LATER − 1): later gradients count more
LARGE = 512  # numbers of a side whose eigenbasis is costly: renewed less often, in turns
FIRST = 8  # observations before the first eigenbases: until then all is diagonal
GROWTH = {False: 1.1, True: 1.3}  # renewed when there are so many times as many; True: LARGE
FLOOR = 1e-3  # of the mean: no row or column counts as smaller


@dataclass(eq=False)
class Layer:
    """The curvature of one place, whose weight has this shape. Tensors are None until something was
    seen."""

    place: Place
    shape: torch.Size
    S: Tensor | None = None  # [O, O]
    A: Tensor | None = None  # [I, I]
    U_S: Tensor | None = None
    U_A: Tensor | None = None
    spectrum: Tensor | None = None  # Λ [O, I], or [numbers] of a vector
    left: Tensor | None = None  # κ of rows [O], or of numbers
    right: Tensor | None = None  # κ of columns [I]; None of a vector
    tau: Tensor | None = None  # []
    seen: int = 0  # observations
    renewal: int = FIRST  # the next eigenbases come at so many observations
    _cast: dict[torch.dtype, list[Tensor | None]] = field(default_factory=dict, repr=False)

    @property
    def matrix(self) -> tuple[int, int] | None:
        """The sizes O and I, with the bias; None: a vector, whose curvature is diagonal."""
        if len(self.shape) < 2:
            return None
        O, I = self.shape[0], math.prod(self.shape[1:])  # noqa: E741
        if self.place.bias is None:
            return O, I
        return (O + 1, I) if self.place.transposed else (O, I + 1)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of its parameters, by name."""
        outputs = self.shape[1 if self.place.transposed else 0 :][:1]
        return dict(zip(self.place.names, (self.shape, outputs), strict=False))

    @property
    def rotated(self) -> tuple[bool, bool]:
        """Which of its sides get an eigenbasis."""
        O, I = (0, 0) if self.place.table else self.matrix or (0, 0)  # noqa: E741
        return 1 < O <= WIDEST, 1 < I <= WIDEST

    @property
    def kind(self) -> str:
        """For people: how its curvature is kept."""
        return {(True, True): "two-sided", (False, False): "diagonal"}.get(
            self.rotated, "one-sided"
        )

    @property
    def numbers(self) -> int:
        """How many numbers it keeps when all is there."""
        sizes = self.matrix or (math.prod(self.shape),)
        sides = sum(2 * n * n for n, yes in zip(sizes, self.rotated, strict=False) if yes)
        return sides + math.prod(sizes) + sum(sizes) + 1

    def scale(self, squares: Sequence[Tensor | None], weight: Tensor) -> None:
        """Take κ from the optimizer's mean squares [*W] of the weight and of the bias; None of a
        weight: κ = 1."""
        sizes = self.matrix or (math.prod(self.shape),)
        before = [weight.new_ones(n) for n in sizes]
        if self.matrix is None:
            before = [before[0].view(self.shape)]
        if self.left is not None:
            before = [x for x in (self.left, self.right) if x is not None]
        if squares[0] is None:
            found = before
        else:
            rows = [None if x is None else x.detach().to(weight.dtype)[None] for x in squares]
            v = joined(self.place, rows, weight)[0]
            mean = v.mean()
            sides = [v] if self.matrix is None else [v.flatten(1).mean(1), v.flatten(1).mean(0)]
            units = [
                torch.ones_like(mean),
                mean,
            ]  # κ² of a row and a column is (v̂_o v̂_i / v̄)^(−1/2)
            known = (mean > 0) & mean.isfinite()  # not in a step that mixed precision skips
            found = [
                torch.where(known, (x.maximum(FLOOR * mean) / unit) ** -0.25, old)
                for x, unit, old in zip(sides, units, before, strict=False)
            ]
        self.left, self.right = (found[0], None) if len(found) == 1 else found

    def squared_size(self, G: Sequence[Tensor]) -> Tensor:
        """‖κ ⊙ G‖², G of the weight and perhaps of the bias."""
        assert self.left is not None
        given = [*G, *[None] * (len(self.place.names) - len(G))]
        x = joined(self.place, [g if g is None else g[None] for g in given], G[0])[0]
        if self.right is None:
            return (x * self.left).square().sum()
        return (x.flatten(1) * self.left[:, None] * self.right).square().sum()

    def see(self, sample: Sample) -> None:
        """Take gradients of single examples into the running means. A sample that is not finite
        (a step that mixed precision skips) changes nothing."""
        self.seen += 1
        weight = min(1.0, LATER / (self.seen + LATER - 1))
        if self.left is not None:
            sample = sample.scaled(self.left, self.right)
        left, right = self.rotated
        if not (left or right):
            new = sample.squares(None, None)
            self.spectrum = _mean(self.spectrum, new, weight, new.isfinite().all())
            return
        S = sample.left() if left else None
        A = sample.right() if right else None
        ok = _finite([x for x in (S, A) if x is not None])
        if S is not None:
            self.S = _mean(self.S, S, weight, ok)
        if A is not None:
            self.A = _mean(self.A, A, weight, ok)
        if self.seen >= self.renewal:
            self.renewal = max(self.seen + 1, int(self.seen * GROWTH[self.large]))
            self.renew()
        new = sample.squares(self.U_S, self.U_A)
        self.spectrum = _mean(self.spectrum, new, weight, new.isfinite().all())

    @property
    def large(self) -> bool:
        """Is an eigenbasis of it costly?"""
        sizes = self.matrix or ()
        return any(n > LARGE for n, yes in zip(sizes, self.rotated, strict=False) if yes)

    def renew(self) -> None:
        """New eigenbases; Λ goes with them: the diagonal, in the new basis, of what it stood for in
        the old one."""
        self._cast.clear()
        for side, factor in (("S", self.S), ("A", self.A)):
            before: Tensor | None = getattr(self, f"U_{side}")
            U = _basis(factor) if before is None else _turned(factor, before)
            if U is None:
                continue
            if self.spectrum is not None:
                overlap = (U.mT if before is None else U.mT @ before).square()
                moved = overlap @ (self.spectrum if side == "S" else self.spectrum.mT)
                self.spectrum = moved if side == "S" else moved.mT.contiguous()
            setattr(self, f"U_{side}", U)

    def pass_time(self, rate: Tensor) -> None:
        """Add an effective learning rate to τ."""
        self.tau = rate if self.tau is None else self.tau + rate

    def directions(
        self, v: Sequence[Tensor | None], a: float, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """u = κ ⊙ (F + a/τ)⁻¹(κ ⊙ v) for each of v [Q, *W], of the weight and of the bias; None
        stands for zeros. Products are taken in ``dtype``."""
        x = self.turned(v, dtype) / self.divisor(a)
        assert self.left is not None
        if self.right is None:
            return [x * self.left]
        U_S, U_A = self._bases(dtype or x.dtype)
        x = _times(U_S, x, U_A, dtype, back=True) * self.left[:, None] * self.right
        return apart(self.place, x, x.new_empty(()).expand(self.shape))

    def turned(self, v: Sequence[Tensor | None], dtype: torch.dtype | None = None) -> Tensor:
        """U_Sᵀ (κ ⊙ v) U_A [Q, O, I]; of a vector κ ⊙ v."""
        assert self.spectrum is not None and self.left is not None
        x = joined(self.place, v, self.spectrum.new_empty(()).expand(self.shape))
        if self.right is None:
            return x * self.left
        U_S, U_A = self._bases(dtype or x.dtype)
        return _times(U_S, x.flatten(2) * self.left[:, None] * self.right, U_A, dtype, back=False)

    def _bases(self, dtype: torch.dtype) -> list[Tensor | None]:
        """The eigenbases in this type, cast once."""
        if dtype not in self._cast:
            self._cast[dtype] = [U if U is None else U.to(dtype) for U in (self.U_S, self.U_A)]
        return self._cast[dtype]

    def to(self, device: torch.device, dtype: torch.dtype) -> Layer:
        """What directions need of it, there and in this type."""
        moved = Layer(self.place, self.shape, seen=self.seen)
        for key in KEPT:
            x: Tensor | None = getattr(self, key)
            setattr(moved, key, x if x is None else x.to(device, dtype))
        return moved

    def divisor(self, a: float) -> Tensor:
        """Λ + a/τ, of the shape of Λ. At τ = 0 nothing has moved yet: infinite, so that u is 0."""
        assert self.spectrum is not None and self.tau is not None
        return self.spectrum + a / self.tau


KEPT = ("U_S", "U_A", "spectrum", "left", "right", "tau")  # what directions need


def _mean(old: Tensor | None, new: Tensor, weight: float, ok: Tensor) -> Tensor:
    if old is None:
        return torch.where(ok, new, 0.0)
    return torch.where(ok, torch.lerp(old, new, weight), old)


def _finite(some: list[Tensor]) -> Tensor:
    """A flag on the device: are these finite? The trace is not if anything is not, up to rounding:
    the factors are sums of squares."""
    return torch.stack([x.sum() for x in some]).isfinite().all()


def _basis(factor: Tensor | None) -> Tensor | None:
    """Eigenvectors as columns; None: there is no factor, or it has none that can be found."""
    if factor is None:
        return None
    try:
        found: Tensor = torch.linalg.eigh(factor)[1]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    return found


def _turned(factor: Tensor | None, U: Tensor) -> Tensor | None:
    """A basis nearer to the eigenvectors, from one that was: a step of orthogonal iteration, with
    the largest first. Much cheaper than eigenvectors, and as good in trials."""
    if factor is None:
        return None
    moved = factor @ U
    order = (U * moved).sum(0).argsort(descending=True, stable=True)
    found: Tensor = torch.linalg.qr(moved[:, order])[0]
    return found


def _times(
    U_S: Tensor | None, x: Tensor, U_A: Tensor | None, dtype: torch.dtype | None, back: bool
) -> Tensor:
    """U_Sᵀ x U_A, or with ``back`` U_S x U_Aᵀ, in the type of x."""
    own = x.dtype
    y = x if dtype is None else x.to(dtype)
    if U_S is not None:
        y = (U_S if back else U_S.mT) @ y
    if U_A is not None:
        y = y @ (U_A.mT if back else U_A)
    return y.to(own)

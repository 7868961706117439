"""The curvature of one parameter: a Fisher matrix in Kronecker eigenbases, and its damped inverse.

With g_i the gradient of one example's loss by a weight [O, I], the Fisher matrix F = E[g gᵀ] (g as
a vector) stands for the Hessian of the training loss. It is kept as in EK-FAC (George et al. 2018):

    S = E[g gᵀ] [O, O],  A = E[gᵀ g] [I, I]         two factors (g as a matrix)
    S = U_S (…) U_Sᵀ,    A = U_A (…) U_Aᵀ           their eigenbases, renewed now and then
    Λ = E[(U_Sᵀ g U_A)²] [O, I]                     the diagonal of F in the basis U_S ⊗ U_A

and the direction of a validation gradient v is

    u = (F + λ)⁻¹ v = U_S [(U_Sᵀ v U_A) / (Λ + λ)] U_Aᵀ,   λ = a/τ.

τ is the learning rate that the layer has had in all, Σ_t η_eff: gradient descent for a time τ has
moved a direction of curvature h the part 1 − e^{−τh} of the way to where it is going, and
1/(h + 1/τ) is nearly (1 − e^{−τh})/h. So what training had no time for is not credited.

Departures from K-FAC: the factors come from per-example gradients, not from single tokens' a and δ
(materialised gradients have none; for one token per example they differ by the weights ‖a‖², ‖δ‖²
only). A convolution is the matrix [O, I·k·k]. A side longer than ``WIDEST`` (a vocabulary) keeps
its own coordinates, U = 1; vectors are diagonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inrun.curvature.samples import Sample

WIDEST = 4096  # numbers of a side that gets an eigenbasis
LATER = 4.0  # weights of the running means grow with step^(LATER − 1): later gradients count more
LARGE = 1024  # numbers of a side whose eigenbasis is costly: renewed less often
FIRST = 8  # observations before the first eigenbases: until then all is diagonal
GROWTH = {False: 1.5, True: 3.0}  # renewed when there are so many times as many; True: LARGE


@dataclass(eq=False)
class Layer:
    """The curvature of one parameter of this shape. Tensors are None until something was seen."""

    shape: torch.Size
    S: Tensor | None = None  # [O, O]
    A: Tensor | None = None  # [I, I]
    U_S: Tensor | None = None
    U_A: Tensor | None = None
    spectrum: Tensor | None = None  # Λ [O, I], or [numbers] of a vector
    tau: Tensor | None = None  # []
    seen: int = 0  # observations
    renewal: int = FIRST  # the next eigenbases come at so many observations
    _cast: dict[torch.dtype, list[Tensor | None]] = field(default_factory=dict, repr=False)

    @property
    def matrix(self) -> tuple[int, int] | None:
        """The sizes O and I; None: a vector, whose curvature is diagonal."""
        if len(self.shape) < 2:
            return None
        return self.shape[0], math.prod(self.shape[1:])

    @property
    def rotated(self) -> tuple[bool, bool]:
        """Which of its sides get an eigenbasis."""
        O, I = self.matrix or (0, 0)  # noqa: E741
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
        O, I = self.matrix or (0, 0)  # noqa: E741
        sides = sum(2 * n * n for n, yes in zip((O, I), self.rotated, strict=True) if yes)
        return sides + math.prod(self.shape) + 1

    def see(self, sample: Sample) -> None:
        """Take gradients of single examples into the running means. A sample that is not finite
        (a step that mixed precision skips) changes nothing."""
        self.seen += 1
        weight = min(1.0, LATER / (self.seen + LATER - 1))
        if self.matrix is None:
            new = sample.squares(None, None)
            self.spectrum = _mean(self.spectrum, new, weight, new.isfinite().all())
            return
        left, right = self.rotated
        S = sample.left() if left else None
        A = sample.right() if right else None
        ok = _finite([x for x in (S, A) if x is not None])
        if S is not None:
            self.S = _mean(self.S, S, weight, ok)
        if A is not None:
            self.A = _mean(self.A, A, weight, ok)
        if self.seen >= self.renewal:
            large = any(n > LARGE for n, yes in zip(self.matrix, self.rotated, strict=True) if yes)
            self.renewal = int(self.seen * GROWTH[large])
            self.renew()
        new = sample.squares(self.U_S, self.U_A)
        self.spectrum = _mean(self.spectrum, new, weight, new.isfinite().all())

    def renew(self) -> None:
        """New eigenbases; Λ goes with them: the diagonal, in the new basis, of what it stood for in
        the old one."""
        self._cast.clear()
        for side, U in (("S", _basis(self.S)), ("A", _basis(self.A))):
            if U is None:
                continue
            before: Tensor | None = getattr(self, f"U_{side}")
            if self.spectrum is not None:
                overlap = (U.mT if before is None else U.mT @ before).square()
                moved = overlap @ (self.spectrum if side == "S" else self.spectrum.mT)
                self.spectrum = moved if side == "S" else moved.mT.contiguous()
            setattr(self, f"U_{side}", U)

    def pass_time(self, rate: Tensor) -> None:
        """Add an effective learning rate to τ."""
        self.tau = rate if self.tau is None else self.tau + rate

    def directions(self, v: Tensor, a: float, dtype: torch.dtype | None = None) -> Tensor:
        """u = (F + a/τ)⁻¹ v for each of v [Q, *W]; products are taken in ``dtype``."""
        assert self.spectrum is not None and self.tau is not None
        divisor = self.divisor(a)
        if self.matrix is None:
            return v / divisor
        U_S, U_A = self._bases(dtype or v.dtype)
        x = _times(U_S, v.reshape(len(v), *self.matrix), U_A, dtype, back=False)
        return _times(U_S, x / divisor, U_A, dtype, back=True).reshape(v.shape)

    def _bases(self, dtype: torch.dtype) -> list[Tensor | None]:
        """The eigenbases in this type, cast once."""
        if dtype not in self._cast:
            self._cast[dtype] = [U if U is None else U.to(dtype) for U in (self.U_S, self.U_A)]
        return self._cast[dtype]

    def to(self, device: torch.device, dtype: torch.dtype) -> Layer:
        """What directions need of it, there and in this type."""
        moved = Layer(self.shape, seen=self.seen)
        for key in ("U_S", "U_A", "spectrum", "tau"):
            x: Tensor | None = getattr(self, key)
            setattr(moved, key, x if x is None else x.to(device, dtype))
        return moved

    def divisor(self, a: float) -> Tensor:
        """Λ + a/τ, of the shape of Λ. At τ = 0 nothing has moved yet: infinite, so that u is 0."""
        assert self.spectrum is not None and self.tau is not None
        return self.spectrum + a / self.tau


def _mean(old: Tensor | None, new: Tensor, weight: float, ok: Tensor) -> Tensor:
    if old is None:
        return torch.where(ok, new, 0.0)
    return torch.where(ok, torch.lerp(old, new, weight), old)


def _finite(some: list[Tensor]) -> Tensor:
    """A flag on the device: are these finite? The trace is not if anything is not, up to rounding:
    the factors are sums of squares."""
    if not some:
        return torch.ones((), dtype=torch.bool, device="cpu")
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

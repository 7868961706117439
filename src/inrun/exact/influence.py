"""``estimator="influence"`` as its definition says, with whole matrices: slow, obvious, float64.

Shares no code with curvature/. One object holds the curvature of one parameter as a matrix of
numbers × numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scale_of(squares: Tensor, floor: float) -> Tensor:
    """κ of a matrix or vector of mean squares: (row mean × column mean / mean)^(−1/4), where no row
    or column counts as less than ``floor`` of the mean."""
    mean = float(squares.mean())
    if squares.ndim == 1:
        return squares.clamp(min=floor * mean) ** -0.25
    rows = squares.mean(1).clamp(min=floor * mean)
    columns = squares.mean(0).clamp(min=floor * mean)
    return (torch.outer(rows, columns) / mean) ** -0.25


class WholeFisher:
    """F = B diag(Λ) Bᵀ of a weight [O, I] (or a vector), with B = U_S ⊗ U_A written out.

    Eigenbases are of eigenvectors the first time, then a step of orthogonal iteration, with the
    directions ordered by their curvature.

    Args:
        later: the k-th observation has the weight later/(k + later − 1) in the running means.
        renewed: the observations, from 1, at which the eigenbases are renewed.
    """

    def __init__(self, later: float, renewed: set[int]) -> None:
        self.later, self.renewed = later, renewed
        self.k = 0
        self.S = self.A = self.F = torch.zeros(())
        self.basis = torch.zeros(())
        self.U_S: Tensor | None = None
        self.U_A: Tensor | None = None
        self.tau = 0.0

    def see(self, g: Tensor) -> None:
        """Gradients of single examples [n, O, I] or [n, numbers]."""
        self.k += 1
        weight = min(1.0, self.later / (self.k + self.later - 1))
        if g.ndim == 3:
            self.S = (1 - weight) * self.S + weight * sum(x @ x.T for x in g) / len(g)
            self.A = (1 - weight) * self.A + weight * sum(x.T @ x for x in g) / len(g)
            if self.k in self.renewed:
                self.U_S, self.U_A = _next_basis(self.S, self.U_S), _next_basis(self.A, self.U_A)
                self.basis = torch.kron(self.U_S, self.U_A)
        flat = g.reshape(len(g), -1)
        if not self.basis.ndim:  # until the first eigenbases: the coordinates
            self.basis = torch.eye(flat.shape[1], dtype=g.dtype)
        new = self._diagonal(flat.T @ flat / len(g))
        old = self._diagonal(self.F) if self.k > 1 else torch.zeros_like(new)
        diagonal = (1 - weight) * old + weight * new
        self.F = self.basis @ torch.diag(diagonal) @ self.basis.T

    def _diagonal(self, F: Tensor) -> Tensor:
        return torch.diagonal(self.basis.T @ F @ self.basis)

    def direction(self, v: Tensor, a: float) -> Tensor:
        """(F + a/τ)⁻¹ v."""
        damped = self.F + a / self.tau * torch.eye(len(self.F), dtype=self.F.dtype)
        return torch.linalg.solve(damped, v.flatten()).reshape(v.shape)


def _next_basis(factor: Tensor, U: Tensor | None) -> Tensor:
    if U is None:
        return torch.linalg.eigh(factor).eigenvectors
    curvatures = [float(x @ factor @ x) for x in U.T]
    columns: list[Tensor] = []  # Gram and Schmidt, twice, for the precision
    for k in sorted(range(len(curvatures)), key=lambda k: -curvatures[k]):
        x = factor @ U[:, k]
        for _ in range(2):
            for y in columns:
                x = x - (x @ y) * y
            x = x / x.norm()
        columns.append(x)
    return torch.stack(columns, dim=1)

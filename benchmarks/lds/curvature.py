"""EK-FAC, the obvious way: whole factors, whole eigenbases, per-example gradients.

For a linear layer or a convolution with inputs a and errors δ, A = E[aaᵀ] and S = E[δδᵀ] over
tokens (or places) give eigenbases U_A and U_S; the eigenvalues Λ = E_i[(U_Sᵀ g_i U_A)²] are those
of per-example gradients. Other parameters have a diagonal, Λ = E_i[g_i²]. Then u = (F + λ)⁻¹v is
U_S [(U_Sᵀ v U_A) / (Λ + λ)] U_Aᵀ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lds.gradients import Weights, per_example
from benchmarks.lds.problems import Batch, Problem

WIDEST = 4096  # a side of a matrix that is longer has no basis


@dataclass
class Curvature:
    bases: dict[str, tuple[Tensor, Tensor]]  # U_S [O, O], U_A [I, I]
    eigenvalues: Weights = field(default_factory=dict)
    examples: int = 0

    def into(self, rows: Weights) -> Weights:
        """Gradients [B, *W] in the eigenbases."""
        return {k: self._turned(k, g, back=False) for k, g in rows.items()}

    def _turned(self, name: str, g: Tensor, back: bool) -> Tensor:
        if name not in self.bases:
            return g
        S, A = self.bases[name]
        matrix = g.flatten(2)
        turned = S @ matrix @ A.T if back else S.T @ matrix @ A
        return turned.view(g.shape)

    def add(self, rows: Weights) -> None:
        """Per-example gradients [B, *W] for the eigenvalues."""
        for k, g in self.into(rows).items():
            squared = (g**2).sum(0)
            self.eigenvalues[k] = self.eigenvalues.get(k, 0) + squared
        self.examples += len(next(iter(rows.values())))

    def solve(self, v: Weights, damping: dict[str, float]) -> Weights:
        """(F + λ)⁻¹v for v of shape [Q, *W]."""
        found = {}
        for k, g in self.into(v).items():
            scaled = g / (self.eigenvalues[k] / self.examples + damping[k])
            found[k] = self._turned(k, scaled, back=True)
        return found


class Factors:
    """Sums of aaᵀ and δδᵀ of every linear layer and convolution of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}
        self.tokens: dict[str, int] = {}

    def add(self, loss: Callable[[nn.Module], Tensor]) -> None:
        """One backward pass of the *sum* of the losses of its rows."""
        handles = []
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                handles.append(module.register_forward_hook(self._hook(f"{name}.weight")))
        try:
            torch.autograd.grad(loss(self.model), list(self.model.parameters()), allow_unused=True)
        finally:
            for h in handles:
                h.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def forward(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            a = inputs[0].detach()
            if isinstance(module, nn.Conv2d):
                a = F.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride)
                a = a.transpose(1, 2)
            output.register_hook(lambda delta: self._count(name, a, delta, output.ndim == 4))

        return forward

    def _count(self, name: str, a: Tensor, delta: Tensor, picture: bool) -> None:
        d = delta.detach()
        d = d.flatten(2).transpose(1, 2) if picture else d
        a, d = a.reshape(-1, a.shape[-1]), d.reshape(-1, d.shape[-1])
        if max(a.shape[-1], d.shape[-1]) > WIDEST:
            return
        S, A = d.T @ d, a.T @ a
        if name in self.sums:
            S, A = S + self.sums[name][0], A + self.sums[name][1]
        self.sums[name] = S, A
        self.tokens[name] = self.tokens.get(name, 0) + len(a)

    def bases(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {k: (torch.linalg.eigh(S)[1], torch.linalg.eigh(A)[1])
                for k, (S, A) in self.sums.items()}  # fmt: skip


def ekfac(
    problem: Problem, model: nn.Module, weights: Weights, parts: Iterable[Batch]
) -> Curvature:
    """Of these rows at these weights, with their own labels (the empirical Fisher matrix)."""
    parts = list(parts)
    restore = {k: w.detach().clone() for k, w in model.named_parameters()}
    load(model, weights)
    factors = Factors(model)
    for batch in parts:
        factors.add(lambda m, batch=batch: problem.losses(m, batch).sum())  # type: ignore[misc]
    load(model, restore)
    found = Curvature(factors.bases())
    for batch in parts:
        found.add(per_example(problem, model, weights, batch))
    return found


def load(model: nn.Module, weights: Weights) -> None:
    with torch.no_grad():
        for k, w in model.named_parameters():
            w.copy_(weights[k])

"""Many copies of a model side by side, each with its own weights, trained by one real optimizer.

A coordinate-wise optimizer does not know that its parameter of shape [C, *W] is a stack of C
copies, so C steps from the same state, or C trainings, are one call of ``optimizer.step()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Stack = dict[str, nn.Parameter]


class WithLoss(nn.Module):
    """The loss as a module, so that ``functional_call`` can put other weights below it."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


def stacked(model: nn.Module, optimizer: Optimizer, copies: int) -> tuple[Stack, Optimizer]:
    """``copies`` copies of the model's parameters and an optimizer of the same class, options and
    state for all of them."""

    def repeat(x: Tensor) -> Tensor:
        return x.detach().expand(copies, *x.shape).clone()

    stack = {k: nn.Parameter(repeat(p)) for k, p in model.named_parameters()}
    of = {id(p): stack[k] for k, p in model.named_parameters()}
    groups = [g | {"params": [of[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    twin = type(optimizer)(groups)  # type: ignore[call-arg]
    for p, state in optimizer.state.items():
        twin.state[of[id(p)]] = {
            k: x if not isinstance(x, Tensor) else repeat(x) if x.shape == p.shape else x.clone()
            for k, x in state.items()
        }
    return stack, twin


def losses(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], stack: dict[str, Any], batch: Any
) -> Tensor:
    """The loss of each copy on the same batch: [C]."""
    inner = WithLoss(model, loss)

    def one(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(
            inner, {f"model.{k}": w for k, w in weights.items()}, (batch,)
        )

    first = next(iter(stack.values()))
    with torch.no_grad():
        if len(first) == 1:
            return one({k: w[0] for k, w in stack.items()}).reshape(1)
        return torch.func.vmap(one)({k: w.detach() for k, w in stack.items()})


def backward(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], stack: Stack, batches: Any
) -> None:
    """Each copy's gradient on its own batch (tensors [C, B, ...]) into ``.grad``."""
    inner = WithLoss(model, loss)

    def one(weights: dict[str, Tensor], batch: Any) -> Tensor:
        return torch.func.functional_call(
            inner, {f"model.{k}": w for k, w in weights.items()}, (batch,)
        )

    grads = torch.func.vmap(torch.func.grad(one))(
        {k: w.detach() for k, w in stack.items()}, batches
    )
    for k, w in stack.items():
        w.grad = grads[k].contiguous()  # fused optimizers want the parameter's own layout

"""Many copies of a model side by side, each with its own weights, trained by one real optimizer.

A coordinate-wise optimizer does not know that its parameter of shape [C, *W] is a stack of C
copies, so C steps from the same state, or C trainings, are one call of ``optimizer.step()``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Stack = dict[str, nn.Parameter]
Loss = Callable[[nn.Module, Any], Tensor]
Gradients = Callable[[dict[str, Tensor], Any], dict[str, Tensor]]


class WithLoss(nn.Module):
    """The loss as a module, so that ``functional_call`` can put other weights below it."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
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


def losses(model: nn.Module, loss: Loss, stack: dict[str, Any], batch: Any) -> Tensor:
    """The loss of each copy on the same batch: [C]."""
    one = _with_weights(model, loss)
    first = next(iter(stack.values()))
    with torch.no_grad():
        if len(first) == 1:
            return one({k: w[0] for k, w in stack.items()}, batch).reshape(1)
        return torch.func.vmap(one, in_dims=(0, None))(
            {k: w.detach() for k, w in stack.items()}, batch
        )


def outputs(model: nn.Module, stack: Stack, inputs: Tensor, rows: int = 128) -> Tensor:
    """What each copy returns for the same inputs, so many rows at a time: [C, N, ...]."""
    one = _with_weights(model, lambda m, x: m(x))
    each = torch.func.vmap(one, in_dims=(0, None))
    weights = {k: w.detach() for k, w in stack.items()}
    with torch.no_grad():
        return torch.cat([each(weights, part) for part in inputs.split(rows)], dim=1)


def backward(model: nn.Module, loss: Loss, stack: Stack, batches: Any) -> None:
    """Each copy's gradient on its own batch (tensors [C, B, ...]) into ``.grad``. Dropout is drawn
    for each copy on its own."""
    _into_grad(stack, _gradients(model, loss), batches)


def train(
    model: nn.Module, loss: Loss, stack: Stack, optimizer: Optimizer, data: tuple[Tensor, ...],
    order: Sequence[Tensor], steps: Iterable[int],
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext, compiled: bool = False,
) -> None:  # fmt: skip
    """Train each copy on its own rows of ``data``: ``order`` holds [C, B] for each step. Where B is
    always the same, the gradients are recorded as a CUDA graph; they can be compiled before.

    ``precision`` makes the context of the forward pass, such as autocast. ``steps`` may change the
    learning rate between steps.
    """
    ids, grads = order[0].clone(), _gradients(model, loss)
    if compiled:
        grads = torch.compile(grads)

    def work() -> None:
        with precision():
            _into_grad(stack, grads, tuple(x[ids] for x in data))

    alike = all(rows.shape == ids.shape for rows in order)
    again = replayed(work, ids.device) if alike else work
    for step in steps:
        if alike:
            ids.copy_(order[step])
        else:
            ids = order[step]
        again()
        optimizer.step()


def replayed(work: Callable[[], None], device: torch.device, before: int = 2) -> Any:
    """``work`` recorded as a CUDA graph: under ``vmap`` the host launches kernels more slowly than
    a GPU does them. On a CPU, or where it cannot be recorded, ``work`` itself."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(before):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    except RuntimeError as error:
        torch.cuda.synchronize()
        warnings.warn(f"not recorded as a CUDA graph, and slow for it: {error}", stacklevel=2)
        return work
    return graph.replay


def _gradients(model: nn.Module, loss: Loss) -> Gradients:
    one = torch.func.grad(_with_weights(model, loss))
    return torch.func.vmap(one, randomness="different")


def _into_grad(stack: Stack, gradients: Gradients, batches: Any) -> None:
    found = gradients({k: w.detach() for k, w in stack.items()}, batches)
    for k, w in stack.items():
        w.grad = found[k].contiguous()  # fused optimizers want the parameter's own layout


def _with_weights(model: nn.Module, loss: Loss) -> Callable[[dict[str, Tensor], Any], Tensor]:
    inner = WithLoss(model, loss)

    def one(weights: dict[str, Tensor], batch: Any) -> Tensor:
        return torch.func.functional_call(
            inner, {f"model.{k}": w for k, w in weights.items()}, (batch,)
        )

    return one

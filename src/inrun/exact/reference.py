"""Slow and obvious definitions of everything: the oracle of the tests and of ``Run.check``.

Nothing here shares code with the fast path. Losses, gradients and optimizer steps are taken with
the real model, real ``backward()`` and real ``optimizer.step()`` on copies.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Utility = Callable[[frozenset[int]], float]
Optimizers = Optimizer | Iterable[Optimizer]  # several step one after the other


def per_example_gradients(
    model: nn.Module,
    batch: Any,
    B: int,
    forward: Callable[[nn.Module, Any], Tensor],
    loss: Callable[[Tensor, Any], Tensor],
    batch_dim: int = 0,
) -> dict[str, Tensor]:
    """g_i = ∂L/∂W_i with one copy W_i of the model per row, all rows in one loss.

    Row i is computed by copy i alone; the copies run side by side and meet only in BatchNorm,
    whose statistics are those of the whole batch, and in the loss.

    Args:
        forward: the model's outputs for (some rows of) a batch, examples in ``batch_dim``.
        loss: the loss of the outputs of the whole batch.

    Returns:
        For each trainable parameter its gradients, stacked: [B, *W].
    """
    copies = [copy.deepcopy(model) for _ in range(B)]
    meeting = _Meeting(B)
    for row, copied in enumerate(copies):
        for name, module in copied.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                vars(module)["forward"] = meeting.batch_norm(name, row, module)
    outputs: list[Any] = [None] * B

    def run(row: int) -> None:
        try:
            outputs[row] = forward(copies[row], take_row(batch, row, B, batch_dim))
        except BaseException as e:
            outputs[row] = e
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(row,)) for row in range(B)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outputs:
        if isinstance(out, BaseException) and not isinstance(out, threading.BrokenBarrierError):
            raise out
    loss(torch.cat(outputs, batch_dim), batch).backward()
    named = [dict(c.named_parameters()) for c in copies]
    return {
        k: torch.stack([torch.zeros_like(p) if (g := n[k].grad) is None else g for n in named])
        for k, p in model.named_parameters()
        if p.requires_grad
    }


class _Meeting:
    """Where the copies wait for each other to compute statistics over the whole batch."""

    def __init__(self, B: int) -> None:
        self.barrier = threading.Barrier(B)
        self.inputs: dict[str, list[Any]] = {}
        self.lock = threading.Lock()
        self.B = B

    def batch_norm(self, name: str, row: int, module: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with self.lock:
                self.inputs.setdefault(name, [None] * self.B)[row] = x
            self.barrier.wait()
            whole = torch.cat(self.inputs[name])
            dims = [d for d in range(whole.ndim) if d != 1]
            mean = whole.mean(dims, keepdim=True)
            var = whole.var(dims, unbiased=False, keepdim=True)
            self.barrier.wait()
            shape = [1, -1] + [1] * (x.ndim - 2)
            xhat = (x - mean) / torch.sqrt(var + module.eps)
            return xhat * module.weight.view(shape) + module.bias.view(shape)

        return forward


def take_row(batch: Any, row: int, B: int, dim: int = 0) -> Any:
    """One example of a batch of tensors, as a batch of one."""
    if isinstance(batch, Tensor):
        if batch.ndim > dim and batch.shape[dim] == B:
            return batch.narrow(dim, row, 1)
        return batch
    if isinstance(batch, Mapping):
        return {k: take_row(v, row, B, dim) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(take_row(v, row, B, dim) for v in batch)
    return batch


def exact_shapley(n: int, utility: Utility) -> np.ndarray:
    """Shapley values over all 2^n coalitions."""
    subsets = [itertools.combinations(range(n), size) for size in range(n + 1)]
    U = {S: utility(S) for S in map(frozenset, itertools.chain(*subsets))}
    phi = np.zeros(n)
    for i in range(n):
        for S, u in U.items():
            if i not in S:
                weight = math.factorial(len(S)) * math.factorial(n - len(S) - 1) / math.factorial(n)
                phi[i] += weight * (U[S | {i}] - u)
    return phi


def permutation_shapley(
    n: int, utility: Utility, permutations: int, seed: int = 0, tolerance: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Truncated Monte Carlo Shapley values (Ghorbani and Zou 2019) and their standard errors.

    A permutation is cut short, its further marginals counted as 0, once the utility is within
    ``tolerance`` of the whole batch's.
    """
    rng = np.random.default_rng(seed)
    nothing, everything = utility(frozenset()), utility(frozenset(range(n)))
    marginals = np.zeros((permutations, n))
    for k in range(permutations):
        S: frozenset[int] = frozenset()
        before = nothing
        for i in rng.permutation(n):
            if tolerance and abs(everything - before) <= tolerance:
                break
            S = S | {int(i)}
            after = everything if len(S) == n else utility(S)
            marginals[k, i] = after - before
            before = after
    error = (
        marginals.std(axis=0, ddof=1) / math.sqrt(permutations)
        if permutations > 1
        else np.full(n, np.nan)
    )
    return marginals.mean(axis=0), error


def groups_of(optimizer: Optimizers) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer, or of several in their order."""
    members = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    return [group for o in members for group in o.param_groups]


def stepped(
    optimizer: Optimizers, gradients: Sequence[Tensor | None], scale: Tensor | None = None
) -> list[Tensor]:
    """The weights after a real ``optimizer.step()`` on a copy, for these gradients.

    Weights and gradients are in the order of the optimizer's parameter groups. The optimizer
    itself, its state and its parameters are not changed.
    """
    if not isinstance(optimizer, Optimizer):
        rest = iter(gradients)
        found = []
        for o in optimizer:
            n = sum(len(group["params"]) for group in o.param_groups)
            found += stepped(o, list(itertools.islice(rest, n)), scale)
        return found
    twin = twin_of(optimizer, _copied_parts(optimizer))
    params = [p for group in twin.param_groups for p in group["params"]]
    for p, g in zip(params, gradients, strict=True):
        p.grad = None if g is None else (g if scale is None else g / scale).clone()
    twin.step()
    return [p.detach() for p in params]


def twin_of(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy of an optimizer, with its own parameters and state; ``memo`` as ``deepcopy`` takes it.

    Methods that others have replaced in the object (a learning rate scheduler puts a ``step`` there
    that steps the original) are those of the class again.
    """
    twin = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():  # attributes of subclasses are not in its state
        replaced = callable(getattr(type(optimizer), name, None))
        unlike = replaced or name.startswith("_optimizer") or name in ("grad_scale", "found_inf")
        if not unlike:
            vars(twin).setdefault(name, value)
    return twin


def _copied_parts(optimizer: Optimizer) -> dict[int, Any]:
    """A memo for ``deepcopy`` with copies of the tensors in the state that are made of others and
    cannot be cloned whole (torchao's low-bit moments): copied part by part."""
    memo: dict[int, Any] = {}
    for state in optimizer.state.values():
        for x in state.values():
            if isinstance(x, Tensor) and hasattr(type(x), "__tensor_flatten__"):
                whole: Any = x
                names, rest = whole.__tensor_flatten__()
                parts = {name: getattr(whole, name).clone() for name in names}
                memo[id(x)] = type(whole).__tensor_unflatten__(parts, rest, x.shape, x.stride())
    return memo


def value_of(
    model: nn.Module, optimizer: Optimizers, weights: Sequence[Tensor], loss: Callable[[], float]
) -> float:
    """A loss of the model with these weights for the optimizer's parameters; then the old ones."""
    params = [p for group in groups_of(optimizer) for p in group["params"]]
    own = [p.data for p in params]
    try:
        for p, w in zip(params, weights, strict=True):
            p.data = w.to(p.dtype)
        return loss()
    finally:
        for p, w in zip(params, own, strict=True):
            p.data = w


def coalition_utility(
    model: nn.Module,
    optimizer: Optimizers,
    gradients: Sequence[Tensor | None],
    loss: Callable[[], float],
    clip: Callable[[list[Tensor | None]], list[Tensor | None]] = lambda g: g,
) -> Utility:
    """U(S) = ℓ_val(decay(w) − ηΨ(C(Σ_{i∈S} g_i))): the validation loss after a step of S alone.

    Args:
        gradients: per-example gradients [B, *W] in the order of the optimizer's parameters; None
            for a parameter without gradient, which takes no step.
        loss: the validation loss of the model as it stands.
        clip: C, what happens to the gradient before the optimizer sees it.
    """

    def utility(S: frozenset[int]) -> float:
        members = sorted(S)
        total = [None if g is None else g[members].sum(0) for g in gradients]
        return value_of(model, optimizer, stepped(optimizer, clip(total)), loss)

    return utility


def values(
    model: nn.Module,
    optimizer: Optimizers,
    rows: Sequence[Tensor],
    loss: Callable[[nn.Module], Tensor],
    kind: str = "secant",
    points: Sequence[float | None] = (0.5,),
    step: float = 1e-6,
) -> Tensor:
    """The estimators of the method from finite differences of a real ``optimizer.step()``.

    Args:
        rows: per-example gradients [B, *W] in the order of the optimizer's parameters; G is
            their sum.
        loss: the validation loss of a model.
        kind: "secant" divides the whole change by G; "tangent" differentiates numerically at G;
            "sgd" multiplies by the learning rate; "shapley" is the Shapley value of the update
            itself, over all coalitions, the validation loss taken as linear.
        points: where on the path from w_∅ (0) to w_B (1) the validation gradient is taken; None
            is w_t.

    Returns:
        One value per example.
    """
    G = [r.sum(0) for r in rows]
    without = stepped(optimizer, [torch.zeros_like(g) for g in G])
    with_batch = stepped(optimizer, G)
    gradient = _validation_gradient(model, optimizer, loss, without, with_batch, points)
    if kind == "shapley":
        return _shapley_of_update(optimizer, rows, gradient)
    if kind == "secant":
        change = [
            (a - b) / torch.where(g == 0, 1.0, g)
            for a, b, g in zip(without, with_batch, G, strict=True)
        ]
    elif kind == "tangent":
        size = [step * g.abs().clamp(min=1e-3 * float(g.abs().max())) for g in G]
        up = stepped(optimizer, [g + h for g, h in zip(G, size, strict=True)])
        down = stepped(optimizer, [g - h for g, h in zip(G, size, strict=True)])
        change = [(d - u) / (2 * h) for u, d, h in zip(up, down, size, strict=True)]
    else:
        lr = [float(group["lr"]) for group in groups_of(optimizer) for _ in group["params"]]
        change = [torch.full_like(g, eta) for g, eta in zip(G, lr, strict=True)]
    total = torch.zeros(len(rows[0]), dtype=rows[0].dtype)
    for c, v, g, r in zip(change, gradient, G, rows, strict=True):
        # zero but for rounding: the batch does not move it
        moves = g.abs() > 1e-10 * r.abs().sum(0)
        total += (c * v * r * moves).reshape(len(r), -1).sum(1)
    return total


def _shapley_of_update(
    optimizer: Optimizers, rows: Sequence[Tensor], gradient: Sequence[Tensor]
) -> Tensor:
    """Shapley values of −⟨∇ℓ, w(S)⟩, w(S) the weights after a step of the coalition S; of all, with
    the gradient that is there."""
    params = [p for group in groups_of(optimizer) for p in group["params"]]

    def utility(S: frozenset[int]) -> float:
        g = [r[sorted(S)].sum(0) for r in rows]
        if len(S) == len(rows[0]):
            pairs = zip(params, g, strict=True)
            g = [own if p.grad is None else p.grad.clone() for p, own in pairs]
        weights = zip(gradient, stepped(optimizer, g), strict=True)
        return -sum(float((v * w).sum()) for v, w in weights)

    return torch.from_numpy(exact_shapley(len(rows[0]), utility))


def _validation_gradient(
    model: nn.Module, optimizer: Optimizers, loss: Callable[[nn.Module], Tensor],
    without: Sequence[Tensor], with_batch: Sequence[Tensor], points: Sequence[float | None],
) -> list[Tensor]:  # fmt: skip
    """The mean of the validation gradients at these points of the path from w_∅ to w_B."""
    params = [p for group in groups_of(optimizer) for p in group["params"]]
    own = [p.data for p in params]
    gradient = [torch.zeros_like(w) for w in own]
    for x in points:
        for p, w, a, b in zip(params, own, without, with_batch, strict=True):
            p.data = w if x is None else (1 - x) * a + x * b
        grads = torch.autograd.grad(loss(model), params, allow_unused=True)
        for total, g in zip(gradient, grads, strict=True):
            total += 0 if g is None else g / len(points)
        for p, w in zip(params, own, strict=True):
            p.data = w
    return gradient

"""Per-example gradients, the obvious way, and one plain training with what it passed through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.lds import clock
from benchmarks.lds.problems import Batch, Problem

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """A plain training: the model at its end, and of some steps the weights before them."""

    model: nn.Module
    order: list[Tensor]  # rows of each step
    weights: dict[int, Weights]  # by step; the last are those at the end
    second: Weights  # v̂ of AdamW at the end


def weights_of(model: nn.Module) -> Weights:
    return {k: w.detach().clone() for k, w in model.named_parameters()}


def train(problem: Problem, seed: int, checkpoints: int | None = None) -> Training:
    """``checkpoints``: keep the weights of so many steps, equally far apart; None: of all."""
    model = problem.make(seed)
    optimizer = problem.optimizer(model)
    order = problem.order(torch.arange(problem.examples), seed)
    every = 1 if checkpoints is None else max(1, len(order) // checkpoints)
    kept: dict[int, Weights] = {}
    for t, rows in enumerate(order):
        if t % every == 0 and checkpoints != 0:
            kept[t] = weights_of(model)
        ids = rows.to(problem.device)
        problem.loss(model, tuple(x[ids] for x in problem.train)).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept[len(order)] = weights_of(model)
    beta = optimizer.param_groups[0]["betas"][1]
    second = {
        k: optimizer.state[w]["exp_avg_sq"] / (1 - beta ** len(order))
        for k, w in model.named_parameters()
    }
    return Training(model, order, kept, second)


def plain_seconds(problem: Problem, seed: int) -> float:
    """Seconds of one training with nothing beside it."""
    model = problem.make(seed)
    optimizer = problem.optimizer(model)
    order = [rows.to(problem.device) for rows in problem.order(torch.arange(problem.examples), 0)]
    wait(problem)
    begun = clock.now()
    for ids in order:
        problem.loss(model, tuple(x[ids] for x in problem.train)).backward()
        optimizer.step()
        optimizer.zero_grad()
    wait(problem)
    return clock.now() - begun


def wait(problem: Problem) -> None:
    if problem.device.type == "cuda":
        torch.cuda.synchronize()


def per_example(problem: Problem, model: nn.Module, weights: Weights, batch: Batch) -> Weights:
    """The gradient of each row's own loss: [B, *W] for each parameter."""

    def one(weights: Weights, row: Batch) -> Tensor:
        def call(module: nn.Module) -> Tensor:
            return problem.losses(module, tuple(x[None] for x in row))[0]

        return torch.func.functional_call(_Calling(model, call), _below(weights), ())

    return torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(weights, batch)


class _Calling(nn.Module):
    def __init__(self, model: nn.Module, call) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.model, self.call = model, call

    def forward(self) -> Tensor:
        return self.call(self.model)


def _below(weights: Weights) -> Weights:
    return {f"model.{k}": w for k, w in weights.items()}


def chunks(problem: Problem, batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
    """The rows of a batch, so many at a time that their gradients fit: (which, rows)."""
    which = torch.arange(len(batch[0]), device=batch[0].device)
    for ids in which.split(problem.chunk or 100):
        yield ids, tuple(x[ids] for x in batch)


def all_rows(problem: Problem, model: nn.Module, weights: Weights, batch: Batch) -> Weights:
    """As ``per_example``, of a batch of any size; what it returns must fit."""
    found = [per_example(problem, model, weights, rows) for _, rows in chunks(problem, batch)]
    return {k: torch.cat([f[k] for f in found]) for k in found[0]}


def dots(rows: Weights, directions: Weights) -> Tensor:
    """⟨g_i, u_q⟩ over all parameters: [B, Q]."""
    return sum(rows[k].flatten(1) @ directions[k].flatten(1).T for k in directions)  # type: ignore

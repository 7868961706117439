"""Two more questions to a credit: what if the rows it names are removed (brittleness), and what if
the trained model takes one more step on them (tail patch)?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.lds.gradients import Training, Weights
from benchmarks.lds.ours import end
from benchmarks.lds.problems import Problem
from benchmarks.lds.retrain import query_losses, trained


def top(credit: Tensor, k: int) -> Tensor:
    """The k rows of most credit of each query: [Q, k]."""
    return credit.detach().cpu().topk(k, dim=0).indices.T


def random_rows(problem: Problem, k: int, seed: int = 0) -> Tensor:
    """k other rows for each query, drawn by chance: [Q, k]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(problem.examples, generator=generator)[:k]
             for _ in range(len(problem.queries[0]))]  # fmt: skip
    return torch.stack(drawn)


def removed(problem: Problem, rows: Tensor, queries: int, seeds: int, together: int = 50) -> Tensor:
    """Loss of each of the first ``queries`` queries after retraining without its own rows [Q, k],
    mean over seeds: [queries]."""
    masks = torch.ones(queries, problem.examples, dtype=torch.bool)
    masks.scatter_(1, rows[:queries], False)
    each = []
    for s in range(seeds):
        parts = []
        for start in range(0, queries, together):
            part = masks[start : start + together]
            numbers = [50_000_000 + 1000 * s + start + k for k in range(len(part))]
            losses = query_losses(problem, trained(problem, part, numbers))
            parts.append(losses[:, start : start + len(part)].diagonal().cpu())
        each.append(torch.cat(parts))
    return torch.stack(each).mean(0)


def brittleness(
    problem: Problem, credits: dict[str, Tensor], k: int, queries: int, seeds: int
) -> dict[str, Any]:
    """Mean rise of a query's loss where its top k rows are removed, against k random rows. All
    retrainings for one query and seed begin with the same weights."""
    base = removed(problem, random_rows(problem, k), queries, seeds)
    found: dict[str, Any] = {
        "k": k,
        "queries": queries,
        "seeds": seeds,
        "random": float(base.mean()),
    }
    found["rise"] = {
        name: float((removed(problem, top(c, k), queries, seeds) - base).mean())
        for name, c in credits.items()
    }
    return found


def tail_patch(
    problem: Problem, training: Training, credits: dict[str, Tensor], k: int
) -> dict[str, Any]:
    """Mean drop of a query's loss by one more step on its top k rows, from the trained weights:
    what their mean gradient g adds to a step of Adam, lr · (1 − β1) · g / √(β2 v̂ + (1 − β2) g²)."""
    weights = end(training)

    def losses(w: Weights, rows: tuple[Tensor, ...]) -> Tensor:
        return torch.func.functional_call(_Losses(problem, training), _below(w), (rows,))

    gradient = torch.func.grad(lambda w, rows: losses(w, rows).mean())

    def drop(chosen: Tensor) -> float:
        drops = []
        for q, rows in enumerate(chosen.to(problem.device)):
            query = tuple(x[q : q + 1] for x in problem.queries)
            g = gradient(weights, tuple(x[rows] for x in problem.train))
            with torch.no_grad():
                stepped = {
                    n: w - 0.1 * problem.lr * g[n] / _root(training.second[n], g[n])
                    for n, w in weights.items()
                }
                drops.append(losses(weights, query) - losses(stepped, query))
        return float(torch.cat(drops).mean())

    found: dict[str, Any] = {"k": k, "random": drop(random_rows(problem, k))}
    found["drop"] = {name: drop(top(c, k)) for name, c in credits.items()}
    return found


def _root(second: Tensor, g: Tensor) -> Tensor:
    return (0.999 * second + 0.001 * g**2).sqrt() + 1e-8


class _Losses(torch.nn.Module):
    def __init__(self, problem: Problem, training: Training) -> None:
        super().__init__()
        self.problem, self.model = problem, training.model

    def forward(self, rows: tuple[Tensor, ...]) -> Tensor:
        return self.problem.losses(self.model, rows)


def _below(weights: Weights) -> Weights:
    return {f"model.{k}": w for k, w in weights.items()}

"""Two more questions to a credit: what if the rows it names are removed (brittleness), and what if
the trained model takes one more step on them (tail patch)?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.lds.gradients import Training, Weights
from benchmarks.lds.ours import end
from benchmarks.lds.problems import Problem
from benchmarks.lds.retrain import query_logits, query_losses, trained


def top(credit: Tensor, k: int) -> Tensor:
    """The k rows of most credit of each query: [Q, k]."""
    return credit.detach().cpu().topk(k, dim=0).indices.T


def random_rows(problem: Problem, k: int, seed: int = 0) -> Tensor:
    """k other rows for each query, drawn by chance: [Q, k]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(problem.examples, generator=generator)[:k]
             for _ in range(len(problem.queries[0]))]  # fmt: skip
    return torch.stack(drawn)


@dataclass(frozen=True)
class Without:
    """Retrainings without some rows: each query's loss [seeds, queries], and the label that it gets
    (of problems that classify)."""

    losses: Tensor
    labels: Tensor | None


def removed(
    problem: Problem, rows: Tensor, queries: int, seeds: int, together: int = 50
) -> Without:
    """Of each of the first ``queries`` queries: retrained without its own rows [Q, k]."""
    masks = torch.ones(queries, problem.examples, dtype=torch.bool)
    masks.scatter_(1, rows[:queries], False)
    losses, labels = [], []
    for s in range(seeds):
        for start in range(0, queries, together):
            part = masks[start : start + together]
            numbers = [50_000_000 + 1000 * s + start + k for k in range(len(part))]
            stack = trained(problem, part, numbers)
            own = slice(start, start + len(part))
            losses.append(query_losses(problem, stack)[:, own].diagonal().cpu())
            if problem.classifies:
                found = query_logits(problem, stack)[:, own].argmax(-1)
                labels.append(found.diagonal().cpu())
    return Without(
        torch.cat(losses).view(seeds, queries),
        torch.cat(labels).view(seeds, queries) if labels else None,
    )


def brittleness(
    problem: Problem, credits: dict[str, Tensor], sizes: Sequence[int], queries: int, seeds: int
) -> dict[str, Any]:
    """What becomes of a query where its top k rows are removed, for each k of ``sizes``: mean rise
    of its loss against k random rows, and the share of queries that get another label than from all
    rows. All retrainings for one query and seed begin with the same weights."""
    nobody = torch.empty(len(problem.queries[0]), 0, dtype=torch.long)
    whole = removed(problem, nobody, queries, seeds)
    found: dict[str, Any] = {"queries": queries, "seeds": seeds, "sizes": {}}
    for k in sizes:
        base = removed(problem, random_rows(problem, k), queries, seeds)
        own = {name: removed(problem, top(c, k), queries, seeds) for name, c in credits.items()}
        found["sizes"][str(k)] = {
            "random": float(base.losses.mean()),
            "random_flips": flips(base, whole),
            "rise": {name: float((x.losses - base.losses).mean()) for name, x in own.items()},
            "flips": {name: flips(x, whole) for name, x in own.items()},
        }
    return found


def flips(without: Without, whole: Without) -> float | None:
    """The share of queries, over all seeds, that get another label."""
    if without.labels is None or whole.labels is None:
        return None
    return float((without.labels != whole.labels).double().mean())


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

"""Credits of one watched run: inrun, as a user would call it, with one target per query; and
``inrun.ask``, for queries that come after the run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import inrun
from benchmarks.lds import clock
from benchmarks.lds.credit import Credit
from benchmarks.lds.gradients import Training, wait
from benchmarks.lds.problems import Batch, Problem

SKIPPED = 10  # "without the first tenth": 1 / SKIPPED of the steps
MEMORY = 10**11  # bytes that the directions of all queries may take


def queries(problem: Problem) -> dict[str, Batch]:
    asked = range(len(problem.queries[0]))
    return {f"q{k}": tuple(x[k : k + 1] for x in problem.queries) for k in asked}


def watched(
    problem: Problem, seed: int, estimators: Sequence[str], targets: dict[str, Batch]
) -> tuple[nn.Module, Any, float]:
    """The model after a watched run, the run, and the seconds that it took."""
    model = problem.make(seed)
    optimizer = problem.optimizer(model)
    order = [rows.tolist() for rows in problem.order(torch.arange(problem.examples), seed)]
    wait(problem)
    begun = clock.now()
    with inrun.watch(
        model, optimizer, targets={k: [v] for k, v in targets.items()}, loss=problem.loss,
        estimator=list(estimators), training="fast", audit_every=0,
    ) as run:  # fmt: skip
        for rows in order:
            ids = torch.tensor(rows, device=problem.device)
            with run.batch(rows):
                problem.loss(model, tuple(x[ids] for x in problem.train)).backward()
            optimizer.step()
            optimizer.zero_grad()
        wait(problem)
        seconds = clock.now() - begun
    return model, run, seconds


def sums(problem: Problem, run: Any, estimator: str, seconds: float) -> dict[str, Credit]:
    """Sums over the visits of a run, and the same without the first tenth of the steps."""
    history = run.history(estimator=estimator)
    asked = list(queries(problem))
    values = torch.from_numpy(history[asked].to_numpy(dtype="float64", copy=True))
    ids = torch.from_numpy(history["id"].to_numpy(copy=True))
    steps = int(history["step"].max()) + 1
    late = torch.from_numpy((history["step"] >= steps // SKIPPED).to_numpy(copy=True))
    if not values.isfinite().all():
        warnings.warn(f"{estimator}: some steps have no values", stacklevel=2)
    values = values.nan_to_num()

    def summed(which: Tensor) -> Tensor:
        found = torch.zeros(problem.examples, len(asked), dtype=torch.float64)
        return found.index_add_(0, ids[which], values[which])

    every = torch.ones_like(late)
    return {
        f"inrun {estimator}": Credit(summed(every), seconds, True),
        f"inrun {estimator}, without the first tenth": Credit(summed(late), seconds, True),
    }


def in_run(problem: Problem, seed: int, *estimators: str) -> dict[str, Credit]:
    _, run, seconds = watched(problem, seed, estimators, queries(problem))
    return {k: c for e in estimators for k, c in sums(problem, run, e, seconds).items()}


def secant(problem: Problem, seed: int, _: Training) -> dict[str, Credit]:
    return in_run(problem, seed, "secant")


def carry(problem: Problem, seed: int, _: Training) -> dict[str, Credit]:
    return in_run(problem, seed, "carry")


def influence(problem: Problem, seed: int, _: Training) -> dict[str, Credit]:
    return in_run(problem, seed, "influence")


def beside(problem: Problem, seed: int, _: Training) -> dict[str, Credit]:
    """Both in one run, which share its captures and its validation pass: the cost is of both."""
    return in_run(problem, seed, "secant", "influence")


def ask(problem: Problem, seed: int, _: Training) -> dict[str, Credit]:
    """A run watched for one target; the queries come after it."""
    one = {"validation": problem.queries}
    model, run, seconds = watched(problem, seed, ["influence"], one)
    rows = torch.arange(problem.examples).split(problem.chunk or 100)
    pairs = ((i.tolist(), tuple(x[i.to(problem.device)] for x in problem.train)) for i in rows)
    begun = clock.now()
    found = inrun.ask(
        model, pairs, queries(problem), run=run, loss=problem.loss, memory_limit=MEMORY
    )
    wait(problem)
    seconds += clock.now() - begun
    table = found.sort_values("id")[list(queries(problem))]
    values = torch.from_numpy(table.to_numpy(dtype="float64", copy=True))
    return {"inrun ask": Credit(values, seconds, True)}

"""Watched runs, and trainings on what is left: one stack of copies for all of a ratio."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

import inrun
from experiments.common import tasks
from experiments.common.encoder import Batch
from experiments.common.parts import Context, Settings, packed, unpacked
from experiments.common.stacked import Stack, outputs, stacked, train
from experiments.pruning_sst2.task import TARGETS, Task, make, order

DIVERGED = 1e6  # the loss of a training that did: JSON has no NaN


def watch(settings: Settings, context: Context) -> dict[str, Any]:
    """The values of one run."""
    torch.set_float32_matmul_precision("high")
    task, lr = make(settings, context), rate(settings, context)
    torch.manual_seed(settings["seed"])
    model = task.model(settings["seed"]).train()
    optimizer = tasks.optimizer(settings["optimizer"], model, lr)
    rows = order(len(task.train[0]), settings, settings["seed"])
    there = rows.to(context.device)
    targets = {n: batches(task.validation[n], settings["validation"]) for n in TARGETS}
    with inrun.watch(
        model, optimizer, targets=targets, loss=tasks.classify, estimator=settings["estimators"],
        audit_every=0, per_step=1,
        chunk=settings["validation"],  # a pass for each: recorded on a GPU
    ) as run:  # fmt: skip
        for step in warmed(optimizer, context.track(len(rows)), len(rows), lr, settings):
            with run.batch(rows[step]):
                tasks.classify(model, tuple(x[there[step]] for x in task.train)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = {e: run.values(e).set_index("id") for e in settings["estimators"]}
        void = int(run.steps()["void"].notna().sum())
    everything = range(len(task.train[0]))
    return {
        "lr": lr,
        "void": void,
        "values": {
            f"{e}, {t}": packed(table[t].reindex(everything).fillna(0.0).to_numpy())
            for e, table in found.items()
            for t in TARGETS
        },
    }


def full(settings: Settings, context: Context) -> dict[str, Any]:
    """Trainings on everything, one per seed."""
    task = make(settings, context)
    kept = [torch.arange(len(task.train[0]))] * len(settings["seeds"])
    return {"lr": settings["lr"], "runs": fit(task, settings, context, settings["seeds"], kept)}


def prune(settings: Settings, context: Context) -> dict[str, Any]:
    """Trainings on what is left of each seed, by every estimate, and at random."""
    task = make(settings, context)
    n = len(task.train[0])
    out = round(settings["ratio"] * n)
    plan: list[tuple[dict[str, Any], Tensor]] = []
    for seed in settings["seeds"]:
        for repeat in range(settings["repeats"]):
            generator = torch.Generator().manual_seed(1000 * (seed + 1) + repeat)
            removed = torch.randperm(n, generator=generator)[:out]
            plan.append(({"seed": seed, "which": "random", "by": None}, removed))
        for by, value in context.result(settings["values_from"][str(seed)])["values"].items():
            ranked = torch.from_numpy(np.argsort(unpacked(value), kind="stable"))
            plan.append(({"seed": seed, "which": "bottom", "by": by}, ranked[:out]))
            plan.append(({"seed": seed, "which": "top", "by": by}, ranked[n - out :]))
    seeds = [about["seed"] for about, _ in plan]
    kept = [keep(n, removed) for _, removed in plan]
    found = fit(task, settings, context, seeds, kept)
    runs = [
        about | run | {"flipped": float(task.flipped[removed].float().mean())}
        for (about, removed), run in zip(plan, found, strict=True)
    ]
    return {"lr": rate(settings, context), "ratio": settings["ratio"], "runs": runs}


def fit(
    task: Task, settings: Settings, context: Context, seeds: list[int], kept: list[Tensor]
) -> list[dict[str, Any]]:
    """Train one copy for each seed and set of examples (all of one size); how good they become."""
    torch.set_float32_matmul_precision("high")
    lr = rate(settings, context)
    model = task.model(seeds[0]).train()
    stack, optimizer = stacked(model, tasks.optimizer(settings["optimizer"], model, lr), len(seeds))
    for seed in set(seeds):
        fresh = dict(task.model(seed).named_parameters())
        for c in (c for c, s in enumerate(seeds) if s == seed):
            for k, w in stack.items():
                w.data[c].copy_(fresh[k].detach())
    rows = torch.stack(
        [k[order(len(k), settings, s)] for k, s in zip(kept, seeds, strict=True)], dim=1
    ).to(context.device)
    torch.manual_seed(settings.get("dropout_seed", 0))
    train(
        model, tasks.classify, stack, optimizer, task.train, rows.unbind(),
        warmed(optimizer, context.track(len(rows)), len(rows), lr, settings),
        lambda: precision(settings, context), compiled=context.device.type == "cuda",
    )  # fmt: skip
    model.eval()
    accuracy, loss = measured(model, stack, task.evaluation, settings, context)
    choice, _ = measured(model, stack, task.choice, settings, context)
    return [
        {"seed": seed, "accuracy": accuracy[c], "loss": loss[c], "choice": choice[c]}
        for c, seed in enumerate(seeds)
    ]


def measured(
    model: torch.nn.Module, stack: Stack, batch: Batch, settings: Settings, context: Context
) -> tuple[list[float], list[float]]:
    """Accuracy and loss of each copy."""
    with precision(settings, context):
        logits = outputs(model, stack, batch[0]).float()
    right = (logits.argmax(-1) == batch[1]).double().mean(1)
    loss = [float(F.cross_entropy(x, batch[1]).nan_to_num(DIVERGED)) for x in logits]
    return [round(float(a), 6) for a in right], [round(x, 5) for x in loss]


def precision(settings: Settings, context: Context) -> AbstractContextManager[Any]:
    """bfloat16 where it is asked for, on a GPU."""
    half = settings["bfloat16"] and context.device.type == "cuda"
    return torch.autocast(context.device.type, torch.bfloat16, enabled=half, cache_enabled=False)


def warmed(
    optimizer: Optimizer, steps: Iterable[int], total: int, lr: float, settings: Settings
) -> Iterator[int]:
    """The steps, with the learning rate of each."""
    warm = settings["warm_up"] * total
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / warm) if warm else lr
        yield step


def rate(settings: Settings, context: Context) -> float:
    """The learning rate: given, or of all ``lr_from`` the one with the best accuracy on held-out
    examples (not those of the evaluation)."""
    if settings["lr"] is not None:
        return float(settings["lr"])
    found = [context.result(part) for part in settings["lr_from"]]
    best = max(found, key=lambda r: float(np.mean([x["choice"] for x in r["runs"]])))
    return float(best["lr"])


def keep(n: int, removed: Tensor) -> Tensor:
    left = torch.ones(n, dtype=torch.bool)
    left[removed] = False
    return left.nonzero()[:, 0]


def batches(data: Batch, rows: int) -> list[Batch]:
    """In a random order, what is left over dropped."""
    shuffled = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(2))
    whole = shuffled[: len(shuffled) // rows * rows].to(data[1].device)
    return [(data[0][i], data[1][i]) for i in whole.split(rows)]

"""Monte Carlo Shapley values over permutations, many trainings side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.common import tasks
from experiments.common.game import numbers
from experiments.common.parts import Context, Settings
from experiments.common.stacked import backward, losses, stacked
from experiments.common.tasks import Task

BLOCKS = 4  # a permutation's prefixes are trained in so many rounds, with truncation between


def along(settings: Settings, context: Context) -> dict[str, Any]:
    """One training per permutation, all side by side; a step's loss change is its group's."""
    torch.set_float32_matmul_precision("high")
    task = tasks.make(settings, context, torch.float32)
    copies, group = settings["permutations"], settings["group"]
    orders = torch.stack(
        [
            torch.randperm(task.examples, generator=torch.Generator().manual_seed(p))
            for p in range(copies)
        ]
    )
    stack, optimizer = stacked(
        task.model, tasks.optimizer(settings["optimizer"], task.model, settings["lr"]), copies
    )
    marginals = np.zeros((copies, task.examples))
    first = before = losses(task.model, task.loss, stack, task.validation).double().cpu()
    for step in context.track(task.examples // group):
        ids = orders[:, step * group : (step + 1) * group]
        batches = tuple(x[ids.to(context.device)] for x in task.train)
        backward(task.model, task.loss, stack, batches)
        optimizer.step()
        after = losses(task.model, task.loss, stack, task.validation).double().cpu()
        np.put_along_axis(marginals, ids.numpy(), ((before - after) / group).numpy()[:, None], 1)
        before = after
    half = copies // 2
    return {
        "kind": "along", "model": settings["model"], "optimizer": settings["optimizer"],
        "group": group, "permutations": copies, "loss": [float(first.mean()), float(after.mean())],
        "halves": [numbers(marginals[:half].mean(0), 5), numbers(marginals[half:].mean(0), 5)],
    }  # fmt: skip


def retrain(settings: Settings, context: Context) -> dict[str, Any]:
    """Truncated Monte Carlo: the utility of a coalition is a training from scratch."""
    n, group = settings["players"], settings["group"]
    task = tasks.make(settings | {"examples": n * group}, context, torch.float32)
    rng = np.random.default_rng(settings["order"])
    orders = np.stack([rng.permutation(n) for _ in range(settings["permutations"])])
    keys = torch.rand(
        settings["steps"], n * group, generator=torch.Generator().manual_seed(settings["seed"])
    ).to(context.device)
    with torch.no_grad():
        nothing = float(task.loss(task.model, task.validation))
    everything = float(train(task, settings, np.ones((1, n), bool), keys)[0])
    tolerance = settings["tolerance"] * abs(nothing - everything)
    marginals = np.zeros((len(orders), n))
    before = np.full(len(orders), nothing)
    active, trained = np.arange(len(orders)), 0
    blocks = np.array_split(np.arange(1, n + 1), BLOCKS)
    for b in context.track(BLOCKS):
        if len(active) == 0:
            continue
        members = np.zeros((len(active), len(blocks[b]), n), bool)
        for row, p in enumerate(active):
            for column, size in enumerate(blocks[b]):
                members[row, column, orders[p, :size]] = True
        utility = train(task, settings, members.reshape(-1, n), keys)
        trained += len(utility)
        still = []
        for p, own in zip(active, utility.reshape(len(active), -1), strict=True):
            cut = False
            for size, after in zip(blocks[b], own, strict=True):
                if not cut:
                    marginals[p, orders[p, size - 1]] = before[p] - after
                    before[p] = after
                    cut = abs(after - everything) <= tolerance
            if not cut:
                still.append(p)
        active = np.array(still, int)
    return {
        "kind": "retrain", "model": settings["model"], "optimizer": settings["optimizer"],
        "label": f"{settings['seed']}-{settings['order']}", "players": n, "group": group,
        "permutations": len(orders), "retrainings": trained, "loss": [nothing, everything],
        "values": numbers(marginals.mean(0)),
        "noise": numbers(marginals.std(0, ddof=1) / np.sqrt(len(orders))),
    }  # fmt: skip


def train(task: Task, settings: Settings, members: np.ndarray, keys: Tensor) -> np.ndarray:
    """The validation loss of each coalition [C, players] after a training on it alone.

    At each step every example draws a key, the same for all coalitions, and a coalition's batch
    are its members with the lowest keys (all of them, repeated, where it has fewer): coalitions
    that differ by one member see nearly the same batches.
    """
    found = []
    budget = 2**34 if keys.is_cuda else 2**25
    size = sum(p.numel() for p in task.model.parameters()) * 4
    for part in np.array_split(members, max(1, len(members) * size // budget)):
        mask = torch.from_numpy(part).to(keys.device).repeat_interleave(settings["group"], dim=1)
        count = mask.sum(1, keepdim=True).clamp(max=settings["batch"])
        stack, optimizer = stacked(
            task.model, tasks.optimizer(settings["optimizer"], task.model, settings["lr"]),
            len(part),
        )  # fmt: skip
        slots = torch.arange(settings["batch"], device=keys.device) % count
        for key in keys:
            order = key.expand_as(mask).masked_fill(~mask, torch.inf).argsort(1)
            ids = order.gather(1, slots)
            backward(task.model, task.loss, stack, tuple(x[ids] for x in task.train))
            optimizer.step()
        found.append(losses(task.model, task.loss, stack, task.validation).double().cpu().numpy())
    return np.concatenate(found)

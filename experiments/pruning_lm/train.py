"""One part: a watched preliminary run, then the trainings that are compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

import inrun
from experiments.common import tasks
from experiments.common.parts import Context, Settings
from experiments.common.tasks import Batch, Task
from inrun.report.metrics import bottom_overlap

ESTIMATORS = ("secant", "tangent", "sgd")
PRELIMINARY = 1000  # added to the seed: the watched run has other weights and another order


class Trainer:
    """Trains one model again and again from given weights."""

    def __init__(self, task: Task, settings: Settings, evaluation: Batch, tick: Callable[[], None]):
        self.task, self.settings, self.evaluation, self.tick = task, settings, evaluation, tick
        self.device = task.train[0].device
        self.first = {k: w.clone() for k, w in task.model.state_dict().items()}
        self.void = 0  # steps of the watched run without values

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings["bf16"])

    def train(self, kept: np.ndarray, seed: int, validation: Any = None) -> Any:
        """Losses on the evaluation set every so many steps; with ``validation``, a watched run's
        values by estimator instead."""
        s, model = self.settings, self.task.model
        model.load_state_dict(self.first)
        optimizer = tasks.optimizer("adamw", model, s["lr"])
        watched = validation is not None and inrun.watch(
            model, optimizer, validation=validation, loss=self.task.loss,
            estimator=list(ESTIMATORS), audit_every=0, per_step=1,
        )  # fmt: skip
        curve = []
        with watched or nullcontext() as run:
            for step, ids in enumerate(order(kept, s["steps"], s["batch"], seed)):
                if not run and step % s["every"] == 0:
                    curve.append(self.evaluate())
                for group in optimizer.param_groups:
                    group["lr"] = s["lr"] * min(1.0, (step + 1) / s["warmup"])
                with run.batch(ids) if run else nullcontext():
                    with self.precision():
                        loss = self.task.loss(model, self.task.batch(ids.to(self.device)))
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                self.tick()
            if run:
                self.void = int(run.steps()["void"].notna().sum())
                return {e: run.values(e).set_index("id")["value"] for e in ESTIMATORS}
        return [*curve, self.evaluate()]

    @torch.no_grad()
    def evaluate(self) -> float:
        pieces = zip(*(x.split(self.settings["rows"]) for x in self.evaluation), strict=True)
        with self.precision():
            found = [self.task.loss(self.task.model, piece) for piece in pieces]
        return round(float(torch.stack(found).double().mean()), 5)


def order(kept: np.ndarray, steps: int, batch: int, seed: int) -> tuple[Tensor, ...]:
    """Batches of one size for so many steps: the kept examples in random order, again and again."""
    generator, ids = torch.Generator().manual_seed(seed), torch.from_numpy(kept)
    epochs = -(-steps * batch // len(ids))
    turns = [ids[torch.randperm(len(ids), generator=generator)] for _ in range(epochs)]
    return torch.cat(turns)[: steps * batch].split(batch)


def measure(settings: Settings, context: Context) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    s, seed = settings, settings["seed"]
    held = {"validation": s["values"] + s["evaluation"]}
    done = iter(context.track(7 * s["steps"]))
    # 1. what is every sequence worth?
    task = tasks.make(s | held | {"seed": seed + PRELIMINARY}, context, torch.float32)
    spoilt = spoil(task, s)
    to_value, to_measure = (
        tuple(x[part] for x in task.validation)
        for part in (slice(s["values"]), slice(s["values"], None))
    )
    trainer = Trainer(task, s, to_measure, lambda: next(done))
    everything = np.arange(task.examples)
    batches = list(zip(*(x.split(s["rows"]) for x in to_value), strict=True))
    values = trainer.train(everything, seed + PRELIMINARY, batches)
    unseen = [e for e, v in values.items() if len(v) < task.examples]
    if unseen:
        raise ValueError(
            f"{s['steps']} steps of {s['batch']} do not reach all {task.examples} sequences: "
            "raise steps"
        )
    # 2. train again without some of them, from the same weights
    fresh = tasks.make(s | held, context, torch.float32).model.state_dict()
    trainer.first = {k: w.clone() for k, w in fresh.items()}
    n = round(s["cut"] * task.examples)
    chosen = np.random.default_rng(seed).permutation(task.examples)[:n]
    lowest = {e: v.sort_values(kind="stable").index.to_numpy() for e, v in values.items()}
    removed = {"full": chosen[:0], "random20": chosen}
    removed |= {f"values20, {e}": ids[:n] for e, ids in lowest.items()}
    removed["top20, secant"] = lowest["secant"][-n:]
    curves = {k: trainer.train(np.setdiff1d(everything, r), seed) for k, r in removed.items()}
    return {
        "kind": s["kind"], "seed": seed, "model": s["model"], "examples": task.examples,
        "removed": n, "steps": s["steps"], "batch": s["batch"], "length": s["length"],
        "void": trainer.void, "cut": s["cut"], "curves": curves,
        "at": [*range(0, s["steps"], s["every"]), s["steps"]],
        "spoilt": {k: int(np.isin(r, spoilt).sum()) for k, r in removed.items()} | {
            "all": len(spoilt)
        },
        "overlap": {
            f"{a} / {b}": round(bottom_overlap(values[a], values[b], n), 4)
            for a, b in (("secant", "tangent"), ("secant", "sgd"), ("tangent", "sgd"))
        },
    }  # fmt: skip


def spoil(task: Task, settings: Settings) -> np.ndarray:
    """Shuffle the tokens of some training sequences, the same for every seed; which they are."""
    generator = torch.Generator().manual_seed(settings["data_seed"] + 1)
    chosen = torch.randperm(task.examples, generator=generator)
    chosen = chosen[: round(settings["noise"] * task.examples)]
    (ids,) = task.train
    for i in chosen.tolist():
        ids[i] = ids[i, torch.randperm(ids.shape[1], generator=generator).to(ids.device)]
    return chosen.numpy()

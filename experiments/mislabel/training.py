"""Trainings: plain, watched, and many side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.optim import Optimizer

import inrun
from experiments.common import tasks
from experiments.common.parts import Context, Settings
from experiments.common.stacked import Stack, stacked, train
from experiments.mislabel.problems import Problem

Weights = dict[str, Tensor]
EVALUATED = 1024  # rows of a forward pass


class Trainer:
    """One problem and recipe: ``epochs``, ``batch``, ``lr``, ``warmup``, ``rows`` (of each
    validation target per step)."""

    def __init__(self, problem: Problem, settings: Settings, context: Context) -> None:
        self.problem, self.settings, self.context = problem, settings, context
        self.model = problem.build(settings["seed"])  # what functional calls run through
        self.per_epoch = -(-problem.examples // settings["batch"])
        self.steps = settings["epochs"] * self.per_epoch

    def clock(self) -> float:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def order(self, ids: np.ndarray, seed: int) -> list[Tensor]:
        """Batches of all epochs over these examples."""
        generator, rows = torch.Generator().manual_seed(seed), torch.from_numpy(ids)
        return [
            batch
            for _ in range(self.settings["epochs"])
            for batch in rows[torch.randperm(len(rows), generator=generator)].split(
                self.settings["batch"]
            )
        ]

    def rate(self, step: int) -> float:
        """The learning rate: a linear warm-up, then constant."""
        return self.settings["lr"] * min(1.0, (step + 1) / max(1, self.settings["warmup"]))

    def warm(self, optimizer: Optimizer, step: int) -> int:
        """The step, with its learning rate in the optimizer."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)
        return step

    def rows(self, ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(x[ids.to(self.context.device)] for x in self.problem.train)

    def run(
        self, estimators: Sequence[str] = (), steps: int | None = None, by_label: bool = True,
        out: Path | None = None,
    ) -> Iterator[tuple[int, Any, Any]]:  # fmt: skip
        """One training, watched if ``estimators`` are given: yields (steps done, model, run)."""
        model = self.problem.build(self.settings["seed"])
        optimizer = tasks.optimizer("adamw", model, self.settings["lr"])
        watched = estimators and inrun.watch(
            model, optimizer, targets=self.problem.targets(self.settings["rows"], by_label),
            loss=tasks.classify, estimator=estimators, audit_every=0, per_step=1, out=out,
        )  # fmt: skip
        order = self.order(np.arange(self.problem.examples), self.settings["seed"])[:steps]
        with watched or nullcontext() as run:
            for step, ids in enumerate(order):
                self.warm(optimizer, step)
                with run.batch(ids) if run else nullcontext():
                    tasks.classify(model, self.rows(ids)).backward()
                optimizer.step()
                optimizer.zero_grad()
                yield step + 1, model, run

    def load(self, seeds: Sequence[int]) -> None:
        """Read first weights before a clock runs."""
        for seed in seeds:
            self.problem.build(seed)

    def side_by_side(self, seeds: list[int], orders: list[list[Tensor]], steps: int) -> Stack:
        """Trainings of their own seeds and batches, all at once."""
        optimizer = tasks.optimizer("adamw", self.model, self.settings["lr"])
        stack, twin = stacked(self.model, optimizer, len(seeds))
        with torch.no_grad():
            for copy, seed in enumerate(seeds):
                for k, w in self.problem.build(seed).named_parameters():
                    stack[k][copy] = w
        rows = [torch.stack(ids).to(self.context.device) for ids in zip(*orders, strict=True)]
        warmed = (self.warm(twin, step) for step in range(steps))
        train(self.model, tasks.classify, stack, twin, self.problem.train, rows, warmed)
        return stack

    # What is asked of weights

    @torch.no_grad()
    def logits(self, weights: Weights, x: Tensor) -> Tensor:
        found = [functional_call(self.model, weights, (part,)) for part in x.split(EVALUATED)]
        return torch.cat(found).float()

    def losses(self, weights: Weights) -> Tensor:
        """The loss of every training example."""
        x, y = self.problem.train
        return -self.logits(weights, x).log_softmax(1).gather(1, y[:, None])[:, 0]

    def validation_gradient(self, weights: Weights) -> Weights:
        """∇ of the mean over labels of the validation loss; labels have equally many rows."""
        x, y = self.problem.validation

        def loss(w: Weights) -> Tensor:
            return torch.nn.functional.cross_entropy(functional_call(self.model, w, (x,)), y)

        return grad(loss)(weights)

    def alignment(self, weights: Weights, direction: Weights, first: int | None = None) -> Tensor:
        """⟨∇ℓ_i, direction⟩ of every (or the first) training examples, as the derivative of their
        losses along the direction: no gradient of a single example is formed."""
        found = []
        train = (t[:first].split(EVALUATED) for t in self.problem.train)
        for x, y in zip(*train, strict=True):

            def loss(w: Weights, x: Tensor = x, y: Tensor = y) -> Tensor:
                logits = functional_call(self.model, w, (x,))
                return -logits.log_softmax(1).gather(1, y[:, None])[:, 0]

            with torch.no_grad():
                found.append(jvp(loss, (weights,), (direction,))[1])
        return torch.cat(found)

    def norms(self, weights: Weights) -> Tensor:
        """‖∇ℓ_i‖ of every training example."""

        def loss(w: Weights, x: Tensor, y: Tensor) -> Tensor:
            logits = functional_call(self.model, w, (x[None],))
            return -logits.log_softmax(1)[0].gather(0, y[None])[0]

        size = 4 * sum(w.numel() for w in weights.values())
        budget = 2**33 if self.context.device.type == "cuda" else 2**29
        chunk = max(1, min(EVALUATED, budget // size))
        found = []
        for x, y in zip(*(t.split(chunk) for t in self.problem.train), strict=True):
            rows = vmap(grad(loss), (None, 0, 0))(weights, x, y)
            lengths = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in rows.values()]
            found.append(torch.stack(lengths).norm(dim=0))
        return torch.cat(found)


def copy_of(stack: Stack, copy: int) -> Weights:
    return {k: w[copy].detach() for k, w in stack.items()}


def taken(model: torch.nn.Module) -> Weights:
    """The weights as they are now."""
    return {k: w.detach().clone() for k, w in model.named_parameters()}

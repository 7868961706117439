"""The variants: each trains its own copy of the model on the same batch, one step at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim import SGD, AdamW, Optimizer

import inrun
from inrun.bench.models import Batch, Problem

LR = 1e-4


def make_optimizer(name: str, params: Sequence[Tensor]) -> Optimizer:
    if name == "sgd":
        return SGD(params, lr=LR, momentum=0.9)
    return AdamW(params, lr=LR, fused=True if params[0].is_cuda else None)


class Trainer:
    """Plain training.

    Attributes:
        model: as it was built; ``called`` is what is called, compiled or not.
        estimator: what ``values`` are, None where there are none.
        due: will the next step be scored?
    """

    estimator: str | None = None
    every = 1  # one step in so many is scored, by chance

    def __init__(
        self, problem: Problem, model: nn.Module, optimizer: Optimizer, compiled: bool = False
    ) -> None:
        self.problem, self.model, self.optimizer, self.compiled = (
            problem, model, optimizer, compiled,
        )  # fmt: skip
        self.called: Any = torch.compile(model) if compiled else model
        self.params = list(model.parameters())

    @property
    def due(self) -> bool:
        return True

    def step(self) -> None:
        loss = self.backward()  # held until the step is over, as loops do
        self.optimizer.step()
        self.optimizer.zero_grad()
        del loss

    def backward(self) -> Tensor | None:
        """Leave the gradient of the batch's loss in ``.grad``."""
        loss = self.loss(self.problem.batch)
        loss.backward()
        return loss

    def loss(self, batch: Batch) -> Tensor:
        with self.problem.precision():
            return self.problem.loss(self.called, batch)

    def values(self) -> np.ndarray:
        """Returns the values of the last step: [Q, B]."""
        raise NotImplementedError

    def remark(self) -> str | None:
        """Returns a note for the reader of the times, None if there is nothing to say."""
        return None

    def close(self) -> None: ...


class Watched(Trainer):
    """Training watched by inrun, with these options of ``inrun.watch``."""

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        optimizer: Optimizer,
        compiled: bool = False,
        *,
        estimator: str = "secant",
        **watch: Any,
    ) -> None:
        super().__init__(problem, model, optimizer, compiled)
        self.estimator = estimator
        self.run = inrun.watch(
            self.called, optimizer, targets={k: [b] for k, b in problem.targets.items()},
            loss=problem.loss, estimator=estimator, audit_every=0, **watch,
        )  # fmt: skip
        self.every = self.run.config.every

    @property
    def due(self) -> bool:
        return self.run.config.scores(self.run.step)

    def backward(self) -> Tensor | None:
        with self.run.batch(range(self.problem.examples)):
            return super().backward()

    def values(self) -> np.ndarray:
        history, names = self.run.history(), list(self.problem.targets)
        last = history[history["step"] == self.run.step - 1]
        if last.empty:
            raise RuntimeError(f"the last step was not scored: {self.remark()}")
        return last[names if len(names) > 1 else ["value"]].to_numpy().T

    def remark(self) -> str | None:
        void = self.run.steps()["void"].dropna()
        replays = self.run.replays
        if void.empty and replays is not None and replays.why is not None:
            return f"{replays.count} passes were replayed ({replays.why})"
        if void.empty:
            return None
        return f"{len(void)} of {self.run.step} steps were not scored ({void.iloc[-1]})"

    def close(self) -> None:
        self.run.close()


class Direct(Trainer):
    """The paper's Direct baseline: per-example gradients of all parameters at once, scored naively.

    value_i = η⟨J ∇ℓ_val, g_i⟩ with the validation gradient at the current weights and J the
    diagonal derivative of the update at the batch's gradient (Theorem 4.2): ``estimator="tangent"``
    of inrun, by brute force. The optimizer steps with the sum of the gradients.
    """

    estimator = "tangent"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0
        self.scores: Tensor | None = None

    def backward(self) -> Tensor | None:
        self.steps += 1
        rows = self.gradients()
        for p, r in zip(self.params, rows, strict=True):
            p.grad = r.sum(0, dtype=_wide(r).dtype).to(p.dtype)
        slopes = [self.slope(p) for p in self.params]
        scores = []
        for batch in self.problem.targets.values():
            v = torch.autograd.grad(self.loss(batch), self.params, materialize_grads=True)
            parts = (
                r.flatten(1).to(s.dtype) @ (s * x).flatten()
                for r, s, x in zip(rows, slopes, v, strict=True)
            )
            scores.append(LR * torch.stack(list(parts)).sum(0))
        self.scores = torch.stack(scores)
        return None  # a loss for each example

    def gradients(self) -> list[Tensor]:
        """g_i of all parameters: [B, *W] each."""
        raise NotImplementedError

    def slope(self, p: Tensor) -> Tensor:
        """J: how much the update of each weight moves with its gradient."""
        assert p.grad is not None
        g = _wide(p.grad)
        if isinstance(self.optimizer, SGD):
            return torch.ones_like(g)
        options, state = self.optimizer.param_groups[0], self.optimizer.state.get(p, {})
        (b1, b2), eps, zero = options["betas"], options["eps"], torch.zeros_like(g)
        c1, c2 = 1 - b1**self.steps, 1 - b2**self.steps
        m = (b1 * state.get("exp_avg", zero) + (1 - b1) * g) / c1
        root = ((b2 * state.get("exp_avg_sq", zero) + (1 - b2) * g**2) / c2).sqrt()
        bend = m * (1 - b2) * g / (c2 * root * (root + eps) ** 2)
        return torch.where(root > 0, (1 - b1) / (c1 * (root + eps)) - bend, 0.0)

    def values(self) -> np.ndarray:
        assert self.scores is not None
        return self.scores.double().cpu().numpy()


class DirectLoop(Direct):
    """One backward pass per example."""

    def gradients(self) -> list[Tensor]:
        B = self.problem.examples
        rows = [p.new_empty((B, *p.shape)) for p in self.params]
        for i in range(B):
            example = {k: x[i : i + 1] for k, x in self.problem.batch.items()}
            grads = torch.autograd.grad(self.loss(example) / B, self.params, materialize_grads=True)
            for r, g in zip(rows, grads, strict=True):
                r[i] = g
        return rows


class DirectVmap(Direct):
    """All examples at once: ``vmap(grad(loss))``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        every = vmap(grad(self._example_loss), in_dims=(None, 0), randomness="different")
        self._every = torch.compile(every) if self.compiled else every

    def _example_loss(self, params: dict[str, Tensor], example: Batch) -> Tensor:
        def model(**batch: Tensor) -> Any:
            return functional_call(self.model, params, (), batch)

        with self.problem.precision():
            batch = {k: x.unsqueeze(0) for k, x in example.items()}
            return self.problem.loss(model, batch) / self.problem.examples

    def gradients(self) -> list[Tensor]:
        params = {k: p.detach() for k, p in self.model.named_parameters()}
        with warnings.catch_warnings():  # attention may fall back to a loop: that is what it costs
            warnings.filterwarnings("ignore", "There is a performance drop")
            return list(self._every(params, self.problem.batch).values())


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


VARIANTS: dict[str, Callable[..., Trainer]] = {
    "plain": Trainer,
    "fast": partial(Watched, training="fast"),
    "graphs": partial(Watched, training="fast", cuda_graphs=True),
    "bitwise": partial(Watched, training="bitwise"),
    "tangent": partial(Watched, training="fast", estimator="tangent"),
    "ghost": partial(Watched, training="fast", form="ghost"),
    "materialise": partial(Watched, training="fast", form="materialise"),
    "every-4": partial(Watched, training="fast", every=4),
    "offload": partial(Watched, training="fast", offload=True),
    "direct-loop": DirectLoop,
    "direct-vmap": DirectVmap,
}

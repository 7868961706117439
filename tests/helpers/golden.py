"""Values of three small models that must not change: what ``tests/run/golden_values.json`` holds.

    python tests/helpers/golden.py      writes that file again

Weights and data are fractions of integers, not random numbers, and everything is computed in
float64, so the values are the same on every machine and with every version of torch. Among them
the trainings have what a step can be made of: the plain loop with two targets, gradients clipped
by norm and by value, two micro-batches per step.

The file has one list of numbers for each model, optimizer, estimator and column. It holds for both
forms of per-example gradients (``form=``) and both kinds of training (``training=``), which differ
by rounding alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inrun
from inrun.gpt import GPT

FILE = Path(__file__).parents[1] / "run" / "golden_values.json"
DIGITS = 12  # significant digits of what is written
STEPS, EXAMPLES, BATCH = 4, 9, 4
ESTIMATORS = ["secant", "tangent", "sgd", "secant+gauss2"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
}
MEASURED = ["loss", "batch_share", "momentum_share"]  # columns of run.steps(), by audits
Batch = tuple[Tensor, Tensor]


@dataclass
class Training:
    """A model with its examples, validation targets, and how its loop treats gradients."""

    model: nn.Module
    examples: Batch  # inputs and labels, one row per example
    targets: dict[str, list[Batch]]
    micro_batches: int = 1
    max_norm: float | None = None  # clip by norm
    largest: float | None = None  # clip by value


def fractions(*shape: int, start: int = 0) -> Tensor:
    """Multiples of 0.01 between -0.5 and 0.5 in an irregular order."""
    k = torch.arange(start, start + torch.Size(shape).numel())
    return (((37 * k * k + 11 * k) % 101).double() / 100 - 0.5).view(shape)


def integers(*shape: int, below: int, start: int = 0) -> Tensor:
    """Integers from 0 to ``below`` - 1 in an irregular order."""
    k = torch.arange(start, start + torch.Size(shape).numel())
    return ((7 * k * k + 3 * k + k // 5) % below).view(shape)


def with_fixed_weights(model: nn.Module) -> nn.Module:
    """Matrices get fractions of size 1/√(fan-in); scales of norms are near 1, biases near 0."""
    model.double()
    start = 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            numbers = fractions(*p.shape, start=start)
            scale = name.endswith("weight") and p.ndim == 1
            p.copy_(numbers / p[0].numel() ** 0.5 if p.ndim > 1 else scale + numbers / 5)
            start += p.numel()
    return model


def mlp(**clipping: float) -> Training:
    model = nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3, bias=False)
    )  # fmt: skip

    def rows(n: int, start: int) -> Batch:
        return fractions(n, 5, start=start), integers(n, below=3, start=start)

    targets = {"early": [rows(4, 1000)], "late": [rows(3, 2000)]}
    return Training(with_fixed_weights(model), rows(EXAMPLES, 0), targets, **clipping)


def convnet() -> Training:
    """Some coordinates of the gradient are clipped."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip

    def rows(n: int, start: int) -> Batch:
        return 2 * fractions(n, 2, 6, 6, start=start), integers(n, below=3, start=start)

    targets = {"value": [rows(5, 1000)]}
    return Training(with_fixed_weights(model), rows(EXAMPLES, 0), targets, largest=0.05)


def gpt() -> Training:
    """Two micro-batches per step."""

    def rows(n: int, start: int) -> Batch:
        ids = integers(n, 7, below=11, start=start)
        return ids[:, :-1], ids[:, 1:]

    model = with_fixed_weights(GPT(vocabulary=11, width=8, layers=2, heads=2, length=6))
    return Training(model, rows(EXAMPLES, 0), {"value": [rows(4, 1000)]}, micro_batches=2)


MODELS: dict[str, Callable[[], Training]] = {
    "mlp": mlp,
    "mlp-clipped": lambda: mlp(max_norm=0.1),
    "convnet": convnet,
    "gpt": gpt,
}


def forms(model: str) -> tuple[str, ...]:
    """Forms that give the same values. Where gradients are clipped by norm, Σ‖g_i‖² is needed, and
    the ghost form only estimates it, from random numbers."""
    return ("materialise",) if model == "mlp-clipped" else ("ghost", "materialise")


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def watched(model: str, optimizer: str, form: str, training: str) -> inrun.Run:
    """A run after STEPS steps; most examples are in more than one of its batches."""
    t = MODELS[model]()
    updates = OPTIMIZERS[optimizer](t.model.parameters())
    with inrun.watch(
        t.model, updates, targets=t.targets, loss=mean_loss, estimator=ESTIMATORS, audit_every=1,
        form=form, training=training, max_norm=t.max_norm,
    ) as run:  # fmt: skip
        for step in range(STEPS):
            ids = (torch.arange(BATCH) * 2 + 3 * step) % EXAMPLES
            for part in ids.chunk(t.micro_batches):
                with run.batch(part):
                    loss = mean_loss(t.model, (t.examples[0][part], t.examples[1][part]))
                    (loss / t.micro_batches).backward()
            if t.max_norm is not None:
                nn.utils.clip_grad_norm_(t.model.parameters(), t.max_norm)
            if t.largest is not None:
                nn.utils.clip_grad_value_(t.model.parameters(), t.largest)
            updates.step()
            updates.zero_grad()
    return run


def numbers_of(run: inrun.Run) -> Iterator[tuple[str, list[float]]]:
    """Every estimator's value of every example, and what the audits measured, by name."""
    assert run.steps()["void"].isna().all(), run.steps()["void"].dropna().tolist()
    for estimator in ESTIMATORS:
        values = run.values(estimator).sort_values("id")
        assert values["id"].tolist() == list(range(EXAMPLES))
        signals = ["loss", "el2n", "margin", "loss_change"]
        for column in values.drop(columns=signals).select_dtypes("float64"):
            yield f"{estimator} {column}", values[column].tolist()
    for column in MEASURED:
        yield f"step {column}", run.steps()[column].tolist()


def main() -> None:
    found = {
        f"{model} {optimizer} {name}": [float(f"{x:.{DIGITS}g}") for x in numbers]
        for model in MODELS
        for optimizer in OPTIMIZERS
        for name, numbers in numbers_of(watched(model, optimizer, "materialise", "bitwise"))
    }
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")
    print(f"{FILE}: {len(found)} lists of numbers, by {inrun.__file__}")


if __name__ == "__main__":
    main()

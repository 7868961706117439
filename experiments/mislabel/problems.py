"""Texts and digits some of whose labels are wrong."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.common import encoder, tasks
from experiments.common.models import convnet
from experiments.common.parts import Context, Settings

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """Training examples with the labels given, of which some are ``flipped``; held-out ones whose
    labels are right, as many of each label, to value by; others to measure accuracy on."""

    name: str
    build: Callable[[int], nn.Module]  # by seed
    train: Batch
    flipped: np.ndarray
    validation: Batch
    test: Batch
    classes: int

    @property
    def examples(self) -> int:
        return len(self.flipped)

    def targets(self, rows: int, by_label: bool) -> dict[str, list[Batch]]:
        """One validation target per label, in batches of so many rows, or one for all of them."""
        x, y = self.validation
        found = {
            str(c): list(zip(x[y == c].split(rows), y[y == c].split(rows), strict=True))
            for c in range(self.classes)
        }
        if by_label:
            return found
        joined = [
            (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
            for batches in zip(*found.values(), strict=True)
        ]
        return {"all": joined}


def make(settings: Settings, context: Context) -> Problem:
    """Settings: ``task`` (digits or text), ``examples``, ``rate``, ``each`` (validation rows of
    each label), ``seed`` (of the examples taken and of the flips), for texts ``length``."""
    rng = np.random.default_rng(settings["seed"])
    n, texts = settings["examples"], settings["task"] == "text"
    name, pool, held = text(settings, context) if texts else digits()
    classes = int(pool[1].max()) + 1
    pool = shuffled(pool, rng)
    held = tuple(x[n:] for x in pool) if held is None else shuffled(held, rng)
    x, right = pool[0][:n], pool[1][:n].numpy()
    if len(right) < n:
        raise ValueError(f"{name}: {n:,} examples are wanted and there are {len(right):,}")
    rows = [np.flatnonzero(held[1].numpy() == c) for c in range(classes)]
    if short := [len(r) for r in rows if len(r) < settings["each"]]:
        raise ValueError(
            f"{name}: {settings['each']} validation rows of each label are wanted and there are "
            f"{short[0]}: lower 'each' or 'examples'"
        )
    balanced = np.concatenate([r[: settings["each"]] for r in rows])
    others = np.setdiff1d(np.arange(len(held[1])), balanced)
    flipped = np.zeros(n, bool)
    flipped[rng.choice(n, round(settings["rate"] * n), replace=False)] = True
    y = right.copy()
    y[flipped] = (y[flipped] + rng.integers(1, classes, flipped.sum())) % classes
    if texts:
        used, (x, *rest) = encoder.narrowed(x, held[0])
        held = (rest[0], held[1])
        build = functools.partial(reader, name, context, used)
    else:
        build = functools.partial(network, settings["channels"])

    @functools.cache  # weights are read from disk once
    def first(seed: int) -> nn.Module:
        return build(seed).to(context.device).eval()

    def here(rows: Tensor, labels: Any) -> Batch:
        return rows.to(context.device), torch.as_tensor(labels).to(context.device)

    return Problem(
        name, lambda seed: copy.deepcopy(first(seed)), here(x, y), flipped,
        here(held[0][balanced], held[1][balanced]), here(held[0][others], held[1][others]), classes,
    )  # fmt: skip


def shuffled(batch: Batch, rng: np.random.Generator) -> Batch:
    order = torch.from_numpy(rng.permutation(len(batch[1])))
    return batch[0][order], batch[1][order]


def digits() -> tuple[str, Batch, None]:
    return "digits", tasks.digits(torch.float32), None


def network(channels: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return convnet(channels).float()


def text(settings: Settings, context: Context) -> tuple[str, Batch, Batch | None]:
    """SST-2 where there are data, otherwise passages of CPython's documentation."""
    length = settings["length"]
    if context.data is None:
        return "passages", encoder.passages(length), None
    train, dev = encoder.sst2(context.data, encoder.needed(context.data), length)
    return "SST-2", train, dev


def reader(name: str, context: Context, used: Tensor, seed: int) -> nn.Module:
    """MiniLM-L6 with its weights for SST-2, a small encoder with random ones for passages."""
    if name == "passages":
        return encoder.small(len(used), seed).float()
    return encoder.pretrained(encoder.needed(context.data), used, seed)

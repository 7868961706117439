"""What the scripts of this folder share: small data that comes with inrun's dependencies, and a few
lines about a run at its end. With data of your own you need none of it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import inrun
from inrun.report.metrics import auroc


class Images(NamedTuple):
    """Digits of 8 × 8 pixels; ``flipped`` says which training labels are wrong on purpose."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    flipped: np.ndarray


def digits(n_train: int = 1000, flip: float = 0.1, seed: int = 0) -> Images:
    """scikit-learn's digits, [N, 1, 8, 8]."""
    from sklearn.datasets import load_digits

    found, rng = load_digits(), np.random.default_rng(seed)
    order = rng.permutation(len(found.target))
    x = torch.tensor(found.images[order], dtype=torch.float32)[:, None] / 16
    y = torch.tensor(found.target[order])
    flipped = rng.random(n_train) < flip
    parts = [TensorDataset(x[rows], y[rows]) for rows in torch.arange(1797).split([1000, 300, 497])]
    given = flip_labels(y[:n_train], flipped, 10, rng)
    return Images(TensorDataset(x[:n_train], given), parts[1], parts[2], flipped)


def flip_labels(y: Tensor, flipped: np.ndarray, classes: int, rng: Any) -> Tensor:
    """Other labels where ``flipped`` is true."""
    shift = torch.from_numpy(rng.integers(1, classes, len(y)))
    return torch.where(torch.from_numpy(flipped), (y + shift) % classes, y)


def documentation() -> dict[str, str]:
    """Python's own documentation, a text for each page (CPython has it for ``help()``)."""
    from pydoc_data.topics import topics

    return dict(sorted(topics.items()))


def paragraphs(pages: list[str], shortest: int = 40) -> list[tuple[str, int]]:
    """The paragraphs of some pages, each with the number of its page; repeated ones once."""
    texts, found = documentation(), {}
    for label, page in enumerate(pages):
        for part in re.split(r"\n\s*\n", texts[page]):
            text = " ".join(part.split())
            if len(text) >= shortest:
                found.setdefault(text, label)
    return list(found.items())


def points() -> tuple[TensorDataset, list[Tensor]]:
    """Random points with ids and two classes: 512 to train on, one batch for validation."""
    x = torch.randn(600, 20, generator=torch.Generator().manual_seed(0))
    rows = [torch.arange(600), x, (x[:, 0] + x[:, 1] > 0).long()]
    return TensorDataset(*(t[:512] for t in rows)), [t[512:] for t in rows]


def point_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))


def point_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[1]), batch[2])


def show(run: Any, flipped: np.ndarray | None = None, n: int = 5) -> None:
    """The examples of lowest value, whether the values add up, and whether harm finds the labels
    that were flipped, if some were."""
    values = run.values()
    print(values.nsmallest(n, "value").to_string(index=False))
    explained = run.steps()["explained"].median()  # of the steps that were audited
    print(f"{len(values)} examples, explained {explained:.1%} in the median step")
    if flipped is not None:
        show_flipped(run, flipped)


def show_flipped(run: inrun.Run, flipped: np.ndarray) -> float:
    """How well harm finds the labels that were flipped, as AUROC."""
    harm = run.harm().set_index("id")["harm"].reindex(range(len(flipped))).fillna(0)
    found = auroc(harm.to_numpy(), flipped)
    print(f"harm finds the {flipped.sum()} flipped labels with AUROC {found:.3f}")
    return found

"""The order in which rows of a validation dataset are cycled: every row once per cycle, and labels
spread evenly, where they can be seen without reading the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

LABELS = ("labels", "label")


def balanced_order(dataset: Any, seed: int) -> list[int]:
    """A fixed order of all rows. Any stretch of it has each label nearly in proportion, so that
    batches in turn differ less than those of a plain shuffle; without labels it is one."""
    n = len(dataset)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(n)
    labels = labels_of(dataset)
    if labels is None:
        return [int(i) for i in shuffled]
    _, label = np.unique(labels, return_inverse=True)
    at = np.empty(n)
    for own in (shuffled[label[shuffled] == k] for k in range(label.max() + 1)):
        at[own] = (np.arange(len(own)) + rng.random()) / len(own)  # evenly over the cycle
    return [int(i) for i in np.argsort(at, kind="stable")]


def labels_of(dataset: Any) -> np.ndarray | None:
    """The label of each row as integers or text, or None: a column of a Hugging Face dataset,
    ``targets`` as torchvision has it, the last tensor of a ``TensorDataset``."""
    if isinstance(dataset, Subset):
        base = labels_of(dataset.dataset)
        return None if base is None else base[np.asarray(dataset.indices, dtype=np.int64)]
    found: Any = None
    columns = getattr(dataset, "column_names", None)
    if columns is not None:
        name = next((k for k in LABELS if k in columns), None)
        found = None if name is None else dataset[name]
    elif isinstance(dataset, TensorDataset):
        found = dataset.tensors[-1]
    else:
        found = getattr(dataset, "targets", None)
    return _as_labels(found, len(dataset))


def _as_labels(found: Any, n: int) -> np.ndarray | None:
    """One label for each row, or None where this is something else (token ids, numbers)."""
    if isinstance(found, Tensor):
        found = found.detach().cpu().numpy()
    elif not isinstance(found, Sequence | np.ndarray):
        return None
    try:
        labels = np.asarray(found)
    except ValueError:  # rows of different lengths
        return None
    kinds = "biuU"  # bool, integers, text
    return labels if labels.shape == (n,) and labels.dtype.kind in kinds else None

"""The batches of the targets, in their own order, whatever the training's random state does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from inrun.errors import ValidationError
from inrun.generators import Generators


class Batches:
    """The batches of one target, cycled in their own order.

    The position is (epoch, index), so a resumed run goes on where it stopped; shuffling loaders
    shuffle by ``seed`` and epoch, not by the training's random state.
    """

    def __init__(self, name: str, source: Iterable[Any], seed: int) -> None:
        if isinstance(source, (str, bytes, Tensor)) or not isinstance(source, Iterable):
            raise ValidationError(
                f"target '{name}': a loader or a list of batches is needed, "
                f"not {type(source).__name__}"
            )
        self.name, self.source, self.seed = name, source, seed
        self.epoch, self.index = 0, 0
        self._iterator: Iterator[Any] | None = None
        self._random = Generators(f"drew a batch of target '{name}'")
        self.peek()

    def peek(self) -> None:
        """Fail now rather than at the first step if there is nothing to draw."""
        if isinstance(self.source, Iterator):
            raise ValidationError(
                f"target '{self.name}': an iterator can be read only once; pass the loader itself "
                "or a list of batches"
            )
        if isinstance(self.source, Sequence) and len(self.source) == 0:
            raise ValidationError(f"target '{self.name}': the validation data is empty")
        self.take(1)
        self.epoch, self.index, self._iterator = 0, 0, None

    def take(self, n: int) -> list[Any]:
        """The next n batches."""
        return [self._next() for _ in range(n)]

    def _next(self) -> Any:
        if self._iterator is None:
            fixed = isinstance(self.source, (list, tuple))  # nothing random about it
            with nullcontext() if fixed else self._random.seeded(self.seed, self.epoch):
                self._iterator = iter(self.source)
            for skipped in range(self.index):
                self._draw(skipped)
        batch = self._draw(self.index)
        if batch is _END:
            if self.index == 0:
                raise ValidationError(f"target '{self.name}': the validation data is empty")
            self.epoch, self.index = self.epoch + 1, 0
            self._iterator = None
            return self._next()
        self.index += 1
        return batch

    def _draw(self, index: int) -> Any:
        assert self._iterator is not None
        if isinstance(self.source, (list, tuple)):
            return next(self._iterator, _END)
        with self._random.seeded(self.seed, self.epoch, index + 1):
            return next(self._iterator, _END)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.index, self._iterator = state["epoch"], state["index"], None


_END = object()


def by_label(
    dataset: Dataset[Any],
    label: str | int | Callable[[Any], Any] | Sequence[Any] | None = None,
    *,
    batch_size: int = 64,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> dict[str, DataLoader[Any]]:
    """One validation target per label, for ``watch(..., targets=by_label(dataset))``.

    Args:
        dataset: a map-style dataset of rows.
        label: where a row's label is: a key, an index, a function of the row, or the labels
            themselves, one per row. By default the key ``labels`` or ``label`` of a mapping, or
            the last entry of a tuple.
        batch_size: rows per validation batch.
        collate_fn: as in ``torch.utils.data.DataLoader``.

    Returns:
        A loader for each label, in the order of the sorted labels, named by it.
    """
    n = len(dataset)  # type: ignore[arg-type]
    if isinstance(label, Sequence) and not isinstance(label, str):
        labels = list(label)
        if len(labels) != n:
            raise ValidationError(f"by_label: {len(labels)} labels for {n} rows")
    else:
        labels = [_label(dataset[i], label) for i in range(n)]
    labels = [x.item() if isinstance(x, (Tensor, np.generic)) else x for x in labels]
    rows: dict[Any, list[int]] = {}
    for i, x in enumerate(labels):
        rows.setdefault(x, []).append(i)
    if not rows:
        raise ValidationError("by_label: the dataset is empty")
    return {
        str(x): DataLoader(Subset(dataset, rows[x]), batch_size=batch_size, collate_fn=collate_fn)
        for x in sorted(rows)
    }


def _label(row: Any, label: Any) -> Any:
    if callable(label):
        return label(row)
    if label is not None:
        return row[label]
    if isinstance(row, Mapping):
        return row["labels"] if "labels" in row else row["label"]
    return row[-1]

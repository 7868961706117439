"""The batches of the targets: drawn in their own order, and copied for each pass.

The order does not depend on the training's random state. A forward pass may write to its input
(``x.mul_``, labels masked in place, a ReLU in place on the input, also through ``.data`` or numpy),
so each pass gets copies of all tensors and arrays of its batch: the user's own stay as they are.
Copying costs next to nothing beside the pass.
"""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from inrun.errors import ValidationError
from inrun.torch_compat import tree_leaves, tree_map
from inrun.validation.balance import balanced_order, labels_of
from inrun.validation.reach import slots_of
from inrun.validation.state import Generators


class Batches:
    """The batches of one target, cycled in their own order.

    The position is (epoch, index), so a resumed run goes on where it stopped; shuffling loaders
    shuffle by ``seed`` and epoch, not by the training's random state.
    """

    def __init__(self, name: str, source: Iterable[Any], seed: int) -> None:
        given, source = source, _loader(name, source, seed)
        self.order = "the order of the data given" if source is given else "labels in balance"
        if source is not given and labels_of(given) is None:
            self.order = "rows shuffled once"
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


ROWS = 32  # of a validation batch, where a dataset is given instead of a loader


def _loader(name: str, source: Any, seed: int) -> Iterable[Any]:
    """What to draw batches from: the source itself, or a loader over a dataset of rows, whose order
    is balanced."""
    kind = type(source).__name__
    if isinstance(source, Mapping):
        split = next((k for k, v in source.items() if hasattr(v, "column_names")), None)
        raise ValidationError(
            f"target '{name}': a {kind} is "
            + (f"several splits; name one, as dataset[{split!r}]" if split else "one batch")
            + ("" if split else "; put it into a list: [batch]")
        )
    rows = hasattr(source, "column_names")  # a Hugging Face dataset, whose items are rows
    if rows and not hasattr(source, "__len__"):
        raise ValidationError(
            f"target '{name}': a streamed dataset ({kind}) gives single rows; pass "
            "torch.utils.data.DataLoader(dataset, batch_size=...)"
        )
    if rows or (isinstance(source, Dataset) and not isinstance(source, IterableDataset)):
        if not len(source):
            raise ValidationError(f"target '{name}': the validation data is empty")
        rows_in_turn = Subset(source, balanced_order(source, seed))
        return DataLoader(rows_in_turn, batch_size=ROWS, collate_fn=_Collate(name, kind))
    if isinstance(source, (str, bytes, Tensor)) or not isinstance(source, Iterable):
        raise ValidationError(
            f"target '{name}': a loader, a dataset or a list of batches is needed, not {kind}"
        )
    return source


class _Collate:
    """Rows of a dataset → one batch; refuses what needs a choice (padding, tokenising)."""

    def __init__(self, name: str, kind: str) -> None:
        self.where = f"target '{name}': the rows of the {kind} cannot be put into batches of {ROWS}"

    def __call__(self, rows: list[Any]) -> Any:
        try:
            return default_collate([self._row(row) for row in rows])
        except ValidationError:
            raise
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise ValidationError(f"{self.where} ({_line(error)}). {LOADER}") from error

    def _row(self, row: Any) -> Any:
        """Lists of numbers as tensors: otherwise they would be taken apart, position by position.

        Text is refused, not passed on: what a model wants of it is the user's to say.
        """
        if isinstance(row, Mapping):
            return {key: self._entry(key, x) for key, x in row.items()}
        if isinstance(row, tuple):
            return tuple(self._entry(i, x) for i, x in enumerate(row))
        return self._entry(0, row)

    def _entry(self, key: Any, x: Any) -> Any:
        if isinstance(x, (str, bytes, type(None))):
            raise ValidationError(f"{self.where}: {key!r} is a {type(x).__name__}. {LOADER}")
        return torch.as_tensor(x) if isinstance(x, list) else x


LOADER = (
    "Tokenise it and leave out what the model does not take, and pass the dataset in a "
    "torch.utils.data.DataLoader(dataset, batch_size=..., collate_fn=...), with a collate_fn that "
    "pads if rows have different lengths"
)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


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
        if x is None or x != x:  # NaN is not equal to itself
            raise ValidationError(f"by_label: the label of row {i} is {x}: leave such rows out")
        rows.setdefault(x, []).append(i)
    if not rows:
        raise ValidationError("by_label: the dataset is empty")
    named: dict[str, Any] = {}
    for x in rows:
        if named.setdefault(str(x), x) is not x:
            raise ValidationError(
                f"by_label: the labels {named[str(x)]!r} and {x!r} would both be called "
                f"{str(x)!r}: make them different"
            )
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


# -- copies -----------------------------------------------------------------------------------

# Things without tensors to write to, or which are no part of a batch's data.
_NOT_COPIED = (
    str, bytes, int, float, complex, bool, type(None), range, slice, enum.Enum, type, np.generic,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    weakref.ReferenceType, torch.dtype, torch.device, torch.Generator, nn.Module, Dataset,
    DataLoader,
)  # fmt: skip


def copy_batch(batch: Any, done: dict[int, Any] | None = None) -> Any:
    """The batch with copies of all tensors and arrays in it, also in objects (a tokenizer's
    ``BatchEncoding``, dataclasses); what occurs twice is copied once."""
    done = {} if done is None else done
    if isinstance(batch, Tensor):
        if id(batch) not in done:
            done[id(batch)] = batch.detach().clone().requires_grad_(batch.requires_grad)
        return done[id(batch)]
    if isinstance(batch, _NOT_COPIED):
        return batch
    if id(batch) in done:
        return done[id(batch)]
    made: Any
    if isinstance(batch, np.ndarray):
        made = done[id(batch)] = batch.copy()
        return made
    kind = type(batch)
    if kind in (tuple, set, frozenset):
        made = kind(copy_batch(x, done) for x in batch)
    elif isinstance(batch, tuple) and hasattr(batch, "_make"):
        made = batch._make(copy_batch(x, done) for x in batch)
    elif kind in (dict, list, OrderedDict, defaultdict):
        made = done[id(batch)] = copy.copy(batch)
        for key in range(len(made)) if kind is list else list(made):
            made[key] = copy_batch(made[key], done)
    else:
        made = _copied(batch, done)
    done[id(batch)] = made
    return made


def _copied(x: Any, done: dict[int, Any]) -> Any:
    """An object with copies of what its attributes hold; itself where it cannot be copied."""
    slots = slots_of(type(x))
    if not hasattr(x, "__dict__") and not slots:
        return x
    try:
        made = copy.copy(x)
    except Exception:
        return x
    if made is x:
        return x
    done[id(x)] = made
    space = getattr(made, "__dict__", {})
    for name in list(space):
        space[name] = copy_batch(space[name], done)
    for name in slots:
        if hasattr(made, name) and name not in space:
            object.__setattr__(made, name, copy_batch(getattr(made, name), done))
    if isinstance(made, dict):  # a class of its own, with entries beside its attributes
        for key in list(made):
            dict.__setitem__(made, key, copy_batch(dict.__getitem__(made, key), done))
    elif isinstance(made, list):
        made[:] = [copy_batch(y, done) for y in made]
    return made


def rows_in(batch: Any) -> int | None:
    """How many rows its tensors have; None if they differ."""
    sizes = {x.shape[0] for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def cut_rows(batch: Any, start: int, n: int) -> Any:
    """``n`` rows of each of its tensors."""

    def cut(x: Any) -> Any:
        return x[start : start + n] if isinstance(x, Tensor) and x.ndim else x

    return tree_map(cut, batch)

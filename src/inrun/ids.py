"""Ids for free: ``with_ids`` gives each row of a dataset an id, ``carry_ids`` takes it through the
collator, ``take_ids`` hands it to ``run.batch``.

    dataset = inrun.with_ids(dataset)
    loader = DataLoader(dataset, collate_fn=inrun.carry_ids(collate), shuffle=True)
    for batch in loader:
        names, batch = inrun.take_ids(batch)
        with run.batch(**names):
            ...

An id belongs to the row, not to the place in an epoch: shuffling, resuming, several workers and
several processes do not change it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from inrun.errors import BatchError
from inrun.packing import from_lengths

ID = "inrun_id"  # the key of a row's id, and of the ids of a batch
OWNER = "inrun_owner"  # the key of ``owner`` in a batch whose rows are not the examples

Ids = Sequence[Any] | str | Callable[[Any], Any] | None


class Row(NamedTuple):
    """A row (or a batch) that is no mapping, with its id (ids)."""

    id: Any
    row: Any


def with_ids(dataset: Any, ids: Ids = None) -> Any:
    """Give each row of a dataset an id.

    Args:
        dataset: a map-style or iterable dataset of torch, or a dataset of Hugging Face (also
            streamed). Call this before you shuffle, filter or split it: ids stay with their rows.
        ids: where ids come from: one for each row, the name of a column, or a function of a row.
            By default the row's index; for an iterable dataset, whose rows have no index that
            workers and shuffles leave alone, a hash of what the row holds (:func:`row_id`; equal
            rows share it).

    Returns:
        A dataset of Hugging Face with one more column, ``"inrun_id"``; else a wrapper whose rows
        have this key, or are pairs (id, row) where rows are no dictionaries.
    """
    if isinstance(dataset, DataLoader):
        raise TypeError("with_ids takes the dataset, not the loader: with_ids(loader.dataset)")
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"with_ids got a {type(dataset).__name__} of {len(dataset)} entries: give it one split,"
            " as dataset['train']"
        )
    if hasattr(dataset, "column_names") and hasattr(dataset, "map"):
        return _with_column(dataset, ids)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return MapWithIds(dataset, ids)
    if isinstance(dataset, Iterable):
        return IterableWithIds(dataset, ids)
    raise TypeError(f"with_ids takes a dataset, not a {type(dataset).__name__}")


def _with_column(dataset: Any, ids: Ids) -> Any:
    """A dataset of Hugging Face with the column of ids."""
    if ID in (dataset.column_names or ()):
        if ids is not None:
            raise ValueError(
                f"the dataset has a column {ID!r} already: remove it, or leave ids out"
            )
        return dataset
    streamed = not hasattr(dataset, "__len__")
    if callable(ids) or isinstance(ids, str) or (streamed and ids is None):
        return dataset.map(_AddId(ids))
    if streamed:
        raise TypeError("a streamed dataset has no order to number: give ids as a column's name")
    found = range(len(dataset)) if ids is None else _as_many(ids, len(dataset))
    return dataset.add_column(ID, list(found))


def _as_many(ids: Any, n: int) -> Sequence[Any]:
    if len(ids) != n:
        raise ValueError(f"with_ids got {len(ids)} ids for {n} rows")
    return [plain_id(x) for x in ids]


def plain_id(x: Any) -> Any:
    """An id as a plain int or str; numbers of numpy and torch have it inside."""
    return x.item() if isinstance(x, (Tensor, np.generic)) else x


class _AddId:
    """Row → its id, as a new column; a class, so that datasets can hash and pickle it."""

    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def of(self, row: Any) -> Any:
        if self.ids is None:
            return row_id(row)
        return plain_id(self.ids(row) if callable(self.ids) else row[self.ids])

    def __call__(self, row: Any) -> dict[str, Any]:
        return {ID: self.of(row)}


def _identified(row: Any, name: Any) -> Any:
    return {**row, ID: name} if isinstance(row, Mapping) else Row(name, row)


class _Wrapper:
    """Looks up what it does not know in the dataset that it wraps."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # asked for while it is being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


class MapWithIds(_Wrapper, Dataset[Any]):
    """A map-style dataset whose rows have ids, their index by default."""

    def __init__(self, dataset: Any, ids: Ids = None) -> None:
        self.inner = dataset
        self._add = _AddId(ids) if callable(ids) or isinstance(ids, str) else None
        self._ids = None if ids is None or self._add else _as_many(ids, len(dataset))

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: Any) -> Any:
        return self._named(index, self.inner[index])

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """Called by loaders for a whole batch."""
        several = getattr(self.inner, "__getitems__", None)
        rows = several(indices) if several else [self.inner[i] for i in indices]
        return [self._named(i, row) for i, row in zip(indices, rows, strict=True)]

    def _named(self, index: Any, row: Any) -> Any:
        if self._add is not None:
            return _identified(row, self._add.of(row))
        if isinstance(index, (int, np.integer, Tensor)):
            index = range(len(self))[int(index)]  # from the end, where it is negative
        return _identified(row, index if self._ids is None else self._ids[index])


class IterableWithIds(_Wrapper, IterableDataset[Any]):
    """An iterable dataset whose rows have ids, a hash of what they hold by default."""

    def __init__(self, dataset: Iterable[Any], ids: Ids = None) -> None:
        if ids is not None and not callable(ids) and not isinstance(ids, str):
            raise TypeError("an iterable dataset has no order to number: give ids as a function")
        self.inner, self._add = dataset, _AddId(ids)

    def __iter__(self) -> Iterator[Any]:
        for row in self.inner:
            yield _identified(row, self._add.of(row))


def row_id(row: Any) -> int:
    """A number made of what a row holds: 63 bits of a hash, the same in every process.

    Equal rows have the same number, so their values add up under one id. Two different rows share
    it with a chance of 10⁻⁶ in 4 million rows, 5 · 10⁻⁴ in 100 million.
    """
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, row)
    return int.from_bytes(digest.digest(), "little") >> 1


def _feed(digest: Any, x: Any) -> None:
    if isinstance(x, Tensor):  # as bytes: numpy has no bfloat16
        digest.update(f"t{x.dtype}{tuple(x.shape)}:".encode())
        x = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    if isinstance(x, Mapping):
        keys = sorted((key for key in x if key != ID), key=str)
        digest.update(f"m{len(keys)}:".encode())
        for key in keys:
            _feed(digest, str(key))
            _feed(digest, x[key])
    elif isinstance(x, (list, tuple)):
        digest.update(f"l{len(x)}:".encode())
        for entry in x:
            _feed(digest, entry)
    elif isinstance(x, (str, bytes)):
        raw = x.encode("utf-8", "surrogatepass") if isinstance(x, str) else x
        digest.update(f"{type(x).__name__}{len(raw)}:".encode() + raw)
    elif isinstance(x, np.ndarray) and x.dtype != object:
        digest.update(f"a{x.dtype}{x.shape}:".encode() + np.ascontiguousarray(x).tobytes())
    elif x is None or isinstance(x, (bool, int, float, complex, np.generic)):
        digest.update(f"n{plain_id(x)!r}:".encode())
    elif hasattr(x, "tobytes") and hasattr(x, "size"):  # an image
        digest.update(f"i{x.size}:".encode() + x.tobytes())
    else:
        raise TypeError(
            f"a row holds a {type(x).__name__}, which has no hash that stays the same: pass "
            "with_ids(dataset, ids=...) a column's name or a function of the row"
        )


# -- from rows to batches ---------------------------------------------------------------------


def carry_ids(collate: Callable[[list[Any]], Any] | None = None) -> CarryIds:
    """Wrap a collator (``default_collate`` if None) so that it carries the ids of ``with_ids``.

    The collator itself gets rows without ids. It may pad them, flatten them into one long row, take
    rows that are packed (``seq_lengths``) or make two rows of each (preference pairs): the batch
    then also has ``owner``, which says whose each position is. Where it cannot be known it is
    refused; a collator of your own may put ``"inrun_owner"`` into its batch.
    """
    return collate if isinstance(collate, CarryIds) else CarryIds(collate or default_collate)


class CarryIds:
    """A collator around another one: see :func:`carry_ids`."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        ids, plain = split_rows(rows)
        batch = self.collate(plain)
        if not isinstance(batch, Mapping):
            return Row(_together(ids), batch)
        named: Any = batch
        if OWNER not in named:
            ids, owner = whose(ids, plain, named)
            if owner is not None:
                named[OWNER] = owner
        named[ID] = _together(ids)
        return batch


def split_rows(rows: list[Any]) -> tuple[list[Any], list[Any]]:
    """The ids of rows, and the rows without them."""
    if all(isinstance(row, Row) for row in rows):
        return [plain_id(r.id) for r in rows], [r.row for r in rows]
    if all(isinstance(row, Mapping) and ID in row for row in rows):
        rest = [{k: x for k, x in row.items() if k != ID} for row in rows]
        return [plain_id(row[ID]) for row in rows], rest
    raise BatchError(
        f"the rows of this batch have no ids ({ID!r}): wrap the dataset, as "
        "inrun.with_ids(dataset), before the loader is made"
    )


def _together(ids: list[Any]) -> Any:
    return torch.tensor(ids, device="cpu") if all(type(i) is int for i in ids) else ids


def take_ids(batch: Any) -> tuple[dict[str, Any], Any]:
    """Take the ids out of a batch: returns what ``run.batch(**names)`` needs, and the rest.

    The batch that was given is left as it is.
    """
    if isinstance(batch, Row):
        return {"ids": batch.id}, batch.row
    if not isinstance(batch, Mapping) or ID not in batch:
        raise BatchError(
            f"this batch has no ids ({ID!r}): make the loader of inrun.with_ids(dataset), with "
            "collate_fn=inrun.carry_ids(collate) if it has a collator of its own"
        )
    rest: Any = copy.copy(batch)
    names = {"ids": rest.pop(ID)}
    if OWNER in rest:
        names["owner"] = rest.pop(OWNER)
    return names, rest


def whose(ids: list[Any], rows: list[Any], batch: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The ids of a batch, and ``owner`` where its rows are not the examples one by one."""
    tokens = batch.get("input_ids")
    first = tokens if isinstance(tokens, Tensor) else _first_tensor(batch)
    R, n = (len(rows) if first is None or not first.ndim else len(first)), len(rows)
    if isinstance(tokens, Tensor) and "seq_lengths" in rows[0]:
        return _documents(rows, tokens)
    if n == R or first is None:
        return ids, None
    if isinstance(tokens, Tensor) and R == 1 and "input_ids" in rows[0]:
        _check_flat(rows, tokens)
        return ids, from_lengths([len(row["input_ids"]) for row in rows], tokens.shape)
    if isinstance(tokens, Tensor) and 2 * n == R and {"chosen_ids", "rejected_ids"} <= {*rows[0]}:
        _check_pairs(rows, batch)
        return ids, torch.arange(n, device="cpu").repeat(2)
    if first.ndim > 1 and first.shape[1] == n:  # sequence first: run.batch compares with batch_dim
        return ids, None
    raise BatchError(
        f"the collator made {R} rows of {n} examples, so whose each row is is not known: have it "
        f"put {OWNER!r} into the batch, integers of the leading dimensions of the model's inputs "
        "(docs/packed.md)"
    )


def _first_tensor(batch: Mapping[str, Any]) -> Tensor | None:
    return next((x for x in batch.values() if isinstance(x, Tensor) and x.ndim), None)


def _documents(rows: list[Any], tokens: Tensor) -> tuple[list[Any], Tensor]:
    """Ids and owner of packed rows: each document is named by a hash of its tokens."""
    lengths = [[int(k) for k in row["seq_lengths"]] for row in rows]
    flat = len(tokens) == 1
    if flat:
        _check_flat(rows, tokens)
    elif len(tokens) != len(rows):
        raise BatchError(f"the collator made {len(tokens)} rows of {len(rows)} packed rows")
    ids: list[Any] = []
    for row, own in zip(rows, lengths, strict=True):
        held, start = _listed(row["input_ids"]), 0
        for k in own:
            ids.append(row_id(held[start : start + k]))
            start += k
    if flat:
        return ids, from_lengths([k for own in lengths for k in own], tokens.shape)
    owner, before = torch.full(tokens.shape, -1, device="cpu"), 0
    for r, own in enumerate(lengths):
        mine = from_lengths(own, (tokens.shape[1],))
        owner[r] = torch.where(mine < 0, -1, mine + before)
        before += len(own)
    return ids, owner


def _listed(x: Any) -> list[int]:
    return x.tolist() if isinstance(x, (Tensor, np.ndarray)) else list(x)


def _check_flat(rows: list[Any], tokens: Tensor) -> None:
    """Refuse one long row that is not the examples one after the other."""
    wanted = [t for row in rows for t in _listed(row["input_ids"])]
    if tokens[0, : len(wanted)].tolist() != wanted:
        raise BatchError(
            f"the collator made one row of {len(rows)} examples, but not by putting their "
            f"'input_ids' one after the other: have it put {OWNER!r} into the batch"
        )


def _check_pairs(rows: list[Any], batch: Mapping[str, Any]) -> None:
    """Refuse two rows for each example that are not all the chosen, then all the rejected."""
    mask = batch.get("attention_mask")
    answers = [(row, key) for key in ("chosen_ids", "rejected_ids") for row in rows]
    for r, (row, key) in enumerate(answers):
        whole = _listed(row.get("prompt_ids", [])) + _listed(row[key])
        held = batch["input_ids"][r]
        got = (held if mask is None else held[mask[r].bool()]).tolist()
        if got != whole[: len(got)] and got != whole[len(whole) - len(got) :]:
            raise BatchError(
                "the collator made two rows of each example, but not the chosen answers first and "
                f"then the rejected: have it put {OWNER!r} into the batch"
            )

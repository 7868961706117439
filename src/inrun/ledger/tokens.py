"""Values of single positions (``run.batch(ids, tokens=True)``): how a step keeps them, the columns
of a part, and the table.

In a file they are lists, one for each example that has them: ``inputs`` holds what the model
received at each position (token ids), ``tokens:secant`` the values there, one such column beside
each column of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

INPUTS, VALUES = pa.list_(pa.int64()), pa.list_(pa.float32())  # types of the columns


@dataclass(frozen=True)
class Tokens:
    """The values of the positions of a step. Positions of an example follow each other, examples
    have the order of the ids."""

    sizes: np.ndarray  # [B]: how many positions; 0 where none were recorded
    values: np.ndarray  # [E, Q, N] float32; those of an example add up to its value
    inputs: np.ndarray | None = None  # [N] what the model received, where these are integers

    @property
    def bytes(self) -> int:
        own = self.sizes.nbytes + self.values.nbytes
        return own + (0 if self.inputs is None else self.inputs.nbytes)


def moved_by(tokens: Tokens, more: np.ndarray) -> Tokens:
    """With these numbers [E, Q, B] more for the examples, in equal parts for their positions."""
    each = more / np.maximum(tokens.sizes, 1)
    values = tokens.values + np.repeat(each, tokens.sizes, axis=-1)
    return replace(tokens, values=values.astype(np.float32))


def fields(columns: Sequence[str]) -> list[tuple[str, pa.DataType]]:
    """The columns of a file: inputs, then one beside each column of values."""
    return [("inputs", INPUTS), *((f"tokens:{c}", VALUES) for c in columns)]


def arrays(entries: Sequence[tuple[int, Tokens | None]], columns: int) -> list[pa.Array]:
    """These columns for some steps, each given as its number of examples and its tokens."""
    sizes = [np.zeros(n, np.int64) if t is None else t.sizes for n, t in entries]
    known = [t for _, t in entries if t is not None]
    with_inputs = [
        s if t is not None and t.inputs is not None else np.zeros_like(s)
        for s, (_, t) in zip(sizes, entries, strict=True)
    ]
    inputs = [t.inputs for t in known if t.inputs is not None]
    V = [t.values.reshape(columns, -1) for t in known]
    flat = np.concatenate(V, axis=1) if V else np.zeros((columns, 0))
    ints = np.concatenate(inputs) if inputs else np.zeros(0)
    return [
        _lists(with_inputs, pa.array(ints.astype(np.int64))),
        *(_lists(sizes, pa.array(v.astype(np.float32))) for v in flat),
    ]


def _lists(sizes: Sequence[np.ndarray], flat: pa.Array) -> pa.ListArray:
    """A list of so many numbers for each example, NULL for none."""
    n = np.concatenate(sizes) if sizes else np.zeros(0, np.int64)
    ends = np.concatenate([[0], n.cumsum()])
    offsets = pa.array(ends.astype(np.int32), mask=np.append(n == 0, False))
    return pa.ListArray.from_arrays(offsets, flat)


def table(
    batches: Iterable[pa.RecordBatch], targets: Sequence[str], id: Any = None, step: Any = None
) -> pd.DataFrame:
    """One row per step, example and position. ``batches`` have the columns step, id, inputs and the
    lists of each target."""
    found = list(_pieces(batches, id, step))
    several = [f"target {t}" if t in ("position", "input") else t for t in targets]
    names = ["value", *(several if len(several) > 1 else [])]
    if not found:
        kinds = {"step": "int64", "id": "int64", "position": "int64", "input": "Int64"}
        kinds |= dict.fromkeys(names, "float64")
        return pd.DataFrame({k: pd.Series(dtype=kind) for k, kind in kinds.items()})
    head = {k: np.concatenate([p[k] for p in found]) for k in ("step", "id", "position")}
    frame = pd.DataFrame(head)
    frame["input"] = pd.concat([p["input"] for p in found], ignore_index=True)
    V = np.concatenate([p["V"] for p in found], axis=1)  # [Q, rows]
    frame["value"] = V.mean(axis=0)
    if len(several) > 1:
        frame = pd.concat([frame, pd.DataFrame(V.T, columns=several)], axis=1)
    return frame


def _pieces(batches: Iterable[pa.RecordBatch], id: Any, step: Any) -> Iterator[dict[str, Any]]:
    """The columns of the table for each batch that has rows."""
    for batch in batches:
        chosen = batch.column(3).is_valid()
        for column, wanted in ((1, id), (0, step)):
            if wanted is not None:
                try:
                    key = pa.scalar(wanted, batch.schema.field(column).type)
                except (pa.ArrowException, TypeError, ValueError, OverflowError):
                    return  # the ids of this run are of another kind
                chosen = pc.and_(chosen, pc.equal(batch.column(column), key))
        rows = batch.filter(chosen)
        if not rows.num_rows:
            continue
        steps, ids, inputs, *V = rows.columns
        sizes = V[0].value_lengths().to_numpy()
        parents = np.repeat(np.arange(len(sizes)), sizes)
        starts = np.cumsum(sizes) - sizes
        yield {
            "step": steps.to_numpy()[parents],
            "id": ids.to_numpy(zero_copy_only=False)[parents],
            "position": np.arange(len(parents)) - starts[parents],
            "input": _per_position(inputs, sizes),
            "V": np.stack([v.flatten().to_numpy().astype(np.float64) for v in V]),
        }


def _per_position(inputs: pa.ListArray, sizes: np.ndarray) -> pd.Series:
    """What the model received at each position; NA where that is not known."""
    known = inputs.is_valid().to_numpy(zero_copy_only=False)
    every = np.zeros(int(sizes.sum()), np.int64)
    mask = np.repeat(~known, sizes)
    flat = inputs.flatten().to_numpy()
    every[~mask] = flat
    return pd.Series(pd.arrays.IntegerArray(every, mask))

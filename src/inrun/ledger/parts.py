"""The two Parquet files of a part: their columns, how they are made of entries, and how they are
opened, only if they are undamaged."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.ledger import LedgerError, files
from inrun.ledger.entries import Audit, StepEntry, step_row
from inrun.ledger.manifest import KINDS, Part
from inrun.ledger.signals import FIELDS, SIGNALS
from inrun.ledger.signals import arrays as signal_arrays
from inrun.ledger.tokens import arrays, fields

CARRY, MOVED = "carry", ("drop", "decay")  # an estimator whose steps have two numbers more
BY_HALVES = ("by_half_1", "by_half_2")
LOSSES = ("loss_before", "loss_without_batch", "loss_with_batch")
RUN = "inrun.run"  # in the footers of both files: the run they belong to
VALUES, STEPS = "inrun.values.sha256", "inrun.steps.sha256"  # in that of steps, for `inrun repair`


@dataclass(frozen=True)
class BufferedEntry:
    """An entry that waits in memory for the next flush, copied and checked."""

    entry: StepEntry
    ids: pa.Array
    values: np.ndarray | None  # [E·Q, B] float64

    @property
    def bytes(self) -> int:
        tokens = self.entry.tokens
        own = self.ids.nbytes + (0 if self.values is None else self.values.nbytes)
        for x in (self.entry.signals, self.entry.halves):
            own += 0 if x is None else x.nbytes
        return own + (0 if tokens is None else tokens.bytes)


@dataclass(frozen=True)
class Columns:
    """The columns of both files, from the names of estimators and targets.

    Some files lack the last ones: those of ``values`` where no step has signals, values of
    positions or values by halves; those of ``steps`` that were written before nobody's part was
    (format 2).
    """

    estimators: tuple[str, ...]
    targets: tuple[str, ...]

    def values(self, estimator: int) -> list[str]:
        """The columns of one estimator, one per target."""
        Q = len(self.targets)
        return file_columns(self.estimators, self.targets)[estimator * Q : (estimator + 1) * Q]

    @property
    def nobody(self) -> list[str]:
        """The columns of nobody's part, one per estimator and target."""
        return file_columns(["nobody"], file_columns(self.estimators, self.targets))

    @property
    def moved(self) -> list[str]:
        """The columns of the drop along a step and of decay's part of it, one per target, for
        "carry"; none for other estimators."""
        return file_columns(MOVED, self.targets) if CARRY in self.estimators else []

    @property
    def bend(self) -> list[str]:
        """The columns of how far the secant was off, one per estimator."""
        return file_columns(["bend"], self.estimators)

    def halves(self, estimator: int) -> list[str]:
        """The columns of an estimator's values by both halves of the validation rows."""
        return file_columns(BY_HALVES, self.estimators)[estimator :: len(self.estimators)]

    def tokens(self, estimator: int) -> list[str]:
        """The columns of what the model received, and of its positions' values for each target."""
        return [name for name, _ in fields(self.values(estimator))]

    def optional(self, kind: str) -> list[list[tuple[str, pa.DataType]]]:
        """The last columns, which not all files of this kind have: groups that come together."""
        if kind == "values":
            halves = [(n, pa.float64()) for n in file_columns(BY_HALVES, self.estimators)]
            return [FIELDS, fields(file_columns(self.estimators, self.targets)), halves]
        groups = [*self.nobody, *self.moved], self.bend
        return [[(n, pa.float64()) for n in own] for own in groups]

    def schemas(self, kind: str, ids: str | None) -> list[pa.Schema]:
        """The Arrow schemas that a file of this kind may have: with all optional columns first,
        without any last."""
        found = [list(self.schema(kind, ids))]
        for group in reversed(self.optional(kind)):
            own = [pa.field(*f) for f in group]
            n = len(self.schema(kind, ids))
            found = [[*x[:n], *own, *x[n:]] for x in found] + found
        return [pa.schema(x) for x in found]

    def schema(self, kind: str, ids: str | None) -> pa.Schema:
        """The Arrow schema of a file of this kind without the optional columns."""
        if kind == "values":
            names = file_columns(self.estimators, self.targets)
            head = [("step", pa.int64()), ("id", pa.string() if ids == "string" else pa.int64())]
            return pa.schema([*head, ("weight", pa.float64()), *((n, pa.float64()) for n in names)])
        names = file_columns(["sum"], self.estimators) + file_columns(LOSSES, self.targets)
        head = [
            ("step", pa.int64()), ("lr", pa.float64()), ("examples", pa.int64()),
            ("weight", pa.float64()), ("scored", pa.bool_()), ("missed", pa.float64()),
            ("void", pa.string()),
        ]  # fmt: skip
        return pa.schema([*head, *((n, pa.float64()) for n in names)])


def file_columns(heads: Sequence[str], tails: Sequence[str]) -> list[str]:
    """Column names ``head:tail``, only ``head`` where there is one tail.

    DuckDB and Spark do not tell "a" from "A": a name that differs only in case gets a number.
    """
    names: list[str] = []
    taken: set[str] = {"step", "id", "weight"}
    for head in heads:
        for tail in tails:
            base = f"{head}:{tail}" if len(tails) > 1 else head
            name, n = base, 2
            while name.casefold() in taken:
                name, n = f"{base}~{n}", n + 1
            taken.add(name.casefold())
            names.append(name)
    return names


# -- from entries -----------------------------------------------------------------------------


def values_table(
    waiting: Sequence[BufferedEntry], columns: Columns, kind_of_ids: str | None
) -> pa.Table:
    schema = columns.schema("values", kind_of_ids)
    sizes = [len(e.ids) for e in waiting]
    V = [np.full((len(schema) - 3, n), np.nan) for n in sizes]
    V = [v if e.values is None else e.values for v, e in zip(V, waiting, strict=True)]
    weight = [np.nan if e.values is None else e.entry.weight for e in waiting]
    ids = [e.ids for e in waiting if len(e.ids)] or [pa.array([], schema.field("id").type)]
    data = [
        pa.array(np.repeat(np.array([e.entry.step for e in waiting], np.int64), sizes)),
        pa.chunked_array(ids),
        pa.array(np.repeat(np.array(weight, np.float64), sizes), from_pandas=True),
        *(pa.array(v, from_pandas=True) for v in np.concatenate(V, axis=1)),
    ]
    signals, positions, halves = columns.optional("values")
    more = list(schema)
    if any(e.entry.signals is not None for e in waiting):
        data += signal_arrays([(len(e.ids), e.entry.signals) for e in waiting])
        more += [pa.field(*f) for f in signals]
    if any(e.entry.tokens is not None for e in waiting):
        data += arrays([(len(e.ids), e.entry.tokens) for e in waiting], len(schema) - 3)
        more += [pa.field(*f) for f in positions]
    if any(e.entry.halves is not None for e in waiting):
        data += _halves(waiting, len(halves))
        more += [pa.field(*f) for f in halves]
    return pa.table(data, schema=pa.schema(more))


def _halves(waiting: Sequence[BufferedEntry], n: int) -> list[pa.Array]:
    """Values by halves by column; NULL where they were not measured."""
    none = [np.full((n, len(e.ids)), np.nan) for e in waiting]
    own = [x if e.entry.halves is None or e.values is None
           else e.entry.halves.swapaxes(0, 1).reshape(n, -1)
           for x, e in zip(none, waiting, strict=True)]  # fmt: skip
    return [pa.array(x, from_pandas=True) for x in np.concatenate(own, axis=1)]


def steps_table(waiting: Sequence[BufferedEntry], columns: Columns) -> pa.Table:
    entries = [e.entry for e in waiting]
    data: list[Any] = [
        [r.step for r in entries],
        [float(r.lr) for r in entries],
        [len(r.ids) for r in entries],
        [float(r.weight) for r in entries],
        [r.values is not None for r in entries],
        [float(r.missed) for r in entries],
        [r.void for r in entries],
    ]
    for e in range(len(columns.estimators)):
        sums = np.array([step_row(r, e)["sum"] for r in entries], np.float64)
        data.append(pa.array(sums, from_pandas=True))
    A = np.array([_losses(r.audit, len(columns.targets)) for r in entries])  # [steps, 3·Q]
    data += [pa.array(loss, from_pandas=True) for loss in A.T]
    data += [pa.array(x, from_pandas=True) for x in _nobody(entries, len(columns.nobody))]
    if columns.moved:
        data += [pa.array(x, from_pandas=True) for x in _moved(entries, columns)]
    none = np.full(len(columns.estimators), np.nan)
    bend = np.array([none if r.bend is None or r.values is None else r.bend for r in entries])
    data += [pa.array(x, from_pandas=True) for x in bend.T]
    schema = columns.schemas("steps", None)[0]
    made = [pa.array(x, f.type) for x, f in zip(data, schema, strict=True)]
    return pa.table(made, schema=schema)


def _nobody(entries: Sequence[StepEntry], n: int) -> np.ndarray:
    """Nobody's part by column [E·Q, steps]; NaN where a step has no values."""
    found = np.zeros((len(entries), n))
    for own, entry in zip(found, entries, strict=True):
        if entry.values is None:
            own[:] = np.nan
        elif entry.nobody is not None:
            own[:] = entry.nobody.reshape(-1)
    return found.T


def _moved(entries: Sequence[StepEntry], columns: Columns) -> np.ndarray:
    """The numbers of "carry" by column [2·Q, steps]; NaN where a step has no values."""
    e, found = columns.estimators.index(CARRY), np.full((len(entries), len(columns.moved)), np.nan)
    for own, entry in zip(found, entries, strict=True):
        if entry.values is not None and entry.moved is not None:
            own[:] = entry.moved[e].reshape(-1)
    return found.T


def completed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with these columns: those that its file lacks are NULL."""
    if table.schema.equals(schema):
        return table
    have = set(table.column_names)
    found = [table[f.name] if f.name in have else pa.nulls(len(table), f.type) for f in schema]
    return pa.table(found, schema=schema)


def content_hash(steps: pa.Table) -> str:
    """SHA-256 of the columns of a steps table, independent of the layout of its file."""
    digest = hashlib.sha256()
    for name, column in zip(steps.column_names, steps.columns, strict=True):
        digest.update(name.encode())
        if pa.types.is_string(column.type):
            digest.update(json.dumps(column.to_pylist()).encode())
        else:
            digest.update(np.ascontiguousarray(column.to_numpy()).tobytes())
    return digest.hexdigest()


def buffered(entry: StepEntry, ids: pa.Array, columns: Columns) -> BufferedEntry:
    """Returns a copy of an entry, the only one that waits in memory; refuses a wrong shape."""
    if entry.signals is not None:
        wanted = (len(SIGNALS), len(entry.ids))
        if entry.signals.shape != wanted:
            raise LedgerError(
                f"step {entry.step}: signals have shape {entry.signals.shape}, not {wanted}"
            )
        if isinstance(entry.signals, np.ndarray):  # others are computed when they are written
            entry = replace(entry, signals=np.array(entry.signals, np.float32))
    if entry.values is None:
        return BufferedEntry(entry, ids, None)
    E, Q, B = shape = (len(columns.estimators), len(columns.targets), len(entry.ids))
    if entry.values.shape != shape:
        raise LedgerError(
            f"step {entry.step}: values have shape {entry.values.shape}, not {shape} "
            "(estimators, targets, examples)"
        )
    if entry.halves is not None and entry.halves.shape != (E, 2, B):
        raise LedgerError(
            f"step {entry.step}: values by halves have shape {entry.halves.shape}, not {(E, 2, B)}"
        )
    values = np.array(entry.values, np.float64)
    return BufferedEntry(replace(entry, values=values), ids, values.reshape(E * Q, B))


def _losses(audit: Audit | None, Q: int) -> np.ndarray:
    if audit is None:
        return np.full(3 * Q, np.nan)
    return np.concatenate([audit.before, audit.without_batch, audit.with_batch]).astype(np.float64)


def arrow_ids(ids: Any) -> pa.Array:
    """Returns ids as an Arrow array of int64 or string; refuses anything else, or a mixture."""
    array = np.asarray(ids)
    try:
        if array.dtype.kind in "iu":
            return pa.array(array).cast(pa.int64())
        kinds = {type(x).__name__ for x in array.tolist()}
        if kinds <= {"int"}:
            return pa.array(array.tolist(), pa.int64())
        if kinds == {"str"}:
            return pa.array(array.tolist(), pa.string())
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise LedgerError(f"ids must fit int64 or be valid text: {error}") from None
    raise LedgerError(f"ids must be all int or all str, got {' and '.join(sorted(kinds))}")


# -- from disk --------------------------------------------------------------------------------

_verified: set[tuple[Any, ...]] = set()  # files whose checksum this process has verified
RACY = 2_000_000_000  # ns; a file younger than this may change again under the same time stamp


def verify(folder: Path, kind: str, part: Part) -> None:
    """Refuse a file that is not byte for byte what the manifest says. Errors name the file."""
    file, at = folder / kind / f"{part.name}.parquet", KINDS.index(kind)
    files.stay_inside(file.parent, folder)
    files.stay_inside(file, folder)
    size, sha256 = part.bytes[at], part.sha256 and part.sha256[at]
    try:
        found = os.stat(file)  # noqa: PTH116
        if not stat.S_ISREG(found.st_mode):
            raise damaged(folder, file, "is no plain file")
        if found.st_size != size:
            raise damaged(folder, file, f"is damaged: {found.st_size} of {size} bytes")
        if sha256 is None:
            return
        key = (found.st_dev, found.st_ino, size, found.st_mtime_ns, sha256)
        if key in _verified:
            return
        if files.sha256_of(file) != sha256:
            raise damaged(folder, file, "is damaged: its content does not match its checksum")
    except FileNotFoundError:
        raise damaged(folder, file, "is missing") from None
    except OSError as error:
        raise damaged(folder, file, f"cannot be read: {_line(error)}") from error
    if time.time_ns() - found.st_mtime_ns > RACY:
        _verified.add(key)


def open_part(folder: Path, kind: str, part: Part, schemas: Sequence[pa.Schema]) -> pq.ParquetFile:
    """Open one file of a verified part; refuse other rows or columns than expected."""
    file = folder / kind / f"{part.name}.parquet"
    rows = part.rows if kind == "values" else part.steps
    try:
        source = pq.ParquetFile(pa.OSFile(str(file)), page_checksum_verification=True)
        found, count = source.schema_arrow, source.metadata.num_rows
    except FileNotFoundError:
        raise damaged(folder, file, "is missing") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(folder, file, f"cannot be read: {_line(error)}") from error
    if count != rows:
        raise damaged(folder, file, f"is damaged: {count} rows, not {rows}")
    if rows and not any(found.equals(s) for s in schemas):
        like = min(schemas, key=lambda s: abs(len(s) - len(found)))
        raise damaged(folder, file, f"is damaged: {_difference(found, like)}")
    return source


def damaged(folder: Path, file: Path, what: str) -> LedgerError:
    return LedgerError(
        f"{file} {what}. `inrun repair {folder}` sets a damaged part aside, so that the others can "
        "be read, and says which steps are gone"
    )


def _difference(found: pa.Schema, wanted: pa.Schema) -> str:
    for a, b in zip(found, wanted, strict=False):
        if a != b:
            return f"a column is {a.name!r} ({a.type}), not {b.name!r} ({b.type})"
    return f"{len(found)} columns, not {len(wanted)}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())

"""The parts of a ledger that count: read from the manifest, written and replaced through it.

``Committed`` reads the tables from the Parquet files of these parts. A part is read only if it is
byte for byte what the manifest says.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from inrun.ledger import LedgerError, files
from inrun.ledger.audits import audit_columns
from inrun.ledger.database import unreadable
from inrun.ledger.manifest import KINDS, Lost, Manifest, Part, part_name, read_manifest
from inrun.ledger.parts import (
    CARRY,
    LOSSES,
    MOVED,
    RUN,
    STEPS,
    VALUES,
    Columns,
    completed,
    content_hash,
    file_columns,
    open_part,
    verify,
)
from inrun.ledger.signals import FIELDS
from inrun.ledger.tables import STEP_COLUMNS, LedgerTables, Scan

BATCH_CELLS = 1 << 22  # numbers that are decoded at a time
TOKEN_ROWS = 1 << 12  # examples whose positions are decoded at a time
SMALL_BYTES = 64 << 20  # a smaller part may be merged with others, and deleted, while it is read
Opened = Callable[[], pq.ParquetFile]


class Committed(LedgerTables):
    """What is on disk, without the entries that still wait in memory."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path, self.info = path, info
        self.targets, self.estimators = list(info["targets"]), list(info["estimators"])
        self.columns = Columns(tuple(self.estimators), tuple(self.targets))
        self._ids: str | None = None  # "int64" or "string", None before the first id
        self._manifest = Manifest()  # as it is on disk
        self._attempted: Manifest | None = None  # perhaps on disk: writing it was interrupted
        self._restarting = False  # forget all parts with the next flush
        self._load()

    def file(self, kind: str, name: str) -> Path:
        return self.path / kind / f"{name}.parquet"

    # -- reading ----------------------------------------------------------------------------

    def sources(self) -> list[Part]:
        """The parts to read now."""
        raise NotImplementedError

    def steady(self) -> contextlib.AbstractContextManager[Any]:
        """While this is held, no part is replaced by a writer of this process."""
        return contextlib.nullcontext()

    def name(self) -> str:
        return str(self.path)

    def id_type(self) -> pa.DataType:
        return pa.string() if self._ids == "string" else pa.int64()

    def scans(self, n: int) -> list[Scan]:
        copies = self._open("values", n)
        return [partial(self._scan, parts) for parts in copies] if copies[0] else []

    def steps(self, estimator: int) -> pd.DataFrame:
        """One row per step, with the audit where there was one (means over targets)."""
        tables = [self._read(part) for part in self._open("steps")[0]]
        if not tables:
            return pd.DataFrame(columns=list(STEP_COLUMNS))
        schema = self.columns.schemas("steps", None)[0]
        raw = pa.concat_tables([completed(t, schema) for t in tables])
        losses = file_columns(LOSSES, self.targets)
        A = np.stack([raw[c].to_numpy() for c in losses]).reshape(3, len(self.targets), -1)
        total = raw[file_columns(["sum"], self.estimators)[estimator]].to_numpy()
        columns = {name: raw[name].to_numpy() for name in ("step", "lr", "examples", "missed")}
        Q = len(self.targets)
        names = self.columns.nobody[estimator * Q : (estimator + 1) * Q]
        parts = np.stack([raw[c].to_numpy() for c in names])
        scored = raw["scored"].to_numpy()
        nobody = np.where(scored, np.nan_to_num(parts).mean(axis=0), np.nan)
        void = np.array(raw["void"].to_pylist(), dtype=object)
        columns |= {"sum": total, "nobody": nobody, "void": void}
        columns |= dict.fromkeys(MOVED, np.full(len(raw), np.nan))
        if self.estimators[estimator] == CARRY:
            moved = np.stack([raw[c].to_numpy() for c in self.columns.moved]).reshape(2, Q, -1)
            columns |= dict(zip(MOVED, moved.mean(axis=1), strict=True))
        columns["bend"] = raw[self.columns.bend[estimator]].to_numpy()
        before, without, after = A.mean(axis=1)
        columns |= audit_columns(total, nobody, before, without, after, columns["drop"])
        return pd.DataFrame(columns)[list(STEP_COLUMNS)]

    def _scan(
        self, parts: list[Opened], estimator: int, targets: Sequence[int], rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Step, id, weight and the values of some targets, a limited number of rows at a time."""
        names = self.columns.values(estimator)
        names = [*names, *(name for name, _ in FIELDS), *self.columns.halves(estimator)]
        columns = ["step", "id", "weight", *(names[q] for q in targets)]
        rows = max(1, min(rows, max(1024, BATCH_CELLS // len(columns))))
        for part in parts:
            try:
                source = part()
                have = set(source.schema_arrow.names)
                for batch in source.iter_batches(rows, columns=[c for c in columns if c in have]):
                    yield _selected(batch, columns)
            except (pa.ArrowException, OSError) as error:
                raise unreadable(self.path, error) from error

    def has_signals(self) -> bool:
        files = (part() for part in self._open("values")[0])
        return any(FIELDS[0][0] in f.schema_arrow.names for f in files)

    def token_batches(self, estimator: int) -> Iterator[pa.RecordBatch]:
        columns = ["step", "id", *self.columns.tokens(estimator)]
        for part in self._open("values")[0]:
            try:
                source = part()
                if columns[-1] in source.schema_arrow.names:
                    for batch in source.iter_batches(TOKEN_ROWS, columns=columns):
                        yield batch.select(columns)
            except (pa.ArrowException, OSError) as error:
                raise unreadable(self.path, error) from error

    def _read(self, part: Opened) -> pa.Table:
        try:
            return part().read()
        except (pa.ArrowException, OSError) as error:
            raise unreadable(self.path, error) from error

    def _open(self, kind: str, copies: int = 1) -> list[list[Opened]]:
        """Open the files of one kind, verified; try again if a writer replaced them meanwhile.

        A part that a writer may merge with others stays open, so that it can be read to the end
        after it was deleted. Large ones are opened in turn: there may be more than a process may
        hold open. ``copies`` are handles of their own, for readers that run side by side.
        """
        for attempt in range(3):
            with self.steady():
                parts = self.sources()
                wanted = [p for p in parts if kind == "steps" or p.rows]
                try:
                    found = [self._opened(kind, p, copies) for p in wanted]
                    return [[part[i] for part in found] for i in range(copies)]
                except LedgerError:
                    if attempt == 2 or not self._changed(parts):
                        raise
        raise AssertionError

    def _opened(self, kind: str, part: Part, copies: int) -> list[Opened]:
        schemas = self.columns.schemas(kind, self._ids)
        verify(self.path, kind, part)
        if sum(part.bytes) >= SMALL_BYTES:
            return [lambda: open_part(self.path, kind, part, schemas)] * copies
        held = [open_part(self.path, kind, part, schemas) for _ in range(copies)]
        return [lambda f=f: f for f in held]  # type: ignore[misc]

    def _changed(self, parts: list[Part]) -> bool:
        """Did a writer replace the files that were being read?"""
        try:
            return parts != self.sources()
        except LedgerError:
            return False

    # -- parts ------------------------------------------------------------------------------

    @property
    def _parts(self) -> list[Part]:
        return [] if self._restarting else list(self._manifest.parts)

    @property
    def _committed(self) -> int:
        parts = self._parts
        return parts[-1].last if parts else -1

    @property
    def lost(self) -> tuple[Lost, ...]:
        return self._manifest.lost

    def _load(self) -> None:
        self._manifest = read_manifest(self.path, self.info["version"]) or Manifest()
        self._ids = self._manifest.ids

    def _lost_before(self, step: int) -> tuple[Lost, ...]:
        """Returns the lost parts that began before this step; of one that contains it, the name."""
        found = [x for x in self._manifest.lost if x.first is None or x.first < step]
        return tuple(
            x if x.last is None or x.last < step else Lost(x.name, None, None, None) for x in found
        )

    def _steps_before(self, step: int) -> tuple[int, bool]:
        """Returns how many steps were recorded before this one, lost ones too; is that sure?"""
        lost = self._lost_before(step)
        known = sum(p.steps for p in self._parts if p.last < step)
        for part in self._parts:
            if part.first < step <= part.last:
                known += sum(before(t, step).num_rows for t in self._tables("steps", [part]))
        return known + sum(x.steps or 0 for x in lost), all(x.steps is not None for x in lost)

    def _fits(self, steps: int, wanted: int, sure: bool) -> bool:
        """Does the ledger hold as many steps as a checkpoint says?"""
        return steps == wanted if sure else steps <= wanted

    def _small(self) -> list[Part]:
        """The small parts at the end; large ones are never rewritten."""
        large = [i for i, p in enumerate(self._parts) if sum(p.bytes) >= SMALL_BYTES]
        return self._parts[large[-1] + 1 if large else 0 :]

    def _tables(self, kind: str, parts: Sequence[Part]) -> Iterator[pa.Table]:
        """Yields the tables of these parts, all with the same columns. They are verified first:
        damage is never copied into a file with a new checksum."""
        schemas = self.columns.schemas(kind, self._ids)
        for part in parts:
            verify(self.path, kind, part)
        have = set(schemas[-1].names)
        for part in parts:
            with open_part(self.path, kind, part, schemas) as source:
                have |= set(source.schema_arrow.names)
        wanted = pa.schema([f for f in schemas[0] if f.name in have])
        for part in parts:
            with open_part(self.path, kind, part, schemas) as source:
                for group in range(source.num_row_groups):
                    table = source.read_row_group(group)
                    yield completed(table, wanted) if table.num_rows else table

    def _write_part(self, values: Iterable[pa.Table], steps: Iterable[pa.Table]) -> Part:
        """Write both files of a new part; they do not count before ``_commit``."""
        name = part_name(self._manifest.next)
        note = {RUN: str(self.info.get("run"))}
        empty = self.columns.schema("values", self._ids).empty_table()
        v = files.write_parquet(self.file("values", name), _some(values, empty), note)
        table = pa.concat_tables(steps)
        first, last = (f(table["step"]).as_py() for f in (pc.min, pc.max))
        note |= {VALUES: v.sha256, STEPS: content_hash(table)}
        s = files.write_parquet(self.file("steps", name), [table], note)
        return Part(name, first, last, s.rows, v.rows, (v.bytes, s.bytes), (v.sha256, s.sha256))

    def _commit(self, parts: Sequence[Part], lost: tuple[Lost, ...] | None = None) -> None:
        """Make these the parts that count, in one rename, then delete those they replace."""
        old, names = self._manifest, {p.name for p in parts}
        left = [n for n in old.replaced if any(self.file(k, n).exists() for k in KINDS)]
        self._attempted = Manifest(
            self._ids,
            old.next + 1,
            tuple(parts),
            (*left, *(p.name for p in old.parts if p.name not in names)),
            old.lost if lost is None else lost,
        )
        self._attempted.write(self.path)
        self._manifest, self._attempted = self._attempted, None
        self._clean()

    def _clean(self, *drafts: str) -> None:
        """Delete what our manifest names as replaced, and the leftovers of a killed writer."""
        old = [f"{name}.parquet" for name in (*self._manifest.replaced, *drafts)]
        found = [self.path / kind / name for kind in KINDS for name in old]
        if drafts:
            found += [f.with_name(f.name + ".tmp") for f in found]
            found += [self.path / f"{n}.tmp" for n in ("run.json", "manifest.json", ".writer")]
        for file in found:
            with contextlib.suppress(OSError):  # it stays in the manifest, for the next time
                file.unlink(missing_ok=True)


def _selected(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """These columns in this order; those that the file lacks are NULL, others are float64."""
    found = []
    for name in columns:
        at = batch.schema.get_field_index(name)
        x = pa.nulls(len(batch), pa.float64()) if at < 0 else batch.column(at)
        found.append(x.cast(pa.float64()) if pa.types.is_float32(x.type) else x)
    return pa.record_batch(found, names=list(columns))


def tell_lost(folder: Path, lost: Sequence[Lost]) -> None:
    if lost:
        warnings.warn(
            f"{folder}: {', '.join(map(str, lost))} were damaged and set aside by inrun repair; "
            "the tables leave them out",
            stacklevel=3,
        )


def _some(tables: Iterable[pa.Table], empty: pa.Table) -> Iterator[pa.Table]:
    """Yields the tables that have rows (empty ones may have another type of id), or ``empty``."""
    some = False
    for table in tables:
        if table.num_rows:
            some = True
            yield table
    if not some:
        yield empty


def before(table: pa.Table, step: int) -> pa.Table:
    return table.filter(pc.less(table["step"], step))

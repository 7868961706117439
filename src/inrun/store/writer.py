"""The ledger on disk: a folder of Parquet files that any table tool reads as it is.

    run.json                      what the run was: config, versions, targets, coverage, ...
    manifest.json                 the parts that count, in order of steps
    values/part-000007.parquet    step, id, weight, one column per estimator and target
    steps/part-000007.parquet     step, lr, examples, weight, scored, void, sums, audited losses

A row of ``values`` says that an example was seen at a step; ``weight`` and the values are NULL
where that step was not scored. Columns are called ``secant``, or ``secant:math`` where a run has
several targets. They are float64: what was recorded comes back bit for bit, also from a float64
run, and the zero low bits of float32 values compress away.

Every change (flush, truncate, compact) writes new files, replaces the manifest in one rename and
only then deletes what it no longer names. A process killed anywhere leaves the folder as it was
before or after that change; the next writer removes the leftovers.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock

from inrun.ledger import Audit, LedgerError, StepRecord, check_targets, step_row
from inrun.store import files
from inrun.store.folder import FORMAT, VERSION, begin, check, read_info
from inrun.store.tables import KINDS, LOSSES, ParquetTables, Part, file_columns

FIXED = ("format", "version", "config", "targets", "estimators", "run")  # of run.json
SMALL_PARTS = 64  # more small parts than this at the end of the ledger are merged
SMALL_BYTES = 64 << 20


@dataclass(frozen=True)
class _Row:
    """A record waiting for the next flush, copied and checked."""

    record: StepRecord
    ids: pa.Array
    values: np.ndarray | None  # [E·Q, B] float64


class Store(ParquetTables):
    """A ledger in a folder: ``Store.create`` writes, one writer at a time, ``Store.open`` reads."""

    flush_seconds = 5.0
    flush_rows = 1_000_000

    def __init__(self, path: Path, info: dict[str, Any], lock: FileLock | None) -> None:
        super().__init__(path, info["targets"], info["estimators"])
        self.info = info
        self._lock = lock
        self._buffer: list[_Row] = []
        self._waiting = 0  # rows of values in the buffer, about
        self._parts: list[Part] = []
        self._ids: str | None = None  # "int64" or "string", None before the first id
        self._next = 0  # number of the next part
        self._flushed = time.monotonic()
        self._read_manifest()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: dict[str, Any],
        targets: Sequence[str],
        estimators: Sequence[str],
        overwrite: bool = False,
    ) -> Store:
        """Start a ledger in ``path``, or continue the one that a run with this config left there.

        A continued ledger keeps all its records until ``load_state_dict`` (or ``truncate``) says
        where the run goes on, or ``restart`` forgets them. ``overwrite`` accepts a ledger of a
        run with another config, to be restarted.
        """
        folder = Path(path)
        fixed = {
            "format": FORMAT,
            "version": VERSION,
            "config": files.plain(config, "config"),
            "targets": check_targets(targets),
            "estimators": [str(e) for e in estimators],
        }
        check(folder, fixed, overwrite)
        with files.disk(folder, "nothing was recorded"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = files.acquire(folder)
        try:
            with files.disk(folder, "nothing was recorded"):
                info = check(folder, fixed, overwrite)
                for kind in KINDS:
                    (folder / kind).mkdir(exist_ok=True)
                if info is None:
                    info = begin(fixed)
                    files.write_json(folder / "run.json", info)
                elif overwrite:
                    info = info | fixed
                store = cls(folder, info, lock)
                store._clean()
        except BaseException:
            lock.release()
            raise
        atexit.register(store.close)
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Read a ledger, also while another process writes it."""
        folder = Path(path)
        if not folder.is_dir():
            raise LedgerError(f"{folder}: no such folder")
        info = read_info(folder)
        if info is None:
            raise LedgerError(f"{folder} is not a ledger of inrun: it has no run.json")
        return cls(folder, info, None)

    def restart(self) -> None:
        """Forget everything: this is a new run in an old folder."""
        self.truncate(0)
        self._ids = None
        info = begin({key: self.info[key] for key in FIXED if key != "run"})
        with files.disk(self.path, "run.json stays as it was"):
            files.write_json(self.path / "run.json", info)
        self.info = info

    def update_info(self, **sections: Any) -> None:
        """Put sections (model, optimizer, coverage, ...) into run.json, replacing it atomically."""
        if fixed := [key for key in sections if key in FIXED]:
            raise LedgerError(f"{fixed[0]!r} of run.json is fixed when the ledger is created")
        self._writable()
        info = self.info | files.plain(sections, "run.json")
        with files.disk(self.path, "run.json stays as it was"):
            files.write_json(self.path / "run.json", info)
        self.info = info

    def close(self) -> None:
        """Flush, merge small files and let the next writer in."""
        if self._lock is None:
            return
        self.flush()  # if that fails, nothing is given up: close again
        try:
            self.compact()
        finally:
            atexit.unregister(self.close)
            (self.path / ".writer").unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    # -- writing ----------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """The last step on record, -1 if there is none."""
        return self._buffer[-1].record.step if self._buffer else self._committed

    @property
    def _committed(self) -> int:
        return self._parts[-1].last if self._parts else -1

    def append(self, record: StepRecord) -> None:
        """Record one step. It reaches the disk with the first step after ``flush_seconds``."""
        self._writable()
        if record.step <= self.last_step:
            raise LedgerError(
                f"{self.path} already has steps up to {self.last_step} and step {record.step} came "
                "again: continue from a checkpoint with run.load_state_dict(), or start over in "
                "another folder"
            )
        ids = as_ids(record.ids)
        kind = str(ids.type)
        if len(ids) and self._ids not in (None, kind):
            raise LedgerError(
                f"ids of this run are {self._ids} and step {record.step} brought {kind}: use one "
                "kind of id, int or str, throughout"
            )
        values = None
        if record.values is not None:
            shape = (len(self.estimators), len(self.targets), len(ids))
            if record.values.shape != shape:
                raise LedgerError(
                    f"step {record.step}: values have shape {record.values.shape}, not {shape} "
                    "(estimators, targets, examples)"
                )
            values = np.array(record.values, np.float64).reshape(shape[0] * shape[1], shape[2])
        self._ids = kind if len(ids) else self._ids
        self._buffer.append(_Row(record, ids, values))
        self._waiting += len(ids)
        due = time.monotonic() - self._flushed >= self.flush_seconds
        if due or self._waiting >= self.flush_rows:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered: on disk, fsynced and committed when this returns.

        If the disk refuses, the records stay in memory and the next flush tries again.
        """
        self._flushed, self._waiting = time.monotonic(), 0
        self._buffer = [row for row in self._buffer if row.record.step > self._committed]
        if not self._buffer:
            return
        self._writable()
        with files.disk(self.path, f"{len(self._buffer)} steps wait in memory for the next flush"):
            part = self._write_part([self._values_table()], [self._steps_table()])
            self._commit([*self._parts, part])
        self._buffer = []
        if len(self._small()) > SMALL_PARTS:
            self.compact()

    def truncate(self, step: int) -> None:
        """Forget every record from this step on (resuming from an older checkpoint)."""
        self._writable()
        self._buffer = [row for row in self._buffer if row.record.step < step]
        kept = [p for p in self._parts if p.last < step]
        if len(kept) == len(self._parts):
            return
        with files.disk(self.path, f"the ledger still holds the steps from {step} on"):
            for part in self._parts:
                if part.first < step <= part.last:
                    values, steps = (
                        (_before(table, step) for table in self._read(kind, [part]))
                        for kind in KINDS
                    )
                    kept.append(self._write_part(values, steps))
            self._commit(kept)

    def compact(self) -> None:
        """Merge the small parts at the end of the ledger into one."""
        self.flush()
        if len(small := self._small()) > 1:
            with files.disk(self.path, "nothing is lost, the small files stay as they are"):
                values, steps = (self._read(kind, small) for kind in KINDS)
                merged = self._write_part(values, steps)
                self._commit([*self._parts[: -len(small)], merged])

    def state_dict(self) -> dict[str, Any]:
        """Flushed and fsynced before it returns: a checkpoint never runs ahead of its ledger."""
        self.flush()
        steps = sum(p.steps for p in self._parts)
        return {"run": self.info.get("run"), "last_step": self.last_step, "steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to the checkpoint: what was recorded after it is removed."""
        self.flush()
        if "last_step" not in state:
            raise LedgerError("this checkpoint was made with a ledger in memory (out=None)")
        if state.get("run") != self.info.get("run"):
            raise LedgerError(f"{self.path}: the checkpoint belongs to another ledger")
        last = int(state["last_step"])
        parts = [p for p in self._parts if p.first <= last]
        kept = sum(_before(table, last + 1).num_rows for table in self._read("steps", parts))
        if kept != state["steps"]:
            raise LedgerError(
                f"{self.path} holds {kept} steps up to step {last}, the checkpoint was made with "
                f"{state['steps']}: it belongs to another ledger"
            )
        self.truncate(last + 1)

    # -- parts ------------------------------------------------------------------------------

    def sources(self) -> list[Part]:
        """The parts to read now: a writer flushes first, a reader looks at the manifest again."""
        if self._lock is not None:
            self.flush()
        else:
            self._read_manifest()
        for part in self._parts:
            for kind, size in zip(KINDS, part.bytes, strict=True):
                file = self.file(kind, part.name)
                found = file.stat().st_size if file.exists() else -1
                if found != size:
                    what = "missing" if found < 0 else f"damaged: {found} of {size} bytes"
                    raise LedgerError(f"{file} is {what}")
        return self._parts

    def _small(self) -> list[Part]:
        """The small parts at the end; large ones are never rewritten."""
        large = [i for i, p in enumerate(self._parts) if sum(p.bytes) >= SMALL_BYTES]
        return self._parts[large[-1] + 1 if large else 0 :]

    def _values_table(self) -> pa.Table:
        rows = self._buffer
        names = file_columns(self.estimators, self.targets)
        sizes = [len(row.ids) for row in rows]
        V = [np.full((len(names), n), np.nan) for n in sizes]
        V = [v if row.values is None else row.values for v, row in zip(V, rows, strict=True)]
        weight = [np.nan if row.values is None else row.record.weight for row in rows]
        ids = [row.ids for row in rows if len(row.ids)] or [pa.array([], self._ids or "int64")]
        columns: dict[str, Any] = {
            "step": np.repeat(np.array([row.record.step for row in rows], np.int64), sizes),
            "id": pa.chunked_array(ids),
            "weight": pa.array(np.repeat(np.array(weight, np.float64), sizes), from_pandas=True),
        }
        for name, v in zip(names, np.concatenate(V, axis=1), strict=True):
            columns[name] = pa.array(v, from_pandas=True)
        return pa.table(columns)

    def _steps_table(self) -> pa.Table:
        records = [row.record for row in self._buffer]
        columns: dict[str, Any] = {
            "step": pa.array([r.step for r in records], pa.int64()),
            "lr": pa.array([float(r.lr) for r in records], pa.float64()),
            "examples": pa.array([len(r.ids) for r in records], pa.int64()),
            "weight": pa.array([float(r.weight) for r in records], pa.float64()),
            "scored": pa.array([r.values is not None for r in records], pa.bool_()),
            "missed": pa.array([float(r.missed) for r in records], pa.float64()),
            "void": pa.array([r.void for r in records], pa.string()),
        }
        for e, name in enumerate(file_columns(["sum"], self.estimators)):
            sums = np.array([step_row(r, e)["sum"] for r in records], np.float64)
            columns[name] = pa.array(sums, from_pandas=True)
        A = np.array([_losses(r.audit, len(self.targets)) for r in records])  # [steps, 3·Q]
        for name, loss in zip(file_columns(LOSSES, self.targets), A.T, strict=True):
            columns[name] = pa.array(loss, from_pandas=True)
        return pa.table(columns)

    def _read(self, kind: str, parts: Sequence[Part]) -> Iterator[pa.Table]:
        for part in parts:
            file = self.file(kind, part.name)
            try:
                with pq.ParquetFile(file) as source:
                    for group in range(source.num_row_groups):
                        yield source.read_row_group(group)
            except (pa.ArrowException, OSError) as error:
                raise LedgerError(f"{file} cannot be read: {error}") from error

    def _write_part(self, values: Iterable[pa.Table], steps: Iterable[pa.Table]) -> Part:
        """Write both files of a new part; they do not count before ``_commit``."""
        name = f"part-{self._next:06d}"
        rows, size = files.write_parquet(self.file("values", name), values)
        steps = list(steps)
        first, last = (f(pa.concat_tables(steps)["step"]).as_py() for f in (pc.min, pc.max))
        count, steps_size = files.write_parquet(self.file("steps", name), steps)
        return Part(name, first, last, count, rows, (size, steps_size))

    def _commit(self, parts: list[Part]) -> None:
        """Make these the parts that count, in one rename, then delete the others."""
        manifest = {"ids": self._ids, "next": self._next + 1, "parts": [asdict(p) for p in parts]}
        files.write_json(self.path / "manifest.json", manifest)
        self._parts, self._next = parts, self._next + 1
        self._clean()

    def _clean(self) -> None:
        """Delete our own files that the manifest does not name: leftovers of a killed writer."""
        live = {p.name for p in self._parts}
        for kind in KINDS:
            for file in (self.path / kind).glob("part-*"):
                if file.suffix == ".tmp" or (file.suffix == ".parquet" and file.stem not in live):
                    file.unlink(missing_ok=True)
        for file in self.path.glob("*.json.tmp"):
            file.unlink(missing_ok=True)

    def _read_manifest(self) -> None:
        manifest = files.read_json(self.path / "manifest.json")
        if manifest is None:
            return
        try:
            parts = [Part(**p | {"bytes": tuple(p["bytes"])}) for p in manifest["parts"]]
            self._ids, self._next, self._parts = manifest["ids"], manifest["next"], parts
        except (KeyError, TypeError) as error:
            raise LedgerError(f"{self.path / 'manifest.json'} is damaged: {error}") from error

    def _writable(self) -> None:
        if self._lock is None:
            raise LedgerError(f"{self.path} is closed, or open for reading only")


def as_ids(ids: Any) -> pa.Array:
    """Ids as an Arrow array of int64 or string; anything else, or a mixture, is refused."""
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


def _before(table: pa.Table, step: int) -> pa.Table:
    return table.filter(pc.less(table["step"], step))


def _losses(audit: Audit | None, Q: int) -> np.ndarray:
    if audit is None:
        return np.full(3 * Q, np.nan)
    return np.concatenate([audit.before, audit.without_batch, audit.with_batch]).astype(np.float64)

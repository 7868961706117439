"""Reading a ledger: the tables of ``MemoryLedger`` from Parquet files, by DuckDB.

Sums run inside DuckDB under a memory limit, with its temporary files on disk, so a ledger may be
larger than memory; only the answer (one row per example) becomes a pandas table.

A ledger may come from a stranger. DuckDB gets record batches, never files: it is told to touch
nothing outside itself, and no name from the ledger becomes part of a query. Targets are the columns
x0, x1, ... there.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.ledger.manifest import Part
from inrun.ledger.parts import LOSSES, Columns, file_columns, open_part, verify
from inrun.ledger.records import (
    ROUNDING,
    STEP_COLUMNS,
    LedgerError,
    MemoryLedger,
    history_table,
    value_columns,
)

if TYPE_CHECKING:
    import duckdb

MEMORY_LIMIT = "2GiB"  # of DuckDB; the answer comes on top
BATCH_ROWS, BATCH_CELLS = 1 << 17, 1 << 22  # rows and numbers that are decoded at a time
TOGETHER = 32  # columns of a query: DuckDB's time to plan it grows faster than their number
SMALL_BYTES = 64 << 20  # a smaller part may be merged with others, and deleted, while it is read
T = TypeVar("T")
Opened = Callable[[], pq.ParquetFile]


class ParquetTables:
    """The tables of the parts that ``sources`` names. ``estimator`` is an index, as in Ledger."""

    _ids: str | None = None  # "int64" or "string", None before the first id

    def __init__(self, path: Path, targets: Sequence[str], estimators: Sequence[str]) -> None:
        self.path = path
        self.targets = list(targets)
        self.estimators = list(estimators)
        self.columns = Columns(tuple(estimators), tuple(targets))

    def sources(self) -> list[Part]:
        """The parts to read now."""
        raise NotImplementedError

    def steady(self) -> contextlib.AbstractContextManager[Any]:
        """While this is held, no part is replaced by a writer of this process."""
        return contextlib.nullcontext()

    def file(self, kind: str, name: str) -> Path:
        return self.path / kind / f"{name}.parquet"

    # -- tables -----------------------------------------------------------------------------

    def values(self, estimator: int) -> pd.DataFrame:
        """One row per example: id, value, one column per named target, steps seen and scored."""
        columns = value_columns(self.targets)

        def sums(k: int) -> str:
            found = "".join(f"sum(weight * x{i}), " for i in range(k))
            return f"SELECT id, {found}count(*), count(weight) FROM v0 GROUP BY id ORDER BY id"

        found = self._ask(estimator, columns, sums)
        if not found:
            return MemoryLedger(self.targets).values(0)
        ids, *_, steps, scored = found[0].columns
        parts = [found[0][ids], *(t.iloc[:, 1:-2] for t in found), found[0][[steps, scored]]]
        table = pd.concat(parts, axis=1)
        table.columns = pd.Index(["id", *columns, "steps", "scored"])
        return table

    def harm(self, estimator: int) -> pd.DataFrame:
        """One row per example: id, harm (see ``MemoryLedger.harm``)."""
        return self._harm(estimator, self.targets)

    def top(
        self,
        estimator: int,
        n: int = 20,
        by: str = "value",
        target: str | None = None,
        worst: bool = False,
    ) -> pd.DataFrame:
        """The n examples of highest (``worst``: lowest) value, or of most harm, best first.

        Columns: id, value (of one target if named), harm where asked for, steps, scored. Examples
        that were never scored are left out.
        """
        self._known(target)
        sums = "SELECT id, sum(weight * x0) AS value, count(*) AS steps, count(weight) AS scored"
        column = [target or "value"]
        if by == "harm":
            harm = self._harm(estimator, [target] if target else self.targets).dropna()
            picked = harm.sort_values(["harm", "id"], ascending=[False, True]).head(int(n))
            chosen = pa.table({"id": pa.array(picked["id"], self._id_type())})
            select = f"{sums} FROM v0 WHERE id IN (SELECT id FROM picked) GROUP BY id"
            found = self._ask(estimator, column, lambda _: select, picked=chosen)
            names = ["id", "value", "harm", "steps", "scored"]
            return picked.merge(found[0], on="id")[names] if found else pd.DataFrame(columns=names)
        order = "ASC" if worst else "DESC"
        select = f"""{sums} FROM v0 GROUP BY id HAVING value IS NOT NULL
            ORDER BY value {order}, id LIMIT {int(n)}"""
        found = self._ask(estimator, column, lambda _: select)
        return found[0] if found else pd.DataFrame(columns=["id", "value", "steps", "scored"])

    def history(self, estimator: int) -> pd.DataFrame:
        """One row per step and example: step, id, value and one column per named target."""
        chunks = list(self.history_batches(estimator))
        if not chunks:
            return MemoryLedger(self.targets).history(estimator)
        return pd.concat(chunks, ignore_index=True)

    def history_batches(self, estimator: int, rows: int = 1_000_000) -> Iterator[pd.DataFrame]:
        """``history`` in pieces of at most this many rows, for ledgers larger than memory."""
        for batch in self._scan(self._open("values")[0], estimator, range(len(self.targets)), rows):
            scored = batch.filter(batch["weight"].is_valid())
            step, ids, _, *V = (c.to_numpy(zero_copy_only=False) for c in scored.columns)
            if len(ids):
                yield history_table(step, ids, np.stack(V, axis=1), self.targets)

    def steps(self, estimator: int) -> pd.DataFrame:
        """One row per step, with the audit where there was one (means over targets)."""
        tables = [self._read(part) for part in self._open("steps")[0]]
        if not tables:
            return MemoryLedger(self.targets).steps(0)
        raw = pa.concat_tables(tables)
        losses = file_columns(LOSSES, self.targets)
        A = np.stack([raw[c].to_numpy() for c in losses]).reshape(3, len(self.targets), -1)
        before, without, after = A.mean(axis=1)
        total = raw[file_columns(["sum"], self.estimators)[estimator]].to_numpy()
        share = without - after
        columns = {name: raw[name].to_numpy() for name in ("step", "lr", "examples")}
        columns |= {
            "sum": total,
            "loss": before,
            "batch_share": share,
            "momentum_share": before - without,
            "residual": share - total,
            "explained": total / np.where(share == 0, np.nan, share),
            "missed": raw["missed"].to_numpy(),
            "void": np.array(raw["void"].to_pylist(), dtype=object),
        }
        return pd.DataFrame(columns)[list(STEP_COLUMNS)]

    # -- queries ----------------------------------------------------------------------------

    def _harm(self, estimator: int, targets: Sequence[str]) -> pd.DataFrame:
        found = self._ask(estimator, targets, _harm_sql, scans=2)
        if not found:
            return MemoryLedger(self.targets).harm(0)
        total = pd.concat([t["harm"] for t in found], axis=1).sum(axis=1, min_count=1)
        return pd.DataFrame({"id": found[0]["id"], "harm": total})

    def _known(self, target: str | None) -> None:
        if target is not None and target not in self.targets:
            raise LedgerError(f"no target {target!r} in {self.path}; it has {_list(self.targets)}")

    def _ask(
        self,
        estimator: int,
        columns: Sequence[str],
        sql: Callable[[int], str],
        scans: int = 1,
        **others: pa.Table,
    ) -> list[pd.DataFrame]:
        """Run a query over the values, for up to ``TOGETHER`` columns at a time.

        ``columns`` are targets, or "value" for the mean over them. ``sql(k)`` reads them as x0 ...
        x(k-1) from the tables v0, v1, ... which are the same, each to be read once. The answer is
        empty for a ledger without values.
        """
        import duckdb

        copies = self._open("values", scans)
        if not copies[0]:
            return []
        answers: list[pd.DataFrame] = []
        failed: list[LedgerError] = []
        with connect() as db:
            for name, table in others.items():
                db.register(name, table)
            for start in range(0, len(columns), TOGETHER):
                some = columns[start : start + TOGETHER]
                for i, parts in enumerate(copies):
                    db.register(f"v{i}", self._reader(parts, estimator, some, failed))
                try:
                    answers.append(db.sql(sql(len(some))).df())
                except duckdb.Error as error:
                    if failed:
                        raise failed[0] from error
                    raise self._unreadable(error) from error
        return answers

    def _reader(
        self, parts: list[Opened], estimator: int, columns: Sequence[str], failed: list[LedgerError]
    ) -> pa.RecordBatchReader:
        """Step, id, weight and the columns as x0, x1, ..., for DuckDB."""
        Q = len(self.targets)
        where = {name: q for q, name in enumerate(self.targets)} | ({"value": 0} if Q == 1 else {})
        mean = "value" in columns and Q > 1
        wanted = list(range(Q)) if mean else [where[c] for c in columns]
        fields = [("step", pa.int64()), ("id", self._id_type()), ("weight", pa.float64())]
        fields += [(f"x{i}", pa.float64()) for i in range(len(columns))]
        schema = pa.schema(fields)

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                for batch in self._scan(parts, estimator, wanted, BATCH_ROWS):
                    step, ids, weight, *x = batch.columns
                    if mean:
                        V = np.stack([c.to_numpy(zero_copy_only=False) for c in x], axis=1)
                        average = pa.array(V.mean(axis=1), from_pandas=True)
                        x = [average if c == "value" else x[where[c]] for c in columns]
                    yield pa.record_batch([step, ids, weight, *x], schema=schema)
            except LedgerError as error:  # DuckDB would make it an error of its own
                failed.append(error)
                raise

        return pa.RecordBatchReader.from_batches(schema, batches())

    def _id_type(self) -> pa.DataType:
        return pa.string() if self._ids == "string" else pa.int64()

    # -- files ------------------------------------------------------------------------------

    def _scan(
        self, parts: list[Opened], estimator: int, targets: Sequence[int], rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Step, id, weight and the values of some targets, a limited number of rows at a time."""
        names = self.columns.values(estimator)
        columns = ["step", "id", "weight", *(names[q] for q in targets)]
        rows = max(1, min(rows, max(1024, BATCH_CELLS // len(columns))))
        for part in parts:
            try:
                for batch in part().iter_batches(rows, columns=columns):
                    yield batch.select(columns)
            except (pa.ArrowException, OSError) as error:
                raise self._unreadable(error) from error

    def _read(self, part: Opened) -> pa.Table:
        try:
            return part().read()
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def _open(self, kind: str, copies: int = 1) -> list[list[Opened]]:
        """The files of one kind, verified; once more if a writer replaced them meanwhile.

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
        schema = self.columns.schema(kind, self._ids)
        verify(self.path, kind, part)
        if sum(part.bytes) >= SMALL_BYTES:
            return [lambda: open_part(self.path, kind, part, schema)] * copies
        held = [open_part(self.path, kind, part, schema) for _ in range(copies)]
        return [lambda f=f: f for f in held]  # type: ignore[misc]

    def _changed(self, parts: list[Part]) -> bool:
        """Did a writer replace the files that were being read?"""
        try:
            return parts != self.sources()
        except LedgerError:
            return False

    def _unreadable(self, error: Exception) -> LedgerError:
        return LedgerError(f"{self.path} cannot be read: {' '.join(str(error).split())}")


@contextlib.contextmanager
def connect() -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB in memory, limited, spilling to a temporary folder, closed off from the rest."""
    try:
        import duckdb
    except ImportError:
        raise LedgerError("reading a ledger needs duckdb: pip install inrun") from None
    settings: dict[str, Any] = {
        "memory_limit": MEMORY_LIMIT,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,
        "preserve_insertion_order": False,
    }
    with (
        tempfile.TemporaryDirectory(prefix="inrun-", ignore_cleanup_errors=True) as spill,
        duckdb.connect(config=settings | {"temp_directory": spill}) as db,
    ):
        db.execute("SET enable_external_access = false")  # not before temp_directory is set
        db.execute("SET lock_configuration = true")
        yield db


def _harm_sql(k: int) -> str:
    """Harm by id. A join with the spread of each step, not a window: no sort of all rows."""
    each = range(k)
    x = ", ".join(
        f"CASE WHEN weight IS NOT NULL AND isfinite(x{q}) THEN x{q} END AS y{q}" for q in each
    )
    spread = ", ".join(f"stddev_pop(y{q}) AS s{q}, max(abs(y{q})) AS m{q}" for q in each)
    hurt = ", ".join(
        f"sum(CASE WHEN s{q} > {ROUNDING} * m{q} AND y{q} IS NOT NULL "
        f"THEN greatest(-y{q} / s{q}, 0) END) AS h{q}"
        for q in each
    )
    some = " OR ".join(f"h{q} IS NOT NULL" for q in each)
    total = " + ".join(f"coalesce(h{q}, 0)" for q in each)
    return f"""SELECT id, CASE WHEN {some} THEN {total} END AS harm FROM (
        SELECT id, {hurt} FROM (SELECT id, step, {x} FROM v0) JOIN (
            SELECT step, {spread} FROM (SELECT step, {x} FROM v1) GROUP BY step) USING (step)
        GROUP BY id) ORDER BY id"""


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")

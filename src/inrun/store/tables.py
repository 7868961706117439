"""Reading a ledger: the tables of ``MemoryLedger`` from Parquet files, by DuckDB.

Sums run inside DuckDB under a memory limit, with its temporary files on disk, so a ledger may be
larger than memory; only the answer (one row per example) becomes a pandas table.

A ledger may come from a stranger. DuckDB gets record batches, never files: it is told to touch
nothing outside itself, and no name from the ledger becomes part of a query. Targets are the columns
c0, c1, ... there.
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

from inrun.ledger import (
    ROUNDING,
    STEP_COLUMNS,
    LedgerError,
    MemoryLedger,
    history_table,
    value_columns,
)
from inrun.store.manifest import Part
from inrun.store.parts import LOSSES, Columns, file_columns, open_part, verify

if TYPE_CHECKING:
    import duckdb

MEMORY_LIMIT = "2GiB"  # of DuckDB; the answer comes on top
BATCH_CELLS = 1 << 22  # numbers that are decoded at a time
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
        sums = ", ".join(f"sum(weight * {x})" for x in self._exprs(columns))
        select = f"SELECT id, {sums}, count(*), count(weight) FROM v0 GROUP BY id ORDER BY id"
        table = self._ask(select, estimator, lambda: MemoryLedger(self.targets).values(0))
        table.columns = pd.Index(["id", *columns, "steps", "scored"])
        return table

    def harm(self, estimator: int) -> pd.DataFrame:
        """One row per example: id, harm (see ``MemoryLedger.harm``)."""
        select = self._harm_sql(self.targets) + " ORDER BY id"
        return self._ask(select, estimator, lambda: MemoryLedger(self.targets).harm(0))

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
        value = self._exprs([target or "value"])[0]
        sums = f"sum(weight * {value}) AS value, count(*) AS steps, count(weight) AS scored"
        if by == "harm":
            harm = self._harm_sql([target] if target else self.targets)
            select = f"""WITH h AS MATERIALIZED (SELECT * FROM ({harm}) WHERE harm IS NOT NULL
                ORDER BY harm DESC, id LIMIT {int(n)}), v AS (SELECT id, {sums} FROM v2
                WHERE id IN (SELECT id FROM h) GROUP BY id)
                SELECT id, value, harm, steps, scored FROM h JOIN v USING (id)
                ORDER BY harm DESC, id"""
        else:
            order = "ASC" if worst else "DESC"
            select = f"""SELECT id, {sums} FROM v0 GROUP BY id HAVING value IS NOT NULL
                ORDER BY value {order}, id LIMIT {int(n)}"""
        names = ["id", "value", *(["harm"] if by == "harm" else []), "steps", "scored"]
        return self._ask(select, estimator, lambda: pd.DataFrame(columns=names))

    def history(self, estimator: int) -> pd.DataFrame:
        """One row per step and example: step, id, value and one column per named target."""
        chunks = list(self.history_batches(estimator))
        if not chunks:
            return MemoryLedger(self.targets).history(estimator)
        return pd.concat(chunks, ignore_index=True)

    def history_batches(self, estimator: int, rows: int = 1_000_000) -> Iterator[pd.DataFrame]:
        """``history`` in pieces of at most this many rows, for ledgers larger than memory."""
        for batch in self._scan(self._open("values")[0], estimator, rows):
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

    def _exprs(self, columns: Sequence[str]) -> list[str]:
        """SQL for "value" (the mean over targets) and for single targets, by name."""
        Q = len(self.targets)
        mean = "c0" if Q == 1 else f"({_sum([f'c{q}' for q in range(Q)])} / {Q})"
        where = {name: f"c{q}" for q, name in enumerate(self.targets)}
        return [mean if c == "value" else where[c] for c in columns]

    def _harm_sql(self, targets: Sequence[str]) -> str:
        """Harm by id. A join with the spread of each step, not a window: no sort of all rows."""
        x = [
            f"CASE WHEN weight IS NOT NULL AND isfinite({c}) THEN {c} END"
            for c in self._exprs(targets)
        ]
        spread = ", ".join(
            f"stddev_pop({c}) AS s{q}, max(abs({c})) AS m{q}" for q, c in enumerate(x)
        )
        hurt = [
            f"sum(CASE WHEN s{q} > {ROUNDING} * m{q} AND {c} IS NOT NULL "
            f"THEN greatest(-{c} / s{q}, 0) END)"
            for q, c in enumerate(x)
        ]
        parts = ", ".join(f"{h} AS h{q}" for q, h in enumerate(hurt))
        some = "coalesce(" + ", ".join(f"h{q}" for q in range(len(x))) + ")"
        total = _sum([f"coalesce(h{q}, 0)" for q in range(len(x))])
        return f"""SELECT id, CASE WHEN {some} IS NOT NULL THEN {total} END AS harm FROM (
            SELECT id, {parts} FROM v0 JOIN (
                SELECT step, {spread} FROM v1 GROUP BY step) USING (step)
            GROUP BY id)"""

    def _known(self, target: str | None) -> None:
        if target is not None and target not in self.targets:
            raise LedgerError(f"no target {target!r} in {self.path}; it has {_list(self.targets)}")

    def _ask(self, sql: str, estimator: int, empty: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """Run a query over the values; ``empty`` answers for a ledger without any.

        Its tables v0, v1, v2 are the same; each can be read once.
        """
        import duckdb

        copies = self._open("values", 3)
        if not copies[0]:
            return empty()
        failed: list[LedgerError] = []
        with connect() as db:
            for i, parts in enumerate(copies):
                db.register(f"v{i}", self._reader(parts, estimator, failed))
            try:
                return db.sql(sql).df()
            except duckdb.Error as error:
                if failed:
                    raise failed[0] from error
                first = str(error).splitlines()[0]
                raise LedgerError(f"{self.path} cannot be read: {first}") from error

    def _reader(
        self, parts: list[Opened], estimator: int, failed: list[LedgerError]
    ) -> pa.RecordBatchReader:
        """Step, id, weight and the values of one estimator as c0, c1, ..., for DuckDB."""
        schema = self.columns.schema("values", self._ids)
        fields = [(n, schema.field(n).type) for n in ("step", "id", "weight")]
        fields += [(f"c{q}", pa.float64()) for q in range(len(self.targets))]

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                for batch in self._scan(parts, estimator, GROUP):
                    yield batch.rename_columns([name for name, _ in fields])
            except LedgerError as error:  # DuckDB would make it an error of its own
                failed.append(error)
                raise

        return pa.RecordBatchReader.from_batches(pa.schema(fields), batches())

    # -- files ------------------------------------------------------------------------------

    def _scan(self, parts: list[Opened], estimator: int, rows: int) -> Iterator[pa.RecordBatch]:
        """Step, id, weight and the values of one estimator, a limited number of rows at a time."""
        columns = ["step", "id", "weight", *self.columns.values(estimator)]
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


GROUP = 1 << 17  # rows of a batch for DuckDB


def _sum(terms: Sequence[str]) -> str:
    """a + b + ... as a balanced tree: DuckDB refuses expressions more than 1,000 deep."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return f"({_sum(terms[:half])} + {_sum(terms[half:])})"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")

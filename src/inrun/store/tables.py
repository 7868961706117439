"""Reading a ledger: the tables of ``MemoryLedger`` from Parquet files, by DuckDB.

Sums run inside DuckDB under a memory limit, with its temporary files on disk, so a ledger may be
larger than memory; only the answer (one row per example) becomes a pandas table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

if TYPE_CHECKING:
    import duckdb

KINDS = ("values", "steps")
LOSSES = ("loss_before", "loss_without_batch", "loss_with_batch")
MEMORY_LIMIT = "2GiB"  # of DuckDB; the answer comes on top
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """One pair of files, ``values/<name>.parquet`` and ``steps/<name>.parquet``."""

    name: str
    first: int  # first and last step
    last: int
    steps: int  # how many steps, and rows of values
    rows: int
    bytes: tuple[int, int]  # sizes of the two files: a cheap test that both are whole


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


class ParquetTables:
    """The tables of the parts that ``sources`` names. ``estimator`` is an index, as in Ledger."""

    def __init__(self, path: Path, targets: Sequence[str], estimators: Sequence[str]) -> None:
        self.path = path
        self.targets = list(targets)
        self.estimators = list(estimators)

    def sources(self) -> list[Part]:
        """The parts to read now."""
        raise NotImplementedError

    def file(self, kind: str, name: str) -> Path:
        return self.path / kind / f"{name}.parquet"

    # -- tables -----------------------------------------------------------------------------

    def values(self, estimator: int) -> pd.DataFrame:
        """One row per example: id, value, one column per named target, steps seen and scored."""
        columns = value_columns(self.targets)
        sums = ", ".join(f"sum(weight * {x})" for x in self._exprs(estimator, columns))
        select = (
            f"SELECT id, {sums}, count(*), count(weight) FROM {{values}} GROUP BY id ORDER BY id"
        )
        table = self._ask(select, lambda: MemoryLedger(self.targets).values(0))
        table.columns = pd.Index(["id", *columns, "steps", "scored"])
        return table

    def harm(self, estimator: int) -> pd.DataFrame:
        """One row per example: id, harm (see ``MemoryLedger.harm``)."""
        select = self._harm_sql(estimator, self.targets) + " ORDER BY id"
        return self._ask(select, lambda: MemoryLedger(self.targets).harm(0))

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
        value = self._exprs(estimator, [target or "value"])[0]
        sums = f"sum(weight * {value}) AS value, count(*) AS steps, count(weight) AS scored"
        if by == "harm":
            harm = self._harm_sql(estimator, [target] if target else self.targets)
            select = f"""WITH h AS MATERIALIZED (SELECT * FROM ({harm}) WHERE harm IS NOT NULL
                ORDER BY harm DESC, id LIMIT {int(n)}), v AS (SELECT id, {sums} FROM {{values}}
                WHERE id IN (SELECT id FROM h) GROUP BY id)
                SELECT id, value, harm, steps, scored FROM h JOIN v USING (id)
                ORDER BY harm DESC, id"""
        else:
            order = "ASC" if worst else "DESC"
            select = f"""SELECT id, {sums} FROM {{values}} GROUP BY id HAVING value IS NOT NULL
                ORDER BY value {order}, id LIMIT {int(n)}"""
        names = ["id", "value", *(["harm"] if by == "harm" else []), "steps", "scored"]
        return self._ask(select, lambda: pd.DataFrame(columns=names))

    def history(self, estimator: int) -> pd.DataFrame:
        """One row per step and example: step, id, value and one column per named target."""
        chunks = list(self.history_batches(estimator))
        if not chunks:
            return MemoryLedger(self.targets).history(estimator)
        return pd.concat(chunks, ignore_index=True)

    def history_batches(self, estimator: int, rows: int = 1_000_000) -> Iterator[pd.DataFrame]:
        """``history`` in pieces of at most this many rows, for ledgers larger than memory."""
        columns = self._file_columns(estimator)
        for part in self._parts_of("values"):
            for batch in _batches(part, rows, ["step", "id", "weight", *columns]):
                scored = batch.filter(batch["weight"].is_valid())
                V = np.stack([scored[c].to_numpy(zero_copy_only=False) for c in columns], axis=1)
                step = scored["step"].to_numpy(zero_copy_only=False)
                ids = scored["id"].to_numpy(zero_copy_only=False)
                if len(ids):
                    yield history_table(step, ids, V, self.targets)

    def steps(self, estimator: int) -> pd.DataFrame:
        """One row per step, with the audit where there was one (means over targets)."""
        tables = [part.read() for part in self._parts_of("steps")]
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

    # -- how --------------------------------------------------------------------------------

    def _file_columns(self, estimator: int) -> list[str]:
        Q = len(self.targets)
        return file_columns(self.estimators, self.targets)[estimator * Q : (estimator + 1) * Q]

    def _exprs(self, estimator: int, columns: Sequence[str]) -> list[str]:
        """SQL for "value" (the mean over targets) and for single targets, by name."""
        quoted = [_name(c) for c in self._file_columns(estimator)]
        mean = quoted[0] if len(quoted) == 1 else f"(({' + '.join(quoted)}) / {len(quoted)})"
        return [mean if c == "value" else quoted[self.targets.index(c)] for c in columns]

    def _harm_sql(self, estimator: int, targets: Sequence[str]) -> str:
        """Harm by id. A join with the spread of each step, not a window: no sort of all rows."""
        x = [
            f"CASE WHEN weight IS NOT NULL AND isfinite({c}) THEN {c} END"
            for c in self._exprs(estimator, targets)
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
        some = " OR ".join(f"h{q} IS NOT NULL" for q in range(len(x)))
        total = " + ".join(f"coalesce(h{q}, 0)" for q in range(len(x)))
        return f"""SELECT id, CASE WHEN {some} THEN {total} END AS harm FROM (
            SELECT id, {parts} FROM {{values}} JOIN (
                SELECT step, {spread} FROM {{values}} GROUP BY step) USING (step)
            GROUP BY id)"""

    def _known(self, target: str | None) -> None:
        if target is not None and target not in self.targets:
            raise LedgerError(f"no target {target!r} in {self.path}; it has {_list(self.targets)}")

    def _ask(self, sql: str, empty: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """Run a query over the values files; ``empty`` answers for a ledger without any."""

        def ask(parts: list[Part]) -> pd.DataFrame:
            if not parts:
                return empty()
            names = ", ".join(_text(str(self.file("values", p.name))) for p in parts)
            # a folder called step=100 is no partition of a table
            source = f"read_parquet([{names}], hive_partitioning=false)"
            with connect() as db:
                return db.sql(sql.replace("{values}", source)).df()

        return self._steady(ask)

    def _parts_of(self, kind: str) -> list[pq.ParquetFile]:
        return self._steady(lambda parts: [_open(self.file(kind, p.name)) for p in parts])

    def _changed(self, parts: list[Part]) -> bool:
        """Did a writer replace the files that were being read?"""
        try:
            return parts != self.sources()
        except LedgerError:
            return False

    def _steady(self, read: Callable[[list[Part]], T]) -> T:
        """Read; once more if a writer replaced the files meanwhile; errors name what is damaged."""
        import duckdb

        for attempt in range(3):
            parts: list[Part] = []
            try:
                parts = self.sources()
                return read(parts)
            except (duckdb.Error, pa.ArrowException, OSError, LedgerError) as error:
                if attempt < 2 and self._changed(parts):
                    continue
                if isinstance(error, LedgerError):
                    raise
                first = str(error).splitlines()[0]
                raise LedgerError(f"{self.path} cannot be read: {first}") from error
        raise AssertionError


def connect() -> duckdb.DuckDBPyConnection:
    """DuckDB in memory, limited, spilling to a temporary folder, never reaching for the network."""
    try:
        import duckdb
    except ImportError:
        raise LedgerError("reading a ledger needs duckdb: pip install inrun") from None
    settings: dict[str, Any] = {
        "memory_limit": MEMORY_LIMIT,
        "temp_directory": tempfile.gettempdir(),
        "autoinstall_known_extensions": False,
        "preserve_insertion_order": False,
    }
    return duckdb.connect(config=settings)


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise LedgerError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error


def _batches(part: pq.ParquetFile, rows: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    try:
        yield from part.iter_batches(rows, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise LedgerError(f"a values file cannot be read: {error}") from error


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")

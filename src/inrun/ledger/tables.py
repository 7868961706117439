"""The tables of a ledger: what ``values``, ``harm``, ``history`` and ``steps`` are, defined once.

A ledger in memory and a ledger on disk differ only in where the rows come from. They hand them over
as Arrow record batches: step, id, weight and one column of values for each target. DuckDB sums them
under a memory limit, with its temporary files on disk, so a ledger may be larger than memory; only
the answer (one row per example) becomes a pandas table.

A ledger may come from a stranger. DuckDB gets record batches, never files: it is told to touch
nothing outside itself, and no name from the ledger becomes part of a query. Targets are the columns
x0, x1, ... there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from inrun.ledger import LedgerError, signals, steady, visits
from inrun.ledger.database import connect, unreadable
from inrun.ledger.signals import WHOLE, Window
from inrun.ledger.tokens import table as token_table

BATCH_ROWS = 1 << 17  # rows that DuckDB is given at a time
TOGETHER = 32  # columns of a query: DuckDB's time to plan it grows faster than their number
ROUNDING = 1e-6  # times the largest value of a batch: a smaller spread counts as none
STEP_COLUMNS = (
    "step", "lr", "examples", "sum", "nobody", "loss", "batch_share", "momentum_share",
    "residual", "explained", "drop", "decay", "missed", "bend", "void",
)  # fmt: skip
HALVES = ("half 1", "half 2")  # targets, or ends of their names, that ``inrun.halves`` makes
RESERVED = ("step", "id", "value", "steps", "scored", "weight", "harm")
# scan(estimator, targets, rows): record batches of at most so many rows, with the columns step, id,
# weight (null where the step was not scored) and the values of these targets, unweighted. Targets
# beyond the last are the signals (signals.py), and behind these the values by two halves of the
# validation rows (steady.py).
Scan = Callable[[int, Sequence[int], int], Iterator[pa.RecordBatch]]


class LedgerTables:
    """The tables of a ledger. ``estimator`` is an index into the run's list of estimators."""

    epochs, suspects, steadiness = visits.epochs, visits.suspects, steady.steadiness
    targets: list[str]
    threads: int | None = None  # of DuckDB; None leaves it the choice

    def scans(self, n: int) -> list[Scan]:
        """Returns n ways to read the same rows, which may be used side by side; none if empty."""
        raise NotImplementedError

    def id_type(self) -> pa.DataType:
        """Returns the Arrow type of the ids: int64 or string."""
        raise NotImplementedError

    def name(self) -> str:
        """Returns what error messages call this ledger."""
        raise NotImplementedError

    @property
    def last_step(self) -> int:
        """The last step on record, -1 if there is none."""
        raise NotImplementedError

    def has_signals(self) -> bool:
        """Are signals on record (signals.py)?"""
        raise NotImplementedError

    def steps(self, estimator: int) -> pd.DataFrame:
        """One row per step."""
        raise NotImplementedError

    def values(self, estimator: int, window: Window = WHOLE) -> pd.DataFrame:
        """One row per example: id, value, one column per named target, steps seen and scored, and
        the means of the signals where there are any, with the change of the loss.

        The values of an example are summed over the steps that were scored, each times the weight
        of its step. An example that was never scored has NaN.
        """
        columns = value_columns(self.targets)
        found = self._query(estimator, columns, _values_sql, window=window)
        if not found:
            return _empty(id="int64", **dict.fromkeys(columns, "float64"), **_COUNTS)
        ids, *_, steps, scored = found[0].columns
        parts = [found[0][ids], *(t.iloc[:, 1:-2] for t in found), found[0][[steps, scored]]]
        table = pd.concat(parts, axis=1)
        table.columns = pd.Index(["id", *columns, "steps", "scored"])
        if not self.has_signals():
            return table
        sql = signals.means_and_change_sql
        (means,) = self._query(estimator, signals.SHOWN, sql, window=window)
        names = [*signals.shown_names(self.targets), signals.change_name(self.targets)]
        return pd.concat([table, means.iloc[:, 1:].set_axis(names, axis=1)], axis=1)

    def harm(
        self, estimator: int, targets: Sequence[str] | None = None, window: Window = WHOLE,
        signed: bool = False,
    ) -> pd.DataFrame:  # fmt: skip
        """One row per example: id, harm.

        Each step's values are divided by their standard deviation within the batch and target; the
        negative parts are summed over steps and targets (all, or those named). Steps whose examples
        are all alike (one example, or copies that differ by rounding only) have no spread and do
        not count; nor do values that are not finite. Harm is NaN where nothing counts. ``signed``:
        values above 0 count, too, against it.
        """
        sql = partial(_harm_sql, signed=signed)
        found = self._query(estimator, targets or self.targets, sql, scans=2, window=window)
        if not found:
            return _empty(id="int64", harm="float64")
        total = pd.concat([t["harm"] for t in found], axis=1).sum(axis=1, min_count=1)
        return pd.DataFrame({"id": found[0]["id"], "harm": total})

    def top(
        self,
        estimator: int,
        n: int = 20,
        by: str = "value",
        target: str | None = None,
        worst: bool = False,
        window: Window = WHOLE,
    ) -> pd.DataFrame:
        """The n examples of highest (``worst``: lowest) value, best first; or of most harm, highest
        loss or EL2N, lowest margin.

        Columns: id, value (of one target if named), harm or the signal where asked for, steps,
        scored. Examples that were never scored are left out.
        """
        if target is not None and target not in self.targets:
            known = ", ".join(self.targets[:10]) + (", ..." if len(self.targets) > 10 else "")
            raise LedgerError(f"no target {target!r} in {self.name()}; it has {known}")
        column = [target or "value"]
        if by in signals.SHOWN:
            return visits.top_by_signal(self, estimator, n, by, target or "value", window)
        if by == "harm":
            harm = self.harm(estimator, [target] if target else None, window).dropna()
            picked = harm.sort_values(["harm", "id"], ascending=[False, True]).head(int(n))
            chosen = pa.table({"id": pa.array(picked["id"], self.id_type())})
            found = self._query(estimator, column, _picked_sql, window=window, picked=chosen)
            names = ["id", "value", "harm", "steps", "scored"]
            if not found:
                return pd.DataFrame(columns=names)
            sums = found[0].set_axis(["id", "value", "steps", "scored"], axis=1)
            return picked.merge(sums, on="id")[names]
        order = "ASC" if worst else "DESC"
        found = self._query(
            estimator,
            column,
            lambda k: (
                f"""SELECT * FROM ({_values_sql(k)}) WHERE value0 IS NOT NULL
                ORDER BY value0 {order}, id LIMIT {int(n)}"""
            ),
            window=window,
        )
        names = ["id", "value", "steps", "scored"]
        return found[0].set_axis(names, axis=1) if found else pd.DataFrame(columns=names)

    def history(self, estimator: int, window: Window = WHOLE) -> pd.DataFrame:
        """One row per scored step and example: step, id, value, one column per named target."""
        pieces = list(self.history_batches(estimator, window=window))
        if not pieces:
            columns = value_columns(self.targets)
            return _empty(step="int64", id="int64", **dict.fromkeys(columns, "float64"))
        return pd.concat(pieces, ignore_index=True)

    def history_batches(
        self, estimator: int, rows: int = 1_000_000, window: Window = WHOLE, label: bool = False
    ) -> Iterator[pd.DataFrame]:
        """``history`` in pieces of at most this many rows, for ledgers larger than memory.
        ``label``: with a column of labels, where they are known."""
        Q = len(self.targets)
        extra = signals.shown_names(self.targets) if self.has_signals() else []
        extra += ["signal label"] if label and extra else []
        for scan in self.scans(1):
            for batch in scan(estimator, range(Q + len(extra)), rows):
                batch = window.cut(batch)
                scored = batch.filter(batch["weight"].is_valid())
                step, ids, _, *V = (c.to_numpy(zero_copy_only=False) for c in scored.columns)
                if len(ids):
                    frame = _history_table(step, ids, np.stack(V[:Q], axis=1), self.targets)
                    own: dict[str, np.ndarray] = dict(zip(extra, V[Q:], strict=True))
                    yield pd.concat([frame, pd.DataFrame(own)], axis=1) if own else frame

    def by_halves(self, estimator: int, window: Window = WHOLE) -> pd.DataFrame:
        """The visits that have values by two halves of the validation rows: step, id, weight,
        value (the mean over targets, unweighted), a and b."""
        Q, found = len(self.targets), list[pd.DataFrame]()
        last = self.last_step if window.until is None else min(window.until - 1, self.last_step)
        first = Q + len(signals.SIGNALS)
        for scan in self.scans(1):
            for batch in scan(estimator, [first, first + 1, *range(Q)], BATCH_ROWS):
                known = window.cut(batch.filter(batch.column(3).is_valid()))
                if not known.num_rows:
                    continue
                step, ids, weight, a, b, *V = known.columns
                V = np.stack([x.to_numpy(zero_copy_only=False) for x in V])
                own = {"step": step, "id": ids, "weight": window.weights(step, weight, last),
                       "a": a, "b": b}  # fmt: skip
                frame = pd.DataFrame({k: x.to_numpy(zero_copy_only=False) for k, x in own.items()})
                found.append(frame.assign(value=V.mean(axis=0)))
        columns = ["step", "id", "weight", "value", "a", "b"]
        return (
            pd.concat(found, ignore_index=True)[columns]
            if found
            else pd.DataFrame({}, columns=columns)
        )

    def token_batches(self, estimator: int) -> Iterator[pa.RecordBatch]:
        """Yields step, id, inputs and the values of positions, a list for each example (NULL: none
        were recorded), one column per target."""
        raise NotImplementedError

    def tokens(self, estimator: int, id: Any = None, step: int | None = None) -> pd.DataFrame:
        """One row per step, example and position: see ``RunTables.tokens``."""
        return token_table(self.token_batches(estimator), self.targets, id, step)

    def _query(
        self,
        estimator: int,
        columns: Sequence[str],
        sql: Callable[[int], str],
        scans: int = 1,
        window: Window = WHOLE,
        **others: pa.Table,
    ) -> list[pd.DataFrame]:
        """Run a query over the values, for up to ``TOGETHER`` columns at a time.

        ``columns`` are targets, or "value" for the mean over them, or signals. ``sql(k)`` reads
        them as x0 ... x(k-1) from the tables v0, v1, ... which are the same, each to be read once.
        Returns one table for each group of columns, none for a ledger without values.
        """
        readers = self.scans(scans)
        if not readers:
            return []
        answers: list[pd.DataFrame] = []
        failed: list[LedgerError] = []
        with connect(self.threads) as db:
            import duckdb

            for name, table in others.items():
                db.register(name, table)
            for start in range(0, len(columns), TOGETHER):
                some = columns[start : start + TOGETHER]
                for i, scan in enumerate(readers):
                    db.register(f"v{i}", self._reader(scan, estimator, some, failed, window))
                try:
                    answers.append(db.sql(sql(len(some))).df())
                except duckdb.Error as error:
                    if failed:
                        raise failed[0] from error
                    raise unreadable(self.name(), error) from error
        return answers

    def _reader(
        self,
        scan: Scan,
        estimator: int,
        columns: Sequence[str],
        failed: list[LedgerError],
        window: Window = WHOLE,
    ) -> pa.RecordBatchReader:
        """Returns step, id, weight and the columns as x0, x1, ..., for DuckDB.

        An error of the ledger is also put into ``failed``: DuckDB would raise one of its own.
        """
        Q = len(self.targets)
        where = {name: q for q, name in enumerate(self.targets)} | ({"value": 0} if Q == 1 else {})
        mean = "value" in columns and Q > 1
        if columns is signals.SHOWN:
            where = {name: Q + i for i, name in enumerate(signals.SHOWN)}
        wanted = list(range(Q)) if mean else [where[c] for c in columns]
        last = self.last_step if window.until is None else min(window.until - 1, self.last_step)
        fields = [("step", pa.int64()), ("id", self.id_type()), ("weight", pa.float64())]
        fields += [(f"x{i}", pa.float64()) for i in range(len(columns))]
        schema = pa.schema(fields)

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                for batch in scan(estimator, wanted, BATCH_ROWS):
                    step, ids, weight, *x = window.cut(batch).columns
                    weight = window.weights(step, weight, last)
                    if mean:
                        V = np.stack([c.to_numpy(zero_copy_only=False) for c in x], axis=1)
                        average = pa.array(V.mean(axis=1), from_pandas=True)
                        x = [average if c == "value" else x[where[c]] for c in columns]
                    yield pa.record_batch([step, ids, weight, *x], schema=schema)
            except LedgerError as error:
                failed.append(error)
                raise

        return pa.RecordBatchReader.from_batches(schema, batches())


def _values_sql(k: int, where: str = "") -> str:
    """The sum of each column over the scored steps of an example; all rows of it, and scored."""
    sums = "".join(f"sum(weight * x{q}) AS value{q}, " for q in range(k))
    return f"""SELECT id, {sums}count(*) AS steps, count(weight) AS scored
        FROM v0 {where} GROUP BY id ORDER BY id"""


def _picked_sql(k: int) -> str:
    return _values_sql(k, "WHERE id IN (SELECT id FROM picked)")


def _harm_sql(k: int, signed: bool = False) -> str:
    """Harm by id. A join with the spread of each step, not a window: no sort of all rows."""
    each = range(k)
    x = ", ".join(
        f"CASE WHEN weight IS NOT NULL AND isfinite(x{q}) THEN x{q} END AS y{q}" for q in each
    )
    spread = ", ".join(f"stddev_pop(y{q}) AS s{q}, max(abs(y{q})) AS m{q}" for q in each)
    part = "-y{0} / s{0}" if signed else "greatest(-y{0} / s{0}, 0)"
    hurt = ", ".join(
        f"sum(CASE WHEN s{q} > {ROUNDING} * m{q} AND y{q} IS NOT NULL THEN {part.format(q)} END) "
        f"AS h{q}"
        for q in each
    )
    some = " OR ".join(f"h{q} IS NOT NULL" for q in each)
    total = " + ".join(f"coalesce(h{q}, 0)" for q in each)
    return f"""SELECT id, CASE WHEN {some} THEN {total} END AS harm FROM (
        SELECT id, {hurt} FROM (SELECT id, step, {x} FROM v0) JOIN (
            SELECT step, {spread} FROM (SELECT step, {x} FROM v1) GROUP BY step) USING (step)
        GROUP BY id) ORDER BY id"""


def harm_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Harm of one step, the obvious way, from its values [Q, B]: the examples that count and what
    each gets, summed over targets. What the query above sums over the steps."""
    finite = np.isfinite(values)
    y = np.where(finite, values, np.nan)
    spread = np.full(len(y), np.nan)
    some = finite.any(axis=1)
    spread[some] = np.nanstd(y[some], axis=1)
    largest = np.where(finite, np.abs(values), 0).max(axis=1, initial=0)
    counts = finite & (spread > ROUNDING * largest)[:, None]
    hurt = np.where(counts, np.maximum(-y / np.where(spread > 0, spread, 1)[:, None], 0), 0)
    counted = counts.any(axis=0)
    return counted, hurt.sum(axis=0)[counted]


# -- columns and arithmetic -------------------------------------------------------------------

_COUNTS = {"steps": "int64", "scored": "int64"}


def _empty(**dtypes: str) -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in dtypes.items()})


def check_targets(targets: Sequence[str]) -> list[str]:
    """Target names become columns: at least one, all different, none that a table already uses."""
    names = [str(t) for t in targets]
    if not names or len(set(names)) < len(names):
        raise LedgerError(f"targets need different names, at least one; got {names}")
    if len(names) > 1 and (taken := [t for t in names if t in RESERVED]):
        raise LedgerError(f"a target cannot be called {taken[0]!r}: the tables use that name")
    return names


def value_columns(targets: Sequence[str]) -> list[str]:
    """The columns of a table of values: the mean over targets, then each target if several."""
    return ["value", *(targets if len(targets) > 1 else [])]


def _history_table(
    step: np.ndarray, ids: np.ndarray, V: np.ndarray, targets: Sequence[str]
) -> pd.DataFrame:
    """``history()`` from its columns; V has shape [rows, Q]."""
    frame = pd.DataFrame({"step": step, "id": ids, "value": V.mean(axis=1)})
    if len(targets) > 1:
        frame = pd.concat([frame, pd.DataFrame(V, columns=list(targets))], axis=1)
    return frame

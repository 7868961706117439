"""Free signals of each visit of an example, and windows of steps.

A file of values may have one column for each signal, ``signal:loss`` and so on (float32; NULL: not
known). A scan of a ledger gives them behind its Q targets, as targets Q, Q + 1, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from inrun.ledger import LedgerError

SIGNALS = ("loss", "el2n", "margin", "label")  # the rows of StepEntry.signals
SHOWN = SIGNALS[:3]  # those that have a mean over visits
CHANGE = "loss_change"  # from an example's first visit to its last
FIELDS = [(f"signal:{name}", pa.float32()) for name in SIGNALS]  # columns of a file


class Later(Protocol):
    """The signals of a step that are computed when ``np.asarray`` asks for them."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


@dataclass(frozen=True)
class Window:
    """The steps since ≤ step < until. ``half_life``: a value counts half if its step is so many
    steps before the last one of the window."""

    since: int | None = None
    until: int | None = None
    half_life: float | None = None

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            x = getattr(self, name)
            if x is not None and (isinstance(x, bool) or not isinstance(x, (int, np.integer))):
                raise LedgerError(f"{name} is the number of a step, not {x!r}")
        if self.half_life is not None and not 0 < self.half_life < float("inf"):
            raise LedgerError(f"half_life is a number of steps above 0, not {self.half_life!r}")
        if self.since is not None and self.until is not None and self.until <= self.since:
            raise LedgerError(f"no step lies in since={self.since}, until={self.until}")

    @property
    def whole(self) -> bool:
        return self.since is None and self.until is None

    def cut(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of the window. The first column is the step."""
        if self.whole:
            return batch
        step = batch.column(0)
        low = -(2**62) if self.since is None else self.since
        high = 2**62 if self.until is None else self.until
        return batch.filter(pc.and_(pc.greater_equal(step, low), pc.less(step, high)))

    def weights(self, step: pa.Array, weight: pa.Array, last: int) -> pa.Array:
        """The weights of rows of these steps, ``last`` being the last step of the window."""
        if self.half_life is None:
            return weight
        age = last - step.to_numpy(zero_copy_only=False)
        return pc.multiply(weight, pa.array(np.exp2(-age / self.half_life)))


WHOLE = Window()


def shown_names(targets: Sequence[str]) -> list[str]:
    """The columns of the signals in a table, beside those of named targets."""
    taken = set(targets) if len(targets) > 1 else set()
    return [f"signal {s}" if s in taken else s for s in SHOWN]


def change_name(targets: Sequence[str]) -> str:
    """The column of the loss's change."""
    return CHANGE if len(targets) < 2 or CHANGE not in targets else f"signal {CHANGE}"


def arrays(entries: Sequence[tuple[int, np.ndarray | Later | None]]) -> list[pa.Array]:
    """The columns of a file for some steps, each given as its number of examples and signals."""
    parts = [np.full((len(SIGNALS), n), np.nan) if s is None else np.asarray(s) for n, s in entries]
    every = np.concatenate(parts, axis=1) if parts else np.zeros((len(SIGNALS), 0))
    return [pa.array(x.astype(np.float32), from_pandas=True) for x in every]


def means_sql(k: int) -> str:
    """The mean of each column over the visits of an example."""
    means = ", ".join(f"avg(x{i}) AS s{i}" for i in range(k))
    return f"SELECT id, {means} FROM v0 GROUP BY id ORDER BY id"


def means_and_change_sql(k: int) -> str:
    """The same, and by how much the first column (the loss) changed from the first visit in which
    it is known to the last; NULL of one visit."""
    means = ", ".join(f"avg(x{i}) AS s{i}" for i in range(k))
    first, last = (f"arg_{m}(x0, step) FILTER (x0 IS NOT NULL)" for m in ("min", "max"))
    change = f"CASE WHEN count(x0) > 1 THEN {last} - {first} END AS change"
    return f"SELECT id, {means}, {change} FROM v0 GROUP BY id ORDER BY id"


def epochs_sql(k: int) -> str:
    """Step, and how often its examples had been visited before (the median)."""
    return """SELECT step, CAST(floor(median(visit)) AS BIGINT) AS epoch FROM (
        SELECT step, row_number() OVER (PARTITION BY id ORDER BY step) - 1 AS visit FROM v0)
        GROUP BY step ORDER BY step"""


def epochs_table(by_step: pd.DataFrame, steps: pd.DataFrame, means: pd.DataFrame) -> pd.DataFrame:
    """One row per epoch. ``by_step``: step, epoch; ``means``: step and the mean of each signal."""
    table = by_step.merge(steps[["step", "examples", "sum"]], on="step", how="left")
    table["epoch"] = table["epoch"].cummax()  # one passes into the next once
    table = table.merge(means, on="step", how="left")
    grouped = table.groupby("epoch", sort=True)
    found = grouped.agg(since=("step", "min"), until=("step", "max"), examples=("examples", "sum"))
    found["until"] += 1
    found["value"] = grouped["sum"].sum(min_count=1)
    for name in means.columns.drop("step"):
        known = table[name].notna()
        weighed = (table[name] * table["examples"])[known].groupby(table["epoch"]).sum()
        found[name] = weighed / table["examples"][known].groupby(table["epoch"]).sum()
    return found.reset_index()

"""Ledgers on disk: ``Store`` for the run that writes one, ``open_run`` for whoever reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa

from inrun.ledger.audits import audit_summary
from inrun.ledger.committed import tell_lost
from inrun.ledger.display import run_html
from inrun.ledger.ranks import RankedStore
from inrun.ledger.run_tables import RunTables
from inrun.ledger.signals import Window
from inrun.ledger.writer import Store

__all__ = ["RankedStore", "SavedRun", "Store", "open_run"]


class SavedRun(RunTables):
    """A finished or still running run, read from its ledger: the tables of the live ``Run``.

    Estimators go by name; None is the first that the run recorded.
    """

    _ledger: RankedStore

    def __init__(self, ledger: RankedStore) -> None:
        self._ledger = ledger
        self.path = ledger.path
        self.info: dict[str, Any] = ledger.info
        self.targets: list[str] = ledger.targets
        self.estimators: list[str] = ledger.estimators
        self._names = ledger.estimators

    def __repr__(self) -> str:
        from inrun.console import safe  # names of somebody else's ledger

        return f"<inrun run {str(self.path)!r}: {safe(', '.join(self.estimators))}>"

    def _repr_html_(self) -> str:
        line = f"{self.path}: {', '.join(self.estimators)}"
        return run_html(line, self._ledger, self.steadiness())

    def _how_validated(self) -> Any:
        return self.info.get("validation")

    @property
    def bytes(self) -> int:
        """The size of the parts that count, of all ranks."""
        return sum(sum(part.bytes) for part in self._ledger.all_parts())

    def history_batches(
        self, estimator: str | None = None, rows: int = 1_000_000
    ) -> Iterator[pd.DataFrame]:
        """``history`` in pieces, for a ledger larger than memory."""
        return self._ledger.history_batches(self._index(estimator), rows)

    def token_batches(self, estimator: str | None = None) -> Iterator[pa.RecordBatch]:
        """What ``tokens`` shows, a few examples at a time: step, id, inputs, a list per target."""
        return self._ledger.token_batches(self._index(estimator))

    def top(
        self,
        n: int = 20,
        by: str = "value",
        target: str | None = None,
        worst: bool = False,
        estimator: str | None = None,
        *,
        since: int | None = None,
        until: int | None = None,
        half_life: float | None = None,
    ) -> pd.DataFrame:
        """The n best (``worst``: lowest) examples by value, those of most harm, or those that the
        model fitted worst (``by="loss"``, ``"el2n"``, ``"margin"``)."""
        window = Window(since, until, half_life)
        return self._ledger.top(self._index(estimator), n, by, target, worst, window)

    def summary(self, estimator: str | None = None) -> dict[str, float]:
        """Do the values add up? The audited steps summed."""
        return audit_summary(self.steps(estimator))

    def coverage(self) -> pd.DataFrame:
        """One row per parameter: is it scored, and how (empty if the run did not note it)."""
        coverage = self.info.get("coverage") or {}
        return pd.DataFrame(coverage.get("parameters", []))


def open_run(path: str | os.PathLike[str]) -> SavedRun:
    """Open a ledger folder for reading, also while its run goes on. What several ranks recorded
    there is one run."""
    store = RankedStore.open(path)
    for other in store.others():
        tell_lost(other.path, other.lost)
    return SavedRun(store)

"""When a ledger cannot be written: training goes on, entries wait in memory, warnings say so.

1. The first failure warns. The entries stay in the buffer.
2. Writing is tried again after ``pause`` seconds, twice as long after each failure.
3. Beyond ``LIMIT`` bytes of waiting entries the values of further steps are dropped. Such a step
   is recorded as void, so that the tables show the gap, and a second warning says so.
4. ``flush``, ``state_dict``, ``close`` and the tables raise as long as entries are not on disk.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from inrun.ledger import LedgerError
from inrun.ledger.entries import StepEntry
from inrun.ledger.parts import BufferedEntry

LIMIT = 1 << 30  # bytes of entries that wait in memory
LONGEST = 300.0  # seconds between two attempts
LOST = "not recorded: the ledger could not be written and too many records waited in memory"


class Outage:
    """Whether the ledger can be written now, and which warnings were given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.since: float | None = None
        self.pause = 0.0
        self.dropped = 0  # steps whose values were given up
        self._told = self._told_forked = False

    def failed(self, pause: float) -> None:
        self.since = self.since or time.monotonic()
        self.pause = min(2 * max(self.pause, pause), LONGEST)

    def over(self) -> None:
        self.since, self.pause, self._told = None, 0.0, False

    def full(self, size: int) -> bool:
        """Must the values of the next entry be dropped? Counts them; warns the first time."""
        if self.since is None or size <= LIMIT:
            return False
        self.dropped += 1
        if self.dropped == 1:
            self._warn(
                f"{self.folder} still cannot be written and {LIMIT / 2**20:.0f} MiB of records "
                "wait in memory: from this step on values are LOST until it can. These steps will "
                "be void in the tables; the number of them is said at the end."
            )
        return True

    def tell(self, error: LedgerError) -> None:
        """Warn, once for each outage."""
        if not self._told:
            self._told = True
            self._warn(
                f"{error}. The training goes on. Up to {LIMIT / 2**20:.0f} MiB of records wait in "
                "memory and writing is tried again; run.state_dict() and run.close() raise if it "
                "still fails then."
            )

    def tell_dropped(self) -> None:
        if self.dropped:
            self._warn(
                f"{self.folder}: the values of {self.dropped} steps were lost while it could not "
                "be written; steps() shows them as void"
            )

    def forked(self, pid: int) -> bool:
        """Is this a forked child of the writer, process ``pid``? Warns the first time."""
        if pid == os.getpid():
            return False
        if not self._told_forked:
            self._told_forked = True
            self._warn(
                f"{self.folder} is written by process {pid}; this is a forked child of it, and "
                "what it trains is not recorded"
            )
        return True

    def _warn(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)


def void_entry(entry: StepEntry) -> BufferedEntry:
    """Returns an entry without values: it says only that the step took place."""
    ids = np.empty(0, np.int64)
    given_up = replace(entry, ids=ids, values=None, void=LOST, audit=None, tokens=None)
    return BufferedEntry(given_up, pa.array(ids), None)

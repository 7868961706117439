"""A ledger that several ranks write, each in a folder of its own, and that reads as one run.

    out/                 rank 0's: run.json, manifest.json, values/, steps/ as in one process
    out/rank-00003/      rank 3's: the same files, of the same run

No rank waits for another: each commits its own parts, and a rank that is killed loses what it had
not flushed. A row of ``values`` is in the folder of the rank that saw the example. ``steps`` has a
row in every folder; sums, nobody's part and losses in it are those of all ranks, ``examples`` are
the rank's own. The tables take the row of the lowest rank that has one and add the examples up.
Sums and nobody's part of "carry" are known long after the step and are the rank's own, too.

A folder ``rank-…`` whose run.json names another run does not count (an older run's, or copied from
elsewhere). When a run goes on with fewer ranks, rank 0 cuts the folders that no rank writes any
more back to the checkpoint, and empties them when the run starts again.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from inrun.ledger import files
from inrun.ledger.entries import ELSEWHERE
from inrun.ledger.folder import read_info
from inrun.ledger.manifest import Part
from inrun.ledger.parts import CARRY
from inrun.ledger.signals import WHOLE, Window
from inrun.ledger.tables import Scan
from inrun.ledger.writer import Store

RANK = re.compile(r"rank-([0-9]{5,})")


def rank_folder(root: Path, rank: int) -> Path:
    return root if rank == 0 else root / f"rank-{rank:05d}"


def rank_folders(root: Path) -> dict[int, Path]:
    """The folders of the other ranks that are there, by rank."""
    found = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        match = RANK.fullmatch(folder.name)
        if match and int(match[1]) > 0 and rank_folder(root, int(match[1])) == folder:
            found[int(match[1])] = folder
    return found


class RankedStore(Store):
    """The ledger of one rank, whose tables are those of all ranks that are on disk."""

    rank, ranks = 0, 1
    _root: Path | None = None

    @classmethod
    def of_rank(
        cls, path: str | os.PathLike[str], rank: int, ranks: int, config: dict[str, Any],
        targets: Sequence[str], estimators: Sequence[str], overwrite: bool, run: str | None,
    ) -> RankedStore:  # fmt: skip
        """``create`` for one of several ranks; ``run`` is rank 0's, None on rank 0 itself."""
        root = Path(path).absolute()
        folder = rank_folder(root, rank)
        store = cls.create(folder, config, targets, estimators, overwrite, run)
        store._root, store.rank, store.ranks = root, rank, ranks
        return store

    @property
    def root(self) -> Path:
        """The folder of the run, which is rank 0's."""
        return self._root or self.path

    def others(self) -> list[Store]:
        """The ledgers of the other ranks, for reading."""
        found = []
        for rank, folder in ({0: self.root} | rank_folders(self.root)).items():
            if rank == self.rank:
                continue
            files.stay_inside(folder, self.root)
            info = read_info(folder)
            if info is None:  # it is just being made
                continue
            if info.get("run") != self.info.get("run"):
                warnings.warn(f"{folder} is of another run and does not count", stacklevel=3)
                continue
            found.append(Store(folder, info, None))
        return found

    # -- tables of all ranks ----------------------------------------------------------------

    def scans(self, n: int) -> list[Scan]:
        each = [Store.scans(s, n) for s in (self, *self.others())]
        some = [scans for scans in each if scans]
        return [partial(_chained, [scans[i] for scans in some]) for i in range(n)] if some else []

    def id_type(self) -> pa.DataType:
        known = self._ids or next((s._ids for s in self.others() if s._ids), None)
        return pa.string() if known == "string" else pa.int64()

    def all_parts(self) -> list[Part]:
        """The parts of all ranks that count."""
        return [part for store in (self, *self.others()) for part in store.sources()]

    def token_batches(self, estimator: int) -> Iterator[pa.RecordBatch]:
        for store in (self, *self.others()):
            yield from Store.token_batches(store, estimator)

    def steps(self, estimator: int) -> pd.DataFrame:
        """One row per step: of the lowest rank that recorded it, with the examples of all."""
        others = self.others()
        own = Store.steps(self, estimator)
        if not others:
            return own
        by_rank = sorted([self, *others], key=lambda s: (s.path != self.root, s.path.name))
        tables = [own if s is self else Store.steps(s, estimator) for s in by_rank]
        every = pd.concat([t for t in tables if len(t)] or [own], ignore_index=True)
        examples = every.groupby("step")["examples"].sum()
        told = every["void"].notna() & (every["void"] != ELSEWHERE)
        reasons = every[told].drop_duplicates("step").set_index("step")["void"]
        found = every.drop_duplicates("step").sort_values("step").reset_index(drop=True)
        found["examples"] = found["step"].map(examples)
        for name in ("sum", "nobody") if self.estimators[estimator] == CARRY else ():
            found[name] = found["step"].map(every.groupby("step")[name].sum(min_count=1))
        known = found["step"].map(reasons)
        found["void"] = known.where(known.notna(), found["void"])
        return found

    def has_signals(self) -> bool:
        return any(Store.has_signals(s) for s in (self, *self.others()))

    def history(self, estimator: int, window: Window = WHOLE) -> pd.DataFrame:
        """As of one process: in the order of steps, and of ranks within a step."""
        found = Store.history(self, estimator, window)
        return found.sort_values("step", kind="stable", ignore_index=True)

    # -- a run that goes on, or starts again --------------------------------------------------

    def restart(self, run: str | None = None) -> None:
        unused = list(self._unused())
        super().restart(run)
        for store in unused:
            store.restart(self.info["run"])
            store.close()

    def truncate(self, step: int) -> None:
        super().truncate(step)
        for store in self._unused():
            store.truncate(step)
            store.close()

    def _fits(self, steps: int, wanted: int, sure: bool) -> bool:
        """The checkpoint may be rank 0's: a killed rank may lack what it had not flushed."""
        return super()._fits(steps, wanted, sure and self.rank == 0)

    def _unused(self) -> Iterator[Store]:
        """On rank 0: the folders of ranks that this run no longer has, open for writing."""
        for rank, folder in rank_folders(self.root).items() if self.rank == 0 else ():
            info = read_info(folder) if rank >= self.ranks else None
            if info is not None and info.get("run") == self.info.get("run"):
                yield Store.create(folder, info["config"], info["targets"], info["estimators"])


def _chained(
    scans: Sequence[Scan], estimator: int, targets: Sequence[int], rows: int
) -> Iterator[pa.RecordBatch]:
    """The rows of several ledgers, one after the other."""
    return chain.from_iterable(scan(estimator, targets, rows) for scan in scans)

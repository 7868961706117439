"""The scores of a pass over the training data, as they come: in memory, or in a folder
(stored.py), to go on from there. Several ranks have a folder each and read as one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from torch import Tensor

from inrun.asking.stored import (
    ABOUT,
    DONE,
    FORMAT,
    Answers,
    open_answers,
    part_file,
    read_about,
    read_part,
    summed,
)
from inrun.ledger import LedgerError, files
from inrun.ledger.lock import WriterLock
from inrun.ledger.ranks import rank_folder
from inrun.ranks.world import ALONE, World

ROWS = 1 << 16  # of a part,
SECONDS = 60.0  # or as many as came in this time
CLOSE = 1e-3  # relative: losses of the same questions to the same model
BEGUN = {".lock", ".writer", ".writer.tmp", ABOUT + ".tmp"}  # of ours, before there is anything


@dataclass(frozen=True)
class Scored:
    """The scores of a batch [rows, Q]: a row for each example, or for each position (``slots`` says
    whose, −1: nobody's; ``inputs`` what the model received there)."""

    ids: np.ndarray
    scores: np.ndarray
    slots: Tensor | None = None
    inputs: Tensor | None = None


class Parts:
    """Scores by batch. ``has`` says whether those of the next batch are there already."""

    def __init__(
        self, folder: Path | None, names: Sequence[str], losses: Sequence[float],
        about: Mapping[str, Any], kind: type[np.floating[Any]] = np.float32, world: World = ALONE,
    ) -> None:  # fmt: skip
        self.names, self._kind, self._world = list(names), kind, world
        self.folder = None if folder is None else rank_folder(folder, world.rank)
        self._done: list[pa.Table] = []
        self._waiting: list[pa.Table] = []
        self._written: list[dict[str, Any]] = []  # rows and SHA-256 of each part
        self._known = np.empty(0, object)
        self._at = 0  # rows of the data that have passed
        self._since = time.monotonic()
        self._lock: WriterLock | None = None
        if self.folder is not None:
            whole = {"format": FORMAT, **about, "ranks": world.size, "questions": self.names}
            self._open(self.folder, whole, losses)

    def close(self) -> None:
        """Let others write to the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open(self, folder: Path, about: dict[str, Any], losses: Sequence[float]) -> None:
        if not (folder / ABOUT).exists():
            if folder.exists() and (not folder.is_dir() or _others(folder)):
                raise LedgerError(f"{folder} holds something else: choose a folder that is empty")
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(folder)
        try:
            self._read(folder, about, losses)
        except BaseException:
            self.close()
            raise

    def _read(self, folder: Path, about: dict[str, Any], losses: Sequence[float]) -> None:
        """What is there already."""
        found = read_about(folder)
        if found is None:
            files.write_json(folder / ABOUT, files.signed(about | {"losses": list(losses)}))
            return
        _refuse_other(folder, found, about, losses)
        while (part := part_file(folder, len(self._done))).exists():
            self._done.append(read_part(part, len(self.names)))
            row = {"rows": self._done[-1].num_rows, "sha256": files.sha256_of(part)}
            self._written.append(row)
        if self._done:
            self._known = np.concatenate([t["id"].to_numpy() for t in self._done])

    def has(self, ids: np.ndarray) -> bool:
        """Are the scores of the next batch, with these ids, there already?"""
        start, self._at = self._at, self._at + len(ids)
        known = self._known[start : self._at]
        if not len(known):
            return False
        if len(known) < len(ids) or not np.array_equal(known, ids):
            raise LedgerError(
                f"{self.folder} holds the scores of other data: its row {start} onwards has other "
                "ids. Pass the data in the same order and batches, or choose another folder"
            )
        return True

    def add(self, ids: np.ndarray, scores: np.ndarray) -> None:
        """The scores [B, Q] of a batch."""
        columns = scores_of(scores.astype(self._kind))
        self._waiting.append(pa.table({"id": pa.array(ids.tolist())} | columns))
        full = sum(t.num_rows for t in self._waiting) >= ROWS
        if full or time.monotonic() - self._since >= SECONDS:
            self._flush()

    def _flush(self) -> None:
        self._since = time.monotonic()
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        if self.folder is not None:
            with files.disk(self.folder, "the pass can go on from what is there"):
                part = part_file(self.folder, len(self._done))
                written = files.write_parquet(part, [table])
            self._written.append({"rows": written.rows, "sha256": written.sha256})
        self._done.append(table)
        self._waiting = []

    def end(self) -> None:
        """All data have passed."""
        if self._at < len(self._known):
            raise LedgerError(
                f"{self.folder} holds the scores of {len(self._known)} rows, and the data has only "
                f"{self._at}: pass the same data, or choose another folder"
            )
        self._flush()

    def table(self, examples: int | None = None) -> pd.DataFrame:
        """All scores divided by the number of examples, by default the rows of the data. Every rank
        has those of all ranks."""
        each = self._world.gather((self._done, self._at))
        rows = sum(n for _, n in each)
        if not rows:
            raise ValueError("the training data is empty: there is nobody to score")
        if self.folder is not None:
            done = {"examples": examples or rows, "parts": self._written}
            with files.disk(self.folder, "all parts are there: ask again"):
                files.write_json(self.folder / DONE, files.signed(done))
        tables = [tables for tables, _ in each]
        _tell_repeated(tables)
        return summed([t for own in tables for t in own], self.names, examples or rows)


def answers_to(folder: Path, names: Sequence[str], about: Mapping[str, Any]) -> Answers:
    """The answers in a folder, which must be those to these questions."""
    found = open_answers(folder)
    _refuse_other(folder, read_about(folder) or {}, {**about, "questions": list(names)})
    return found


def _refuse_other(
    folder: Path, found: Mapping[str, Any], about: Mapping[str, Any],
    losses: Sequence[float] | None = None,
) -> None:  # fmt: skip
    """Refuse a folder that holds the answers to something else."""
    other = next((k for k, x in about.items() if found.get(k) != x), None)
    if other is None and losses is not None:
        same = np.allclose(found["losses"], losses, rtol=CLOSE, atol=0)
        other = None if same else "losses"
    if other is not None:
        raise LedgerError(
            f"{folder} holds the answers to something else: its {other} differ. Choose another "
            "folder, or ask the same questions to the same model"
        )


def scores_of(scores: np.ndarray) -> dict[str, pa.Array]:
    """The columns q0, q1, … of scores [rows, Q]."""
    return {f"q{q}": pa.array(scores[:, q]) for q in range(scores.shape[1])}


def _others(folder: Path) -> bool:
    """Is there anything in the folder that is not ours? Folders of other ranks are."""
    return any(f.name not in BEGUN and not f.name.startswith("rank-") for f in folder.iterdir())


def _tell_repeated(tables: Sequence[Sequence[pa.Table]]) -> None:
    """Warn of ids that several ranks have scored."""
    if len(tables) < 2:
        return
    each = [np.unique(np.concatenate([t["id"].to_numpy() for t in own])) for own in tables if own]
    ids, counts = np.unique(np.concatenate(each), return_counts=True)
    if twice := int((counts > 1).sum()):
        warnings.warn(
            f"{twice} ids were scored by more than one rank, {ids[counts > 1][0]!r} for one: their "
            "scores are added up. DistributedSampler repeats rows so that all ranks have as many: "
            "give each rank its own share instead, range(rank, len(data), ranks)",
            stacklevel=3,
        )

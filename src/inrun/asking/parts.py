"""The scores of a pass over the training data: in memory, or in a folder, to go on from there.

A folder has asked.json, what was asked, and parts of the pass, part-00000.parquet and so on: id,
and a column q0, q1, … of ⟨u, ∇ℓ_i⟩ for each question. A part is complete or not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from inrun.ledger import LedgerError, files

ROWS = 1 << 16  # of a part
ABOUT = "asked.json"
FORMAT = "inrun-asked"
CLOSE = 1e-3  # relative: losses of the same questions to the same model


@dataclass(frozen=True)
class Scored:
    """The scores of a batch [rows, Q]: a row for each example, or for each position (``slots`` says
    whose, −1: nobody's; ``inputs`` what the model received there)."""

    ids: np.ndarray
    scores: np.ndarray
    slots: Tensor | None = None
    inputs: Tensor | None = None


def positions(found: Iterable[Scored], names: Sequence[str], examples: int) -> pd.DataFrame:
    """A row for each position of the examples, in their order."""
    frames = []
    for batch in found:
        assert batch.slots is not None
        slots = batch.slots.cpu().numpy()
        frame = pd.DataFrame(batch.scores / examples, columns=pd.Index(names))
        inputs = None if batch.inputs is None else batch.inputs.flatten().cpu().numpy()
        frame.insert(0, "input", pd.NA if inputs is None else inputs)
        order = np.argsort(slots, kind="stable")
        order = order[slots[order] >= 0]
        frame, owner = frame.iloc[order].reset_index(drop=True), slots[order]
        frame.insert(0, "position", frame.groupby(owner).cumcount())
        frame.insert(0, "id", batch.ids[owner])
        frames.append(frame)
    if not frames:
        raise ValueError("the training data is empty: there is nobody to score")
    return pd.concat(frames, ignore_index=True)


class Parts:
    """Scores by batch. ``has`` says whether those of the next batch are there already."""

    def __init__(
        self, folder: Path | None, names: Sequence[str], losses: Sequence[float],
        about: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.folder, self.names = folder, list(names)
        self._done: list[pa.Table] = []
        self._waiting: list[pa.Table] = []
        self._known = np.empty(0, object)
        self._at = 0  # rows of the data that have passed
        if folder is not None:
            self._open(folder, {"format": FORMAT, **about, "questions": self.names}, losses)

    def _open(self, folder: Path, about: dict[str, Any], losses: Sequence[float]) -> None:
        file = folder / ABOUT
        found = files.read_json(file) if folder.is_dir() else None
        if found is None:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise LedgerError(f"{folder} holds something else: choose a folder that is empty")
            folder.mkdir(parents=True, exist_ok=True)
            files.write_json(file, files.signed(about | {"losses": list(losses)}))
            return
        if found.get(files.CHECK) != files.checksum(found):
            raise LedgerError(f"{file} is damaged or was edited: choose another folder")
        other = next((k for k, x in about.items() if found.get(k) != x), None)
        before = found.get("losses", [])
        if other is None and not np.allclose(before, losses, rtol=CLOSE, atol=0):
            other = "losses"
        if other is not None:
            raise LedgerError(
                f"{folder} holds the answers to something else: its {other} differ. Choose another "
                "folder, or ask the same questions to the same model"
            )
        while (part := folder / f"part-{len(self._done):05d}.parquet").exists():
            files.stay_inside(part, folder)
            try:
                self._done.append(pq.read_table(part, schema=None))
            except (OSError, pa.ArrowException) as error:
                raise LedgerError(f"{part} is damaged: delete it, and ask again") from error
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
        columns = {
            f"q{q}": pa.array(scores[:, q].astype(np.float32)) for q in range(len(self.names))
        }
        self._waiting.append(pa.table({"id": pa.array(ids.tolist())} | columns))
        if sum(t.num_rows for t in self._waiting) >= ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        if self.folder is not None:
            with files.disk(self.folder, "the pass can go on from what is there"):
                files.write_parquet(self.folder / f"part-{len(self._done):05d}.parquet", [table])
        self._done.append(table)
        self._waiting = []

    def table(self, examples: int | None = None) -> pd.DataFrame:
        """All scores divided by the number of examples, by default the rows of the data; an id
        that came more than once has the sum."""
        if self._at < len(self._known):
            raise LedgerError(
                f"{self.folder} holds the scores of {len(self._known)} rows, and the data has only "
                f"{self._at}: pass the same data, or choose another folder"
            )
        self._flush()
        if not self._done:
            raise ValueError("the training data is empty: there is nobody to score")
        raw = pa.concat_tables(self._done).to_pandas()
        total = raw.groupby("id", sort=False, as_index=False).sum()
        scores = total.drop(columns="id").astype(float) / (examples or len(raw))
        scores.columns = pd.Index(self.names)
        return pd.concat([total[["id"]], scores], axis=1)

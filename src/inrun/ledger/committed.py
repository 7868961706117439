"""The parts of a ledger that count: read from the manifest, written and replaced through it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from inrun.ledger import files
from inrun.ledger.manifest import KINDS, Lost, Manifest, Part, part_name, read_manifest
from inrun.ledger.parts import RUN, STEPS, VALUES, content_hash, open_part, verify
from inrun.ledger.tables import SMALL_BYTES, ParquetTables


class Committed(ParquetTables):
    """What is on disk, without the records that still wait in memory."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        super().__init__(path, info["targets"], info["estimators"])
        self.info = info
        self._manifest = Manifest()  # as it is on disk
        self._attempted: Manifest | None = None  # perhaps on disk: writing it was interrupted
        self._restarting = False  # forget all parts with the next flush
        self._load()

    @property
    def _parts(self) -> list[Part]:
        return [] if self._restarting else list(self._manifest.parts)

    @property
    def _committed(self) -> int:
        parts = self._parts
        return parts[-1].last if parts else -1

    def _load(self) -> None:
        self._manifest = read_manifest(self.path, self.info["version"]) or Manifest()
        self._ids = self._manifest.ids

    def _lost_before(self, step: int) -> tuple[Lost, ...]:
        """The lost parts that began before this step; one that goes on after it, by name only."""
        found = [x for x in self._manifest.lost if x.first is None or x.first < step]
        return tuple(
            x if x.last is None or x.last < step else Lost(x.name, None, None, None) for x in found
        )

    def _steps_before(self, step: int) -> tuple[int, bool]:
        """How many steps were recorded before this one, lost ones too, and whether that is sure."""
        lost = self._lost_before(step)
        known = sum(p.steps for p in self._parts if p.last < step)
        for part in self._parts:
            if part.first < step <= part.last:
                known += sum(before(t, step).num_rows for t in self._tables("steps", [part]))
        return known + sum(x.steps or 0 for x in lost), all(x.steps is not None for x in lost)

    def _small(self) -> list[Part]:
        """The small parts at the end; large ones are never rewritten."""
        large = [i for i, p in enumerate(self._parts) if sum(p.bytes) >= SMALL_BYTES]
        return self._parts[large[-1] + 1 if large else 0 :]

    def _tables(self, kind: str, parts: Sequence[Part]) -> Iterator[pa.Table]:
        """Verified, so that damage is never copied into a file with a new checksum."""
        schema = self.columns.schema(kind, self._ids)
        for part in parts:
            verify(self.path, kind, part)
            with open_part(self.path, kind, part, schema) as source:
                for group in range(source.num_row_groups):
                    yield source.read_row_group(group)

    def _write_part(self, values: Iterable[pa.Table], steps: Iterable[pa.Table]) -> Part:
        """Write both files of a new part; they do not count before ``_commit``."""
        name = part_name(self._manifest.next)
        note = {RUN: str(self.info.get("run"))}
        empty = self.columns.schema("values", self._ids).empty_table()
        v = files.write_parquet(self.file("values", name), _some(values, empty), note)
        table = pa.concat_tables(steps)
        first, last = (f(table["step"]).as_py() for f in (pc.min, pc.max))
        note |= {VALUES: v.sha256, STEPS: content_hash(table)}
        s = files.write_parquet(self.file("steps", name), [table], note)
        return Part(name, first, last, s.rows, v.rows, (v.bytes, s.bytes), (v.sha256, s.sha256))

    def _commit(self, parts: Sequence[Part], lost: tuple[Lost, ...] | None = None) -> None:
        """Make these the parts that count, in one rename, then delete those they replace."""
        old, names = self._manifest, {p.name for p in parts}
        left = [n for n in old.replaced if any(self.file(k, n).exists() for k in KINDS)]
        self._attempted = Manifest(
            self._ids,
            old.next + 1,
            tuple(parts),
            (*left, *(p.name for p in old.parts if p.name not in names)),
            old.lost if lost is None else lost,
        )
        self._attempted.write(self.path)
        self._manifest, self._attempted = self._attempted, None
        self._clean()

    def _clean(self, *drafts: str) -> None:
        """Delete what our manifest names as replaced, and the leftovers of a killed writer."""
        old = [f"{name}.parquet" for name in (*self._manifest.replaced, *drafts)]
        found = [self.path / kind / name for kind in KINDS for name in old]
        if drafts:
            found += [f.with_name(f.name + ".tmp") for f in found]
            found += [self.path / f"{n}.tmp" for n in ("run.json", "manifest.json", ".writer")]
        for file in found:
            with contextlib.suppress(OSError):  # it stays in the manifest, for the next time
                file.unlink(missing_ok=True)


def tell_lost(folder: Path, lost: Sequence[Lost]) -> None:
    if lost:
        warnings.warn(
            f"{folder}: {', '.join(map(str, lost))} were damaged and set aside by inrun repair; "
            "the tables leave them out",
            stacklevel=3,
        )


def _some(tables: Iterable[pa.Table], empty: pa.Table) -> Iterator[pa.Table]:
    """The tables that have rows (others may have another type of id), or one without."""
    some = False
    for table in tables:
        if table.num_rows:
            some = True
            yield table
    if not some:
        yield empty


def before(table: pa.Table, step: int) -> pa.Table:
    return table.filter(pc.less(table["step"], step))

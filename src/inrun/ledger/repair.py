"""``inrun repair``: makes a new manifest of the undamaged parts. Deletes nothing.

1. Every part in the folder is read in full: both files there, checksums (those of the old manifest,
   or those that the files carry), columns, and the same examples in both files.
2. If the old manifest can be read, the undamaged ones among its parts count. If not, all undamaged
   parts do; where two overlap, the later one: it replaced the other.
3. The new manifest is written, with the steps that are lost, and everything that does not count is
   moved to ``damaged/``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from inrun.ledger import LedgerError, files
from inrun.ledger.folder import VERSION, intact, read_info, write_info
from inrun.ledger.lock import WriterLock
from inrun.ledger.manifest import (
    KINDS,
    Lost,
    Manifest,
    Part,
    number,
    part_files,
    part_name,
    read_manifest,
)
from inrun.ledger.parts import RUN, STEPS, VALUES, Columns, content_hash, open_part

ASIDE = "damaged"
NOTES = ((0, RUN), (1, RUN), (1, VALUES), (1, STEPS))  # file and key
HIGHEST = 10**12  # number of a part; a file with a higher one is not ours, and new ones follow ours
UNFINISHED = "an unfinished write, or not named as inrun does"


@dataclass(frozen=True)
class Repaired:
    """What was found and done."""

    parts: tuple[Part, ...]  # that count now
    aside: dict[str, str]  # parts that do not count, moved to damaged/, and why
    lost: tuple[Lost, ...]  # known to be missing now
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        return sum(p.steps for p in self.parts)


class _BadPartError(Exception):
    """Why a part does not count."""


def repair(path: str | os.PathLike[str]) -> Repaired:
    """Make a ledger readable again. Errors say what cannot be mended."""
    folder = Path(path)
    if not folder.is_dir():
        raise LedgerError(f"{folder}: no such folder")
    info = read_info(folder, verify=False)
    if info is None:
        raise LedgerError(
            f"{folder} has no run.json, so it is not known what its columns mean: put back a copy "
            "of it, or read the Parquet files with another tool"
        )
    for kind in KINDS:
        files.stay_inside(folder / kind, folder)
    with files.disk(folder, "run inrun repair again"):
        lock = WriterLock(folder.absolute())
        try:
            return _repair(folder, info)
        finally:
            lock.release()


def _repair(folder: Path, info: dict[str, Any]) -> Repaired:
    columns = Columns(tuple(info["estimators"]), tuple(info["targets"]))
    notes = [] if intact(info) else ["run.json did not match its checksum: taken as it stands"]
    old: Manifest | None = None
    try:
        old = read_manifest(folder, info["version"]) or Manifest()
    except LedgerError as error:
        notes.append(str(error).split(". `inrun repair")[0])
    found = part_files(folder)
    names = {f.name.split(".")[0] for f in found}
    written = {f.stem for f in found if f.suffix == ".parquet"}
    listed = {p.name: p for p in old.parts} if old else {}
    whole: dict[str, tuple[Part, str | None]] = {}
    bad: dict[str, str] = {}
    for name in sorted(names | set(listed), key=lambda n: (number(n), n)):
        if old is not None and name not in listed:
            leftover = name in old.replaced or name == part_name(old.next)
            bad[name] = "a leftover" if leftover else "not named by manifest.json"
        elif name not in listed and (name not in written or part_name(number(name)) != name):
            bad[name] = UNFINISHED
        if name in bad:
            continue
        try:
            whole[name] = _examine(folder, name, listed.get(name), columns, info.get("run"))
        except _BadPartError as error:
            bad[name] = str(error)
    kept = _agreeing(whole, old, bad)
    lost = (*(old.lost if old else ()), *_lost(folder, bad, listed, old is not None, kept))
    ids = old.ids if old else next((i for p, i in whole.values() if i and p in kept), None)
    taken = [number(n) for n in names if number(n) < HIGHEST]
    following = max([n + 1 for n in taken] + [old.next if old else 0])
    new = Manifest(ids, following, tuple(kept), (), lost)
    if old is None or info["version"] < VERSION or bad or replace(old, replaced=()) != new:
        new.write(folder)
    if info["version"] < VERSION or not intact(info):
        write_info(folder, info | {"version": VERSION})
    for name in bad:
        _move(folder, name)
    return Repaired(tuple(kept), bad, lost, tuple(notes))


def _examine(
    folder: Path, name: str, listed: Part | None, columns: Columns, run: Any
) -> tuple[Part, str | None]:
    """The part as it must stand in a manifest, and the type of its ids."""
    found = []
    for kind in KINDS:
        file = folder / kind / f"{name}.parquet"
        try:
            files.stay_inside(file, folder)
            if not stat.S_ISREG(file.stat().st_mode):
                raise _BadPartError(f"{kind} is no plain file")
            found.append((file.stat().st_size, files.sha256_of(file)))
        except FileNotFoundError:
            raise _BadPartError(f"{kind} is missing") from None
        except (OSError, LedgerError) as error:
            raise _BadPartError(f"{kind} cannot be read: {' '.join(str(error).split())}") from error
    sizes, hashes = (found[0][0], found[1][0]), (found[0][1], found[1][1])
    for i, kind in enumerate(KINDS):
        if listed and (listed.bytes[i] != sizes[i] or (listed.sha256 or hashes)[i] != hashes[i]):
            raise _BadPartError(f"{kind} does not match its checksum")
    try:
        part, ids = _content(folder, name, columns, sizes, hashes, run)
    except (LedgerError, pa.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
        first = " ".join(str(error).split()).split(". `inrun repair")[0]
        raise _BadPartError(f"cannot be read: {first}") from error
    if listed and replace(listed, sha256=hashes) != part:
        raise _BadPartError("its steps are not those of manifest.json")
    return part, ids


def _content(
    folder: Path, name: str, columns: Columns, sizes: Any, hashes: Any, run: Any
) -> tuple[Part, str | None]:
    """Read both files to the end and check that they hold the same steps and examples."""
    metadata = [pq.read_metadata(folder / kind / f"{name}.parquet") for kind in KINDS]
    notes = [(metadata[i].metadata or {}).get(k.encode()) for i, k in NOTES]
    if any(note is not None for note in notes):  # format 1 has none of them
        if None in notes or {notes[0], notes[1]} != {str(run).encode()}:
            raise _BadPartError("it belongs to another run")
        if notes[2] != hashes[0].encode():
            raise _BadPartError("values does not match the checksum that steps carries")
    rows, count = (m.num_rows for m in metadata)
    part = Part(name, 0, 0, count, rows, sizes, hashes)
    with open_part(folder, "steps", part, columns.schemas("steps", None)) as source:
        steps = source.read()
    if notes[3] not in (None, content_hash(steps).encode()):
        raise _BadPartError("steps does not match its checksum")
    step, examples = (steps[c].to_numpy() for c in ("step", "examples"))
    if not len(step) or step[0] < 0 or (np.diff(step) <= 0).any():
        raise _BadPartError("its steps are not in order")
    ids = str(pq.read_schema(folder / "values" / f"{name}.parquet").field("id").type)
    kind = ids if rows and ids == "string" else "int64"
    seen = np.zeros(len(step), np.int64)
    with open_part(folder, "values", part, columns.schemas("values", kind)) as source:
        for batch in source.iter_batches(1 << 16):
            at = np.searchsorted(step, batch["step"].to_numpy(zero_copy_only=False))
            if (step[np.minimum(at, len(step) - 1)] != batch["step"].to_numpy()).any():
                raise _BadPartError("values has steps that steps has not")
            seen += np.bincount(at, minlength=len(step))
    if (seen != examples).any():
        raise _BadPartError("values has not the examples that steps counts")
    first, last = int(step[0]), int(step[-1])
    return replace(part, first=first, last=last), kind if rows else None


def _agreeing(
    whole: dict[str, tuple[Part, str | None]], old: Manifest | None, bad: dict[str, str]
) -> list[Part]:
    """Returns the parts that count. Without a manifest, the later of two that overlap."""
    if old is not None:
        return [whole[p.name][0] for p in old.parts if p.name in whole]
    kept: list[Part] = []
    known: str | None = None
    for name in reversed(whole):
        part, ids = whole[name]
        known = known or ids
        if ids not in (None, known):
            bad[name] = f"its ids are {ids}, those of later parts {known}"
            continue
        other = next((p for p in kept if p.first <= part.last and part.first <= p.last), None)
        if other is None:
            kept.append(part)
        else:
            bad[name] = f"replaced by {other.name}"
    return sorted(kept, key=lambda p: p.first)


def _lost(
    folder: Path, bad: dict[str, str], listed: dict[str, Part], named: bool, kept: Sequence[Part]
) -> list[Lost]:
    """Returns the steps that are lost with the damaged parts, as far as they are known."""
    found = []
    for name, why in bad.items():
        if name in listed:
            p = listed[name]
            found.append(Lost(name, p.first, p.last, p.steps))
        elif not named and why != UNFINISHED and not why.startswith(("replaced", "it belongs")):
            lost = _range(folder, name)
            if lost.first is None or not any(p.first <= lost.first <= p.last for p in kept):
                found.append(lost)
    return found


def _range(folder: Path, name: str) -> Lost:
    try:
        step = pq.read_table(folder / "steps" / f"{name}.parquet", columns=["step"])["step"]
        lost = Lost(name, pc.min(step).as_py(), pc.max(step).as_py(), len(step))
        assert lost.first is not None and lost.first >= 0
        return lost
    except (pa.ArrowException, OSError, ValueError, KeyError, AssertionError):
        return Lost(name, None, None, None)


def _move(folder: Path, name: str) -> None:
    """Set the files of a part aside, under a name that is free."""
    for kind in KINDS:
        for file in sorted((folder / kind).iterdir()) if (folder / kind).is_dir() else ():
            if file.name.split(".")[0] != name:
                continue
            aside = folder / ASIDE / kind
            aside.mkdir(parents=True, exist_ok=True)
            target, n = aside / file.name, 2
            while os.path.lexists(target):
                target, n = aside / f"{file.name}~{n}", n + 1
            file.rename(target)

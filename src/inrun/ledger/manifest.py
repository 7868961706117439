"""manifest.json: which parts count, in order of steps, and how damage to them is noticed.

    ids       "int64" or "string", null before the first id
    next      number of the part that is written next; what lies there now is an unfinished flush
    parts     name, first and last step, steps, rows, and size and SHA-256 of both files
    replaced  former parts, still to be deleted: their entries are in ``parts`` or were dropped
    lost      damaged parts that ``inrun repair`` has set aside
    check     SHA-256 of all of the above

A ledger of format 1 has neither hashes nor ``replaced``, ``lost`` and ``check``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from inrun.ledger import LedgerError, files

NAME = "manifest.json"
KINDS = ("values", "steps")
PART = re.compile(r"part-[0-9]{1,18}")


@dataclass(frozen=True)
class Part:
    """One pair of files, ``values/<name>.parquet`` and ``steps/<name>.parquet``."""

    name: str
    first: int  # first and last step
    last: int
    steps: int  # how many steps, and rows of values
    rows: int
    bytes: tuple[int, int]  # sizes of the two files, in the order of KINDS
    sha256: tuple[str, str] | None = None  # None in a ledger of format 1


@dataclass(frozen=True)
class Lost:
    """A part that was damaged and set aside; None where a number is not known."""

    name: str
    first: int | None
    last: int | None
    steps: int | None

    def __str__(self) -> str:
        if self.first is None:
            return f"the steps of {self.name}"
        return f"steps {self.first} to {self.last}"


@dataclass(frozen=True)
class Manifest:
    ids: str | None = None
    next: int = 0
    parts: tuple[Part, ...] = ()
    replaced: tuple[str, ...] = ()
    lost: tuple[Lost, ...] = field(default=())

    def write(self, folder: Path) -> None:
        files.write_json(folder / NAME, files.signed(files.json_value(asdict(self), NAME)))


def part_name(n: int) -> str:
    return f"part-{n:06d}"


def number(name: str) -> int:
    return int(name.removeprefix("part-"))


def repair_hint(folder: Path) -> str:
    return (
        f"`inrun repair {folder}` makes a new manifest.json from the parts that are whole, sets "
        "damaged ones aside and deletes nothing"
    )


def read_manifest(folder: Path, version: int) -> Manifest | None:
    """The manifest of a ledger, None if there is none and nothing it could name."""
    file = folder / NAME
    files.stay_inside(file, folder)
    content = files.read_json(file, repair_hint(folder))
    if content is None:
        if found := part_files(folder):
            raise LedgerError(
                f"{folder} has no manifest.json, which says which of its parts count, but "
                f"{found[0].relative_to(folder)} is there. {repair_hint(folder)}"
            )
        return None
    try:
        return _manifest(content, version)
    except (KeyError, TypeError, ValueError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise LedgerError(f"{file} is damaged: {why}. {repair_hint(folder)}") from error


def part_files(folder: Path) -> list[Path]:
    """Everything in the two folders that is called like a part or like an unfinished one."""
    found = []
    for kind in KINDS:
        if (folder / kind).is_dir():
            found += [f for f in (folder / kind).iterdir() if PART.fullmatch(f.name.split(".")[0])]
    return sorted(found)


def _manifest(content: dict[str, Any], version: int) -> Manifest:
    if version > 1 or files.CHECK in content:
        if content.get(files.CHECK) != files.checksum(content):
            raise ValueError("its content does not match its checksum")
        known = {"ids", "next", "parts", "replaced", "lost", files.CHECK}
        if unknown := [k for k in content if k not in known]:
            raise ValueError(f"{unknown[0]!r} is no entry of a manifest")
    ids = content["ids"]
    if ids not in (None, "int64", "string"):
        raise ValueError(f"ids are {ids!r}, not int64 or string")
    parts = tuple(_part(p) for p in _list(content["parts"], "parts"))
    replaced = tuple(_name(n) for n in _list(content.get("replaced", []), "replaced"))
    lost = tuple(_lost(x) for x in _list(content.get("lost", []), "lost"))
    following = _count(content["next"], "next")
    names: set[str] = set()
    for name in (p.name for p in parts):
        if name in names:
            raise ValueError(f"{name} is listed twice")
        names.add(name)
        if number(name) >= following:
            raise ValueError(f"{name} is listed, but the next part is number {following}")
    for a, b in pairwise(parts):
        if b.first <= a.last:
            raise ValueError(f"{b.name} begins at step {b.first}, {a.name} ends at step {a.last}")
    if both := names & set(replaced):
        raise ValueError(f"{sorted(both)[0]} is both in use and replaced")
    return Manifest(ids, following, parts, replaced, lost)


def _part(p: Any) -> Part:
    if not isinstance(p, dict):
        raise ValueError(f"a part is {p!r:.80}")
    name = _name(p["name"])
    first, last, steps, rows = (_count(p[k], k) for k in ("first", "last", "steps", "rows"))
    if not 1 <= steps <= last - first + 1:
        raise ValueError(f"{name} has {steps} steps from {first} to {last}")
    sizes = tuple(_count(x, "bytes") for x in _list(p["bytes"], "bytes"))
    hashes = p.get("sha256")
    if hashes is not None:
        hashes = tuple(str(h) for h in _list(hashes, "sha256"))
        if len(hashes) != len(KINDS):
            raise ValueError(f"{name} has {len(hashes)} hashes")
    if len(sizes) != len(KINDS):
        raise ValueError(f"{name} has {len(sizes)} sizes")
    return Part(name, first, last, steps, rows, (sizes[0], sizes[1]), hashes)


def _lost(x: Any) -> Lost:
    if not isinstance(x, dict):
        raise ValueError(f"a lost part is {x!r:.80}")
    counts = [None if x[k] is None else _count(x[k], k) for k in ("first", "last", "steps")]
    if None in counts and counts != [None] * 3:
        raise ValueError("the steps of a lost part are known in part only")
    return Lost(_name(x["name"]), *counts)


def _name(name: Any) -> str:
    fits = isinstance(name, str) and PART.fullmatch(name)
    if not fits or part_name(number(name)) != name:
        raise ValueError(f"{name!r:.80} is no name of a part (part-000000)")
    return name


def _count(x: Any, what: str) -> int:
    if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x < 2**63:
        raise ValueError(f"{what!r} is {x!r:.80}, not a number from 0 on")
    return x


def _list(x: Any, what: str) -> Sequence[Any]:
    if not isinstance(x, list):
        raise ValueError(f"{what!r} is {x!r:.80}, not a list")
    return x

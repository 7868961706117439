"""run.json, and whether a folder holds this run's ledger, another run's, or something else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

from inrun.ledger import LedgerError, files
from inrun.ledger.manifest import KINDS, part_files
from inrun.ledger.tables import check_targets

FORMAT, VERSION = "inrun-ledger", 4
READABLE = (1, 2, 3, 4)  # 1: without checksums, 2: without nobody's part, 3: of one process
DEEPEST = 64  # levels of run.json; more would exhaust the stack of whatever walks through it
WAY_OUT = (
    "Put back a copy of run.json if you have one; without it the numbers can only be read with "
    "another tool, from the Parquet files"
)


def read_info(folder: Path, verify: bool = True) -> dict[str, Any] | None:
    """run.json of a ledger, checked; None if there is none. ``verify``: also its checksum."""
    file = folder / "run.json"
    files.stay_inside(file, folder)
    info = files.read_json(file, WAY_OUT)
    if info is None:
        return None
    if info.get("format") != FORMAT:
        raise LedgerError(f"{folder} is not a ledger of inrun: its run.json is another program's")
    version = info.get("version")
    if type(version) is not int or version not in READABLE:
        raise LedgerError(
            f"{folder} has ledger format {version!r:.40}, this inrun reads {VERSION}: use "
            "the inrun that wrote it, or a newer one"
        )
    if why := _fault(info):
        raise LedgerError(f"{file} is damaged: {why}. {WAY_OUT}")
    if verify and not intact(info):
        raise LedgerError(
            f"{file} is damaged or was edited: its content does not match its checksum. Put back a "
            f"copy of it, or look at it and accept it as it is with `inrun repair {folder}`"
        )
    return info


def intact(info: dict[str, Any]) -> bool:
    """Does run.json match its checksum? In format 1 it has none."""
    unsigned = info["version"] == 1 and files.CHECK not in info
    return unsigned or info.get(files.CHECK) == files.checksum(info)


def write_info(folder: Path, info: dict[str, Any]) -> None:
    files.write_json(folder / "run.json", files.signed(info))


def _fault(info: dict[str, Any]) -> str | None:
    """Returns what is wrong with the entries of run.json that inrun reads, None if nothing is."""
    if _deeper(info, DEEPEST):
        return f"its entries are nested more than {DEEPEST} deep"
    if missing := [k for k in ("config", "targets", "estimators") if k not in info]:
        return f"it has no {missing[0]!r}"
    for key in ("targets", "estimators"):
        names = info[key]
        if not isinstance(names, list) or not all(_is_text(n) for n in names):
            return f"{key!r} is not a list of names"
        if not names or len(set(names)) < len(names):
            return f"{key!r} needs different names, at least one"
    try:
        check_targets(info["targets"])
    except LedgerError as error:
        return str(error)
    for key in ("config", "model", "optimizer", "versions", "coverage"):
        kinds = dict | str if key in ("model", "optimizer") else dict
        if not isinstance(info.get(key, {}), kinds):
            return f"{key!r} is {info[key]!r:.40}, not a group of entries"
    for key in ("run", "created"):
        if not (info.get(key) is None or _is_text(info[key])):
            return f"{key!r} is {info[key]!r:.40}, not text"
    coverage = info.get("coverage", {})
    share, rows = coverage.get("share", 0.0), coverage.get("parameters", [])
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        return f"the share of 'coverage' is {share!r:.40}, not a number from 0 to 1"
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return "the parameters of 'coverage' are no list of rows"
    return None


def _deeper(x: Any, levels: int) -> bool:
    """Are lists and dictionaries nested more than ``levels`` deep?"""
    inner = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return any(levels == 0 or _deeper(y, levels - 1) for y in inner)


def _is_text(x: Any) -> bool:
    """Is it a str that can be written as UTF-8? (JSON may hold halves of surrogate pairs.)"""
    if not isinstance(x, str):
        return False
    try:
        x.encode()
    except UnicodeEncodeError:
        return False
    return True


def check(
    folder: Path, fixed: dict[str, Any], overwrite: bool = False, run: str | None = None
) -> dict[str, Any] | None:
    """Returns run.json of the ledger to continue, None to start one; refuses other folders. ``run``
    is that of rank 0, where this is another rank's folder."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise LedgerError(f"{folder} is a file, not a folder")
    for kind in KINDS:
        files.stay_inside(folder / kind, folder)
    info = read_info(folder)
    if info is None:
        ours = {".lock", ".writer", ".writer.tmp", "run.json.tmp", "demo.json", *KINDS}
        foreign = [f for f in folder.iterdir() if f.name not in ours]
        foreign += [f for kind in KINDS if (folder / kind).exists() for f in _inside(folder / kind)]
        if foreign:
            first = min(f.relative_to(folder).as_posix() for f in foreign)
            raise LedgerError(f"{folder} holds other files ({first}): choose an empty folder")
        return None
    for key in () if overwrite else ("config", "targets", "estimators"):
        if info[key] != fixed[key]:
            a, b = info[key], fixed[key]
            if isinstance(a, dict):
                key = next(k for k in [*a, *b] if a.get(k) != b.get(k))
                a, b = a.get(key), b.get(key)
            raise LedgerError(
                f"{folder} holds another run: its {key} is {a!r}, this run's is {b!r}; choose "
                "another folder, or pass overwrite=True to start again here"
            )
    if run is not None and info.get("run") != run and not overwrite:
        raise LedgerError(
            f"{folder} holds what a rank of another run recorded: choose another folder, or pass "
            "overwrite=True to start again here"
        )
    return info


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else [folder]


def no_strangers(folder: Path, known: set[str]) -> None:
    """Refuse to write beside parts that the manifest does not name: they may hold entries."""
    for file in part_files(folder):
        if file.name.split(".")[0] not in known:
            raise LedgerError(
                f"{file} is a part that manifest.json does not name, so it is not known whether "
                f"its records count. `inrun repair {folder}` sets it aside and deletes nothing"
            )


def fixed_entries(
    config: dict[str, Any], targets: Sequence[str], estimators: Sequence[str]
) -> dict[str, Any]:
    """The entries of run.json that are fixed when a ledger is created."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": files.json_value(config, "config"),
        "targets": check_targets(targets),
        "estimators": [str(e) for e in estimators],
    }


def begin(fixed: dict[str, Any], run: str | None = None) -> dict[str, Any]:
    """Returns run.json of a run that begins now; its ``run`` is unique, or another rank's."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return fixed | {"run": run or uuid4().hex, "created": created, "versions": files.versions()}

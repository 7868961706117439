"""Whose folder is it: a ledger of this run, of another run, or not ours at all."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

from inrun.ledger import LedgerError
from inrun.store import files
from inrun.store.tables import KINDS

FORMAT, VERSION = "inrun-ledger", 1


def read_info(folder: Path) -> dict[str, Any] | None:
    info = files.read_json(folder / "run.json")
    if info is None:
        return None
    if info.get("format") != FORMAT:
        raise LedgerError(f"{folder} is not a ledger of inrun: its run.json is another program's")
    if info.get("version") != VERSION:
        raise LedgerError(
            f"{folder} has ledger format {info.get('version')}, this inrun reads {VERSION}: use "
            "the inrun that wrote it, or a newer one"
        )
    if missing := [k for k in ("config", "targets", "estimators") if k not in info]:
        raise LedgerError(f"{folder}: run.json is damaged, it has no {missing[0]!r}")
    return info


def check(folder: Path, fixed: dict[str, Any], overwrite: bool = False) -> dict[str, Any] | None:
    """run.json of the ledger to continue, None to start one; refuse what is not this run's."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise LedgerError(f"{folder} is a file, not a folder")
    info = read_info(folder)
    if info is None:
        ours = {".lock", ".writer", "run.json.tmp", "demo.json", *KINDS}
        if foreign := sorted(f.name for f in folder.iterdir() if f.name not in ours):
            raise LedgerError(f"{folder} holds other files ({foreign[0]}): choose an empty folder")
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
    return info


def begin(fixed: dict[str, Any]) -> dict[str, Any]:
    """run.json of a run that begins now; ``run`` tells it from any other."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return fixed | {"run": uuid4().hex, "created": created, "versions": files.versions()}

"""Files that commands write: never over a file that is not theirs, and never half of a file."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

LEDGER_FILES = ("run.json", "manifest.json", ".lock", ".writer")
LEDGER_FOLDERS = ("values", "steps")


class OutputError(ValueError):
    """A file must not be written; the message says why and what to do."""


def check_output(
    path: Path,
    *,
    inputs: Iterable[Path | None] = (),
    force: bool = False,
    ours: Callable[[Path], bool] = lambda path: False,
    option: str = "-o",
) -> None:
    """Refuse to write over an input, a file of a ledger, or, without ``force``, any other file.

    ``ours`` says of an existing file that the same command wrote it and may write it again.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder: name a file with {option}")
    for other in inputs:
        if other is not None and _same(path, other):
            raise OutputError(
                f"{path} is what the command reads: choose another file with {option}"
            )
    folder = path.resolve().parent
    if ledger := _ledger_of(path.resolve()):
        raise OutputError(
            f"{path} is a file of the ledger {ledger}: choose another file with {option}"
        )
    if special(path) or force or not os.path.lexists(path) or ours(path):
        return
    raise OutputError(
        f"{path} exists already: choose another file with {option}, or pass --force to replace it"
        + ("" if os.access(folder, os.W_OK) else f" ({folder} cannot be written to)")
    )


def special(path: Path) -> bool:
    """Is it a pipe, a terminal or another device? Then there is nothing to write over."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_output(path: Path, content: bytes, replace: bool = True) -> int:
    """Write a file at once or not at all; returns its size.

    The file is written beside it under another name, fsynced and renamed. Unless ``replace``, a
    file that appeared there meanwhile is not replaced.
    """
    if special(path):
        return path.write_bytes(content)
    file = path.resolve()  # through a link: the link stays
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name[:50]}.{os.getpid()}.tmp")  # 50: names have 255 bytes
    new = draft.open("xb")  # outside of try: a file that was there before is not ours to delete
    try:
        with new as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        if file.exists():
            with contextlib.suppress(OSError):
                shutil.copymode(file, draft)
        if replace or not _link(draft, file):
            draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    return len(content)


def _link(draft: Path, file: Path) -> bool:
    """Give the draft its name unless that is taken; False where the disk has no hard links."""
    try:
        file.hardlink_to(draft)
    except FileExistsError:
        raise OutputError(
            f"{file} appeared while it was being written: pass --force to replace it"
        ) from None
    except OSError:
        if os.path.lexists(file):
            raise OutputError(f"{file} exists already: pass --force to replace it") from None
        return False
    return True


def _same(path: Path, other: Path) -> bool:
    """Is ``path`` the same file as an input, by whatever name, or inside a folder that is one?"""
    if not path.exists() or not other.exists():
        return path.resolve() == other.resolve()
    return path.samefile(other) or other.resolve() in path.resolve().parents


def _ledger_of(file: Path) -> Path | None:
    """Returns the ledger that a file would belong to by its place and name, None if to none."""
    folder = file.parent
    if file.name in LEDGER_FILES and _is_ledger(folder):
        return folder
    if folder.name in LEDGER_FOLDERS and _is_ledger(folder.parent):
        return folder.parent
    return None


def _is_ledger(folder: Path) -> bool:
    if any(next((folder / kind).glob("part-*.parquet"), None) for kind in LEDGER_FOLDERS):
        return True
    try:
        with (folder / "run.json").open("rb") as file:
            return b"inrun-ledger" in file.read(1 << 16)
    except OSError:
        return False

"""Sources to read, and JSON lines that survive a kill."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from inrun.output import write_output

TEXT = ("z_star", "text", "sentence")


class VariantsError(ValueError):
    """What is wrong, where, why and what to do, in one line."""


class Source(NamedTuple):
    id: int | str
    z_star: str


def read_sources(path: Path) -> list[Source]:
    """Texts with ids: .txt (one per line, the line's number from 0 is its id) or .jsonl."""
    if path.suffix == ".txt":
        found = [Source(i, line.strip()) for i, line in enumerate(_lines(path)) if line.strip()]
    elif path.suffix in (".jsonl", ".ndjson"):
        found = [_source(row, f"{path}, line {n}", n - 1) for n, row in read_rows(path)]
    else:
        raise VariantsError(f"{path}: sources come from .txt (one per line) or .jsonl")
    if not found:
        raise VariantsError(f"{path} holds no source")
    seen: set[int | str] = set()
    for source in found:
        if source.id in seen:
            raise VariantsError(f"{path}: the id {source.id!r} occurs twice; ids must be unique")
        seen.add(source.id)
    return found


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a .jsonl file, each with the number of its line."""
    return _objects(path, _lines(path))


def _objects(path: Path, lines: Iterable[str]) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = _parse(line)
            if row is None:
                raise VariantsError(
                    f"{path}, line {number} is not a JSON object: mend or remove it"
                )
            rows.append((number, row))
    return rows


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise VariantsError(f"{path}: no such file") from None
    return _decode(path, content.removeprefix(codecs.BOM_UTF8).split(b"\n"))  # no other mark


def _decode(path: Path, lines: Iterable[bytes]) -> list[str]:
    try:
        return [line.decode() for line in lines]
    except UnicodeDecodeError as error:
        raise VariantsError(f"{path} is not UTF-8 text: {error.reason} at {error.start}") from None


def _parse(line: str | bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _source(row: dict[str, Any], where: str, number: int) -> Source:
    key = row.get("id", number)
    if not isinstance(key, int | str) or isinstance(key, bool):
        raise VariantsError(f"{where}: the id is {key!r}; it must be an integer or a string")
    text = next((row[name] for name in TEXT if name in row), None)
    if not isinstance(text, str) or not text.strip():
        raise VariantsError(f"{where} has no text: name the field {' or '.join(TEXT)}")
    return Source(key, text.encode("utf-8", "replace").decode())  # half a surrogate pair is no text


class Journal:
    """A .jsonl file that grows by whole lines, each on the disk before ``append`` returns.

    One writer at a time. A last line that a kill cut short is removed when the file is opened, once
    ``known`` has found the rows before it to be ours: it raises an error otherwise.
    """

    def __init__(
        self, path: Path, known: Callable[[list[dict[str, Any]]], object] = lambda rows: None
    ) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise VariantsError(
                f"{path} is being written by another process: wait for it, or name another file"
            ) from None
        try:
            whole, cut = self._read()
            known(self.rows)
            self._file = path.open("ab", buffering=0)
            if cut and _parse(cut) is None:
                self._file.truncate(whole)
            elif cut:
                self._file.write(b"\n")
        except BaseException:
            self.close()
            raise

    def append(self, row: dict[str, Any]) -> None:
        line, end = _encode(row), self.path.stat().st_size
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # no half a line between whole ones
            raise VariantsError(
                f"cannot write to {self.path}: {error.strerror or error}; make room and run again"
            ) from error

    def rewrite(self, rows: Iterable[dict[str, Any]]) -> None:
        """Make the file hold these rows, at once or not at all."""
        content = b"".join(map(_encode, rows))
        if self.path.read_bytes() == content:
            return

        self._file.close()
        try:
            write_output(self.path, content)
        finally:
            self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
        self._lock.release()

    def _read(self) -> tuple[int, bytes]:
        """Sets ``rows``; returns how many bytes are whole lines, and the line after them."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].split(b"\n")
        if _parse(content[whole:]) is not None:
            lines.append(content[whole:])
        self.rows = [row for _, row in _objects(self.path, _decode(self.path, lines))]
        return whole, content[whole:]


def _encode(row: dict[str, Any]) -> bytes:
    line = json.dumps(row, ensure_ascii=False) + "\n"
    return line.encode("utf-8", "replace")  # half a surrogate pair is no text

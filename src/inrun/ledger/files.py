"""Writing and reading the files of a ledger: atomic writes, checksums, JSON, no links followed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import platform
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.ledger import LedgerError

GROUP_ROWS = 1 << 18  # rows of a Parquet row group: enough to scan fast, small enough to stream
GROUP_CELLS = 1 << 23  # numbers of a row group: with many targets a group has fewer rows
JSON_BYTES = 256 << 20  # a larger run.json or manifest.json is not ours
CHECK = "check"  # key under which a JSON file of a ledger holds its own checksum


@dataclass(frozen=True)
class Written:
    rows: int
    bytes: int
    sha256: str


def replace(path: Path, write: Callable[[IO[bytes]], None]) -> int:
    """Write a file under a temporary name, fsync, rename, fsync the folder; returns its size.

    The temporary file is always a new one, so a symbolic link that waits under its name is removed
    and never followed.
    """
    draft = path.with_name(path.name + ".tmp")
    if os.path.lexists(draft):
        draft.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(draft, flags, 0o666), "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    os.replace(draft, path)  # noqa: PTH105 (one patchable name for the crash tests)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return size


class _Hashing(io.RawIOBase):
    """A file that passes bytes on to another and keeps their SHA-256."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()


def write_parquet(
    path: Path, tables: Iterable[pa.Table], metadata: Mapping[str, str] | None = None
) -> Written:
    """Stream tables into one file, regrouped to ``GROUP_ROWS``, with ``metadata`` in its footer."""
    rows, digest = 0, ""

    def write(file: IO[bytes]) -> None:
        nonlocal rows, digest
        source = (table.replace_schema_metadata(metadata) for table in tables)
        waiting = [next(source)]
        schema = waiting[0].schema
        size = min(GROUP_ROWS, max(1024, GROUP_CELLS // len(schema)))
        sink = _Hashing(file)
        options = {"compression": "zstd", "write_page_checksum": True}
        with pq.ParquetWriter(pa.PythonFile(sink, "w"), schema, **options) as writer:
            for table in source:
                if sum(t.num_rows for t in waiting) >= size:
                    writer.write_table(pa.concat_tables(waiting), row_group_size=size)
                    rows += sum(t.num_rows for t in waiting)
                    waiting = []
                waiting.append(table)
            writer.write_table(pa.concat_tables(waiting), row_group_size=size)
            rows += sum(t.num_rows for t in waiting)
        digest = sink.sha256.hexdigest()

    bytes_ = replace(path, write)
    return Written(rows, bytes_, digest)


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    data = text.encode("utf-8", "backslashreplace")  # half a surrogate pair becomes a JSON escape

    def write(file: IO[bytes]) -> None:
        file.write(data)

    replace(path, write)


def read_json(path: Path, way_out: str = "") -> dict[str, Any] | None:
    """The content of a JSON file, None if there is no such file."""
    if way_out:
        try:
            return read_json(path)
        except LedgerError as error:
            raise LedgerError(f"{error}. {way_out}") from error
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > JSON_BYTES:
            raise LedgerError(f"{path} is not a file of inrun: no plain file, or far too large")
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if path.is_symlink():
            raise LedgerError(f"{path} is a symbolic link that leads nowhere") from None
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise LedgerError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise LedgerError(f"{path} is not a file of inrun")
    return content


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the entries of a JSON file except the checksum itself; layout does not matter."""
    rest = {k: v for k, v in content.items() if k != CHECK}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def signed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content with its checksum added, so that damage is noticed."""
    return {k: v for k, v in content.items() if k != CHECK} | {CHECK: checksum(content)}


def json_value(x: Any, where: str) -> Any:
    """Returns ``x`` as JSON would read it back, so that written and read values compare equal."""
    if x is None or isinstance(x, bool | int | str):
        return x
    if isinstance(x, np.generic):
        return json_value(x.item(), where)
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    if isinstance(x, Path):
        return str(x)
    if isinstance(x, Mapping):
        return {str(k): json_value(v, f"{where}.{k}") for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [json_value(v, f"{where}[{i}]") for i, v in enumerate(x)]
    raise LedgerError(f"{where} is a {type(x).__name__}; run.json holds only plain JSON values")


@contextlib.contextmanager
def disk(folder: Path, note: str) -> Iterator[None]:
    """Turn errors of the disk into a LedgerError that names the ledger and ends with ``note``."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise LedgerError(f"cannot write to {folder}: {why}; {note}") from error


def stay_inside(file: Path, folder: Path) -> None:
    """Refuse a symbolic link that leads out of the ledger's folder."""
    if file.is_symlink() and not file.resolve().is_relative_to(folder.resolve()):
        raise LedgerError(
            f"{file} is a symbolic link out of the ledger's folder: a ledger is one folder without "
            "such links. If it is yours, move the whole folder and link that instead"
        )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("inrun", "torch", "numpy", "pandas", "pyarrow", "duckdb"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found

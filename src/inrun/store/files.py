"""Files that are whole or not there: atomic writes, the lock of one writer, plain JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from inrun.ledger import LedgerError

GROUP_ROWS = 1 << 18  # rows of a Parquet row group: enough to scan fast, small enough to stream
WAIT_FOR_DEAD = 15.0  # seconds that loader workers may outlive a killed writer and hold its lock


def replace(path: Path, write: Callable[[IO[bytes]], None]) -> int:
    """Write a file under a temporary name, fsync, rename, fsync the folder; returns its size."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
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


def write_parquet(path: Path, tables: Iterable[pa.Table]) -> tuple[int, int]:
    """Stream tables into one file, regrouped to ``GROUP_ROWS``; returns its rows and its size."""
    rows = 0

    def write(file: IO[bytes]) -> None:
        nonlocal rows
        source = iter(tables)
        waiting = [next(source)]
        with pq.ParquetWriter(file, waiting[0].schema, compression="zstd") as writer:
            for table in source:
                if sum(t.num_rows for t in waiting) >= GROUP_ROWS:
                    writer.write_table(pa.concat_tables(waiting), row_group_size=GROUP_ROWS)
                    rows += sum(t.num_rows for t in waiting)
                    waiting = []
                waiting.append(table)
            writer.write_table(pa.concat_tables(waiting), row_group_size=GROUP_ROWS)
            rows += sum(t.num_rows for t in waiting)

    size = replace(path, write)
    return rows, size


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)

    def write(file: IO[bytes]) -> None:
        file.write(text.encode())

    replace(path, write)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file, None if there is no such file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise LedgerError(f"{path} is not a file of inrun")
    return content


def plain(x: Any, where: str) -> Any:
    """``x`` as JSON says it, so that what is written compares equal to what is read."""
    if x is None or isinstance(x, bool | int | str):
        return x
    if isinstance(x, np.generic):
        return plain(x.item(), where)
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    if isinstance(x, Path):
        return str(x)
    if isinstance(x, Mapping):
        return {str(k): plain(v, f"{where}.{k}") for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain(v, f"{where}[{i}]") for i, v in enumerate(x)]
    raise LedgerError(f"{where} is a {type(x).__name__}; run.json holds only plain JSON values")


@contextlib.contextmanager
def disk(folder: Path, note: str) -> Iterator[None]:
    """Say which ledger could not be written and what became of the records."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise LedgerError(f"cannot write to {folder}: {why}; {note}") from error


def acquire(folder: Path) -> FileLock:
    """The lock of the folder's only writer."""
    lock = FileLock(str(folder / ".lock"), thread_local=False)
    owner = folder / ".writer"
    try:
        pid = int(owner.read_text())
    except (OSError, ValueError):
        pid = 0
    try:
        lock.acquire(timeout=0 if _alive(pid) else WAIT_FOR_DEAD if pid else 1.0)
    except Timeout:
        who = f"process {pid}" if pid else "another process"
        raise LedgerError(f"{folder} is being written by {who}: one writer at a time") from None
    owner.write_text(str(os.getpid()))
    return lock


def _alive(pid: int) -> bool:
    if pid <= 0 or os.name != "posix":
        return pid > 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("inrun", "torch", "numpy", "pandas", "pyarrow", "duckdb"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found

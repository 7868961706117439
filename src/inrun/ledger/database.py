"""DuckDB, as the tables of a ledger use it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from inrun.ledger import LedgerError

if TYPE_CHECKING:
    import duckdb

MEMORY_LIMIT = "2GiB"  # of DuckDB; the answer comes on top


@contextlib.contextmanager
def connect(threads: int | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB in memory, limited, spilling to a temporary folder, closed off from the rest."""
    try:
        import duckdb
    except ImportError:
        raise LedgerError("reading a ledger needs duckdb: pip install inrun") from None
    settings: dict[str, Any] = {
        "memory_limit": MEMORY_LIMIT,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,
        "preserve_insertion_order": False,
    }
    if threads is not None:
        settings["threads"] = threads
    with (
        tempfile.TemporaryDirectory(prefix="inrun-", ignore_cleanup_errors=True) as spill,
        duckdb.connect(config=settings | {"temp_directory": spill}) as db,
    ):
        db.execute("SET enable_external_access = false")  # not before temp_directory is set
        db.execute("SET lock_configuration = true")
        yield db


def unreadable(name: object, error: Exception) -> LedgerError:
    return LedgerError(f"{name} cannot be read: {' '.join(str(error).split())}")

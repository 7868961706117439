"""What each training example did to your model, measured during the run you were doing anyway."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from inrun.check import Check
from inrun.errors import BatchError, CaptureError, ValidationError
from inrun.follow import register_layout
from inrun.layout import Layout
from inrun.ledger import LedgerError
from inrun.logging import log
from inrun.ops import register_op
from inrun.rules import register_optimizer
from inrun.run import Run
from inrun.targets import by_label
from inrun.watching import watch

if TYPE_CHECKING:
    from inrun.store import SavedRun

try:
    __version__ = version("inrun")
except PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0+unknown"


def open(path: str | os.PathLike[str]) -> SavedRun:
    """Open the ledger folder of a run, also while the run goes on: the tables of the live run."""
    from inrun.store import open_run

    return open_run(path)


__all__ = [
    "BatchError",
    "CaptureError",
    "Check",
    "Layout",
    "LedgerError",
    "Run",
    "ValidationError",
    "__version__",
    "by_label",
    "log",
    "open",
    "register_layout",
    "register_op",
    "register_optimizer",
    "watch",
]

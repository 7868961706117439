"""What each training example did to your model, measured during the run you were doing anyway."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inrun.asking.ask import ask
    from inrun.asking.stored import open_answers
    from inrun.errors import BatchError, CaptureError, ValidationError
    from inrun.exact.check import Check
    from inrun.gradients import register_op
    from inrun.ids import carry_ids, row_id, take_ids, with_ids
    from inrun.ledger import LedgerError
    from inrun.ledger.saved import SavedRun
    from inrun.optimizers import register_optimizer
    from inrun.run.logging import log
    from inrun.run.run import Run
    from inrun.run.watching import watch
    from inrun.tensors.follow import register_layout
    from inrun.tensors.layout import Layout
    from inrun.validation.steady import halves
    from inrun.validation.targets import by_label

__version__: str  # looked up when it is first asked for

# Where each public name is. They are imported when they are first used, so that the command line
# can answer Ctrl-C while torch is being imported.
_PLACES = {
    "BatchError": "errors",
    "CaptureError": "errors",
    "Check": "exact.check",
    "Layout": "tensors.layout",
    "LedgerError": "ledger",
    "LinearLoss": "gradients.fused_loss",
    "Run": "run.run",
    "ValidationError": "errors",
    "ask": "asking.ask",
    "by_label": "validation.targets",
    "carry_ids": "ids",
    "halves": "validation.steady",
    "log": "run.logging",
    "open_answers": "asking.stored",
    "register_function": "capture.mode",
    "register_layout": "tensors.follow",
    "register_op": "gradients",
    "register_optimizer": "optimizers",
    "row_id": "ids",
    "take_ids": "ids",
    "watch": "run.watching",
    "with_ids": "ids",
}


def __getattr__(name: str) -> Any:
    found: Any
    if name == "__version__":
        found = _version()
    elif name in ("integrations", "packing"):
        found = import_module(f"inrun.{name}")
    elif name in _PLACES:
        found = getattr(import_module(f"inrun.{_PLACES[name]}"), name)
    else:
        raise AttributeError(f"module 'inrun' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("inrun")
    except PackageNotFoundError:  # used from a source tree that is not installed
        return "0+unknown"


def open(path: str | os.PathLike[str]) -> SavedRun:
    """Open the ledger folder of a run, also while the run goes on: the tables of the live run."""
    from inrun.ledger.saved import open_run

    return open_run(path)


__all__ = [
    "BatchError",
    "CaptureError",
    "Check",
    "Layout",
    "LedgerError",
    "LinearLoss",
    "Run",
    "ValidationError",
    "__version__",
    "ask",
    "by_label",
    "carry_ids",
    "halves",
    "integrations",
    "log",
    "open",
    "open_answers",
    "packing",
    "register_function",
    "register_layout",
    "register_op",
    "register_optimizer",
    "row_id",
    "take_ids",
    "watch",
    "with_ids",
]

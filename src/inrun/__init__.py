"""What each training example did to your model, measured during the run you were doing anyway."""

from importlib.metadata import PackageNotFoundError, version

from inrun.check import Check
from inrun.errors import BatchError, CaptureError, ValidationError
from inrun.layout import Layout, register_layout
from inrun.ledger import LedgerError
from inrun.ops import register_op
from inrun.rules import register_optimizer
from inrun.run import Run, watch
from inrun.store import SavedRun
from inrun.store import open_run as open
from inrun.validation import by_label

try:
    __version__ = version("inrun")
except PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "BatchError",
    "CaptureError",
    "Check",
    "Layout",
    "LedgerError",
    "Run",
    "SavedRun",
    "ValidationError",
    "__version__",
    "by_label",
    "open",
    "register_layout",
    "register_op",
    "register_optimizer",
    "watch",
]

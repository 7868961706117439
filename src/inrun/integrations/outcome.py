"""What every integration shows of a run: numbers for the framework's own log, and the report."""

from __future__ import annotations

import math
import os
from pathlib import Path

import inrun


def numbers(run: inrun.Run) -> dict[str, float]:
    """Sums since the training began: of the values, the explained share, the validation loss."""
    tally = run.tally
    if not tally.steps:
        return {}
    found = {
        "inrun_sum": tally.total,
        "inrun_explained": tally.explained,
        "inrun_validation_loss": tally.loss,
    }
    if tally.void:
        found["inrun_void_steps"] = float(tally.void)
    return {name: x for name, x in found.items() if math.isfinite(x)}


def write_report(out: str | os.PathLike[str]) -> None:
    """Write ``report.html`` into the ledger's folder."""
    from inrun.report import write_report as write

    write(inrun.open(out), Path(out) / "report.html")

"""The report of a run, and the page of the answers that were asked of it (answers.py)."""

from __future__ import annotations

from pathlib import Path

from inrun.ledger.saved import SavedRun
from inrun.ledger.signals import WHOLE, Window
from inrun.output import check_output, write_output
from inrun.report.data import payload
from inrun.report.render import embed, render
from inrun.report.tokens import Tokenizer

__all__ = ["embed", "is_report", "render", "write_report"]

GENERATOR = b'<meta name="generator" content="inrun report">'


def write_report(
    run: SavedRun,
    output: str | Path,
    examples: str | Path | None = None,
    estimator: str | None = None,
    replace: bool = True,
    tokenizer: Tokenizer | None = None,
    answers: str | Path | None = None,
    window: Window = WHOLE,
) -> int:
    """Write the report of a run, at once or not at all; returns its size in bytes.

    ``tokenizer`` gives the text of input ids where the run has values of positions: "bytes", a
    tokenizer of transformers (folder or name), or a function of a list of ids. ``window``: values,
    harm and suspects of these steps alone.

    ``answers`` is a folder of ``inrun.ask``; without it the report shows those in the folder
    "answers" of the run, if there are any.

    A file that is there is replaced, unless ``replace=False``; never the examples or a file of a
    ledger.
    """
    file = Path(output)
    inputs = [] if examples is None else [Path(examples)]
    check_output(file, inputs=inputs, force=replace)
    folder = None if answers is None else Path(answers)
    data = payload(run, examples, estimator, tokenizer, folder, window)
    page = render(data).encode("utf-8", "replace")  # half a surrogate
    return write_output(file, page, replace)


def is_report(path: Path) -> bool:
    """Is this file a report that we wrote?"""
    try:
        with path.open("rb") as file:
            return GENERATOR in file.read(1 << 12)
    except OSError:
        return False

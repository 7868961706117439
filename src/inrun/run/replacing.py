"""In a notebook a cell is run again: ``watch`` then replaces the run that it made before.

In a script a second ``watch`` of the same model is refused (``run/attaching.py``): there it is a
mistake.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inrun.run.attaching import open_runs


def in_notebook() -> bool:
    """Does this run in IPython: a notebook, Colab, or its command line?"""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def replace_earlier(
    watched: Sequence[Any], out: str | os.PathLike[str] | None, overwrite: bool
) -> None:
    """In a notebook, close the open runs that watch one of these or write into this folder."""
    if not in_notebook():
        return
    folder = None if out is None else Path(out).absolute()
    for run, theirs in open_runs():
        own = getattr(run._ledger, "path", None)
        same = own is not None and folder is not None and Path(own).absolute() == folder
        if same or any(x is y for x in watched for y in theirs):
            run.close()
            print(_note(run, same and not overwrite and run.step > 0))


def _note(run: Any, kept: bool) -> str:
    done = f"{run.step:,} step{'s' * (run.step != 1)}"
    note = f"inrun: this replaces the run that was open here, which is closed after {done}."
    if kept:
        note += (
            f" {run._ledger.name()} keeps them: pass overwrite=True to start it again, or another "
            "out="
        )
    return note

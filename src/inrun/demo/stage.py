"""What both demos share: the folder, the progress bar, the report, the machine."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from inrun.console import safe
from inrun.ledger import LedgerError
from inrun.ledger.saved import open_run
from inrun.output import LEDGER_FILES, LEDGER_FOLDERS
from inrun.report import write_report
from inrun.run.bookkeeping import Tally
from inrun.run.run import Run

MARK = "demo.json"  # its presence says that a demo made the folder
OURS = (MARK, "examples.npz", "examples.jsonl", "report.html", *LEDGER_FILES)


def fresh(folder: Path) -> Path:
    """Empty the demo's folder: remove what an earlier demo wrote there, and nothing else."""
    if folder.exists() and not folder.is_dir():
        raise LedgerError(f"{folder} is a file, not a folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise LedgerError(f"{folder} was not made by a demo: choose another folder with --out")
        found = [f for f in folder.rglob("*") if f.is_symlink() or not f.is_dir()]
        if others := sorted(str(f) for f in found if not _of_a_demo(f.relative_to(folder))):
            raise LedgerError(
                f"{others[0]} was not made by a demo: move it away, or choose another folder with "
                "--out"
            )
        for file in found:
            file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text("{}\n", "utf-8")  # from now on it is a demo's, finished or not
    return folder


def _of_a_demo(file: Path) -> bool:
    name = DRAFT.sub(r"\1", file.name)
    if len(file.parts) == 1:
        return name in OURS
    return len(file.parts) == 2 and file.parts[0] in LEDGER_FOLDERS and bool(PART.fullmatch(name))


PART = re.compile(r"part-\d+\.parquet")
DRAFT = re.compile(r"^\.?(.+?)(\.\d+)?\.tmp$")  # of a file that a kill left half written


@contextmanager
def threads(n: int) -> Iterator[None]:
    """The demo's models are too small for many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(n, os.cpu_count() or 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def progress(console: Console, what: str, total: int, run: Run | None = None) -> Iterator[Any]:
    """A bar over steps; with a run, its explained ratio as it goes. Yields ``advance()``."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[note]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what.ljust(22), total=total, note="")
        if run is not None:
            run.tally.listeners.append(lambda tally: bar.update(task, note=_note(tally)))
        yield lambda: bar.advance(task)


def _note(tally: Tally) -> str:
    return f"explained {tally.explained:.1%}" if tally.batch else ""


def table(*columns: str, words: Sequence[int] = (0,)) -> Table:
    """A quiet table; the columns in ``words`` are text, the others numbers."""
    made = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i in words else "right", no_wrap=True)
    return made


def say(console: Console, title: str, body: Any, note: str) -> None:
    """A titled part of the result, with a remark below."""
    console.print()
    console.print(Text(safe(title), "bold underline"))
    console.print(body)
    console.print(Text(note, "dim italic"))


def finish(
    folder: Path, examples: Path, result: dict[str, Any], console: Console, top: str
) -> None:
    """Keep the numbers, write the report and say where it is."""
    (folder / MARK).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    report = folder / "report.html"
    write_report(open_run(folder), report, examples)
    result["report"] = str(report)
    console.print()
    more = f"inrun top {folder} {top} --examples {examples}"
    for name, what in {"Report": str(report), "Ledger": str(folder), "More": more}.items():
        bold = "bold" if name == "Report" else ""
        line = Text.assemble((name.ljust(8), "dim"), (safe(what), bold))
        console.print(line, soft_wrap=True)


def machine() -> dict[str, Any]:
    """What the numbers were measured with."""
    return {
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("inrun", "torch", "numpy")},
    }

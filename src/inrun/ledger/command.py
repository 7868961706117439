"""``inrun repair`` on the command line."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from inrun.console import Json, say
from inrun.ledger.ranks import rank_folders
from inrun.ledger.repair import ASIDE, repair


def repair_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Ledger folder: watch(..., out=RUN).")],
    as_json: Json = False,
) -> None:
    """Make a damaged ledger readable again: keep the parts that are whole, set the others aside.

    A lost or damaged manifest.json is made again from the parts. Nothing is deleted: what does not
    count is moved to RUN/damaged. A ledger that is whole stays as it is.
    """
    lines, data = _repaired(run)
    for rank, folder in rank_folders(run).items():
        more, found = _repaired(folder)
        lines += [f"{folder.name}: {line}" for line in more]
        data.setdefault("ranks", {})[str(rank)] = found
    say(as_json, data, "\n".join(lines))


def _repaired(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Repair the ledger of one process; returns what to print, and the same as data."""
    result = repair(folder)
    n = len(result.parts)
    lines = [*result.notes, f"{n:,} part{'' if n == 1 else 's'} whole: {result.steps:,} steps"]
    lines += [f"moved to {folder / ASIDE}: {name} ({why})" for name, why in result.aside.items()]
    lines += [f"lost: {lost}" for lost in result.lost]
    if not (result.notes or result.aside or result.lost):
        lines.append("nothing to repair")
    data = {
        "notes": list(result.notes),
        "parts": n,
        "steps": result.steps,
        "aside": result.aside,
        "lost": [asdict(lost) for lost in result.lost],
    }
    return lines, data

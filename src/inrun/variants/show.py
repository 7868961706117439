"""What the command prints: a bar while it asks, a summary, the table of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from inrun.console import console, safe
from inrun.variants.filters import REASONS
from inrun.variants.generate import Outcome
from inrun.variants.tokens import CAPITALS

LISTED = 10  # of what is short, failed or dropped; --json has all


@contextmanager
def progress(model: str) -> Iterator[Callable[[Outcome], None]]:
    """A bar over the sources, on stderr."""
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task(f"Asking {safe(model)}", total=None, note="")

        def show(outcome: Outcome) -> None:
            note = [f"{outcome.asked:,} asked"]
            note += [f"{len(x)} {name}" for name, x in _left(outcome).items() if x]
            bar.update(task, total=outcome.sources, completed=outcome.done, note=", ".join(note))

        yield show


def summary(outcome: Outcome, output: Path, k: int, entities: str) -> Table:
    """What was written, what it took, what is missing and how to get it."""
    complete = outcome.there + outcome.complete
    table = _rows()
    then = f" ({outcome.there:,} were there)" if outcome.there else ""
    table.add_row("complete", f"{complete:,} of {outcome.sources:,} sources{then}")
    each = f"1 partial_same, {k} of each other category"
    table.add_row("variants", Text(f"{each}, in {safe(output)}"))
    asked = [f"{outcome.asked:,} sent, {outcome.cached:,} from the cache"]
    table.add_row("requests", ", ".join(asked + _counts(outcome.problems)))
    table.add_row("dropped", ", ".join(_counts(outcome.dropped)) or "nothing")
    table.add_row("entities", _entities(entities))
    for x in outcome.short[:LISTED]:
        table.add_row("short", Text(f"{safe(x['id'])}: lacks {', '.join(_counts(x['lacks']))}"))
    for x in outcome.failed[:LISTED]:
        table.add_row("no reply", Text(f"{safe(x['id'])}: {safe(x['why'])}"))
    for name, found in _left(outcome).items():
        if len(found) > LISTED:
            table.add_row(name, f"and {len(found) - LISTED:,} more; --json lists all")
    if outcome.failed:
        table.add_row("next", "run the same command again: it asks only for what is missing")
    elif outcome.short:
        table.add_row("next", "more --rounds ask on; --keep-short writes what there is")
    return table


def checked(report: Mapping[str, Any], path: Path) -> Table:
    """Passed and dropped by category, and the first ones that were dropped."""
    table = _rows()
    table.add_row("file", Text(f"{safe(path)}, {report['sources']:,} sources"))
    each = f"1 partial_same and {report['k']} of each other category"
    table.add_row("complete", f"{report['complete']:,} sources have {each} that pass")
    table.add_row("entities", _entities(report["entities"]))
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    used = [r for r in REASONS if any(c[r] for c in report["categories"].values())]
    for name in ("category", "window", "variants", "pass", *used):
        grid.add_column(name, justify="left" if name == "category" else "right", no_wrap=True)
    for category, n in report["categories"].items():
        low, high = report["windows"][category]
        counts = (f"{n[name]:,}" for name in ("variants", "pass", *used))
        grid.add_row(category, f"{low:g}–{high:g}", *counts)
    table.add_row("", "")
    table.add_row("filter", grid)
    for drop in report["dropped"][:LISTED]:
        why = f"{drop['id']} {drop['category']}: {drop['reason']}, {drop['detail']}"
        table.add_row("dropped", Text.assemble(safe(why), "\n", (safe(drop["text"]), "dim")))
    if (more := len(report["dropped"]) - LISTED) > 0:
        table.add_row("dropped", f"and {more:,} more; --json lists all")
    return table


def _rows() -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    return table


def _entities(label: str) -> Text:
    better = " (with spaCy installed, its named entities)" if label == CAPITALS.label else ""
    return Text(safe(label + better))


def _left(outcome: Outcome) -> dict[str, list[dict[str, Any]]]:
    return {"short": outcome.short, "no reply": outcome.failed}


def _counts(found: Mapping[str, int]) -> list[str]:
    return [f"{n:,} × {name}" for name, n in sorted(found.items())]

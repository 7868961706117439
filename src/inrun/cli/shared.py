"""Options and tables that several commands have in common."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.table import Table
from rich.text import Text

from inrun.console import excerpt, safe
from inrun.report.examples import load_examples

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Ledger folder: watch(..., out=RUN).")]
Estimator = Annotated[
    str | None, typer.Option(help="One of the run's estimators; the first by default.")
]
Examples = Annotated[
    Path | None,
    typer.Option(help="What the ids stand for: .jsonl, .csv, .parquet, .npz or a dataset folder."),
]
Since = Annotated[int | None, typer.Option(help="Only from this step on.")]
Until = Annotated[int | None, typer.Option(help="Only before this step.")]
HalfLife = Annotated[
    float | None, typer.Option(help="Values of older steps count less: half for so many.")
]


def with_examples(table: pd.DataFrame, examples: Path | None) -> pd.DataFrame:
    """The table with text, label and group of each id, where they are given."""
    if examples is None or not len(table):
        return table
    shown = load_examples(examples, table["id"].tolist()).drop(columns="image")
    shown = shown.dropna(axis=1, how="all").astype({"id": table["id"].dtype})
    return table.merge(shown, on="id", how="left")


def grid(table: pd.DataFrame) -> Table:
    """A table for the terminal."""
    names = [c for c in table.columns if c != "scored"]
    found = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        words = name in ("id", "text", "label", "group", "hurts")
        justify: Any = "left" if words else "right"
        found.add_column(safe(name), justify=justify, no_wrap=not words, overflow="fold")
    for row in table[names].itertuples(index=False):
        found.add_row(*(Text(_cell(name, x)) for name, x in zip(names, row, strict=True)))
    return found


def _cell(name: str, x: Any) -> str:
    if isinstance(x, float):
        return "" if math.isnan(x) else f"{x:.4g}"
    if x is None:
        return ""
    return safe(x, 200) if name == "id" else excerpt(x)  # two ids never look the same

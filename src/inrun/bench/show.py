"""Prints the result of a benchmark as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inrun.console import excerpt

MODES = {"eager": "eager", "compile": "torch.compile"}
LONGEST = 300  # characters of a message; the JSON has all of it


def show(result: dict[str, Any], console: Console) -> None:
    """For each mode a table of times, one of what was verified, one of the stages of a step."""
    console.print(_heading(result))
    for mode in dict.fromkeys(row["mode"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        _title(console, MODES[mode])
        console.print(_times(rows))
        for row in rows:
            if row["message"]:
                _remark(console, f"{row['variant']}: {row['message']}")
        if any(row["verify"] for row in rows):
            _title(console, f"{MODES[mode]}: values of a step against float64")
            console.print(_verified(rows))
        if any(len(row["stages_ms"]) > 1 for row in rows):
            _title(console, f"{MODES[mode]}: stages, ms per step")
            console.print(_stages(rows))


def _heading(result: dict[str, Any]) -> Text:
    options, hardware, targets = result["options"], result["hardware"], result["options"]["targets"]
    shape = f"batch {options['batch']}"
    if options["model"] != "convnet":
        shape += f" × {options['length']} tokens"
    where = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads"
    return Text.assemble(
        (f"inrun bench: {options['model']}", "bold"),
        f" ({result['parameters']:,} parameters), {options['dtype']}, {options['optimizer']}\n"
        f"{shape}, {targets} validation target{'s' * (targets > 1)} of {options['validation']}\n"
        f"{where}, torch {result['versions']['torch']}",
    )


def _times(rows: list[dict[str, Any]]) -> Table:
    memory = any(row["peak_bytes"] for row in rows)
    table = _table("variant", "ms/step", "10–90 %", "samples/s", "of plain")
    for name in ("peak GB", "of plain") if memory else ():
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ms = row["step_ms"]
        if ms is None:
            table.add_row(row["variant"], "", Text(row["status"], "red"))
            continue
        cells = [f"{ms['median']:.1f}", f"{ms['p10']:.1f}–{ms['p90']:.1f}"]
        cells += [f"{row['samples_per_s']:,.1f}", _percent(row["ratio"])]
        if memory:
            cells += [f"{row['peak_bytes'] / 1e9:.2f}", _percent(row["memory_ratio"])]
        table.add_row(row["variant"], *cells)
    return table


def _verified(rows: list[dict[str, Any]]) -> Table:
    table = _table("variant", "Pearson R", "relative error")
    for row in rows:
        if (found := row["verify"]) is None:
            continue
        if "message" in found:
            table.add_row(row["variant"], "", Text(excerpt(found["message"], 60), "red"))
            continue
        R = "" if found["R"] is None else f"{found['R']:.5f}"
        table.add_row(row["variant"], R, f"{found['relative_error']:.1e}")
    return table


def _stages(rows: list[dict[str, Any]]) -> Table:
    staged = [row for row in rows if len(row["stages_ms"]) > 1]  # others are a whole step alone
    names = list(dict.fromkeys(name for row in staged for name in row["stages_ms"]))
    table = _table("variant", *names)
    for row in staged:
        found = row["stages_ms"]
        table.add_row(row["variant"], *(f"{found[n]:.2f}" if n in found else "" for n in names))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold underline"))


def _remark(console: Console, text: str) -> None:
    console.print(Text(excerpt(text, LONGEST), "dim italic"))


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}" if ratio >= 1 else f"{ratio:.1%}"

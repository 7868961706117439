"""The result for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MODES = {"eager": "eager", "compile": "torch.compile"}
LONGEST = 300  # characters of a message; the JSON has all of it


def show(result: dict[str, Any], console: Console) -> None:
    """A table of times per mode, then where the time of the watched steps goes."""
    options, hardware = result["options"], result["hardware"]
    size = f"{result['parameters'] / 1e6:.1f} million parameters"
    shape = f"batch {options['batch']}"
    if options["model"] != "convnet":
        shape += f" × {options['length']} tokens"
    where = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads"
    targets = options["targets"]
    console.print(
        Text.assemble(
            (f"inrun bench: {options['model']}", "bold"),
            f" ({size}), {options['dtype']}, {options['optimizer']}\n{shape}, "
            f"{targets} validation target{'s' * (targets > 1)} of {options['validation']}\n{where}, "
            f"torch {result['versions']['torch']}",
        )
    )
    for mode in dict.fromkeys(row["mode"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        _title(console, MODES[mode])
        console.print(_times(rows, options["verify"]))
        for row in rows:
            if row["message"]:
                _remark(console, f"{row['variant']}: {row['message']}")
            if "message" in (row["verify"] or {}):
                _remark(console, f"{row['variant']}, not verified: {row['verify']['message']}")
        if any(row["stages_ms"] for row in rows):
            _title(console, f"{MODES[mode]}: stages, ms per step")
            console.print(_stages(rows))


def _times(rows: list[dict[str, Any]], verified: bool) -> Table:
    memory = any(row["peak_bytes"] for row in rows)
    table = _table("variant", "ms per step", "10–90 %", "samples/s", "of plain")
    for name in (("peak GB", "of plain") if memory else ()) + (("R", "error") if verified else ()):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells, ms = [row["variant"]], row["step_ms"]
        if ms is None:
            table.add_row(*cells, Text(row["status"], "red"))
            continue
        cells += [f"{ms['median']:.1f}", f"{ms['p10']:.1f}–{ms['p90']:.1f}"]
        cells += [f"{row['samples_per_s']:,.1f}", _percent(row["ratio"])]
        if memory:
            cells += [f"{row['peak_bytes'] / 1e9:.2f}", _percent(row["memory_ratio"])]
        found = row["verify"] or {}
        if verified and "R" in found:
            R = "" if found["R"] is None else f"{found['R']:.5f}"
            cells += [R, f"{found['relative_error']:.1e}"]
        table.add_row(*cells)
    return table


def _stages(rows: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["stages_ms"]))
    table = _table("variant", *names)
    for row in rows:
        if found := row["stages_ms"]:
            cells = [f"{found[n]:.2f}" if n in found else "" for n in names]
            table.add_row(row["variant"], *cells)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold underline"))


def _remark(console: Console, text: str) -> None:
    line = " ".join(text.split())
    console.print(Text(line if len(line) <= LONGEST else line[:LONGEST] + "…", "dim italic"))


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}" if ratio >= 1 else f"{ratio:.1%}"

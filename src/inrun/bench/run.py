"""A benchmark from its options to its numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from inrun.bench import machine
from inrun.bench.measure import LOOKED_INTO, Measurement, Tick, measurements, summary
from inrun.bench.models import make_problem
from inrun.bench.options import Options
from inrun.bench.show import show
from inrun.console import console as make_console
from inrun.output import check_output, write_output


def run_bench(
    options: Options,
    out: Path | None = None,
    console: Console | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Measure, show the tables and return the numbers.

    ``out`` is written after each row: what was measured survives an interruption. A file that is
    there is replaced with ``force`` only.
    """
    console = console or make_console()
    if out is not None:
        check_output(out, force=force, option="--out")
    problem = make_problem(options)
    if out is not None:  # what cannot be written is said before the measurements
        write_output(out, b"{}\n", force)
    result: dict[str, Any] = {
        "options": asdict(options),
        "parameters": sum(p.numel() for p in problem.model.parameters()),
        "hardware": machine.hardware(problem.device),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rows": [],
    }
    rows: list[Measurement] = []
    with _progress(options, console) as tick:
        for row in measurements(problem, options, tick):
            rows.append(row)
            plain = {r.mode: r for r in rows if r.variant == "plain"}
            result["rows"] = [summary(r, plain.get(r.mode), options.batch) for r in rows]
            if out is not None:
                write_output(out, json.dumps(result, indent=1).encode() + b"\n")
    show(result, console)
    return result


@contextmanager
def _progress(options: Options, console: Console) -> Iterator[Tick]:
    """A bar over all steps of all variants, gone at the end."""
    each = options.warmup + options.steps + LOOKED_INTO
    columns = TextColumn("{task.description}"), BarColumn(bar_width=28), TimeRemainingColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=each * len(options.variants) * len(options.modes))
        yield lambda what: bar.update(task, description=what.ljust(22), advance=1)

"""``inrun demo``: two small trainings, watched, that show what the library is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from inrun.console import console as make_console

TASKS = ("digits", "text")


def run_demo(
    task: str,
    out: Path | None = None,
    *,
    seed: int = 0,
    seeds: int = 1,
    epochs: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run a demo, show it on the console and return its numbers. ``seeds`` is for digits only."""
    if seeds < 1 or (epochs is not None and epochs < 1):
        raise ValueError("--seeds and --epochs must be at least 1")
    folder = out or Path("runs") / f"demo-{task}"
    console = console or make_console()
    if task == "digits":
        from inrun.demo import digits

        return digits.demo(folder, range(seed, seed + seeds), epochs or digits.EPOCHS, console)
    if task == "text":
        from inrun.demo import passages

        if seeds > 1:
            raise ValueError("--seeds is for the digits demo")
        return passages.demo(folder, seed, epochs or passages.EPOCHS, console)
    raise ValueError(f"no task {task!r}: choose {' or '.join(TASKS)}")

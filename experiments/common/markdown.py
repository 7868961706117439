"""Tables for the docs."""

from __future__ import annotations

from typing import Any


def heading(*columns: str) -> list[str]:
    """The first two lines of a table."""
    return [row(*columns), "|" + "---|" * len(columns)]


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def unfinished(committed: dict[str, Any]) -> str:
    """Which parts a committed result does without."""
    lines = [
        f"Not done yet at size {size}: {', '.join(f'`{part}`' for part in data['missing'])}."
        for size, data in committed.items()
        if data["missing"]
    ]
    return "\n\n".join(lines) or "All parts are done."

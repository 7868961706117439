"""Tables for the docs."""

from __future__ import annotations


def heading(*columns: str) -> list[str]:
    """The first two lines of a table."""
    return [row(*columns), "|" + "---|" * len(columns)]


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"

"""One look for all figures."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

COLOURS = {
    "secant": "#2a6fbb", "secant+gauss2": "#6fb1e0", "tangent": "#d1701f", "sgd": "#8a8a8a",
    "adamw": "#2a6fbb",
}  # fmt: skip
SHORT = {
    "tangent": "tangent (paper)", "secant": "secant (inrun)", "secant+gauss2": "secant, gauss2",
    "sgd": "SGD proxy",
}  # fmt: skip


def canvas(columns: int, rows: int = 1, width: float = 4.0, height: float = 3.2) -> Any:
    """A figure without a window, and its axes [rows][columns]."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "matplotlib is needed for the figures: pip install 'inrun[experiments]'"
        ) from None
    figure = Figure(figsize=(width * columns, height * rows), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for row in axes:
        for ax in row:
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def last(committed: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The largest size there is: its name and summary."""
    size = "paper" if "paper" in committed else "smoke"
    return size, committed[size]["summary"]


def drawn_by(module: str) -> Callable[[dict[str, Any]], Any]:
    """The ``draw`` of a module, imported (and matplotlib with it) when a figure is drawn."""
    return lambda committed: import_module(module).draw(committed)

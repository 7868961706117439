"""AUROC of every detector; one panel for each task and recipe, at its largest size."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import COLOURS, canvas
from experiments.mislabel.summary import ORDER, WORDS

SHARE = 0.1  # of labels flipped, in the figure


def draw(committed: dict[str, Any]) -> Any:
    panels: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for size, data in committed.items():
        shares = {s["rate"] for s in data["summary"].values()}
        shown = SHARE if SHARE in shares else min(shares)
        for s in data["summary"].values():
            if s["rate"] == shown:
                panels[s["task"], s["recipe"]] = (size, s)
    figure, axes = canvas(len(panels), width=4.6, height=4.2)
    names = [WORDS.get(name, name) for name in reversed(ORDER)]
    for ax, (size, s) in zip(axes[0], panels.values(), strict=True):
        for row, name in enumerate(reversed(ORDER)):
            cell = s["detectors"][name]["auroc"]
            colour = COLOURS.get(name.split(", ")[-1], "#333333")
            ax.plot(cell["mean"], row, "o", color=colour, markersize=5)
            ax.plot([cell["min"], cell["max"]], [row, row], color=colour, linewidth=1.5, alpha=0.5)
        ax.set_yticks(range(len(ORDER)), names if ax is axes[0][0] else [], fontsize=8)
        ax.set_xlabel("AUROC (line: range over seeds)")
        ax.set_title(f"{s['task']}, {s['recipe']}, {s['rate']:.0%} flipped ({size})", fontsize=9)
    return figure

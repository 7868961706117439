"""AUROC of every detector against its cost; one panel for each task and recipe."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import COLOURS, canvas
from experiments.mislabel.summary import ORDER

SHARE = 0.1  # of labels flipped, in the figure


def draw(committed: dict[str, Any]) -> Any:
    panels = [
        (f"{s['task']}, {s['recipe']} ({size})", s)
        for size, data in committed.items()
        for s in data["summary"].values()
        if s["rate"] == SHARE or len(data["summary"]) <= 2
    ]
    figure, axes = canvas(len(panels), width=4.6, height=4.4)
    for ax, (title, s) in zip(axes[0], panels, strict=True):
        for row, name in enumerate(reversed(ORDER)):
            cell = s["detectors"][name]["auroc"]
            ours = name.split(", ")[-1] if name.split(", ")[-1] in COLOURS else None
            colour = COLOURS[ours] if ours else "#333333"
            ax.plot(cell["mean"], row, "o", color=colour, markersize=5)
            ax.plot([cell["min"], cell["max"]], [row, row], color=colour, linewidth=1.5, alpha=0.5)
        ax.set_yticks(range(len(ORDER)), reversed(ORDER), fontsize=8)
        ax.set_xlabel("AUROC (line: range over seeds)")
        ax.set_title(f"{title}: {s['rate']:.0%} flipped", fontsize=10)
    return figure

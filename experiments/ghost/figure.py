"""Ghost scores against fully materialised ones, in both precisions."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import COLOURS, canvas, last


def draw(committed: dict[str, Any]) -> Any:
    size, summary = last(committed)
    model = next(iter(summary.values()))["model"]
    own = [s for s in summary.values() if s["model"] == model]
    figure, axes = canvas(len(own))
    for ax, s in zip(axes[0], own, strict=True):
        ax.scatter(s["scatter"]["same"], s["scatter"]["ghost"], s=10, color=COLOURS["tangent"])
        ax.axline((0, 0), slope=1, color="black", lw=0.7)
        R = s["against"]["ghost, same"]["R"]
        ax.set(xlabel="fully materialised", ylabel="ghost")
        ax.set_title(f"{model}, {s['precision']} ({size}): 1 − R = {1 - R:.0e}", fontsize=10)
        ax.ticklabel_format(style="sci", scilimits=(0, 0))
    return figure

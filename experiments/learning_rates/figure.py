"""Lowest R (top) and largest relative error (bottom) from step 20 on, by learning rate."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import COLOURS, SHORT, canvas, last
from experiments.common.game import ESTIMATORS


def draw(committed: dict[str, Any]) -> Any:
    size, summary = last(committed)
    models = list(dict.fromkeys(c["model"] for c in summary["cells"]))
    figure, axes = canvas(len(models), 2, height=2.6)
    for column, model in enumerate(models):
        own = sorted((c for c in summary["cells"] if c["model"] == model), key=lambda c: c["lr"])
        for row, key in enumerate(("R", "error")):
            ax = axes[row][column]
            for e in ESTIMATORS:
                ax.plot(
                    [c["lr"] for c in own], [c[e][key] for c in own], marker="o", ms=4,
                    color=COLOURS[e], label=SHORT[e],
                )  # fmt: skip
            ax.set_xscale("log")
            ax.set_xlabel("learning rate")
        axes[0][column].set_title(f"{model} ({size})", fontsize=10)
        axes[0][column].set_ylabel("lowest R")
        axes[0][column].axhline(0.96, color="black", lw=0.7, ls=":")
        axes[1][column].set_yscale("log")
        axes[1][column].set_ylabel("largest relative error")
    axes[0][0].legend(fontsize=7)
    return figure

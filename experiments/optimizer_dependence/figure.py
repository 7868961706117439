"""Values under SGD against values under AdamW, with the ceilings in the title."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import COLOURS, canvas, last


def draw(committed: dict[str, Any]) -> Any:
    size, summary = last(committed)
    figure, axes = canvas(len(summary))
    for ax, (name, c) in zip(axes[0], summary.items(), strict=True):
        ax.scatter(c["scatter"]["sgd"], c["scatter"]["adamw"], s=8, alpha=0.6,
                   color=COLOURS["adamw"])  # fmt: skip
        ax.set(xlabel="value under SGD", ylabel="value under AdamW")
        r = c["pearson"]
        ax.set_title(
            f"{name} ({size}): R {r['across']:.2f}\n"
            f"ceilings: SGD {r['ceiling_sgd']:.2f}, AdamW {r['ceiling_adamw']:.2f}",
            fontsize=9,
        )
        ax.ticklabel_format(style="sci", scilimits=(-2, 2))
    return figure

"""Cumulative sums of values beside the cumulative batch share, one panel per optimizer."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import COLOURS, SHORT, canvas, last


def draw(committed: dict[str, Any]) -> Any:
    size, summary = last(committed)
    columns = (len(summary) + 1) // 2
    figure, axes = canvas(columns, 2, height=2.8)
    flat = [ax for row in axes for ax in row]
    for ax, (name, c) in zip(flat, summary.items(), strict=False):
        curves = c["curves"]
        ax.plot(curves["step"], curves["batch_share"], color="black", lw=3, alpha=0.3,
                label="batch share, measured")  # fmt: skip
        ax.plot(curves["step"], curves["momentum_share"], color="black", lw=0.8, ls=":",
                label="momentum share")  # fmt: skip
        for e in ("sgd", "tangent", "secant"):
            ax.plot(curves["step"], curves["sum"][e], color=COLOURS[e], label=SHORT[e], lw=1.3)
        low, high = sorted((min(curves["batch_share"]), max(curves["batch_share"])))
        low, high = min(low, *curves["momentum_share"]), max(high, *curves["momentum_share"])
        room = 0.15 * (high - low)
        ax.set_ylim(low - room, high + room)
        ax.set_title(f"{name} ({size})", fontsize=10)
        ax.set(xlabel="step", ylabel="loss removed so far")
    for ax in flat[len(summary) :]:
        ax.set_visible(False)
    flat[0].legend(fontsize=7)
    return figure

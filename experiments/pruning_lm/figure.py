"""Validation loss against steps, and beside it the difference from random pruning."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import COLOURS, SHORT, canvas, last

LOOK = {"full": ("black", "full"), "random20": ("#8a8a8a", "random20")}
DASHED = "top20, secant"


def draw(committed: dict[str, Any]) -> Any:
    size, summary = last(committed)
    figure, axes = canvas(2, len(summary), width=5.0)
    for (left, right), (kind, s) in zip(axes, summary.items(), strict=True):
        begin = next(i for i, step in enumerate(s["at"]) if step >= 0.2 * s["steps"])
        for name, c in s["settings"].items():
            colour, label = look(name)
            style = "--" if name == DASHED else ":" if name == "values20, sgd" else "-"
            for ax, band in ((left, c), (right, c["beside_random"])):
                x = s["at"][begin:]
                mean, low, high = (band[k][begin:] for k in ("mean", "low", "high"))
                ax.plot(x, mean, style, color=colour, label=label, linewidth=1.3)
                ax.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        for ax in (left, right):
            ax.axvline(s["epochs_at"], color="#bbbbbb", linewidth=0.8)
            ax.set_xlabel("step (line: the full training's epochs are over)")
        left.set(ylabel="validation loss", title=f"{kind} corpus, {s['model']} ({size})")
        right.set(ylabel="validation loss less random20's", title="pairs of the same seed")
        left.legend(fontsize=7)
    return figure


def look(name: str) -> tuple[str, str]:
    """Colour and words of a setting."""
    if name in LOOK:
        return LOOK[name]
    what, estimator = name.split(", ")
    if what == "top20":
        return "#b03a2e", "top20 removed, secant"
    return COLOURS[estimator] if estimator != "sgd" else "#4a9a5a", f"{what}, {SHORT[estimator]}"

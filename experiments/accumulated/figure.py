"""Accumulated scores of the same run: SGD formula against the Adam-aware ones."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import COLOURS, SHORT, canvas, last


def draw(committed: dict[str, Any]) -> Any:
    size, summary = last(committed)
    chosen = {s["model"]: (name, s) for name, s in reversed(summary.items())}
    figure, axes = canvas(len(chosen))
    for ax, (name, s) in zip(axes[0], chosen.values(), strict=True):
        for e in ("tangent", "secant"):
            pair = s["pairs"].get(f"{e} / sgd") or s["pairs"][f"sgd / {e}"]
            label = f"{SHORT[e]}: R {pair['pearson']:.2f}, ρ {pair['spearman']:.2f}"
            ax.scatter(s["scatter"]["sgd"], s["scatter"][e], s=8, alpha=0.6, color=COLOURS[e],
                       label=label)  # fmt: skip
        ax.set(xlabel="SGD proxy, summed over the run", ylabel="Adam-aware, summed")
        ax.set_title(f"{name} ({size})", fontsize=10)
        ax.set_xscale("symlog", linthresh=linear(s["scatter"]["sgd"]))
        ax.set_yscale("symlog", linthresh=linear(s["scatter"]["secant"]))
        ax.tick_params(labelsize=6)
        ax.legend(fontsize=7)
    return figure


def linear(values: list[float]) -> float:
    """Half of the values lie within this of 0."""
    return sorted(abs(v) for v in values)[len(values) // 2] or 1.0

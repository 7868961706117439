"""Left: estimates against exact values at the last probe; right: R by training stage."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.common.figures import COLOURS, SHORT, canvas, last


def draw(committed: dict[str, Any]) -> Any:
    size, summary = last(committed)
    models = list(dict.fromkeys(c["model"] for c in summary["cells"]))
    figure, axes = canvas(len(models) + 1)
    left, *others = axes[0]
    for e in ("sgd", "tangent", "secant"):
        x = np.concatenate([scaled(s["exact"], s["exact"]) for s in summary["scatter"]])
        y = np.concatenate([scaled(s[e], s["exact"]) for s in summary["scatter"]])
        left.scatter(x, y, s=14, color=COLOURS[e], label=SHORT[e], alpha=0.8)
    left.axline((0, 0), slope=1, color="black", lw=0.7)
    left.set(xlabel="exact Shapley value (scaled)", ylabel="estimate (same scale)")
    left.set_title(f"{models[0]}, step {summary['scatter'][0]['step']} ({size})", fontsize=10)
    left.legend(fontsize=8)
    for ax, model in zip(others, models, strict=True):
        own = [c for c in summary["cells"] if c["model"] == model]
        for e in ("sgd", "tangent", "secant"):
            mean = np.array([c[e]["R"]["mean"] for c in own])
            low, high = (
                np.array([c[e]["R"][k] if c[e]["R"][k] is not None else c[e]["R"]["mean"]
                          for c in own])
                for k in ("low", "high")
            )  # fmt: skip
            ax.errorbar(
                range(len(own)), mean, [mean - low, high - mean], marker="o", ms=4, capsize=3,
                color=COLOURS[e], label=SHORT[e],
            )  # fmt: skip
        ax.set_xticks(range(len(own)), [c["stage"] for c in own])
        ax.set(xlabel="training step", ylabel="R with exact values", title=model)
        ax.title.set_fontsize(10)
        ax.set_ylim(top=1.02)
    return figure


def scaled(values: list[float], by: list[float]) -> np.ndarray:
    return np.array(values) / np.abs(by).max()

"""Accuracy against the share that was removed, for each optimizer and estimator."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import SHORT, canvas, last
from experiments.pruning_sst2.summary import NAMES, PAPER

COLOURS = {"bottom": "#2a6fbb", "random": "#8a8a8a", "top": "#d1701f"}


def draw(committed: dict[str, Any]) -> Any:
    size, summary = last(committed)
    cells = summary["cells"]
    optimizers = list(dict.fromkeys(c["optimizer"] for c in cells))
    named = [c["by"].split(", ") for c in cells if c["by"]]
    estimators, targets = (list(dict.fromkeys(x)) for x in zip(*named, strict=True))
    rows = [(optimizer, target) for optimizer in optimizers for target in targets]
    figure, axes = canvas(len(estimators), len(rows), 3.4, 2.7)
    for row, (optimizer, target) in zip(axes, rows, strict=True):
        own = [c for c in cells if c["optimizer"] == optimizer]
        for ax, estimator in zip(row, estimators, strict=True):
            by = f"{estimator}, {target}"
            if ax is not row[0]:
                ax.sharey(row[0])
            if not any(c["by"] == by for c in own):
                ax.set_axis_off()
                continue
            for i, (which, colour) in enumerate(COLOURS.items()):
                drawn = [c for c in own if c["which"] == which and c["by"] in (by, None)]
                drawn.sort(key=lambda c: c["ratio"])
                a = [c["accuracy"] for c in drawn]
                low, high = ([abs(x["mean"] - (x["mean"] if x[k] is None else x[k])) for x in a]
                             for k in ("low", "high"))  # fmt: skip
                ax.errorbar(
                    [100 * c["ratio"] + i - 1 for c in drawn], [x["mean"] for x in a], [low, high],
                    marker="o", ms=4, capsize=3, color=colour, label=which,
                )  # fmt: skip
                if size == "paper":
                    ax.plot(
                        [100 * r + i - 1 for r in PAPER[optimizer]],
                        [x[i] for x in PAPER[optimizer].values()],
                        marker="x", ms=4, ls=":", lw=0.8, color=colour, alpha=0.6,
                    )  # fmt: skip
            full = next(f for f in summary["full"]
                        if (f["optimizer"], f["lr"]) == (optimizer, own[0]["lr"]))  # fmt: skip
            ax.axhline(full["accuracy"]["mean"], color="black", lw=0.7, label="everything")
            ax.set_title(f"{NAMES[optimizer]} ({size})\n{SHORT[estimator]}, {target}", fontsize=8)
            ax.set(xlabel="removed, %", ylabel="accuracy")
            ax.set_xticks(sorted({100 * c["ratio"] for c in own}))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, loc="outside lower center", ncols=len(labels))
    return figure

"""Average rank of the true source, by how far the query is from it."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import COLOURS, SHORT, canvas, last
from experiments.source_identification.summary import METHODS
from experiments.source_identification.texts import CATEGORIES

OWN = {"bm25": "#3a9b5c", "if": "#b04a8f"}


def draw(committed: dict[str, Any]) -> Any:
    size, summary = last(committed)
    runs = summary["runs"]
    columns = min(3, len(runs))
    figure, axes = canvas(columns, -(-len(runs) // columns), width=4.6)
    places = axes.flat
    for name, run in runs.items():
        ax = next(places)
        for k, (method, label) in enumerate(METHODS.items()):
            cells = [run["categories"][c]["methods"].get(method) for c in CATEGORIES]
            found = [(i, c["rank"]) for i, c in enumerate(cells) if c is not None]
            if not found:
                continue
            x = [i + 0.07 * (k - 2) for i, _ in found]
            mean = [r["mean"] for _, r in found]
            ends = [(r["low"] or r["mean"], r["high"] or r["mean"]) for _, r in found]
            error = [
                [max(0.0, m - low) for m, (low, _) in zip(mean, ends, strict=True)],
                [max(0.0, high - m) for m, (_, high) in zip(mean, ends, strict=True)],
            ]
            colour = COLOURS.get(method) or OWN[method]
            ax.errorbar(x, mean, yerr=error, color=colour, marker="o", ms=3.5, lw=1, capsize=2,
                        label=SHORT.get(method, label))  # fmt: skip
        ax.axhline((run["candidates"] + 1) / 2, color="black", lw=0.7, ls=":", label="chance")
        ax.set_yscale("log")
        ax.set_xticks(range(len(CATEGORIES)), [c.replace(" ", "\n") for c in CATEGORIES.values()])
        ax.tick_params(labelsize=7)
        ax.set_ylabel("average rank of the source", fontsize=8)
        title = f"{name}: {run['candidates']:,} candidates, {run['sources']} sources ({size})"
        ax.set_title(title, fontsize=8)
        ax.legend(fontsize=6)
    for ax in places:  # fewer runs than places
        ax.set_visible(False)
    return figure

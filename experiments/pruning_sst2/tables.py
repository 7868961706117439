"""The tables of the docs page."""

from __future__ import annotations

from typing import Any

from experiments.common.markdown import heading, row
from experiments.common.statistics import shown
from experiments.pruning_sst2.summary import NAMES, PAPER, source

WHICH = ("bottom", "random", "top")
MEASURED = ("accuracy, evaluation", "accuracy, other held-out texts")


def accuracy(committed: dict[str, Any]) -> str:
    """Table 3 and ours."""
    lines = heading("size", "optimizer", "removed", "values", "bottom", "random", "top")
    for optimizer, ratios in PAPER.items():
        for ratio, numbers in ratios.items():
            theirs = (f"{x:.4f}" for x in numbers)
            lines.append(row("the paper", NAMES[optimizer], f"{ratio:.0%}", "its own", *theirs))
    for size, data in committed.items():
        cells = data["summary"]["cells"]
        at = {(c["optimizer"], c["ratio"], c["which"], c["by"]): c for c in cells}
        for optimizer, ratio, which, by in at:
            if which != "bottom":
                continue
            own = (
                at[optimizer, ratio, w, None if w == "random" else by]["accuracy"] for w in WHICH
            )
            found = (f"{c['mean']:.4f} ± {c['sd']:.4f}" for c in own)
            lines.append(row(size, NAMES[optimizer], f"{ratio:.0%}", source(by), *found))
    return "\n".join(lines)


def differences(committed: dict[str, Any]) -> str:
    lines = heading("size", "optimizer", "removed", "difference", *MEASURED)
    for size, data in committed.items():
        found = data["summary"]["differences"]
        pooled = {d["optimizer"] for d in found if d["ratio"] == "all"}
        for d in found:
            if d["optimizer"] in pooled and d["ratio"] != "all":
                continue
            removed = "all ratios" if d["ratio"] == "all" else f"{d['ratio']:.0%}"
            both = shown(d["accuracy"]), shown(d["choice"])
            lines.append(row(size, NAMES[d["optimizer"]], removed, d["what"], *both))
    return "\n".join(lines)


def baselines(committed: dict[str, Any]) -> str:
    """Everything kept; under SGD for each learning rate of the grid."""
    lines = heading("size", "optimizer", "learning rate", *MEASURED)
    lines.append(row("the paper", "AdamW", "2e-05", "0.8719 ± 0.0058", "–"))
    for size, data in committed.items():
        used = {(c["optimizer"], c["lr"]) for c in data["summary"]["cells"]}
        for f in data["summary"]["full"]:
            cells = (f"{f[m]['mean']:.4f} ± {f[m]['sd']:.4f}" for m in ("accuracy", "choice"))
            mark = " (used)" if (f["optimizer"], f["lr"]) in used else ""
            lines.append(row(size, NAMES[f["optimizer"]], f"{f['lr']:.0e}{mark}", *cells))
    return "\n".join(lines)


def agreement(committed: dict[str, Any]) -> str:
    lines = heading("size", "optimizer", "values", "Spearman", "lowest fifth in common")
    for size, data in committed.items():
        for optimizer, a in data["summary"]["agreement"].items():
            for pair, c in a["pairs"].items():
                both = f"{c['spearman']:.3f}", f"{c['lowest_fifth']:.0%}"
                lines.append(row(size, NAMES[optimizer], pair, *both))
    return "\n".join(lines)

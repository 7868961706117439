"""What the trainings on the remaining examples say, seed by seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np

from experiments.common.game import ESTIMATORS, finite
from experiments.common.parts import Results, unpacked
from experiments.common.statistics import interval, shown, students
from inrun.report.metrics import bottom_overlap, spearman

PAPER = {  # accuracy of bottom, random, top
    "adamw": {0.1: (0.8838, 0.8713, 0.8685), 0.2: (0.8826, 0.8752, 0.8639),
              0.3: (0.8876, 0.8739, 0.8532)},
    "sgd-momentum": {0.1: (0.8392, 0.8131, 0.8119), 0.2: (0.8228, 0.7706, 0.7649),
                     0.3: (0.7117, 0.6760, 0.6383)},
}  # fmt: skip
NAMES = {"adamw": "AdamW", "sgd-momentum": "SGD, momentum 0.9"}
MEASURES = ("accuracy", "choice", "loss")


def summarise(results: Results) -> dict[str, Any]:
    """Of the parts that are there; what needs all of several parts waits for them."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in results.values():
        kinds[r["kind"]].append(r)
    cells = [c for r in kinds["prune"] for c in cells_of(r)]
    return {
        "full": [
            {k: r[k] for k in ("optimizer", "lr")}
            | {m: spread([x[m] for x in r["runs"]]) for m in MEASURES}
            for r in kinds["full"]
        ],
        "cells": cells,
        "differences": list(paired(cells)),
        "agreement": agreement(kinds["watch"]),
    }


def cells_of(r: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Runs of one ratio grouped by what was removed."""
    grouped: dict[tuple[str, str | None], list[dict[str, Any]]] = defaultdict(list)
    for run in r["runs"]:
        grouped[run["which"], run["by"]].append(run)
    for (which, by), runs in grouped.items():
        seeds = sorted({x["seed"] for x in runs})
        yield {
            "optimizer": r["optimizer"], "lr": r["lr"], "ratio": r["ratio"], "which": which,
            "by": by, "runs": len(runs), "flipped": round(mean(x["flipped"] for x in runs), 4),
            "by_seed": {
                m: [round(mean(x[m] for x in runs if x["seed"] == s), 6) for s in seeds]
                for m in MEASURES
            },
            **{m: spread([x[m] for x in runs], [x["seed"] for x in runs]) for m in MEASURES},
        }  # fmt: skip


def spread(values: list[float], seeds: list[int] | None = None) -> dict[str, Any]:
    """Mean, its interval by seeds, and the standard deviation of runs."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {k: rounded(v) for k, v in (interval(values, seeds) | {"sd": sd}).items()}


def paired(cells: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Differences within seeds (their random repeats averaged), for each ratio and over all."""
    at = {(c["optimizer"], c["ratio"], c["which"], c["by"]): c for c in cells}
    for optimizer in dict.fromkeys(c["optimizer"] for c in cells):
        own = [c for c in cells if c["optimizer"] == optimizer]
        ratios = sorted({c["ratio"] for c in own})
        sources = list(dict.fromkeys(c["by"] for c in own if c["by"]))
        pairs: list[tuple[str, Any, Any]]
        pairs = [(f"{by}: bottom − random", ("bottom", by), ("random", None)) for by in sources]
        pairs += [(f"{by}: random − top", ("random", None), ("top", by)) for by in sources]
        for target in dict.fromkeys(by.split(", ")[1] for by in sources):
            for w in ("bottom", "top"):
                both = (w, f"secant, {target}"), (w, f"tangent, {target}")
                pairs.append((f"{target}: secant − tangent, {w}", *both))
        for what, a, b in pairs:
            every = {}
            for ratio in ratios:
                x, y = (at[optimizer, ratio, which, by]["by_seed"] for which, by in (a, b))
                every[ratio] = {m: np.subtract(x[m], y[m]) for m in ("accuracy", "choice")}
            groups: dict[Any, list[Any]] = {r: [d] for r, d in every.items()}
            if len(ratios) > 1:
                groups["all"] = list(every.values())
            for ratio, found in groups.items():
                yield {"optimizer": optimizer, "ratio": ratio, "what": what} | {
                    m: {k: rounded(v) for k, v in
                        students(np.mean([d[m] for d in found], axis=0)).items()}
                    for m in ("accuracy", "choice")
                }  # fmt: skip


def agreement(watched: list[dict[str, Any]]) -> dict[str, Any]:
    """Do estimators, targets and seeds agree about the examples? Spearman's correlation and the
    share of the lowest fifth in common; and how many steps of these runs have no values."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in watched:
        runs[r["optimizer"]].append(r)
    return {
        optimizer: {
            "void": sum(r["void"] for r in own),
            "pairs": pairs_of([{k: unpacked(v) for k, v in r["values"].items()} for r in own]),
        }
        for optimizer, own in runs.items()
    }


def pairs_of(runs: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    names = list(runs[0])
    pairs = {
        f"{a} / {b}": [(v[a], v[b]) for v in runs]
        for a, b in combinations(names, 2)
        if set(a.split(", ")) & set(b.split(", "))
    }
    if len(runs) > 1:
        for name in names:
            each = [v[name] for v in runs]
            pairs[f"{name}: two seeds"] = list(combinations(each, 2))
    return {
        name: {
            "spearman": rounded(finite(mean(spearman(a, b) for a, b in both))),
            "lowest_fifth": rounded(mean(bottom_overlap(a, b, len(a) // 5) for a, b in both)),
        }
        for name, both in pairs.items()
    }


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def rounded(x: Any) -> Any:
    return round(x, 6) if isinstance(x, float) else x


def source(by: str | None) -> str:
    if by is None:
        return "–"
    estimator, target = by.split(", ")
    return f"{ESTIMATORS[estimator]}, for {target}"


def headline(summary: dict[str, Any]) -> str:
    lines = [f"{NAMES[f['optimizer']]}, lr {f['lr']:.0e}: everything {shown(f['accuracy'])}"
             for f in summary["full"]]  # fmt: skip
    lines += [
        f"{NAMES[d['optimizer']]}, {d['ratio']} removed, {d['what']}: {shown(d['accuracy'])}"
        for d in summary["differences"]
        if d["ratio"] == summary["differences"][-1]["ratio"]
    ]
    return "\n".join(lines)

"""From the parts to what is shown; confident learning's scores are made here, by cleanlab."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.common.markdown import heading, row
from experiments.common.parts import Results, unpacked
from experiments.common.statistics import interval, shown
from inrun.report.metrics import auroc, precision_at_k

CONFIDENT = "confident learning"
ORDER = ("harm, secant", "harm, tangent", "harm, sgd", "secant", "tangent", "sgd", "loss, end",
         "loss, mean over epochs", "EL2N", "GraNd", "TracIn", "TracIn, self-influence",
         CONFIDENT)  # fmt: skip
WORDS = {
    "secant": "sum of values, secant", "tangent": "sum of values, tangent (the paper)",
    "sgd": "sum of values, SGD proxy", "harm, sgd": "harm, SGD proxy",
}  # fmt: skip


def summarise(results: Results) -> dict[str, Any]:
    """Means over seeds for every task, recipe and share of flipped labels."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in results.values():
        key = f"{r['task']}, {r['recipe']}, {r['rate']:.0%} flipped"
        groups.setdefault(key, []).append(r | {"found": confident(r)})
    return {key: one(runs) for key, runs in groups.items()}


def one(runs: list[dict[str, Any]]) -> dict[str, Any]:
    first, timed = runs[0], [r for r in runs if r["cost"]]
    cells = {}
    for name in ORDER:
        own = [r["found"] if name == CONFIDENT else r["detectors"][name] for r in runs]
        cells[name] = {
            "auroc": interval([c["auroc"] for c in own]),
            "precision": interval([c["precision"] for c in own]),
            "cost": interval([r["cost"][name] for r in timed]) if timed else None,
            "counted": first["counted"][name],
        }
    return {
        **{k: first[k] for k in ("task", "recipe", "rate", "examples", "flips", "steps")},
        "seeds": [r["seed"] for r in runs],
        "void": sum(r["void"] for r in runs),
        "accuracy": interval([r["accuracy"] for r in runs]),
        "training_seconds": float(np.mean([r["training_seconds"] for r in timed]))
        if timed
        else None,
        "issues": {
            k: interval([r["found"][k] for r in runs]) for k in ("issues", "correct", "recall")
        },
        "detectors": cells,
    }


def confident(r: dict[str, Any]) -> dict[str, float]:
    """cleanlab's label quality from out-of-fold probabilities, and the set that it calls issues."""
    try:
        from cleanlab.filter import find_label_issues
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        raise ValueError(
            "confident learning needs cleanlab: pip install 'inrun[experiments]', or run the same "
            "command again, with the same output folder, where it is installed"
        ) from None
    labels = np.array([int(c) for c in r["labels"]])
    flipped = np.zeros(len(labels), bool)
    flipped[r["flipped"]] = True
    p = unpacked(r["probabilities"]).reshape(len(labels), -1).clip(1e-6)
    p /= p.sum(1, keepdims=True)  # they are rounded
    doubt = 1 - get_label_quality_scores(labels, p, method="self_confidence")
    issues = find_label_issues(labels, p, n_jobs=1)
    return {
        "auroc": auroc(doubt, flipped),
        "precision": precision_at_k(doubt, flipped, len(r["flipped"])),
        "issues": int(issues.sum()),
        "correct": float(flipped[issues].mean()) if issues.any() else 0.0,
        "recall": float(issues[flipped].mean()),
    }


def headline(summary: dict[str, Any]) -> str:
    lines = []
    for key, s in summary.items():
        lines.append(f"{key}: accuracy {shown(s['accuracy'], 3)}")
        for name, c in s["detectors"].items():
            cost = f"{c['cost']['mean']:+.2f}" if c["cost"] else f"{c['counted']:+.2f} (counted)"
            lines.append(
                f"  {name:24} AUROC {shown(c['auroc'], 3):22} precision "
                f"{shown(c['precision'], 3):22} cost {cost}"
            )
    return "\n".join(lines)


def table(committed: dict[str, Any]) -> str:
    """AUROC and precision of every detector: a column for each share of flipped labels."""
    blocks = []
    for size, data in committed.items():
        tasks: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for s in data["summary"].values():
            tasks.setdefault((s["task"], s["recipe"]), []).append(s)
        for (task, recipe), found in tasks.items():
            about = found[0]
            seeds = len(about["seeds"])
            lines = [
                f"**{task}, {recipe}** ({size}; {about['examples']:,} examples, {about['steps']} "
                f"steps, {seeds} seed{'s' * (seeds > 1)}; AUROC with its interval / precision):",
                "",
                *heading("ranked by", *(f"{s['rate']:.0%} flipped" for s in found)),
            ]
            for name in ORDER:
                best = [max(c["auroc"]["mean"] for c in s["detectors"].values()) for s in found]
                cells = [
                    bold(f"{shown(c['auroc'], 3)} / {c['precision']['mean']:.0%}",
                         c["auroc"]["mean"] == top)
                    for c, top in zip((s["detectors"][name] for s in found), best, strict=True)
                ]  # fmt: skip
                lines.append(row(WORDS.get(name, name), *cells))
            issues = [
                f"{s['issues']['issues']['mean']:.0f}: {s['issues']['correct']['mean']:.0%} / "
                f"{s['issues']['recall']['mean']:.0%}"
                for s in found
            ]
            lines.append(row("*issues cleanlab names: right / of all*", *issues))
            accuracy = [f"{s['accuracy']['mean']:.1%}" for s in found]
            lines.append(row("*accuracy of the training itself*", *accuracy))
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def bold(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text


def cost_table(committed: dict[str, Any]) -> str:
    """What each detector costs on top of one training: measured (counted), by task."""
    columns: dict[str, list[dict[str, Any]]] = {}
    for size, data in committed.items():
        for s in data["summary"].values():
            columns.setdefault(f"{s['task']}, {s['recipe']} ({size})", []).append(s)
    lines = heading("on top of one training", *columns)
    for name in ORDER:
        cells = []
        for found in columns.values():
            own = [s["detectors"][name] for s in found]
            measured = (
                [f"{np.mean([c['cost']['mean'] for c in own]):.2f}"] if own[0]["cost"] else []
            )
            cells.append(" ".join([*measured, f"({own[0]['counted']:.2f})"]))
        lines.append(row(WORDS.get(name, name), *cells))
    each = [[s["training_seconds"] for s in found] for found in columns.values()]
    lines.append(
        row("*one training*", *(f"{np.mean(x):.1f} s" if x[0] is not None else "–" for x in each))
    )
    return "\n".join(lines)

"""From the values of each optimizer and half to correlations and their ceilings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from experiments.common.game import finite, numbers
from experiments.common.markdown import heading, row
from experiments.common.parts import Results
from inrun.report.metrics import pearson, spearman

POINTS = 400  # of the scatter in the committed results
MEASURES = {"pearson": pearson, "spearman": spearman}
Values = dict[str, np.ndarray]  # "0", "1": independent halves; "other": another seed


def summarise(results: Results) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for r in results.values():
        key = f"{r['kind']}, {r['model']}"
        own = found.setdefault(key, {"about": {}, "values": {}})
        own["about"].setdefault(r["optimizer"], {"loss": r["loss"], "retrainings": 0})
        own["about"][r["optimizer"]]["retrainings"] += r.get("retrainings", 0)
        own["about"] |= {
            "group": r["group"], "permutations": r["permutations"],
            "examples": r["players"] * r["group"]
            if r["kind"] == "retrain" else len(r["halves"][0]),
        }  # fmt: skip
        values = own["values"].setdefault(r["optimizer"], {})
        if r["kind"] == "along":
            values |= {"0": np.array(r["halves"][0]), "1": np.array(r["halves"][1])}
        else:
            name = {"0-0": "0", "0-1": "1"}.get(r["label"], "other")
            values[name] = np.array(r["values"])
    return {
        key: own["about"] | compared(own["values"]["sgd"], own["values"]["adamw"])
        for key, own in found.items()
        if {"sgd", "adamw"} <= set(own["values"])
        and all({"0", "1"} <= set(v) for v in own["values"].values())
    }


def compared(sgd: Values, adam: Values) -> dict[str, Any]:
    """Across optimizers, within one (the ceiling), and within one with another seed.

    ``corrected`` is across / √(ceiling · ceiling): what noise alone cannot explain (1 means the
    two optimizers agree as far as the estimates can tell); None where the ceilings are too low.
    """
    found: dict[str, Any] = {}
    for name, correlate in MEASURES.items():
        r = {
            "across": (correlate(sgd["0"], adam["1"]) + correlate(sgd["1"], adam["0"])) / 2,
            "same_permutations": (correlate(sgd["0"], adam["0"]) + correlate(sgd["1"], adam["1"]))
            / 2,
            "ceiling_sgd": correlate(sgd["0"], sgd["1"]),
            "ceiling_adamw": correlate(adam["0"], adam["1"]),
        }
        if "other" in sgd and "other" in adam:
            r["other_seed_sgd"] = (
                correlate(sgd["0"], sgd["other"]) + correlate(sgd["1"], sgd["other"])
            ) / 2
            r["other_seed_adamw"] = (
                correlate(adam["0"], adam["other"]) + correlate(adam["1"], adam["other"])
            ) / 2
        r = {k: finite(v) for k, v in r.items()}
        low = min(r["ceiling_sgd"], r["ceiling_adamw"])
        product = r["ceiling_sgd"] * r["ceiling_adamw"]
        r["corrected"] = r["across"] / math.sqrt(product) if low > 0.2 else None  # type: ignore[assignment]
        found[name] = r
    mean = {k: (v["0"] + v["1"]) / 2 for k, v in (("sgd", sgd), ("adamw", adam))}
    return found | {"scatter": {k: numbers(v[:POINTS], 4) for k, v in mean.items()}}


def headline(summary: dict[str, Any]) -> str:
    return "\n".join(
        f"{key}: Pearson SGD/AdamW {c['pearson']['across']:.3f}, ceilings "
        f"{c['pearson']['ceiling_sgd']:.3f} (SGD) {c['pearson']['ceiling_adamw']:.3f} (AdamW)"
        for key, c in summary.items()
    )


def table(committed: dict[str, Any]) -> str:
    lines = heading(
        "size", "protocol, model", "examples (group)", "permutations", "", "SGD / AdamW",
        "ceiling SGD", "ceiling AdamW", "corrected", "other seed SGD", "other seed AdamW",
    )  # fmt: skip
    for size, data in committed.items():
        for key, c in data["summary"].items():
            for name in MEASURES:
                r = c[name]
                found = (
                    r.get(k)
                    for k in ("across", "ceiling_sgd", "ceiling_adamw", "corrected",
                              "other_seed_sgd", "other_seed_adamw")
                )  # fmt: skip
                cells = ("–" if x is None else f"{x:.3f}" for x in found)
                half = c["permutations"] // 2 if key.startswith("along") else c["permutations"]
                about = f"{c['examples']:,} ({c['group']})", f"2 × {half}"
                lines.append(row(size, key, *about, name.capitalize(), *cells))
    return "\n".join(lines)

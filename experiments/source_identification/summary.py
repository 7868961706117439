"""From ranks to the paper's tables, with intervals over sources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.common.markdown import heading, row
from experiments.common.parts import Results
from experiments.common.statistics import interval
from experiments.source_identification.scores import INFLUENCE, POINTS
from experiments.source_identification.texts import CATEGORIES

METHODS = {
    "bm25": "BM25", "if": "IF-proxy", "sgd": "SGD proxy", "tangent": "tangent (paper)",
    "secant": "secant (inrun)",
}  # fmt: skip
LATER = tuple(f"{e}, later" for e in ("sgd", "tangent", "secant"))  # without the first step
ASKED = ("bm25", "if", *INFLUENCE, "ask")
PAIRS = (("tangent", "sgd"), ("secant", "sgd"), ("secant", "tangent"))
WITHOUT = (
    ("influence", "tangent"), ("influence", "secant"), ("influence", "sgd"), ("ask", "tangent"),
    ("ask", "influence"), ("ask", "if"),
)  # fmt: skip
PAPER = {  # average ranks by candidates and category: BM25, IF-proxy, in-run SGD, in-run Adam
    10_000: {
        "exact": (1.00, 5.07, 1.05, 1.55),
        "partial_same": (1.00, 9.87, 1.25, 1.65),
        "paraphrase": (1.21, 245.41, 9.48, 6.51),
        "significant_paraphrase": (2.05, 216.23, 454.60, 32.10),
        "similar_topic": (2643.50, 2855.13, 1612.50, 753.25),
    },
    1_000: {
        "exact": (1.00, 1.00, 1.00, 1.00),
        "partial_same": (1.00, 4.00, 2.00, 1.50),
        "paraphrase": (1.00, 8.00, 1.75, 4.50),
        "significant_paraphrase": (1.00, 56.25, 13.75, 4.75),
        "similar_topic": (618.00, 658.75, 302.00, 81.50),
    },
}
LIMITS = ("mean", "low", "high")
Rank = tuple[int, str, str, float]  # source, category, method, rank


def summarise(results: Results) -> dict[str, Any]:
    """By run; the parts that deal its sources among them are put together."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, r in results.items():
        if r["task"] == "values":
            runs.setdefault(re.sub(r"-\d+of\d+$", "", name), []).append(r)
    lexical = [r for r in results.values() if r["task"] == "bm25"]
    found = {name: one(shards, lexical) for name, shards in runs.items()}
    pretrained = {n: r for n, r in results.items() if r["task"] == "pretrain"}
    apart = {n: by_method(r, POINTS) for n, r in results.items() if r["task"] == "points"}
    without = {
        n: by_method(r, ASKED, lexical) | {"pairs": pairs_of(r, WITHOUT)}
        for n, r in results.items()
        if r["task"] == "influence"
    }
    return {"runs": found, "pretrained": pretrained, "points": apart, "influence": without}


def by_method(
    result: dict[str, Any], methods: Sequence[str], lexical: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Average ranks of these methods in one run, of the categories that it asked."""
    ranks = flat(result) + lexical_of(result["candidates"], set(result["sources"]), lexical)
    categories = {}
    for c in CATEGORIES:
        own = {m: [(s, r) for s, k, of, r in ranks if (k, of) == (c, m)] for m in methods}
        if any(own.values()):
            categories[c] = {m: places(found) for m, found in own.items() if found}
    return {"candidates": result["candidates"], "categories": categories}


def pairs_of(result: dict[str, Any], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """By how much the first ranks the source higher than the second, query by query."""
    found: dict[str, Any] = {}
    for c in [c for c in CATEGORIES if c in result["categories"]]:
        own = [i for i, k in enumerate(result["categories"]) if k == c]
        ranks, groups = result["ranks"], [result["sources"][i] for i in own]
        found[c] = {
            f"{a} / {b}": interval([ranks[b][i] - ranks[a][i] for i in own], groups)
            for a, b in pairs
        }
    return found


def lexical_of(candidates: int, sources: set[int], lexical: Sequence[dict[str, Any]]) -> list[Rank]:
    """What is known of these sources without a run."""
    same = [r for r in lexical if r["candidates"] == candidates]
    return [x for r in same for x in flat(r) if x[0] in sources]


def one(shards: list[dict[str, Any]], lexical: list[dict[str, Any]]) -> dict[str, Any]:
    candidates = shards[0]["candidates"]
    sources = {s for r in shards for s in r["sources"]}
    ranks = [x for r in shards for x in flat(r)] + lexical_of(candidates, sources, lexical)
    loss = {
        k: [float(np.mean([r["loss"][k][i] for r in shards])) for i in (0, 1)]
        for k in ("candidates", "queries")
    }
    return {
        "model": shards[0]["model"], "candidates": candidates, "sources": len(sources),
        "steps": shards[0]["steps"], "loss": loss,
        **{k: sum(r[k] for r in shards) for k in ("void", "void_after")},  # steps without values
        "categories": {c: cells([x for x in ranks if x[1] == c]) for c in CATEGORIES},
    }  # fmt: skip


def flat(result: dict[str, Any]) -> list[Rank]:
    return [
        (source, category, method, rank)
        for method, found in result["ranks"].items()
        for source, category, rank in zip(
            result["sources"], result["categories"], found, strict=True
        )
    ]


def cells(ranks: list[Rank]) -> dict[str, Any]:
    """One category: every method, and Adam-aware ones beside the SGD proxy query by query."""
    own = {m: [(s, r) for s, _, method, r in ranks if method == m] for m in (*METHODS, *LATER)}
    methods = {m: places(found) for m, found in own.items() if found}
    pairs = {}
    for a, b in (*PAIRS, *((f"{a}, later", f"{b}, later") for a, b in PAIRS)):
        groups = [s for s, _ in own[a]]
        less = [y - x for (_, x), (_, y) in zip(own[a], own[b], strict=True)]
        pairs[f"{a} / {b}"] = interval(less, groups) | {
            "better": float(np.mean([d > 0 for d in less])),
            "worse": float(np.mean([d < 0 for d in less])),
        }
    later = {m.removesuffix(", later"): methods.pop(m) for m in LATER}
    return {"n": len(own["sgd"]), "methods": methods, "pairs": pairs, "later": later}


def places(found: list[tuple[int, float]]) -> dict[str, Any]:
    groups, ranks = [s for s, _ in found], np.array([r for _, r in found])
    return {
        "rank": interval(ranks.tolist(), groups),
        "median": float(np.median(ranks)),
        "mrr": interval((1 / ranks).tolist(), groups),
        "recall10": interval((ranks <= 10).astype(float).tolist(), groups),
    }


def headline(summary: dict[str, Any]) -> str:
    lines = []
    for name, run in summary["runs"].items():
        for category, c in run["categories"].items():
            cells = (f"{m} {x['rank']['mean']:.1f}" for m, x in c["methods"].items())
            lines.append(f"{name:24} {CATEGORIES[category]:20} " + ", ".join(cells))
            cells = (f"{m} {x['rank']['mean']:.1f}" for m, x in c["later"].items())
            lines.append(f"{'':24} {'  without step 0':20} " + ", ".join(cells))
    for name, run in summary.get("influence", {}).items():
        for category, c in run["categories"].items():
            cells = (f"{m} {x['rank']['mean']:.1f}" for m, x in c.items())
            lines.append(f"{name:24} {CATEGORIES[category]:20} " + ", ".join(cells))
    return "\n".join(lines) or "no run is finished"


def named(name: str, run: dict[str, Any]) -> str:
    return f"{name}, {run['candidates']:,}"


def table(committed: dict[str, Any]) -> str:
    """Average ranks, the paper's above ours."""
    lines = heading("size", "run, candidates", "scenario", "queries", *METHODS.values())
    for candidates, rows in PAPER.items():
        for category, numbers in rows.items():
            theirs = (*(f"{x:.2f}" for x in numbers), "–")
            who = f"DistilGPT-2, {candidates:,}"
            lines.append(row("the paper", who, CATEGORIES[category], "–", *theirs))
    for size, data in committed.items():
        for name, run in data["summary"]["runs"].items():
            for category, c in run["categories"].items():
                ours = (rank(c["methods"].get(m)) for m in METHODS)
                what = size, named(name, run), CATEGORIES[category], str(c["n"])
                lines.append(row(*what, *ours))
    return "\n".join(lines)


def rank(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    r = cell["rank"]
    limits = "" if r["low"] is None else f" [{r['low']:.1f}, {r['high']:.1f}]"
    return f"{r['mean']:.2f}{limits}"


def differences(committed: dict[str, Any]) -> str:
    """What the Adam-aware estimators win over the SGD proxy, query by query."""
    lines = heading(
        "size", "run, candidates", "scenario", "tangent above SGD by", "secant above SGD by",
        "secant above tangent by", "better / worse than SGD: tangent", "secant",
        "median: SGD, tangent, secant", "mean without the first step: the same",
        "recall at 10: BM25, IF, SGD, tangent, secant", "MRR: the same",
    )  # fmt: skip
    for size, data in committed.items():
        for name, run in data["summary"]["runs"].items():
            for category, c in run["categories"].items():
                m, pairs = c["methods"], [c["pairs"][f"{e} / sgd"] for e in ("tangent", "secant")]
                by = (gain(p) for p in (*pairs, c["pairs"]["secant / tangent"]))
                share = (f"{p['better']:.0%} / {p['worse']:.0%}" for p in pairs)
                median = ", ".join(f"{m[e]['median']:.1f}" for e in ("sgd", "tangent", "secant"))
                later = ", ".join(f"{x['rank']['mean']:.1f}" for x in c["later"].values())
                recall, mrr = (
                    ", ".join(f"{m[e][k]['mean']:.2f}" if e in m else "–" for e in METHODS)
                    for k in ("recall10", "mrr")
                )
                what = size, named(name, run), CATEGORIES[category]
                lines.append(row(*what, *by, *share, median, later, recall, mrr))
    return "\n".join(lines)


def points(committed: dict[str, Any]) -> str:
    """Both maps at both points."""
    at = ("tangent, current (paper)", "tangent, midpoint", "secant, current", "secant, midpoint")
    lines = heading("size", "run, candidates", "scenario", *at)
    for size, data in committed.items():
        for name, run in data["summary"].get("points", {}).items():
            for category, found in run["categories"].items():
                cells = (rank(found[e]) for e in POINTS)
                lines.append(row(size, named(name, run), CATEGORIES[category], *cells))
    return "\n".join(lines)


def influence(committed: dict[str, Any]) -> str:
    """What would be without the source, in the run and asked after it, beside values."""
    titles = (METHODS.get(m, m) for m in ASKED)
    lines = heading("size", "run, candidates", "scenario", "queries", *titles)
    for size, data in committed.items():
        for name, run in data["summary"].get("influence", {}).items():
            for category, found in run["categories"].items():
                cells = (rank(found.get(m)) for m in ASKED)
                queries = str(found["influence"]["rank"]["n"])
                what = size, named(name, run), CATEGORIES[category], queries
                lines.append(row(*what, *cells))
    if len(lines) > 2:
        return "\n".join(lines)
    return "*Not measured yet: `inrun reproduce source-identification` fills this table.*"


def without(committed: dict[str, Any]) -> str:
    """Influence and ask above other scores, query by query."""
    titles = (f"{METHODS.get(a, a)} above {METHODS.get(b, b)} by" for a, b in WITHOUT)
    lines = heading("size", "run, candidates", "scenario", *titles)
    for size, data in committed.items():
        for name, run in data["summary"].get("influence", {}).items():
            for category, pairs in run["pairs"].items():
                cells = (gain(pairs[f"{a} / {b}"]) for a, b in WITHOUT)
                lines.append(row(size, named(name, run), CATEGORIES[category], *cells))
    return "\n".join(lines)


def gain(cell: dict[str, Any]) -> str:
    mean, low, high = (x if x is None else round(x, 1) + 0.0 for x in map(cell.get, LIMITS))
    return f"{mean:.1f}" + ("" if low is None else f" [{low:.1f}, {high:.1f}]")

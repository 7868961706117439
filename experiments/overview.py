"""The summary table of docs/reproduction: the paper's numbers and ours, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments import load
from experiments.common.figures import last
from experiments.common.markdown import heading, row
from experiments.efficiency import here, with_costs
from experiments.pruning_lm.summary import signed
from experiments.pruning_sst2.summary import NAMES
from experiments.pruning_sst2.summary import PAPER as ACCURACIES
from experiments.source_identification.summary import PAPER as RANKS
from experiments.source_identification.texts import CATEGORIES

Row = tuple[str, str, str, str, str]  # what, the paper, tangent, secant, SGD
NONE = "–"


HEAD = heading(
    "claim", "size", "the paper", "tangent + current (its estimator)", "secant + midpoint (inrun)",
    "SGD proxy",
)  # fmt: skip
HEADLINES = (  # the rows of docs/accuracy.md: of an experiment the first that has these words
    ("fidelity", "100+ (gpt2-small)"),
    ("learning-rates", "(gpt2-small)"),
    ("learning-rates", "(gpt)"),
    ("ghost", "float32"),
    ("efficiency", "eager"),
    ("efficiency", "compile"),
    ("adds-up", "adamw, 3e-04"),
    ("adds-up", "adamw, 1e-03"),
    ("optimizer-dependence", "retrain, mlp"),
    ("source-identification", "significant rewrite (smollm2-135m-10000"),
    ("source-identification", "similar topic (smollm2-135m-10000"),
    ("source-identification", "significant rewrite (distilgpt2-enwik8-10000"),
    ("pruning-sst2", "held-out"),
    ("pruning-lm", "plain"),
    ("mislabel", "10% of labels flipped (digits"),
    ("mislabel", "10% of labels flipped (SST-2"),
)


def table() -> str:
    """All rows of all experiments."""
    return "\n".join([*HEAD, *(line for name in ROWS for line in found(name))])


def headlines() -> str:
    """One or two rows of each."""
    rows = (next((x for x in found(n) if words in x), None) for n, words in HEADLINES)
    return "\n".join([*HEAD, *(x for x in rows if x is not None)])


def short(name: str) -> str:
    """The rows of one experiment, for the head of its page."""
    return "\n".join([*HEAD, *found(name)])


def found(name: str) -> list[str]:
    """The rows of an experiment at the largest size that is committed, and with them those of tasks
    that only the smoke size has."""
    committed = load(name).committed()
    if name == "efficiency":
        committed = with_costs(committed)
    if not committed:
        return []
    size, summary = last(committed)
    rows = {what: row(what, size, *cells) for what, *cells in ROWS[name](summary)}
    if name == "mislabel" and size != "smoke":
        for what, *cells in ROWS[name](committed["smoke"]["summary"]):
            rows.setdefault(what, row(what, "smoke", *cells))
    return list(rows.values())


def dependence(summary: dict[str, Any]) -> list[Row]:
    rows = []
    for key, c in summary.items():
        r = c["pearson"]
        ours = (
            f"measured by training: {r['across']:.3f} (ceiling SGD {r['ceiling_sgd']:.3f}, AdamW "
            f"{r['ceiling_adamw']:.3f})"
        )
        paper = "0.0579, no ceiling" if key.startswith("along") else NONE
        what = f"Fig. 1: Pearson, values under SGD / AdamW ({key})"
        rows.append((what, paper, ours, NONE, NONE))
    return rows


def accumulated(summary: dict[str, Any]) -> list[Row]:
    found = {s["model"]: s for s in reversed(summary.values())}
    return [
        (
            f"Fig. 2a: Pearson / Spearman with the SGD proxy, one run summed ({model})",
            "“weak”",
            *(both(s["pairs"][pair]) for pair in ("tangent / sgd", "sgd / secant")),
            "1",
        )
        for model, s in found.items()
    ]


def fidelity(summary: dict[str, Any]) -> list[Row]:
    return [
        (
            f"Fig. 2b: R with exact Shapley values, steps {c['stage']} ({c['model']})",
            "0.9992; SGD 0.8434",
            *(f"{c[e]['R']['mean']:.4f}" for e in ("tangent", "secant", "sgd")),
        )
        for c in summary["cells"]
        if c["stage"] in ("5–19", "100+")
    ]


def rates(summary: dict[str, Any]) -> list[Row]:
    rows = []
    for model in dict.fromkeys(c["model"] for c in summary["cells"]):
        own = [c for c in summary["cells"] if c["model"] == model and c["lr"] <= 1e-3]
        lowest = (f"{min(c[e]['R'] for c in own):.4f}" for e in ("tangent", "secant", "sgd"))
        what = f"Fig. 3: lowest R, learning rates 1e-7 to 1e-3, from step 20 on ({model})"
        rows.append((what, "> 0.96", *lowest))
    return rows


def ghost(summary: dict[str, Any]) -> list[Row]:
    return [
        (
            f"Fig. 2c: R, ghost / fully materialised ({s['model']}, {s['precision']})",
            "0.999984",
            f"{s['against']['ghost, same']['R']:.8f}",
            NONE,
            NONE,
        )
        for s in summary.values()
    ]


def adds_up(summary: dict[str, Any]) -> list[Row]:
    return [
        (
            f"ours: explained, whole run ({c['optimizer']}, {c['lr']:.0e})",
            NONE,
            *(f"{c['explained'][e]:.1%}" for e in ("tangent", "secant", "sgd")),
        )
        for c in summary.values()
    ]


def sources(summary: dict[str, Any]) -> list[Row]:
    rows = []
    for name, run in summary["runs"].items():
        for category in ("significant_paraphrase", "similar_topic"):
            paper = RANKS.get(run["candidates"], {}).get(category)
            c = run["categories"][category]["methods"]
            cells = (f"{c[e]['rank']['mean']:.1f}" for e in ("tangent", "secant", "sgd"))
            beside = f"{paper[3]:.1f}; SGD {paper[2]:.1f}" if paper else NONE
            what = CATEGORIES[category].lower()
            where = f"{name}, {run['candidates']:,} candidates"
            rows.append((f"Table 2: average rank of the source, {what} ({where})", beside, *cells))
    return rows


def pruning_lm(summary: dict[str, Any]) -> list[Row]:
    rows = []
    for kind, s in summary.items():
        against = (
            signed(s["settings"][f"values20, {e}"]["versus"]["random20"]["steps"])
            for e in ("tangent", "secant", "sgd")
        )
        what = f"App. C: loss without the lowest 20 %, less without a random 20 % ({kind} corpus)"
        rows.append((what, "“often lower”" if kind == "plain" else NONE, *against))
    return rows


def mislabel(summary: dict[str, Any]) -> list[Row]:
    return [
        (
            f"ours: AUROC of harm, {s['rate']:.0%} of labels flipped ({s['task']}, {s['recipe']})",
            NONE,
            *(f"{s['detectors'][f'harm, {e}']['auroc']['mean']:.3f}"
              for e in ("tangent", "secant", "sgd")),
        )
        for s in summary.values()
    ]  # fmt: skip


def efficiency(summary: dict[str, Any]) -> list[Row]:
    """Without the smoke size: throughput on a small model and a CPU is another question."""
    rows = []
    for part in summary.values():
        found = {r["variant"]: r for r in part["rows"]}
        if part["model"] == "gpt2":
            cells = (here(found[v], "ratio") if v in found else NONE for v in ("tangent", "fast"))
            what = f"Table 1: share of plain throughput ({found['plain']['mode']})"
            rows.append((what, "43.9%", *cells, NONE))
    return rows


def pruning(summary: dict[str, Any]) -> list[Row]:
    """Mean differences over the ratios there are, beside the paper's over the same."""
    at = {(d["optimizer"], d["ratio"], d["what"]): d["accuracy"] for d in summary["differences"]}
    rows = []
    for optimizer in dict.fromkeys(o for o, _, _ in at):
        ratios = {r for o, r, _ in at if o == optimizer}
        own = "all" if "all" in ratios else next(iter(ratios))
        known = [v for r, v in ACCURACIES[optimizer].items() if r in ratios]
        paper = [sum(v[i] - v[i + 1] for v in known) / len(known) for i in (0, 1)]
        for target in ("held-out", "evaluation"):
            cells = []
            for e in ("tangent", "secant", "sgd"):
                pair = [at.get((optimizer, own, f"{e}, {target}: {what}"))
                        for what in ("bottom − random", "random − top")]  # fmt: skip
                cells.append(" / ".join(f"{x['mean']:+.4f}" for x in pair if x) or NONE)
            what = (
                "Table 3: accuracy, bottom − random / random − top removed "
                f"({NAMES[optimizer]}, values for {target})"
            )
            rows.append((what, " / ".join(f"{x:+.4f}" for x in paper), *cells))
    return rows


def both(c: dict[str, float]) -> str:
    return f"{c['pearson']:.3f} / {c['spearman']:.3f}"


ROWS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "optimizer-dependence": dependence,
    "accumulated": accumulated,
    "fidelity": fidelity,
    "learning-rates": rates,
    "ghost": ghost,
    "efficiency": efficiency,
    "adds-up": adds_up,
    "source-identification": sources,
    "pruning-sst2": pruning,
    "pruning-lm": pruning_lm,
    "mislabel": mislabel,
}

"""The tables of docs/lds.md, from benchmarks/results/lds-*.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"
TITLES = {
    "digits-mlp": "digits, MLP", "digits-mlp-noisy": "digits, MLP, 10 % flipped",
    "digits-convnet": "digits, ConvNet", "digits-convnet-noisy": "digits, ConvNet, 10 % flipped",
    "byte-gpt": "byte GPT", "byte-gpt-noisy": "byte GPT, 10 % shuffled",
    "sst2": "SST-2, MiniLM", "sst2-noisy": "SST-2, MiniLM, 10 % flipped",
    "smollm2": "WikiText-2, SmolLM2-135M",
}  # fmt: skip
# Others' numbers on another problem: a GPT-2 fine-tuned with Adam, in the README of bergson 0.17 to
# 0.26. That of 2.5.1 has another table.
PUBLIC = {"MAGIC": 0.98, "SOURCE": 0.39, "EK-FAC": 0.26, "TrackStar": 0.18}
Cell = Callable[[dict[str, Any]], str]


def problems(place: str) -> dict[str, Any]:
    path = RESULTS / f"lds-{place}.json"
    found = json.loads(path.read_text())["problems"] if path.exists() else {}
    return {k: found[k] for k in TITLES if k in found}


def methods(found: dict[str, Any]) -> list[str]:
    """All methods; inrun's first, then ours, then those of other libraries."""
    names = dict.fromkeys(m for p in found.values() for m in p["methods"])

    def place(name: str) -> tuple[bool, bool, str]:
        ours = name.startswith(("inrun", "our "))
        return not name.startswith("inrun"), not ours, "" if ours else name

    return sorted(names, key=place)


def grid(place: str, cell: Cell, first: list[str]) -> str:
    """A row for each method, a column for each problem."""
    found = problems(place)
    if not found:
        return "*Not measured yet: `python -m benchmarks.lds` fills this table.*"
    lines = ["| | " + " | ".join(TITLES[p] for p in found) + " |", "|---" * (len(found) + 1) + "|"]
    lines += first
    for method in methods(found):
        cells = [
            cell(p["methods"][method]) if method in p["methods"] else "" for p in found.values()
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *conditions(found)])


def quality(place: str) -> str:
    """LDS with its interval, and the ceiling."""
    found = problems(place)

    def ceiling(p: dict[str, Any]) -> str:
        mean, each = p["ceiling"]["mean"], p["ceiling"]["each"]
        return "" if mean is None else f"{mean:.2f} ({each} seeds each)"

    first = "| *two sets of retrainings agree* | " + " | ".join(map(ceiling, found.values())) + " |"

    def cell(m: dict[str, Any]) -> str:
        x = m["lds"]
        return f"{x['mean']:.2f} [{x['low']:.2f}, {x['high']:.2f}]"

    return grid(place, cell, [first])


def cost(place: str) -> str:
    """Cost in trainings and the agreement of two runs."""

    def cell(m: dict[str, Any]) -> str:
        same = "" if m["agreement"] is None else f", {m['agreement']:.2f}"
        return f"{m['trainings']:.3g}{same}"

    return grid(place, cell, [])


def removal(place: str) -> str:
    """Brittleness and tail patch, in nats of the query's loss."""
    found = {k: p for k, p in problems(place).items() if p.get("brittleness")}
    if not found:
        return "*Not measured yet: `python -m benchmarks.lds --removals 20` fills this table.*"
    lines = ["| | " + " | ".join(TITLES[p] for p in found) + " |", "|---" * (len(found) + 1) + "|"]
    for m in methods(found):
        if not any(m in p["brittleness"]["rise"] for p in found.values()):
            continue
        cells = []
        for p in found.values():
            rise, drop = p["brittleness"]["rise"].get(m), p["tail_patch"]["drop"].get(m)
            cells.append("" if rise is None else f"+{rise:.3f}, −{drop:.4f}".replace("+-", "−"))
        lines.append(f"| {m} | " + " | ".join(cells) + " |")
    random = [f"0, −{p['tail_patch']['random']:.4f}".replace("−-", "+") for p in found.values()]
    lines.append("| random rows | " + " | ".join(random) + " |")
    sizes = {(p["brittleness"]["k"], p["brittleness"]["queries"]) for p in found.values()}
    about = "; ".join(f"{k} rows removed for each of {q} queries" for k, q in sorted(sizes))
    return "\n".join([*lines, "", f"{about}; tail patch: one step on the top 10."])


def conditions(found: dict[str, Any]) -> list[str]:
    """What was measured, with what, and what did not run."""
    lines = []
    for name, p in found.items():
        lines.append(
            f"* {TITLES[name]}: {p['parameters']:,} parameters, {p['examples']:,} examples, "
            f"{p['steps']} steps, {p['queries']} queries, {p['subsets']} halves × {p['repeats']} "
            f"seeds; a training takes {p['plain_seconds']:.2g} s."
        )
        if p["failed"]:
            lines.append(
                f"  Did not run: {'; '.join(f'{k} ({v})' for k, v in p['failed'].items())}."
            )
    last = next(reversed(found.values()))
    names = ("torch", "dattri", "kronfluence", "traker", "captum")
    with_versions = ", ".join(f"{n} {last['versions'].get(n) or '–'}" for n in names)
    where = last["hardware"]["gpu"] or last["hardware"]["cpu"]
    return [*lines, "", f"{where}, {with_versions}, {last['date'][:10]}."]


def public() -> str:
    """Numbers of others, for scale."""
    return ", ".join(f"{name} {value:.2f}" for name, value in PUBLIC.items()) + "."


TABLES: dict[str, Callable[[], str]] = {
    "lds-public": public,
    **{f"lds-{place}": lambda place=place: quality(place) for place in ("cpu", "h200")},  # type: ignore
    **{f"lds-{place}-cost": lambda place=place: cost(place) for place in ("cpu", "h200")},  # type: ignore
    "lds-removal": lambda: removal("cpu"),
}

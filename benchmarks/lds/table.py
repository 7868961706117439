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
    "byte-llama": "byte Llama",
    "sst2-layer": "SST-2, MiniLM's last layer",
    "sst2-layer-noisy": "SST-2, MiniLM's last layer, 10 % flipped",
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


def draws(place: str, name: str) -> str:
    """LDS of one problem and of the same with other rows and queries."""
    path = RESULTS / f"lds-{place}.json"
    known = json.loads(path.read_text())["problems"] if path.exists() else {}
    found = {k: p["methods"] for k, p in known.items() if k.partition(":")[0] == name}
    if len(found) < 2:
        return f"*Not measured yet: `python -m benchmarks.lds {name}:2` fills this table.*"
    named = {k: {"methods": m} for k, m in found.items()}
    shared = [m for m in methods(named) if all(m in own for own in found.values())]
    drawn = [f"draw {k.partition(':')[2] or 0}" for k in found]
    lines = [f"| {TITLES[name]} | " + " | ".join(drawn) + " | mean | two runs agree |",
             "|---" * (len(found) + 3) + "|"]  # fmt: skip
    for m in shared:
        lds = [own[m]["lds"]["mean"] for own in found.values()]
        same = [own[m]["agreement"] for own in found.values()]
        cells = [f"{x:.2f}" for x in [*lds, sum(lds) / len(lds), sum(same) / len(same)]]
        lines.append(f"| {m} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost(place: str) -> str:
    """Cost in trainings and the agreement of two runs."""

    def cell(m: dict[str, Any]) -> str:
        same = "" if m["agreement"] is None else f", {m['agreement']:.2f}"
        return f"{m['trainings']:.3g}{same}"

    return grid(place, cell, [])


def removals(place: str) -> dict[str, Any]:
    path = RESULTS / f"removal-{place}.json"
    found = json.loads(path.read_text())["problems"] if path.exists() else {}
    return {k: found[k] for k in TITLES if k in found}


def removal_grid(
    place: str, cell: Callable[[dict[str, Any], str], str], random: Callable[[dict[str, Any]], str]
) -> list[str]:
    """A row for each method and one of random rows, a column for each problem."""
    found = removals(place)
    lines = ["| | " + " | ".join(TITLES[p] for p in found) + " |", "|---" * (len(found) + 1) + "|"]
    named = {k: {"methods": p["tail_patch"]["drop"]} for k, p in found.items()}
    for m in methods(named):
        cells = [cell(p, m) if m in p["tail_patch"]["drop"] else "" for p in found.values()]
        lines.append(f"| {m} | " + " | ".join(cells) + " |")
    return [*lines, "| random rows | " + " | ".join(map(random, found.values())) + " |"]


MISSING = "*Not measured yet: `python -m benchmarks.lds.without` fills this table.*"


def removal(place: str) -> str:
    """Brittleness at the middle size and tail patch, in nats of the query's loss."""
    if not removals(place):
        return MISSING

    def cell(p: dict[str, Any], m: str) -> str:
        rise, drop = middle(p)[1]["rise"][m], p["tail_patch"]["drop"][m]
        return f"+{rise:.3f}, −{drop:.4f}".replace("+-", "−").replace("−-", "+")

    lines = removal_grid(
        place, cell, lambda p: f"0, −{p['tail_patch']['random']:.4f}".replace("−-", "+")
    )
    return "\n".join([*lines, "", f"{_removed(place, False)}; tail patch: one step on the top 10."])


def flips(place: str) -> str:
    """The share of queries that get another label, for each number of rows removed."""
    if not removals(place):
        return MISSING

    def each(p: dict[str, Any], of: Callable[[dict[str, Any]], float | None]) -> str:
        found = [of(size) for size in p["brittleness"]["sizes"].values()]
        return " / ".join("–" if x is None else f"{100 * x:.0f}" for x in found)

    lines = removal_grid(
        place,
        lambda p, m: each(p, lambda size: size["flips"][m]),
        lambda p: each(p, lambda size: size["random_flips"]),
    )
    return "\n".join([*lines, "", f"{_removed(place, True)}. In per cent of the queries."])


def middle(p: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    sizes = list(p["brittleness"]["sizes"].items())
    return sizes[len(sizes) // 2]


def _removed(place: str, every: bool) -> str:
    """How much was removed, for how many queries."""
    found = set()
    for p in removals(place).values():
        b = p["brittleness"]
        sizes = " / ".join(b["sizes"]) if every else middle(p)[0]
        found.add(f"{sizes} of {p['examples']:,} rows removed for each of {b['queries']} queries, "
                  f"{b['seeds']} retrainings each")  # fmt: skip
    return "; ".join(sorted(found))


NUMBERS = {  # for docs/which-number.md: a method of the tables for each number
    "value (`secant`)": "inrun secant",
    "value, without the first tenth of the steps": "inrun secant, without the first tenth",
    "`carry`": "inrun carry",
    "`influence`": "inrun influence",
    "`inrun.ask`": "inrun ask",
}


def numbers(place: str) -> str:
    """What each number of inrun is worth, over all problems: the lowest and the highest."""
    found, gone = problems(place), removals(place)
    lines = [
        "| number | LDS | two runs agree | loss of a query without its top rows | queries that get "
        "another label |",
        "|---|---|---|---|---|",
    ]

    def among(xs: list[float | None], form: str) -> str:
        known = sorted(x for x in xs if x is not None)
        if not known:
            return ""
        low, high = f"{known[0]:{form}}", f"{known[-1]:{form}}"
        return low if low == high else f"{low} to {high}"

    def line(title: str, name: Callable[[dict[str, Any]], str]) -> str:
        own = [p["methods"][name(p)] for p in found.values() if name(p) in p["methods"]]
        cells = [
            among([m["lds"]["mean"] for m in own], ".2f"),
            among([m["agreement"] for m in own], ".2f"),
        ]
        after = [(p, middle(p)[1], name(found[k])) for k, p in gone.items() if k in found]
        cells.append(among([x["rise"].get(m) for _, x, m in after], "+.2f"))
        cells.append(among([x["flips"].get(m) for _, x, m in after], ".0%"))
        return f"| {title} | " + " | ".join(cells) + " |"

    def rival(p: dict[str, Any]) -> str:
        others = {m: x for m, x in p["methods"].items() if not m.startswith("inrun")}
        return max(others, key=lambda m: others[m]["lds"]["mean"])

    lines += [line(title, lambda p, name=name: name) for title, name in NUMBERS.items()]  # type: ignore[misc]
    lines.append(line("*the best other method of each problem, by LDS*", rival))
    ceilings = [p["ceiling"]["mean"] for p in found.values()]
    random = [middle(p)[1]["random_flips"] for p in gone.values()]
    lines.append(f"| *two sets of retrainings; random rows* | {among(ceilings, '.2f')} | | 0 | "
                 f"{among(random, '.0%')} |")  # fmt: skip
    names = "; ".join(TITLES[p] for p in found)
    flipped = [k for k, p in gone.items() if middle(p)[1]["random_flips"] is not None]
    labels = "" if len(flipped) == len(found) else (
        " Labels only of: " + "; ".join(TITLES[p] for p in flipped) + "."
    )  # fmt: skip
    return "\n".join([*lines, "", f"Lowest and highest of: {names}.{labels}"])


def projected(place: str) -> str:
    """What answers lose by projections: LDS, and the agreement with the exact scores."""
    path = RESULTS / f"projected-{place}.json"
    if not path.exists():
        return "*Not measured yet: `python -m benchmarks.lds.projected` fills this table.*"
    known = json.loads(path.read_text())["problems"]
    found = {k: known[k] for k in TITLES if k in known}
    lines = ["| | " + " | ".join(TITLES[p] for p in found) + " |", "|---" * (len(found) + 1) + "|"]
    for name in next(iter(found.values()))["found"]:
        cells = []
        for p in found.values():
            own, exact = p["found"].get(name, {}), p["found"]["exact"]
            parts = [f"{own['lds']:.2f} ({own['lds'] / exact['lds']:.0%})"] if "lds" in own else []
            parts += [f"{own['same']:.2f}"] if "same" in own else []
            cells.append(", ".join(parts))
        way, _, k = name.partition(", ")
        shown = {"whole": "R g and R (F + λ)⁻¹ v", "half": "(F + λ)^-½ on both sides"}
        title = f"{shown[way]}, {int(k):,} numbers" if k else "exact"
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    known_slopes = [p["found"]["exact"].get("slope") for p in found.values()]
    slopes = " | ".join("" if x is None else f"{x:.2f}" for x in known_slopes)
    lines.append(f"| *real change of the loss where the exact scores say 1* | {slopes} |")
    sizes = ", ".join(f"{p['parameters']:,}" for p in found.values())
    return "\n".join([*lines, "", f"Models of {sizes} parameters; means over two runs."])


def watching(place: str) -> str:
    """What watching costs, in trainings, where it was measured."""
    found = {k: p["watching"]["seconds"] for k, p in problems(place).items() if "watching" in p}
    if not found:
        return "*Not measured yet: `python -m benchmarks.lds.cost` fills this table.*"
    lines = ["| | " + " | ".join(TITLES[p] for p in found) + " |", "|---" * (len(found) + 1) + "|"]
    for name in next(iter(found.values())):
        cells = [f"{p[name] / p['plain']:.1f}" for p in found.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    plain = ", ".join(f"{p['plain']:.2g} s" for p in found.values())
    return "\n".join([*lines, "", f"A plain training: {plain} of CPU time, one thread."])


def whole_runs(place: str) -> str:
    """What watching larger models costs over runs of some lengths, in trainings."""
    path = RESULTS / f"influence-cost-{place}.json"
    if not path.exists():
        return "*Not measured yet: `python benchmarks/influence_cost.py` fills this table.*"
    shapes = json.loads(path.read_text())["shapes"]
    runs = list(next(iter(shapes.values()))["trainings"]["plain"])
    lines = ["| | " + " | ".join(f"{s}, {int(n):,} steps" for s in shapes for n in runs) + " |",
             "|---" * (1 + len(shapes) * len(runs)) + "|"]  # fmt: skip
    for kind in ("secant", "influence", "both"):
        cells = [f"{p['trainings'][kind][n]:.2f}" for p in shapes.values() for n in runs]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    sizes = "; ".join(
        f"{s}: {p['parameters']:,} parameters, one target of {p['validation']} rows; in plain "
        f"steps, {steps(p)}"
        for s, p in shapes.items()
    )
    last = next(reversed(shapes.values()))
    return "\n".join([*lines, "", f"{sizes}. {last['hardware']['cpu']}, {last['date'][:10]}."])


def schedules() -> str:
    """LDS of influence by how often the curvature is observed."""
    path = RESULTS / "schedule-cpu.json"
    if not path.exists():
        return "*Not measured yet: `python -m benchmarks.lds.schedule` fills this table.*"
    found = json.loads(path.read_text())["lds"]
    lines = ["| examples | of the first steps | in the end one in | LDS |", "|---" * 4 + "|"]
    for name, lds in found.items():
        examples, first, every, *new = name.split(",")
        all_of = "all" if every == "1" else str(2 * int(first))
        after = f"{every}, directions at each step" if new else every
        lines.append(f"| {examples} | {all_of} | {after} | {lds:.3f} |")
    return "\n".join(lines)


def steps(shape: dict[str, Any]) -> str:
    """What a run with influence alone is made of."""
    own, plain = shape["seconds"]["influence"], shape["seconds"]["plain"]["others"]
    parts = {
        "a step that is observed": own["observed"], "another": own["others"],
        "the first eigenbases": shape["first_renewal"],
        "later ones": shape["renewal"] + shape["renewal_of_large"],
    }  # fmt: skip
    return ", ".join(f"{name} {x / plain:.2f}" for name, x in parts.items())


def conditions(found: dict[str, Any]) -> list[str]:
    """What was measured, with what, and what did not run."""
    lines = []
    for name, p in found.items():
        lines.append(
            f"* {TITLES[name]}: {p['parameters']:,} parameters, {p['examples']:,} examples, "
            f"{p['steps']} steps, {p['queries']} queries, {p['subsets']} halves × {p['repeats']} "
            f"seeds; a training takes {p['plain_seconds']:.2g} s"
            f"{' of CPU time' if p.get('cpu_seconds') else ''}."
        )
        single = [k for k, m in p["methods"].items() if m["runs"] == 1]
        if len(single) == len(p["methods"]):
            lines[-1] += " Credits are of one run."
        elif single:
            lines[-1] += f" Of one run: {'; '.join(single)}."
        if p["failed"]:
            lines.append(
                f"  Did not run: {'; '.join(f'{k} ({v})' for k, v in p['failed'].items())}."
            )
    last = next(reversed(found.values()))
    names = ("torch", "dattri", "kronfluence", "traker", "captum", "bergson")
    known = {n: x for p in found.values() for n, x in p["versions"].items() if x}
    with_versions = ", ".join(f"{n} {known.get(n, '–')}" for n in names)
    where = last["hardware"]["gpu"] or last["hardware"]["cpu"]
    return [*lines, "", f"{where}, {with_versions}, {last['date'][:10]}."]


def public() -> str:
    """Numbers of others, for scale."""
    return ", ".join(f"{name} {value:.2f}" for name, value in PUBLIC.items()) + "."


TABLES: dict[str, Callable[[], str]] = {
    "lds-public": public,
    **{f"lds-{place}": lambda place=place: quality(place) for place in ("cpu", "h200")},  # type: ignore
    **{f"lds-{place}-cost": lambda place=place: cost(place) for place in ("cpu", "h200")},  # type: ignore
    "lds-draws": lambda: draws("cpu", "digits-convnet-noisy"),
    "lds-watching": lambda: watching("cpu"),
    "influence-cost": lambda: whole_runs("cpu"),
    "influence-schedule": schedules,
    "lds-removal": lambda: removal("cpu"),
    "which-number": lambda: numbers("cpu"),
    "lds-projected": lambda: projected("cpu"),
    "lds-flips": lambda: flips("cpu"),
}

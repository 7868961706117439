"""Writes the measured tables of README and docs from benchmarks/results/*.json and from
experiments/*/results/*.json.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end table -->``. ``python
benchmarks/tables.py`` rewrites all of them; the tests check that they are up to date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import experiments
from experiments import overview

RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def gpu() -> str:
    """The GPU suite in two lines: worst relative error by precision and estimator."""
    data = results("gpu_suite")
    worst: dict[tuple[str, str], float] = {}
    for r in data["results"]:
        if "dtype" in r:
            key = r["dtype"], r["estimator"]
            worst[key] = max(worst.get(key, 0.0), r["relative_error"])
    models = len({r["model"] for r in data["results"] if "dtype" in r})
    loops = [r for r in data["results"] if "loop" in r]
    lines = ["| precision | estimator | largest relative error |", "|---|---|---|"]
    lines += [f"| {dtype} | {kind} | {error:.1e} |" for (dtype, kind), error in worst.items()]
    lines.append("")
    lines.append(
        f"{data['environment']['device']}, torch {data['environment']['torch']}: {models} models, "
        f"every form, {data['passed']} comparisons passed, {data['failed']} failed; training "
        f"bitwise unchanged in {sum(r['bitwise'] for r in loops)} of {len(loops)} loops."
    )
    return "\n".join(lines)


def demo() -> str:
    """The digits demo over five seeds, in a long and a short training."""
    runs = [results("demo"), results("demo-short")]
    ranks = {
        "harm": "harm", "secant": "sum of secant values", "tangent": "sum of tangent values",
        "sgd": "sum of SGD values", "loss": "final training loss",
    }  # fmt: skip
    left = {
        "all": "trained on everything", "random": "a random 10 % removed",
        "harm": "10 % of most harm removed",
    }  # fmt: skip
    titles = [f"{run['epochs']} epochs" for run in runs]
    lines = [f"| mean of {len(runs[0]['seeds'])} seeds | {titles[0]} (default) | {titles[1]} |"]
    lines.append("|---|---|---|")
    for key, name in ranks.items():
        cells = " | ".join(f"{run['mean']['auroc'][key]:.3f}" for run in runs)
        lines.append(f"| AUROC, {name} | {cells} |")
    for key, name in left.items():
        cells = " | ".join(f"{run['mean']['accuracy_after'][key]:.1%}" for run in runs)
        lines.append(f"| accuracy, {name} | {cells} |")
    return "\n".join(lines)


def reproduced() -> dict[str, Callable[[], str]]:
    """The tables of the experiments, from their committed results."""
    loaded = [experiments.load(name) for name in experiments.EXPERIMENTS]
    return {
        name: lambda table=table, e=e: table(e.committed())  # type: ignore[misc]
        for e in loaded
        for name, table in e.tables.items()
    }


TABLES: dict[str, Callable[[], str]] = {
    "gpu": gpu,
    "demo": demo,
    "reproduce": overview.table,
} | reproduced()


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str) -> str:
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + "\n" + m[3], text)


def main() -> None:
    for page in pages():
        text = page.read_text()
        if (new := rendered(text)) != text:
            page.write_text(new)
            print("updated", page.relative_to(ROOT))


if __name__ == "__main__":
    main()

"""Writes the measured tables of README and docs from benchmarks/results/*.json.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end table -->``. ``python
benchmarks/tables.py`` rewrites all of them; the tests check that they are up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def fidelity() -> str:
    """R and relative error of each estimator by learning rate and step."""
    names = {"secant": "inrun (secant)", "tangent": "the paper (tangent)", "sgd": "SGD proxy"}
    rows = {}
    for r in results("fidelity")["results"]:
        if r["estimator"] in names:
            cell = f"{r['R']:.4f} / {r['relative_error']:.1%}"
            rows.setdefault((r["lr"], r["step"]), {})[r["estimator"]] = cell
    lines = [
        "| learning rate | step | " + " | ".join(names.values()) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for (lr, step), cells in rows.items():
        lines.append(f"| {lr:.0e} | {step} | " + " | ".join(cells[n] for n in names) + " |")
    return "\n".join(lines)


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


TABLES: dict[str, Callable[[], str]] = {"fidelity": fidelity, "gpu": gpu, "demo": demo}


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

"""Commit results: ``python -m experiments.publish [FOLDER | SUMMARY.json ...]``.

Copies summaries (by default those under runs/reproduce) to experiments/NAME/results/SIZE.json, then
draws the figures of the docs and rewrites their tables from what is committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import EXPERIMENTS, load
from experiments.common.figures import save
from experiments.common.parts import COMMITTED, ROOT, write

IMAGES = ROOT / "docs" / "images"


def copy(paths: Sequence[Path]) -> None:
    files = [f for p in paths for f in (sorted(p.glob("**/summary.json")) if p.is_dir() else [p])]
    for file in files:
        data = json.loads(file.read_text("utf-8"))
        if data.get("size") not in COMMITTED:
            continue
        target = load(data["experiment"]).folder / f"{data['size']}.json"
        write(target, data)
        print(file, "→", target.relative_to(ROOT))


def draw() -> None:
    for name in EXPERIMENTS:
        experiment = load(name)
        committed = experiment.committed()
        for file, figure in experiment.figures.items() if committed else ():
            save(figure(committed), IMAGES / file)
            print("drew", file)


def main() -> None:
    copy([Path(a) for a in sys.argv[1:]] or [Path("runs/reproduce")])
    draw()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import tables

    tables.main()


if __name__ == "__main__":
    main()

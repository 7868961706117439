"""Does a run know near-duplicates? Twins among digits, sought by the course of their visits.

    python benchmarks/duplicates.py [--noise X] [--seeds 50-54] [--out FILE.json]

100 of 1,000 digits are copied over 100 others, with noise of X standard deviations of a pixel. Of
each example: loss, EL2N, margin and values by label (in spreads of the step) at each of eight
visits, as z-scores. How often is the twin the nearest example of the same label? Beside it, the
same by pixels. Then 100 are removed, and accuracy on held-out digits after training on what is left
(three trainings) is compared with 100 at random: ``prune --by auto`` without and with ``--groups``
that name the twins.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.suspects import COMMON, TASKS, accuracy, problem_of
from experiments.common.parts import Context
from experiments.mislabel.training import Trainer
from inrun.bench.machine import commit, hardware, versions
from inrun.ledger.suspects import removed

SIGNALS = ["loss", "el2n", "margin"]


def found(features: np.ndarray, labels: np.ndarray, pairs: np.ndarray) -> float:
    """The share of pairs of which the first is the nearest of the same label to the second."""
    first, second = pairs
    distance = ((features[second][:, None] - features[None]) ** 2).sum(-1)
    distance[labels[second][:, None] != labels[None]] = np.inf
    distance[np.arange(len(second)), second] = np.inf
    return float((distance.argmin(1) == first).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--seeds", default="50-54")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    first, last = (a.seeds.split("-") * 2)[:2]
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about = {"date": now, "hardware": hardware(torch.device("cpu")), "versions": versions(),
             "commit": commit(), "noise": a.noise}  # fmt: skip
    runs = []
    for seed in range(int(first), int(last) + 1):
        runs.append(measured(seed, a.noise))
        print(json.dumps(runs[-1]), flush=True)
        if a.out:
            a.out.write_text(json.dumps(about | {"runs": runs}, indent=1) + "\n")


def measured(seed: int, noise: float) -> dict[str, Any]:
    settings = COMMON | TASKS["digits, 8 epochs"] | {"task": "digits", "seed": seed, "trainings": 3}
    context, rng = Context(torch.device("cpu"), None), np.random.default_rng(seed)
    problem = problem_of(settings, context)
    pairs = np.stack([rng.choice(500, 100, replace=False), 500 + np.arange(100)])
    x, y = (t.clone() for t in problem.train)
    shift = torch.from_numpy(rng.normal(size=x[pairs[1]].shape)).to(x)
    x[pairs[1]], y[pairs[1]] = x[pairs[0]] + noise * x.std() * shift, y[pairs[0]]
    trainer = Trainer(replace(problem, train=(x, y)), settings, context)
    for _, _, run in trainer.run(["secant"]):  # noqa: B007
        pass
    nearest = {k: found(z, y.numpy(), pairs) for k, z in courses(run).items()}
    nearest["pixels"] = found(x.flatten(1).numpy(), y.numpy(), pairs)
    return {"seed": seed, "nearest": nearest, "removed": retrained(trainer, run, pairs)}


def courses(run: Any) -> dict[str, np.ndarray]:
    """What is known of each example at each of its visits, as z-scores."""
    history = run.history()
    history["visit"] = history.groupby("id").cumcount()
    targets = list(run.targets)
    history[targets] /= history.groupby("step")[targets].transform("std")
    tables = {
        name: history.pivot(index="id", columns="visit", values=columns)
        for name, columns in (
            ("signals", SIGNALS), ("values", targets), ("both", SIGNALS + targets)
        )
    }  # fmt: skip
    return {name: ((t - t.mean()) / t.std()).to_numpy() for name, t in tables.items()}


def retrained(trainer: Trainer, run: Any, pairs: np.ndarray) -> dict[str, float]:
    """Accuracy without 100 examples; of removing at random the mean over three sets."""
    suspects, seed, n = run.suspects(), trainer.settings["seed"], trainer.problem.examples
    ids, groups = suspects["id"].to_numpy(), pd.Series(np.nan, range(n))
    groups[pairs[0]] = groups[pairs[1]] = np.arange(100.0)
    own = groups.reindex(ids)
    gone = {"auto": removed(suspects, 100, "auto", seed),
            "auto, groups": removed(suspects, 100, "auto", seed, own)}  # fmt: skip
    result = {name: accuracy(trainer, ids[at]) for name, at in gone.items()}
    some = [np.random.default_rng((seed, i)).permutation(n)[:100] for i in range(3)]
    result["random"] = round(float(np.mean([accuracy(trainer, s) for s in some])), 5)
    return result


if __name__ == "__main__":
    main()

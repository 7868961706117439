"""Does a run know near-duplicates? Twins among digits, sought by the course of their visits.

    python benchmarks/duplicates.py [--noise X]

100 of 1,000 digits are copied over 100 others, with noise of X standard deviations of a pixel. Of
each example: loss, EL2N, margin and values by label (in spreads of the step) at each of eight
visits, as z-scores. Printed: how often the twin is the nearest example of the same label. Beside
it, the same by pixels.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.suspects import COMMON, TASKS, problem_of
from experiments.common.parts import Context
from experiments.mislabel.training import Trainer

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
    noise = parser.parse_args().noise
    settings = COMMON | TASKS["digits, 8 epochs"] | {"task": "digits", "seed": 50}
    context, rng = Context(torch.device("cpu"), None), np.random.default_rng(0)
    problem = problem_of(settings, context)
    pairs = np.stack([rng.choice(500, 100, replace=False), 500 + np.arange(100)])
    x, y = (t.clone() for t in problem.train)
    shift = torch.from_numpy(rng.normal(size=x[pairs[1]].shape)).to(x)
    x[pairs[1]], y[pairs[1]] = x[pairs[0]] + noise * x.std() * shift, y[pairs[0]]
    for _, _, run in Trainer(replace(problem, train=(x, y)), settings, context).run(["secant"]):  # noqa: B007
        pass
    history, labels = run.history(), y.numpy()
    history["visit"] = history.groupby("id").cumcount()
    targets = list(run.targets)
    history[targets] /= history.groupby("step")[targets].transform("std")
    for name, columns in (("signals", SIGNALS), ("values", targets), ("both", SIGNALS + targets)):
        table = history.pivot(index="id", columns="visit", values=columns)
        z = ((table - table.mean()) / table.std()).to_numpy()
        print(f"by {name}: {found(z, labels, pairs):.2f} of the twins")
    print(f"by pixels: {found(x.flatten(1).numpy(), labels, pairs):.2f} of the twins")


if __name__ == "__main__":
    main()

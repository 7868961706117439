"""What do answers lose if gradients are projected to k random numbers, and kept in that form?

    python -m benchmarks.lds.projected PROBLEM ... --cache FOLDER

The scores of ``inrun.ask`` are products ⟨(F + λ)⁻¹ v, g_i⟩. With numbers R g_i on disk (R of k rows
of random signs, divided by √k) they can be guessed as products of k numbers, with an error of about
‖x‖ ‖y‖ / √k for a product ⟨x, y⟩. The same product may be taken of other pairs: of
(F + λ)^-½ v and (F + λ)^-½ g_i, in which both vectors are shorter.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.lds import inside, measures
from benchmarks.lds.gradients import Weights, all_rows, weights_of
from benchmarks.lds.problems import Problem, problem
from benchmarks.lds.retrain import halves, outcomes
from inrun.bench.machine import commit, hardware, versions
from inrun.curvature.layer import Layer
from inrun.scoring.estimators import DAMPING

SIZES = (512, 2048, 8192)
RUNS = 2


def half(layer: Layer, v: list[Tensor]) -> Tensor:
    """(F + λ)^-½ (κ ⊙ v) in the eigenbasis, of a weight and its bias [Q, *W]."""
    return (layer.turned(v) / layer.divisor(DAMPING).sqrt()).flatten(1)


def flattened(v: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten(1) for x in v], dim=1)


def pairs(problem: Problem, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Vectors of the training rows [N, P] and of the queries [Q, P] whose products are the scores
    of a run that was watched for one target, by what each of them has of (F + λ)⁻¹."""
    model, run, _ = inside.watched(problem, seed, ["influence"], {"validation": problem.queries})
    weights = weights_of(model)
    g, v = (all_rows(problem, model, weights, rows) for rows in (problem.train, problem.queries))
    layers = run.curvature.layers.values()

    def flat(rows: Weights, f: Callable[[Layer, list[Tensor]], Tensor]) -> Tensor:
        return torch.cat([f(x, [rows[k] for k in x.place.names]) for x in layers], dim=1)

    through = flat(v, lambda layer, x: flattened(layer.directions(x, DAMPING)))
    plain = flat(g, lambda _, x: flattened(x)), through
    return {"whole": plain, "half": (flat(g, half), flat(v, half))}


def projected(x: Tensor, y: Tensor, k: int, seed: int) -> Tensor:
    """⟨R x_i, R y_q⟩ [N, Q]."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (x.shape[1], k), generator=generator) * 2.0 - 1.0
    signs = (signs / math.sqrt(k)).to(x)
    return ((x @ signs) @ (y @ signs).T).double()


def slope(predicted: Tensor, real: Tensor) -> float:
    """By how much the loss of the median query really changes where the scores say 1: [M, Q]."""
    a, b = (x.double() - x.double().mean(0) for x in (predicted, real))
    return float(((a * b).sum(0) / (a * a).sum(0)).median())


def measured(given: Problem, args: argparse.Namespace) -> dict[str, Any]:
    masks = halves(given.examples, max(args.subsets, 1))
    truth = None
    if args.subsets:
        truth = outcomes(given, masks, args.repeats, args.cache, args.together)[0].mean(0)
    found: dict[str, Any] = {}

    def note(name: str, credit: Tensor, exact: Tensor) -> None:
        """``same``: agreement with the exact scores; ``slope``: do these have the right size?"""
        cell = {"same": float(measures.spearman(credit, exact).nanmean())}
        if truth is not None:
            sums = measures.predicted(credit, masks)
            cell["lds"] = float(measures.spearman(sums, -truth).nanmean())
            cell["slope"] = slope(sums / given.examples, -truth)
        for key, x in cell.items():
            found.setdefault(name, {}).setdefault(key, []).append(x)

    for seed in range(RUNS):
        every = pairs(given, seed)
        x, y = every["whole"]
        exact = (x @ y.T).double()
        note("exact", exact, exact)
        for way, (x, y) in every.items():
            for k in args.sizes:
                note(f"{way}, {k}", projected(x, y, k, seed), exact)
    means = {k: {n: sum(x) / len(x) for n, x in cell.items()} for k, cell in found.items()}
    parameters = sum(w.numel() for w in given.make(0).parameters())
    return {"parameters": parameters, "subsets": args.subsets, "runs": RUNS, "found": means}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="+", metavar="PROBLEM")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/projected-cpu.json")
    parser.add_argument("--subsets", type=int, default=100, help="0: no retraining, no LDS")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--together", type=int, default=100)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--scale", type=float, default=1.0)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    cpu = torch.device("cpu")
    for name in args.problems:
        result = measured(problem(name, cpu, args.data, args.scale), args)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        result |= {"date": now, "commit": commit(), "hardware": hardware(cpu),
                   "versions": versions()}  # fmt: skip
        whole = json.loads(args.out.read_text()) if args.out.exists() else {"problems": {}}
        whole["problems"][name] = result
        args.out.write_text(json.dumps(whole, indent=1) + "\n")
        print(f"{name}: {result['found']}", flush=True)


if __name__ == "__main__":
    main()

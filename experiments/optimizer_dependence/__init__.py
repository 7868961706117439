"""Figure 1, Appendix B: does an example have the same value under SGD and under AdamW?

Two protocols, both Monte Carlo over permutations of the training examples:

* ``along``: what Appendix B describes ("tracked the marginal contribution of 10,000 samples to the
  validation loss throughout the training process"). A model is trained once per permutation, in its
  order, a group of examples per step; the change of the validation loss at a step is the marginal
  of its group, divided equally.
* ``retrain``: Truncated Monte Carlo as Ghorbani and Zou define it. The utility of a coalition is
  the validation loss of a model trained on it *from scratch*; a permutation is cut short once its
  utility is within ``tolerance`` of the whole set's.

A correlation of two noisy estimates says nothing without a ceiling: each estimate is made twice,
from independent permutations, and the two halves of the same optimizer are compared as well. A
third estimate has other initial weights and another order of batches, on the same examples: how
much do values depend on such choices, beside the optimizer?
"""

from __future__ import annotations

from typing import Any

from experiments.common.figures import drawn_by
from experiments.common.parts import Context, Experiment, Settings
from experiments.optimizer_dependence.summary import headline, summarise, table

LR = {  # by model: each optimizer at a rate at which it learns
    "mlp": {"sgd": 0.5, "adamw": 5e-3},
    "gpt": {"sgd": 0.5, "adamw": 3e-3},
    "gpt2-small": {"sgd": 0.2, "adamw": 3e-4},
}
TWICE = (("half0", 0, 0), ("half1", 0, 1), ("other-seed", 1, 2))  # name, seed, permutations' seed


def parts(size: str) -> dict[str, Settings]:
    mlp: Settings = {"kind": "retrain", "model": "mlp", "players": 60, "group": 1, "steps": 40,
                     "batch": 8, "permutations": 300, "validation": 200,
                     "tolerance": 0.01, "data_seed": 0}  # fmt: skip
    gpt: Settings = mlp | {"model": "gpt", "players": 16, "group": 5, "permutations": 48,
                           "validation": 16, "length": 24, "steps": 30}  # fmt: skip
    along: Settings = {"kind": "along", "model": "gpt", "examples": 1000, "group": 5,
                       "permutations": 16, "validation": 16, "length": 24, "seed": 0}  # fmt: skip
    if size == "tiny":
        games = [mlp | {"players": 10, "permutations": 10, "steps": 10, "validation": 50}]
        along |= {"examples": 60, "permutations": 4, "length": 12, "width": 8, "layers": 1}
    elif size == "smoke":
        games = [mlp, gpt]
    else:
        games = [
            mlp | {"players": 100, "permutations": 400},
            gpt | {"players": 40, "group": 10, "permutations": 100, "length": 32},
        ]
        along |= {"model": "gpt2-small", "length": 32, "examples": 10_000, "group": 10,
                  "permutations": 4}  # fmt: skip
    found: dict[str, Settings] = {
        f"along-{along['model']}-{name}": along | rate(along["model"], name)
        for name in ("sgd", "adamw")
    }
    for game in games:
        for name in ("sgd", "adamw"):
            for label, seed, order in TWICE:
                own = {"seed": seed, "order": order} | rate(game["model"], name)
                found[f"retrain-{game['model']}-{name}-{label}"] = game | own
    return found


def rate(model: str, optimizer: str) -> Settings:
    return {"optimizer": optimizer, "lr": LR[model][optimizer]}


def measure(settings: Settings, context: Context) -> dict[str, Any]:
    from experiments.optimizer_dependence import games

    return (games.along if settings["kind"] == "along" else games.retrain)(settings, context)


EXPERIMENT = Experiment(
    name="optimizer-dependence",
    claim="Figure 1: values under SGD and under AdamW correlate with R = 0.0579, ρ = 0.0465",
    parts=parts,
    measure=measure,
    summarise=summarise,
    headline=headline,
    tables={"reproduce-optimizer-dependence": table},
    figures={
        "reproduce-optimizer-dependence.png": drawn_by("experiments.optimizer_dependence.figure")
    },
)

"""Appendix C: a language model trained again without the fifth of the corpus that was worth least.

One preliminary run is watched; then the same model is trained on everything, without a random fifth
and without the fifth of lowest value, all for the same number of steps.
"""

from __future__ import annotations

from experiments.common.figures import drawn_by
from experiments.common.parts import Experiment, Settings
from experiments.pruning_lm.summary import headline, summarise, table
from experiments.pruning_lm.train import measure


def parts(size: str) -> dict[str, Settings]:
    """``values`` and ``evaluation`` are held-out sequences: to value by, and to measure on.

    ``noise``: the share of the corpus whose tokens are shuffled; 0 is the paper's experiment.
    """
    gpt: Settings = {
        "model": "gpt", "length": 32, "width": 48, "layers": 2, "heads": 2, "examples": 640,
        "values": 64, "evaluation": 256, "rows": 64, "batch": 16, "lr": 1e-3, "warmup": 20,
        "steps": 200, "every": 20, "cut": 0.2, "data_seed": 0, "bf16": False,
    }  # fmt: skip
    seeds: tuple[int, ...] = (0, 1, 2)
    if size == "tiny":
        small = {"length": 32, "width": 16, "layers": 1, "examples": 80, "values": 8, "rows": 8}
        gpt |= small | {"evaluation": 16, "batch": 8, "warmup": 5, "steps": 30, "every": 6}
        seeds = (0, 1)
    if size == "paper":
        gpt |= {
            "model": "distilgpt2", "length": 256, "examples": 4000, "values": 128, "rows": 16,
            "lr": 5e-4, "warmup": 75, "steps": 750, "every": 50, "bf16": True,
        }  # fmt: skip
    return {
        f"{kind}-seed{seed}": gpt | {"kind": kind, "noise": noise, "seed": seed}
        for kind, noise in (("plain", 0.0), ("noisy", 0.2))
        for seed in seeds
    }


EXPERIMENT = Experiment(
    name="pruning-lm",
    claim="Appendix C: without the 20 % of lowest value the validation loss is lower over much of "
    "the middle and later training than on everything, and often than without a random 20 %",
    parts=parts,
    measure=measure,
    summarise=summarise,
    headline=headline,
    tables={"reproduce-pruning-lm": table},
    figures={"reproduce-pruning-lm.png": drawn_by("experiments.pruning_lm.figure")},
)

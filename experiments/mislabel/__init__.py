"""Ours: who finds flipped labels, and at what cost? In-run values and harm beside confident
learning, losses, EL2N, GraNd and TracIn."""

from __future__ import annotations

from experiments.common.figures import drawn_by
from experiments.common.markdown import unfinished
from experiments.common.parts import Experiment, Settings
from experiments.mislabel.detectors import measure
from experiments.mislabel.summary import cost_table, headline, summarise, table

RATES = (0.05, 0.1, 0.2)
SEEDS = (0, 1, 2)


def parts(size: str) -> dict[str, Settings]:
    """``rows``: of each label's validation target in a step, of ``each`` in all. ``early``:
    epochs before EL2N and GraNd. ``timed``, ``rounds``: steps to measure what watching costs;
    without (text takes seconds a step on a CPU, and parts share a GPU) costs are counted only.
    """
    common: Settings = {"folds": 5, "checkpoints": 5}
    digits = common | {
        "task": "digits", "recipe": "20 epochs", "examples": 1000, "channels": 16, "each": 24,
        "rows": 8, "epochs": 20, "batch": 64, "lr": 5e-3, "warmup": 0, "early": 2,
        "early_seeds": 10, "timed": 8, "rounds": 3,
    }  # fmt: skip
    text = common | {
        "task": "text", "recipe": "3 epochs", "examples": 100, "length": 16, "each": 16, "rows": 8,
        "epochs": 3, "batch": 20, "lr": 1e-4, "warmup": 3, "early": 1, "early_seeds": 2, "timed": 0,
        "rounds": 1,
    }  # fmt: skip
    if size == "tiny":
        few = {"rate": 0.2, "seed": 0, "early_seeds": 2, "timed": 1, "rounds": 1}
        return {
            "digits-20": digits
            | few
            | {"examples": 200, "channels": 8, "epochs": 8, "batch": 20, "recipe": "8 epochs"},
            "text-20": text | few | {"examples": 60, "rows": 16, "timed": 0},
        }
    if size == "smoke":
        short = digits | {"recipe": "8 epochs", "epochs": 8}
        return named(
            ("digits", digits, RATES, SEEDS),
            ("digits-short", short, (0.1,), SEEDS),
            ("text", text, (0.1,), SEEDS[:1]),  # a core needs minutes for one
        )
    text |= {
        "examples": 10_000, "length": 64, "each": 64, "rows": 32, "batch": 100, "warmup": 30,
        "early_seeds": 5,
    }  # fmt: skip
    return named(("text", text, RATES, SEEDS))


def named(*kinds: tuple[str, Settings, tuple[float, ...], tuple[int, ...]]) -> dict[str, Settings]:
    """A part for every share of flipped labels and seed; the first seed is timed."""
    return {
        f"{name}-{100 * rate:.0f}-seed{seed}": settings
        | {"rate": rate, "seed": seed, "timed": settings["timed"] if seed == seeds[0] else 0}
        for name, settings, rates, seeds in kinds
        for rate in rates
        for seed in seeds
    }


EXPERIMENT = Experiment(
    name="mislabel",
    claim="ours: flipped labels found by in-run values and harm, beside confident learning, "
    "losses, EL2N, GraNd and TracIn, and what each costs",
    parts=parts,
    measure=measure,
    summarise=summarise,
    headline=headline,
    tables={
        "reproduce-mislabel": table,
        "reproduce-mislabel-unfinished": unfinished,
        "reproduce-mislabel-cost": cost_table,
    },
    figures={"reproduce-mislabel.png": drawn_by("experiments.mislabel.figure")},
)

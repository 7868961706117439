"""Table 3: remove the training examples of lowest, random or highest value and train again."""

from __future__ import annotations

from typing import Any

from experiments.common.figures import drawn_by
from experiments.common.markdown import unfinished
from experiments.common.parts import Context, Experiment, Settings
from experiments.pruning_sst2 import summary, tables, training

SGD_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # the paper's first; chosen by held-out accuracy
PARTS = {"watch": training.watch, "full": training.full, "prune": training.prune}
MOST: Settings = {  # the paper's, where it says
    "examples": 10_000, "evaluation": 872, "batch": 16, "epochs": 5,
    "held_out": 872, "choice": 2000, "validation": 64, "length": 44, "longest": 56, "noise": 0.0,
    "pretrained": True, "hub": "sentence-transformers/all-MiniLM-L6-v2", "bfloat16": True,
}  # fmt: skip
OPTIMIZERS: dict[str, Settings] = {
    "adamw": {"optimizer": "adamw", "warm_up": 0.0, "rates": (2e-5,),
              "estimators": ["secant", "tangent", "sgd"]},
    # under SGD the tangent is the SGD proxy
    "sgd": {"optimizer": "sgd-momentum", "warm_up": 0.06, "rates": SGD_RATES,
            "estimators": ["secant", "tangent"]},
}  # fmt: skip


def parts(size: str) -> dict[str, Settings]:
    small = MOST | {"pretrained": False, "hub": None, "bfloat16": False}
    if size == "tiny":
        common = small | {
            "examples": 96, "evaluation": 64, "held_out": 32, "choice": 32, "noise": 0.2,
            "length": 10, "longest": 12, "epochs": 2, "validation": 16,
        }  # fmt: skip
        rates = {"adamw": (1e-2,), "sgd": (1e-2, 1e-1)}
        return expanded(common, rates, seeds=[0, 1], ratios=[0.2], repeats=2)
    if size == "smoke":
        common = small | {
            "examples": 160, "evaluation": 128, "held_out": 64, "choice": 64, "length": 16,
            "longest": 16, "epochs": 2, "validation": 16, "estimators": ["secant", "tangent"],
        }  # fmt: skip
        return expanded(common, {"adamw": (2e-4,)}, seeds=[0, 1], ratios=[0.2], repeats=2)
    rates = {name: o["rates"] for name, o in OPTIMIZERS.items()}
    return expanded(MOST, rates, seeds=[0, 1, 2], ratios=[0.1, 0.2, 0.3], repeats=5)


def expanded(
    common: Settings, rates: dict[str, tuple[float, ...]], seeds: list[int], ratios: list[float],
    repeats: int,
) -> dict[str, Settings]:  # fmt: skip
    """Full trainings (the grid of learning rates among them), watched runs, trainings on what is
    left."""
    found: dict[str, Settings] = {}
    for name, choices in rates.items():
        own = {k: v for k, v in OPTIMIZERS[name].items() if k != "rates"} | common
        names = {lr: f"full-{name}-{lr:.0e}".replace("e-0", "e-") for lr in choices}
        for lr, part in names.items():
            found[part] = own | {"kind": "full", "seeds": seeds, "lr": lr}
        own |= {
            "lr": choices[0] if len(choices) == 1 else None,
            "lr_from": list(names.values()),
        }
        watched = {seed: f"watch-{name}-seed{seed}" for seed in seeds}
        for seed, part in watched.items():
            found[part] = own | {"kind": "watch", "seed": seed}
        for ratio in ratios:
            found[f"prune-{name}-{ratio * 100:.0f}"] = own | {
                "kind": "prune", "seeds": seeds, "ratio": ratio, "repeats": repeats,
                "values_from": {str(s): p for s, p in watched.items()},
            }  # fmt: skip
    return found


def measure(settings: Settings, context: Context) -> dict[str, Any]:
    kept = {k: settings[k] for k in ("kind", "optimizer", "seed") if k in settings}
    return kept | PARTS[settings["kind"]](settings, context)


def needs(settings: Settings) -> list[str]:
    rate = settings.get("lr_from", []) if settings["lr"] is None else []
    return [*rate, *settings.get("values_from", {}).values()]


EXPERIMENT = Experiment(
    name="pruning-sst2",
    claim="Table 3: without its lowest-valued examples a model becomes better, without its "
    "highest-valued worse, than without as many random ones",
    parts=parts,
    measure=measure,
    needs=needs,
    summarise=summary.summarise,
    headline=summary.headline,
    tables={
        "reproduce-pruning-sst2": tables.accuracy,
        "reproduce-pruning-sst2-unfinished": unfinished,
        "reproduce-pruning-sst2-differences": tables.differences,
        "reproduce-pruning-sst2-baselines": tables.baselines,
        "reproduce-pruning-sst2-agreement": tables.agreement,
    },
    figures={"reproduce-pruning-sst2.png": drawn_by("experiments.pruning_sst2.figure")},
)

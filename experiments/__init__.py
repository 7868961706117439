"""The experiments of the paper, one folder each. They import inrun, never the reverse.

``EXPERIMENTS`` lists the folders; each holds ``EXPERIMENT``. See README.md in this folder.
"""

from __future__ import annotations

from importlib import import_module

from experiments.common.parts import Experiment

EXPERIMENTS = {  # name on the command line: folder
    "optimizer-dependence": "optimizer_dependence",
    "accumulated": "accumulated",
    "fidelity": "fidelity",
    "learning-rates": "learning_rates",
    "ghost": "ghost",
    "efficiency": "efficiency",
    "adds-up": "adds_up",
    "source-identification": "source_identification",
    "pruning-sst2": "pruning_sst2",
    "pruning-lm": "pruning_lm",
    "mislabel": "mislabel",
}


def load(name: str) -> Experiment:
    """The experiment of this name; its imports happen here, not before."""
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}: use one of {', '.join(EXPERIMENTS)}")
    return import_module(f"experiments.{EXPERIMENTS[name]}").EXPERIMENT

"""Optimizer rules: what a step does with the gradient, and how credit flows back through it.

Importing this package registers the rules of `torch.optim` and of some other libraries.
"""

from inrun.optimizers import (  # noqa: F401  (each registers its rules)
    adafactor,
    adam,
    adam_relatives,
    adaptive,
    ademamix,
    lamb,
    lion,
    low_bit,
    muon,
    prodigy,
    refused,
    schedule_free,
    sgd,
    soap,
)
from inrun.optimizers.base import (
    LinearMap,
    Rule,
    UpdateMap,
    refuse_optimizer,
    register_optimizer,
    rule_for,
)
from inrun.optimizers.common import Options, State, decoupled_decay, no_decay

__all__ = [
    "LinearMap",
    "Options",
    "Rule",
    "State",
    "UpdateMap",
    "decoupled_decay",
    "no_decay",
    "refuse_optimizer",
    "register_optimizer",
    "rule_for",
]

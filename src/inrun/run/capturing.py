"""The capture of a run, and the recorded passes that may stand in for the model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from inrun.capture.capture import Capture
from inrun.ranks.world import World
from inrun.replay.replays import Replays, make_replays
from inrun.run.bookkeeping import Config, MemoryLimit
from inrun.run.stepping import Stepper
from inrun.scoring.carry import Window


def make_capture(
    model: nn.Module, params: Mapping[str, Tensor], config: Config, targets: int,
    memory: MemoryLimit, on_first_gradient: Callable[[], None], world: World,
) -> Capture:  # fmt: skip
    return Capture(
        model, params, batch_dim=config.batch_dim, form=config.form,
        fast=config.training == "fast", directions=targets * len(config.estimator),
        offload=memory.offload, check_memory=memory.add, on_first_gradient=on_first_gradient,
        shards=world.shards,
    )  # fmt: skip


def replays_of(
    capture: Capture, config: Config, memory: MemoryLimit, world: World,
    steppers: Sequence[Stepper], carry: Window | None,
) -> Replays | None:  # fmt: skip
    """None where they were not asked for, or where records are kept for longer or elsewhere."""
    usable = world.alone and carry is None and not memory.offload and len(steppers) == 1
    if not (config.cuda_graphs and usable):
        return None
    return make_replays(capture, lambda: bool(steppers[0].micros))

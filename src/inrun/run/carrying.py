"""``estimator="carry"`` at the run's side: what is refused, how long the window is, its memory."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from inrun.optimizers import rule_for
from inrun.optimizers.base import momentum_rules
from inrun.optimizers.joint import Optimizers, members_of
from inrun.ranks.memory import free_bytes
from inrun.ranks.world import World
from inrun.run.bookkeeping import Config
from inrun.scoring.carry import LEFT, Window, window_steps
from inrun.scoring.estimators import CARRY, Estimator

log = logging.getLogger("inrun")


def check_carry(config: Config, optimizer: Optimizers, world: World) -> None:
    """Refuse what ``estimator="carry"`` cannot follow."""
    if CARRY not in config.estimator:
        if config.window is not None:
            raise ValueError(
                f"window={config.window} is for estimator={CARRY!r} only: leave it out"
            )
        return
    if config.window is not None and config.window < 1:
        raise ValueError(f"window={config.window} must be at least 1")
    why = None
    if config.every > 1:
        why = (
            f"every={config.every} leaves steps out, and the value of an example needs the "
            "validation gradient of every step that its momentum still moves. With that at every "
            "step little would be saved; with a part of them, values would be noise. Pass every=1, "
            "or estimator='secant' for the share of the step alone"
        )
    elif config.smooth:
        why = "smooth= mixes validation gradients, and nothing would add up: leave it out"
    elif world.shards is not None:
        why = "it follows whole parameters only, not those that fully_shard has spread over ranks"
    elif not config.step_together and len(members_of(optimizer)) > 1:
        why = "with step_together=False a batch belongs to several steps: let them step together"
    if why is not None:
        raise ValueError(f"estimator={CARRY!r}: {why}")
    for member in members_of(optimizer):
        _check_optimizer(member)


def _check_optimizer(optimizer: Optimizer) -> None:
    momentum, name = rule_for(optimizer).momentum, type(optimizer).__name__
    if momentum is None:
        raise TypeError(
            f"estimator={CARRY!r} cannot follow {name}: its steps are no linear map of one average "
            f"of past gradients. It follows {', '.join(momentum_rules())}; use "
            "estimator='secant' with this one"
        )
    for group in optimizer.param_groups:
        if why := momentum.unsupported(group):
            raise TypeError(f"estimator={CARRY!r} cannot follow this {name}: {why}")


def make_window(
    config: Config, estimators: Sequence[Estimator], optimizer: Optimizers, offload: bool,
    limit: int | None, device: Callable[[], torch.device], world: World,
) -> Window | None:  # fmt: skip
    """The window of "carry"; None for other estimators."""
    e = next((e for e, x in enumerate(estimators) if x.kind == CARRY), None)
    if e is None:
        return None
    keeps = [
        rule.keep(group)
        for o in members_of(optimizer)
        if (rule := rule_for(o).momentum) is not None
        for group in o.param_groups
    ]
    memory = WindowMemory(limit, offload, device, max(keeps), world)
    return Window(e, config.window or window_steps(max(keeps)), offload, memory, world)


class WindowMemory:
    """Says how many bytes the window will take when its first step is known, and refuses what does
    not fit, first on all ranks together. ``limit``: in bytes; None is what is free then."""

    def __init__(
        self, limit: int | None, offload: bool, device: Callable[[], torch.device], keep: float,
        world: World,
    ) -> None:  # fmt: skip
        self.limit, self.offload, self.device, self.keep = limit, offload, device, keep
        self._world, self._sharing, self._said = world, 1, False

    def __call__(self, step: int, held: int, steps: int) -> None:
        """``step`` bytes were kept of a step, ``held`` of all; there will be ``steps`` of them."""
        if self._said:
            self._check(step, held, steps)
        else:
            self._sharing = self._ranks_here()
            self._world.together(lambda: self._check(step, held, steps))

    def _check(self, step: int, held: int, steps: int) -> None:
        if self.limit is None:
            self.limit = held + free_bytes(self.device(), self.offload) // self._sharing
        where = "host memory" if self.offload else f"the memory of {self.device()}"
        if not self._said:
            log.info(
                "carry keeps what was captured in %d steps, about %s in %s",
                steps, _size(step * steps), where,
            )  # fmt: skip
        wanted = max(held, 0 if self._said else step * steps)
        self._said = True
        if wanted > self.limit:
            raise MemoryError(
                f"estimator={CARRY!r} keeps what was captured in {steps} steps (until less than "
                f"{LEFT:.0%} of a gradient is left in a momentum of {self.keep:g}): {steps} × "
                f"{_size(step)} = {_size(wanted)}, and {where} has {_size(self.limit)} for it. "
                "Train fewer parameters (LoRA), leave layers out with ignore=[...], keep it in "
                "host memory with offload=True, or pass a smaller window=: what is older is "
                "credited to nobody, and reported."
            )

    def _ranks_here(self) -> int:
        """How many ranks have their windows in this memory, of a device or a host."""
        host = self.offload or self.device().type != "cuda"
        place = platform.node(), "" if host else str(self.device())
        return self._world.gather(place).count(place)


def _size(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**28 else f"{n / 2**20:.1f} MiB"

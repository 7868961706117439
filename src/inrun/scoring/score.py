"""The result of a step, complete or still being computed on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inrun.ledger.records import Audit
from inrun.scoring.taken import Prediction


@dataclass(frozen=True)
class Score:
    """The result of a step: values [E, Q, B], or the reason why there are none."""

    values: np.ndarray | None = None
    void: str | None = None
    audit: Audit | None = None
    missed: float = 0.0  # part of the update that the secant could not carry (Muon's first steps)


@dataclass
class Begun:
    """What was computed before ``optimizer.step()`` and is needed after it."""

    step: int
    numbers: dict[str, Tensor]
    tolerance: float  # of the sum of the values
    prediction: Prediction
    flags: dict[str, Tensor]  # by reason: if one is up, the step is void
    losses: list[np.ndarray]  # audited: before the step and without the batch
    wait: bool  # fetch the values right after the step instead of during the next one


class Pending:
    """A score whose values are being copied to the host. ``settle`` waits for them."""

    def __init__(self, numbers: Mapping[str, Tensor], conclude: Callable[..., Score]) -> None:
        self._shapes = {k: t.shape for k, t in numbers.items()}
        flat = torch.cat([t.detach().double().flatten() for t in numbers.values()])
        self._conclude, self._event = conclude, None
        if flat.is_cuda:
            host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
            self._numbers = host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._numbers = flat

    def settle(self) -> Score:
        if self._event is not None:
            self._event.synchronize()
        parts = self._numbers.split([math.prod(s) for s in self._shapes.values()])
        named = zip(self._shapes.items(), parts, strict=True)
        return self._conclude(**{k: t.reshape(s).numpy() for (k, s), t in named})

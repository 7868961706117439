"""The shared list of optimizers and options, and real steps to hold the rules against."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

SHAPES = [(3, 4), (5,), (2, 3, 2), ()]
MATRICES = [(3, 4), (6, 3), (4, 4)]


class Moment(NamedTuple):
    """One parameter just before a real step, and its weights just after."""

    g: Tensor
    w: Tensor
    s: dict[str, Any]
    o: dict[str, Any]
    after: Tensor

    @property
    def args(self) -> tuple[Tensor, Tensor, dict[str, Any], dict[str, Any]]:
        return self.g, self.w, self.s, self.o


@dataclass(frozen=True)
class Case:
    cls: type[optim.Optimizer]
    options: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.cls.__name__, *(f"{k}={v}" for k, v in self.options.items())])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return MATRICES if self.cls is optim.Muon else SHAPES

    def moments(
        self,
        at: tuple[int, ...] = (0, 1, 6),  # RAdam rectifies from its sixth step on
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        zeros: bool = True,
    ) -> Iterator[tuple[optim.Optimizer, Moment]]:
        """Real steps with random gradients; some coordinates are exactly 0, once or always."""
        rng = torch.Generator().manual_seed(0)

        def random(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64).to(device, dtype)

        # no requires_grad: then `differentiable=True` can step in place as well
        params = [random(shape) for shape in self.shapes]
        optimizer = self.cls(params, **copy.deepcopy(self.options))
        for step in range(max(at) + 1):
            for p in params:
                p.grad = random(tuple(p.shape))
                if zeros and p.dim() > 0:
                    p.grad.view(-1)[0] = 0
                    p.grad.view(-1)[1 + step % 2] = 0
            before = [
                (
                    p.grad.clone(),
                    p.clone(),
                    copy.deepcopy(optimizer.state.get(p, {})),
                    copy.deepcopy({k: v for k, v in group.items() if k != "params"}),
                )
                for group in optimizer.param_groups
                for p in group["params"]
            ]
            with torch.no_grad():
                optimizer.step()
            for (g, w, s, o), p in zip(before, params, strict=True) if step in at else ():
                yield optimizer, Moment(g, w, s, o, p.detach().clone())


def table(cls: type[optim.Optimizer], **choices: list[Any]) -> list[Case]:
    """One case for each combination of the choices."""
    combinations = itertools.product(*choices.values())
    return [Case(cls, dict(zip(choices, values, strict=True))) for values in combinations]


DECAY = [0.0, 0.1]
BOTH = [False, True]
_ADAM = {"weight_decay": DECAY, "amsgrad": BOTH, "maximize": BOTH}
_STYLES = {"weight_decay": [0.1], "decoupled_weight_decay": BOTH, "maximize": BOTH}

OPTIONS = [
    *table(optim.SGD, lr=[0.1], weight_decay=DECAY, maximize=BOTH),
    *table(
        optim.SGD,
        momentum=[0.9],
        dampening=[0.0, 0.3],
        weight_decay=DECAY,
        maximize=BOTH,
    ),
    *table(optim.SGD, momentum=[0.9], nesterov=[True], weight_decay=DECAY, maximize=BOTH),
    *table(optim.ASGD, lr=[0.1], lambd=[0.01], t0=[3], weight_decay=DECAY, maximize=BOTH),
    *table(optim.Adam, lr=[0.01], **_ADAM),
    *table(optim.Adam, lr=[0.01], betas=[(0.5, 0.6)], weight_decay=DECAY, amsgrad=BOTH),
    *table(optim.Adam, eps=[0.1], decoupled_weight_decay=[True], weight_decay=[0.1]),
    *table(optim.AdamW, lr=[0.01], **_ADAM),
    *table(optim.NAdam, lr=[0.01], **_STYLES),
    *table(optim.NAdam, momentum_decay=[0.1], eps=[0.01], betas=[(0.8, 0.9)]),
    *table(optim.RAdam, lr=[0.01], **_STYLES),
    *table(optim.RAdam, betas=[(0.8, 0.9)], eps=[0.01]),
    *table(optim.Adamax, lr=[0.01], weight_decay=DECAY, maximize=BOTH),
    *table(optim.Adamax, eps=[0.5], betas=[(0.5, 0.6)]),
    *table(
        optim.Adagrad,
        lr_decay=[0.0, 0.2],
        initial_accumulator_value=[0.0, 0.5],
        weight_decay=DECAY,
        maximize=BOTH,
    ),
    *table(optim.Adadelta, lr=[0.5], eps=[1e-6, 0.1], weight_decay=DECAY, maximize=BOTH),
    *table(
        optim.RMSprop,
        centered=BOTH,
        momentum=[0.0, 0.9],
        weight_decay=DECAY,
        maximize=BOTH,
    ),
    *table(optim.Adafactor, lr=[0.01, 2.0], weight_decay=DECAY, maximize=BOTH),
    *table(optim.Adafactor, eps=[(0.3, 3.0)], d=[1.0, 5.0], beta2_decay=[-0.4]),
]

MUON = [
    *table(
        optim.Muon,
        nesterov=BOTH,
        weight_decay=[0.0, 0.2],
        adjust_lr_fn=[None, "original", "match_rms_adamw"],
    ),
    *table(optim.Muon, momentum=[0.5], ns_steps=[3], ns_coefficients=[(2.0, -1.5, 0.5)]),
]

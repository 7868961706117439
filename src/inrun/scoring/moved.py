"""The parameters that a step moves: weights, gradient, optimizer state and options of each.

Training repeats the same step with other numbers: the same parameters, states and groups, at the
same addresses. So ``Moved`` is kept from step to step. ``again`` proves that by identities,
addresses and types, and puts in the new gradients; what was prepared for the parameters (packs, a
kernel's tables) then stays. Learning rates and other options are read anew in every step. Where
anything else differs (a parameter came or went, the state was loaded, the model moved) all is made
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from inrun.optimizers.base import LinearMap, Rule, widen
from inrun.optimizers.common import Options, State
from inrun.ranks.torch_compat import local_of
from inrun.ranks.world import ALONE, World
from inrun.scoring.estimators import MAPS
from inrun.validation.identity import same

HALF = (torch.float16, torch.bfloat16)
Found = TypeVar("Found")
_dtype, _shape, _device = map(attrgetter, ("dtype", "shape", "device"))


@dataclass(eq=False)  # not frozen: one is made for each parameter in each step
class ParamStep:
    """One parameter in a step: weights, the gradient the optimizer receives, state and options.

    Parameters of equal ``kind`` have the same formula with the same numbers, so that they can be
    computed concatenated. None: this one must be computed alone. Numbers of the state that are on
    a device are not compared, because reading them would wait for it: ``numbers_on_device``.
    """

    p: Tensor
    g: Tensor
    rule: Rule
    state: State
    options: Options
    kind: tuple[Any, ...] | None = None
    numbers_on_device: bool = False

    @staticmethod
    def of(p: Tensor, g: Tensor, rule: Rule, state: State, options: Options) -> ParamStep:
        """Half precision is computed in float32: a secant of rounded numbers would be noise."""
        if g.dtype in HALF:
            g = g.float()
        if p.dtype in HALF:
            _, state = widen(g, state, torch.float32)
        made = ParamStep(p, g, rule, state, options)
        if not rule.elementwise or p.ndim == 0:
            return made
        kind: list[Any] = [id(options), p.dtype, g.dtype, p.device]
        for k, x in state.items():
            if not isinstance(x, Tensor):
                if x is not None and not isinstance(x, (bool, int, float)):
                    return made
                kind.append((k, x))
            elif x.shape == p.shape:  # a number for each coordinate
                kind.append((k, x.dtype))
            elif x.numel() != 1:
                return made
            elif x.device.type == "cpu":
                kind.append((k, x.dtype, x.item()))
            else:
                made.numbers_on_device = True
                kind.append((k, x.dtype, x.device))
        made.kind = tuple(kind)
        return made

    def weights_at(self, x: float) -> Tensor:
        """The weights at a point of the path, 0 without the batch, 1 with it."""
        w = self.p.detach()
        args = (w, self.state, self.options)
        with_batch = self.rule.update(self.g, *args) if x else 0.0
        without = self.rule.update(torch.zeros_like(self.g), *args) if x != 1 else 0.0
        decayed = self.rule.decay(self.options) * (w.float() if w.dtype in HALF else w)
        return (decayed - ((1 - x) * without + x * with_batch)).to(w.dtype)

    def map(self, kind: str) -> LinearMap:
        """The linear map of this name (estimators.py), where it comes from the rule."""
        of_rule = MAPS[kind].of_rule
        if of_rule is None:
            raise ValueError(f"the map {kind!r} does not come from the optimizer's rule")
        return of_rule(self.rule, self.g, self.p.detach(), self.state, self.options)


class Moved:
    """All parameters that the optimizers are about to move."""

    def __init__(
        self, steps: Sequence[ParamStep], around: Sequence[tuple[Optimizer, Surroundings]] = ()
    ) -> None:
        self.steps = list(steps)
        self._around = around  # of each optimizer, in the order of the steps; none: for one step
        self._prepared: dict[Any, Any] = {}
        self._in_step: dict[Any, Any] = {}  # likewise, of one step

    @staticmethod
    def of(rules: Sequence[tuple[Optimizer, Rule]], world: World = ALONE) -> Moved:
        found = [
            [
                ParamStep.of(own, g, rule, _state(p, optimizer), group)
                for group in optimizer.param_groups
                for p in group["params"]
                if (g := _gradient(own := world.own(p), optimizer)) is not None
            ]
            for optimizer, rule in rules
        ]
        steps = list(chain.from_iterable(found))
        # Of half precision weights the state is a copy in float32, of this step alone; that of
        # shards is a dictionary of this step.
        if any(m.p.dtype in HALF for m in steps) or world.shards is not None:
            return Moved(steps)
        pairs = zip(rules, found, strict=True)
        return Moved(steps, [(o, Surroundings(o, own)) for (o, _), own in pairs])

    def again(self) -> bool:
        """Put in the gradients of the next step. False if more than numbers has changed."""
        self._in_step = {}
        found = [(o, x.gradients(o)) for o, x in self._around]
        if not found or any(grads is None for _, grads in found):
            return False
        steps = iter(self.steps)
        for optimizer, grads in found:
            scale = getattr(optimizer, "grad_scale", None)
            for g, m in zip(grads or (), steps, strict=False):
                own = g if scale is None else g / scale
                m.g = own.float() if own.dtype in HALF else own
        return True

    def once(self, what: Any, make: Callable[[], Found]) -> Found:
        """What ``make`` returns, kept as long as these parameters are."""
        if what not in self._prepared:
            self._prepared[what] = make()
        found: Found = self._prepared[what]
        return found

    def in_step(self, what: Any, make: Callable[[], Found]) -> Found:
        """What ``make`` returns, kept for this step."""
        if what not in self._in_step:
            self._in_step[what] = make()
        found: Found = self._in_step[what]
        return found

    @property
    def lasting(self) -> bool:
        """Can it serve for more than one step?"""
        return bool(self._around)

    @property
    def on_host(self) -> bool:
        return self.once("on host", lambda: all(m.p.is_cpu for m in self.steps))

    def places(self, params: Sequence[Tensor]) -> list[int]:
        """Where these parameters are among those that move."""
        known = self._prepared.get("places")
        if known is None or not same(known[0], params):
            own = {id(m.p): i for i, m in enumerate(self.steps)}
            known = self._prepared["places"] = params, [own[id(p)] for p in params]
        found: list[int] = known[1]
        return found

    def kinds(self) -> list[list[ParamStep]]:
        """Parameters that can be sampled together, empty ones left out (see ``ParamStep``)."""
        groups: dict[Any, list[ParamStep]] = {}
        for m in self.steps:
            if m.p.numel():
                kind = m.kind or (id(m.rule), m.p.dtype, m.g.dtype, m.p.device)
                groups.setdefault(kind, []).append(m)
        return list(groups.values())


def _gradient(p: Tensor, optimizer: Optimizer) -> Tensor | None:
    """The gradient that the optimizer uses."""
    g, scale = p.grad, getattr(optimizer, "grad_scale", None)  # by a GradScaler, if it is fused
    return g if g is None or scale is None else g / scale


def _state(p: Tensor, optimizer: Optimizer) -> State:
    """What the optimizer keeps for a parameter; of a sharded one, for this rank's shard."""
    state: State = optimizer.state.get(p, {})
    if local_of(p) is p:
        return state
    return {k: local_of(x) if isinstance(x, Tensor) else x for k, x in state.items()}


class Surroundings:
    """What the optimizer held for its parameters, by identity."""

    def __init__(self, optimizer: Optimizer, steps: Sequence[ParamStep]) -> None:
        self.params = [m.p for m in steps]
        self._groups = list(optimizer.param_groups)
        self._held, self._sizes = _held(optimizer)
        own = set(map(id, self.params))
        self._others = [p for p in self._held if id(p) not in own]
        self._states = [optimizer.state.get(p) for p in self.params]
        self._keys, self._values = self._entries()
        self._tensors = [x for x in self._values if isinstance(x, Tensor)]
        self._marks = self._read_marks([g for p in self.params if (g := p.grad) is not None])
        self._numbers = _numbers(steps)

    def gradients(self, optimizer: Optimizer) -> list[Tensor] | None:
        """The gradients, if all is the same but the numbers in gradients, weights, states and
        options; else None."""
        held, sizes = _held(optimizer)
        if sizes != self._sizes or not same(held, self._held):
            return None
        grads = [g for p in self.params if (g := p.grad) is not None]
        if len(grads) < len(self.params) or [p for p in self._others if p.grad is not None]:
            return None
        if not same(optimizer.param_groups, self._groups):
            return None
        if not same(list(map(optimizer.state.get, self.params)), self._states):
            return None
        keys, values = self._entries()
        if keys != self._keys or not same(values, self._values):
            return None
        unchanged = self._read_marks(grads) == self._marks and all(map(_all_equal, self._numbers))
        return grads if unchanged else None

    def _entries(self) -> tuple[list[Any], list[Any]]:
        """Names and values of all entries of the states."""
        states: list[dict[str, Any]] = [s for s in self._states if type(s) is dict]
        values = chain.from_iterable(map(dict.values, states))
        return list(chain.from_iterable(states)), list(values)

    def _read_marks(self, grads: Sequence[Tensor]) -> Any:
        """Addresses, types and shapes."""
        both = [*self.params, *self._tensors]
        return (
            list(map(Tensor.data_ptr, both)), list(map(_dtype, both)), list(map(_shape, both)),
            list(map(Tensor.is_contiguous, both)), list(map(_device, self.params)),
            list(map(_dtype, grads)),
        )  # fmt: skip


def _held(optimizer: Optimizer) -> tuple[list[Tensor], list[int]]:
    """All parameters of an optimizer, and how many each group has."""
    groups = [group["params"] for group in optimizer.param_groups]
    return list(chain.from_iterable(groups)), list(map(len, groups))


def _numbers(steps: Sequence[ParamStep]) -> list[list[Tensor]]:
    """Numbers of the states on the host that parameters of one kind have in common."""
    kinds: dict[Any, list[ParamStep]] = {}
    for m in steps:
        if m.kind is not None:
            kinds.setdefault(m.kind, []).append(m)
    return [
        [m.state[k] for m in members]
        for members in kinds.values()
        for k, x in members[0].state.items()
        if isinstance(x, Tensor) and x.shape != members[0].p.shape and x.device.type == "cpu"
    ]


def _all_equal(numbers: Sequence[Tensor]) -> bool:
    found = [x.item() for x in numbers]
    return found.count(found[0]) == len(found)

"""The curvature of all scored parameters of a run: what it observes in a step, and its maps.

At an observed step, before ``optimizer.step()``, for each weight with its bias:

1. scale: κ from the optimizer's mean squares (layer.py);
2. time: τ grows by the effective learning rate (``effective_rate``), for all steps since the last
   observation;
3. sample: the gradients of a few examples of the step go into the running means, each times the
   root of how many predictions its loss is the mean of (the tokens of a text): the Fisher matrix of
   a mean of n losses is n times the second moment of its gradient, if the n are independent.

Several ranks sample examples of their own and share the means: all have the curvature of the global
batch, and no gradient of a single example is sent.

Nothing here waits for a GPU, but for the first eigenbases. Those of large layers come in turns, so
that no step pays for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from inrun.capture.micro_batch import MicroBatch
from inrun.capture.signals import predictions
from inrun.curvature.layer import FIRST, Layer
from inrun.curvature.places import places
from inrun.curvature.samples import Shared, samples
from inrun.gradients.records import wide
from inrun.optimizers.common import Options, State, scalar, sign, step_count
from inrun.ranks.world import ALONE, World


@dataclass(frozen=True)
class Sampling:
    """What is observed: ``examples`` of a step, in each of the ``first`` steps. Then the steps in
    between become more, up to one in ``every``."""

    examples: int
    first: int
    every: int

    def gap(self, step: int) -> int:
        """The next observation after this step comes so many steps later."""
        return min(self.every, max(1, step // self.first))

    @staticmethod
    def of(numbers: int, kind: str) -> Sampling:
        """For a model of so many numbers on a device of this kind. In short runs of tiny models the
        curvature is the better the more is seen; of others a little is nearly as good, and an
        observed step costs more than any other: an example a tenth of a training step."""
        if kind == "cpu" and numbers <= TINY:
            return Sampling(16, 1, 1)
        return Sampling(4, 16, 16) if numbers <= SMALL else Sampling(2, 8, 16)


TINY = 2**20  # numbers of a model on a CPU that is observed in every step
SMALL = 2**25  # numbers of a model whose sampled gradients are cheap


@dataclass(frozen=True)
class Moving:
    """How a parameter moves in a step.

    Args:
        update: v ↦ Kv, the optimizer's secant.
        received: ḡ, what the optimizer receives.
        G: the gradient of the loss.
        state, options: the optimizer's.
        squares: the running mean of its squared gradient, where the optimizer has one.
    """

    update: Callable[[Tensor], Tensor]
    received: Tensor
    G: Tensor
    state: State
    options: Options
    squares: Tensor | None = None


@dataclass(eq=False)
class Curvature:
    """``layers`` by the name of the weight. ``step`` is that of the last observation."""

    layers: dict[str, Layer] = field(default_factory=dict)
    step: int = -1
    seen: int = 0
    _of: dict[str, Layer] = field(default_factory=dict, repr=False)  # by parameter

    def add(self, layer: Layer) -> None:
        self.layers[layer.place.name] = layer
        self._of |= dict.fromkeys(layer.place.names, layer)

    def due(self, step: int, params: Mapping[str, Tensor]) -> bool:
        """Is this step observed? Once, however many estimators ask."""
        return step - self.step >= _sampling(params).gap(self.step)

    def each_step(self, params: Mapping[str, Tensor]) -> bool:
        """Will every step be observed?"""
        return _sampling(params).every == 1

    def observe(
        self,
        step: int,
        micros: Sequence[MicroBatch],
        modules: Iterable[nn.Module],
        params: Mapping[str, Tensor],
        moving: Mapping[str, Moving],
        scale: float,
        world: World = ALONE,
    ) -> None:
        """Take in a step. Every rank calls it for the same steps.

        Args:
            modules: the model's.
            params: those that are scored.
            moving: how those move that have a gradient.
            scale: what turns recorded gradients into those of the loss (1/loss scale).
        """
        passed, self.step = step - self.step, step
        if not self._of.keys() >= params.keys():
            self._place(modules, params)
        sampled = {}
        for name, layer in self.layers.items():
            own = [moving.get(k) for k in layer.place.names]
            if own[0] is not None:
                squares = [None if m is None else m.squares for m in own]
                layer.scale(squares, wide(own[0].G))
                rate = effective_rate([m for m in own if m is not None], layer)
                layer.pass_time(rate * passed)
                sampled[name] = layer.place
        some = [m for m in micros if m.B]
        if not some and world.alone:
            return
        micro = some[self.seen % len(some)] if some else MicroBatch(0)
        n = min(micro.B, -(-_sampling(params).examples // world.size))
        first = self.seen * n % (micro.B - n + 1)
        self.seen += 1
        drawn, every = _counts(world, micro.B, sum(m.B for m in some))
        # the training loss is the mean over the examples of the step, g_i the part of one in it
        factor = scale * world.share * every
        if n and (rows := predictions(micro)) is not None:
            factor = factor * rows[first : first + n].sqrt()
        for name, sample in samples(micro, sampled, params, first, n, factor):
            joint = sample if world.alone else Shared(sample, world.total, micro.B / drawn)
            self.layers[name].see(joint)

    def _place(self, modules: Iterable[nn.Module], params: Mapping[str, Tensor]) -> None:
        """Make the layers that are missing. Large ones take turns with their eigenbases."""
        for name, place in places(modules, params).items():
            if self._of.keys().isdisjoint(place.names):
                layer = Layer(place, params[name].shape)
                if layer.large:
                    layer.renewal = FIRST + sum(x.large for x in self.layers.values())
                self.add(layer)

    def known(self, name: str) -> Layer | None:
        """The layer of a parameter, if something was seen of it."""
        layer = self._of.get(name)
        return layer if layer is not None and layer.seen and layer.tau is not None else None


def _counts(world: World, drawn: int, every: int) -> tuple[Any, Any]:
    """Of all ranks: examples of the micro-batches that are sampled from, and of the step."""
    if world.alone:
        return drawn, every
    both = torch.tensor([drawn, every], dtype=torch.float64, device="cpu")
    of_drawn, of_every = world.total(both).unbind()
    return of_drawn, of_every


def _sampling(params: Mapping[str, Tensor]) -> Sampling:
    kind = next(iter(params.values())).device.type
    return Sampling.of(sum(p.numel() for p in params.values()), kind)


def effective_rate(steps: Sequence[Moving], layer: Layer) -> Tensor:
    """η_eff of a weight and its bias: what a step does along the gradient, for one unit of it, in
    the scale of κ.

    ⟨K ḡ, G⟩ / ‖κ ⊙ G‖² with K the optimizer's secant: the mean of K/κ², weighted by the square of
    κ⊙G in each coordinate. Momentum hands a gradient on to later steps. All that is added here: K
    has (1 − β1)/(1 − β1^t) of it in Adam, all but the momentum in SGD.
    """
    G = [wide(m.G) for m in steps]
    size = layer.squared_size(G)
    along = sum(
        sign(m.options) * (m.update(m.received) * g).sum() for m, g in zip(steps, G, strict=True)
    )
    rate = along / torch.where(size > 0, size, 1.0)
    rate = torch.where(rate.isfinite(), rate, 0.0).clamp(min=0.0)
    options, state = steps[0].options, steps[0].state
    kept, corrected = scalar(options.get("momentum") or 0.0), 1.0
    if betas := options.get("betas"):
        kept = scalar(betas[0])
        if not state or "step" in state:  # empty before the first step
            corrected = 1.0 - kept ** step_count(state, options, G[0])
    return (rate * (corrected / (1.0 - kept))).to(G[0].dtype)

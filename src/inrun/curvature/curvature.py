"""The curvature of all scored parameters of a run: what it observes in a step, and its maps.

At an observed step, before ``optimizer.step()``:

1. time: τ of each layer grows by its effective learning rate (``effective_rate``), for all steps
   since the last observation;
2. sample: the gradients of a few examples of the step go into the running means (layer.py).

Nothing here waits for a GPU, but for the eigenbases, which are renewed ever more rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.curvature.layer import Layer
from inrun.curvature.samples import samples
from inrun.gradients.records import wide
from inrun.optimizers.common import Options, State, scalar, sign, step_count

SAMPLE = 4  # examples of an observed step
ON_GPU = 1  # the same where gradients are large and steps are many
FIRST = 32  # steps that are all observed; later one in so many:
EVERY = {"cpu": 4, "cuda": 8}
SMALL = 2**20  # numbers of a model on a CPU that is observed in every step


@dataclass(eq=False)
class Curvature:
    """By parameter. ``step`` is that of the last observation."""

    layers: dict[str, Layer] = field(default_factory=dict)
    step: int = -1
    seen: int = 0

    def due(self, step: int, params: Mapping[str, Tensor]) -> bool:
        """Is this step observed? Once, however many estimators ask."""
        kind = next(iter(params.values())).device.type
        small = kind == "cpu" and sum(p.numel() for p in params.values()) <= SMALL
        every = 1 if small or self.seen < FIRST else EVERY.get(kind, EVERY["cuda"])
        return step - self.step >= every

    def observe(
        self,
        step: int,
        micros: Sequence[MicroBatch],
        params: Mapping[str, Tensor],
        rates: Mapping[str, Tensor],
        scale: float,
    ) -> None:
        """Take in a step.

        Args:
            params: those that have a gradient.
            rates: the effective learning rate of each, for one step.
            scale: what turns recorded gradients into those of the loss (1/loss scale).
        """
        some = [m for m in micros if m.B]
        passed, self.step = step - self.step, step
        for name, rate in rates.items():
            self._layer(name, params[name]).pass_time(rate * passed)
        if not some:
            return
        micro = some[self.seen % len(some)]
        device = next(iter(params.values())).device
        n = min(micro.B, SAMPLE if device.type == "cpu" else ON_GPU)
        first = self.seen * n % (micro.B - n + 1)
        self.seen += 1
        # the training loss is the mean over the examples of the step, g_i the part of one in it
        factor = scale * sum(m.B for m in some)
        for name, sample in samples(micro, params, first, n, factor):
            self._layer(name, params[name]).see(sample)

    def _layer(self, name: str, param: Tensor) -> Layer:
        layer = self.layers.get(name)
        if layer is None or layer.shape != param.shape:
            layer = self.layers[name] = Layer(param.shape)
        return layer

    def known(self, name: str) -> Layer | None:
        """The layer of a parameter, if something was seen of it."""
        layer = self.layers.get(name)
        return layer if layer is not None and layer.seen and layer.tau is not None else None


def effective_rate(
    update: Callable[[Tensor], Tensor], received: Tensor, G: Tensor, state: State, options: Options
) -> Tensor:
    """η_eff of a parameter: what a step does along the gradient, for one unit of it.

    ⟨K ḡ, G⟩ / ‖G‖² with K the optimizer's secant: the mean of K, weighted by the gradient's square
    in each coordinate. Momentum hands a gradient on to later steps. All that is added here: K has
    (1 − β1)/(1 − β1^t) of it in Adam, all but the momentum in SGD.

    Args:
        update: v ↦ Kv.
        received: ḡ, what the optimizer receives.
        G: the gradient of the loss.
        state, options: the optimizer's.
    """
    G = wide(G)
    size = G.square().sum()
    rate = sign(options) * (update(received) * G).sum() / torch.where(size > 0, size, 1.0)
    rate = torch.where(rate.isfinite(), rate, 0.0).clamp(min=0.0)
    kept, corrected = scalar(options.get("momentum") or 0.0), 1.0
    if betas := options.get("betas"):
        kept = scalar(betas[0])
        if not state or "step" in state:  # empty before the first step
            corrected = 1.0 - kept ** step_count(state, options, G)
    return (rate * (corrected / (1.0 - kept))).to(G.dtype)

"""G, the gradient as the batches left it, and whether anything else happened to it.

What `optimizer.step()` finds in ``.grad`` must come from the batches of the step alone:

1. before a batch adds to it, it is empty, or what the step's earlier batches left there;
2. at the step it is what the last batch left there, or a recognised function of that (clipping.py).

Copies of the whole gradient decide that in the first steps, in audited ones and as long as anything
is done to it (clipping, unscaling). Otherwise torch's version counters tell, and, since a
GradScaler and whatever writes to ``.data`` leave them alone, a sample of every parameter's
gradient, compared on the device so that nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inrun.scoring import sample
from inrun.torch_compat import foreach_copy_, version_of

FIRST = 3  # steps in a row without any change before copies are no longer kept

CHANGED = "the gradient was changed between backward() and step() for the first time"
BEFORE = "there were gradients from outside run.batch(ids) before one of the step's batches"


@dataclass
class Received:
    """What is known of the gradient at a step."""

    G: dict[str, Tensor]  # as the batches left it
    changed: bool = False  # .grad is something else now
    flags: dict[str, Tensor] = field(default_factory=dict)  # void if one is up, by the reason


class Accumulated:
    """Follows ``.grad`` from batch to batch and to the step."""

    def __init__(self) -> None:
        self.whole = True  # copies are kept
        self._quiet = 0  # steps in a row in which nothing happened
        self._held: dict[str, tuple[Tensor, int]] = {}
        self._copies: dict[str, Tensor] = {}
        self._memory: dict[str, Tensor] = {}  # of the copies, used again
        self._sample: list[Tensor] = []
        self._views = sample.Views()
        self._before: Tensor | None = None

    def forget(self) -> None:
        """The step is over, or was skipped."""
        self._held, self._copies, self._sample, self._before = {}, {}, [], None
        self._views.forget()

    def close(self) -> None:
        self.forget()
        self._memory = {}

    # Around a batch

    def thrown_away(self, params: Mapping[str, Tensor]) -> bool:
        """Was what the last batch left there cleared, with no step in between?

        A gradient that is exactly zero is no sign of it: ``zero_grad`` removes the tensor or
        raises its version counter.
        """
        now = {k: params[k].grad if k in params else None for k in self._held}
        some = {k: g for k, g in now.items() if g is not None}
        if not some:
            return bool(now)
        if self._touched(some):
            return not any(bool(g.any()) for g in some.values())
        on_host = all(g.device.type == "cpu" for g in some.values())
        if not on_host or any(bool(g.any()) for g in some.values()):  # a device: ``_before`` tells
            return False
        return any(bool(x.any()) for x in (*self._copies.values(), *self._sample))

    def begin(self, params: Mapping[str, Tensor], first: bool) -> None:
        """Before a batch adds anything: whatever is in .grad must be the step's own."""
        grads = _gradients(params)
        if first:
            left = [g for g in grads.values() if not _empty(g)]
            found = left if self.whole else self._views.gather(left)
            flags = [x.any() for x in found]
            if flags:
                self._raise_before(torch.stack([f.to(flags[0].device) for f in flags]).any())
        elif self._held:
            if self._copies:
                own = {k: g for k, g in grads.items() if k in self._copies}
                flag = sample.differ(list(own.values()), [self._copies[k] for k in own])
                self._raise_before(flag)
            elif self._touched(grads):
                self._raise_before(torch.ones((), dtype=torch.bool))
            else:
                self._raise_before(
                    sample.differ(self._views.gather(list(grads.values())), self._sample)
                )

    def _raise_before(self, flag: Tensor) -> None:
        if self._before is not None:
            flag = flag.to(self._before.device) | self._before
        self._before = flag

    def note(self, params: Mapping[str, Tensor], scored: bool = True, audit: bool = False) -> None:
        """After a batch."""
        grads = _gradients(params)
        self._held = {k: (g, version_of(g)) for k, g in grads.items()}
        self._copies, self._sample = {}, []
        if scored and (self.whole or audit):
            self._copies = self._copied(grads)
        elif scored:
            self._memory = {}
            self._sample = self._views.gather(list(grads.values()))

    def _copied(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the same memory as in the last step."""
        for k, g in grads.items():
            kept = self._memory.get(k)
            if kept is None or (kept.shape, kept.dtype, kept.device) != (
                g.shape,
                g.dtype,
                g.device,
            ):
                self._memory[k] = torch.empty_like(g)
        copies = {k: self._memory[k] for k in grads}
        if copies:
            foreach_copy_(list(copies.values()), list(grads.values()))
        return copies

    def _touched(self, grads: Mapping[str, Tensor]) -> bool:
        """Was a gradient replaced or written to since it was noted, as far as torch counts?"""
        return any(
            k not in self._held or self._held[k][0] is not g or self._held[k][1] != version_of(g)
            for k, g in grads.items()
        )

    # At the step

    def compare(self, grads: Mapping[str, Tensor]) -> Received:
        """What arrives at the step against what was noted. With copies this waits for the device,
        as it does for everything where something is done to the gradient."""
        found = Received(dict(grads))
        if self._before is not None:
            found.flags[BEFORE] = self._before
        touched = self._touched(grads) or len(grads) != len(self._held)
        if self._copies or not self._held:
            own = {k: self._copies[k] if k in self._copies else torch.zeros_like(g)
                   for k, g in grads.items()}  # fmt: skip
            found.changed = bool(sample.differ(list(grads.values()), list(own.values())))
            found.G = own if found.changed else found.G
        elif touched:
            found.flags[CHANGED] = torch.ones((), dtype=torch.bool)
        else:
            now = self._views.gather(list(grads.values()))
            found.flags[CHANGED] = sample.differ(now, self._sample)
        self._quiet = 0 if touched or found.changed else self._quiet + 1
        self.whole = self._quiet < FIRST
        return found

    def suspect(self) -> None:
        """Something was done to the gradient: keep copies from now on."""
        self.whole, self._quiet = True, 0


def _gradients(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: g for k, p in params.items() if (g := p.grad) is not None}


def _empty(g: Tensor) -> bool:
    return g.numel() == 0

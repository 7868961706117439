"""G, the gradient as the batches left it, and whether anything else happened to it.

What `optimizer.step()` finds in ``.grad`` must come from the batches of the step alone:

1. before a batch adds to it, it is empty, or what the step's earlier batches left there;
2. at the step it is what the last batch left there, or a recognised function of that (clipping.py).

Copies of the whole gradient decide that in the first steps, in audited ones and as long as anything
is done to it (clipping, unscaling). Otherwise torch's version counters tell, and, since a
GradScaler and whatever writes to ``.data`` leave them alone, a sample of every parameter's
gradient (samples.py), compared on the device so that nothing waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_

import torch
from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.ranks.world import ALONE, World
from inrun.scoring.samples import Sample, by_kind
from inrun.torch_compat import flatten_dense_tensors, foreach_copy_, foreach_norm, version_of

FIRST = 3  # steps in a row without any change before copies are no longer kept

_SMALL = 2**12  # numbers

CHANGED = "the gradient was changed between backward() and step() for the first time"
BEFORE = "there were gradients from outside run.batch(ids) before one of the step's batches"


@dataclass
class Received:
    """The gradient that ``optimizer.step()`` receives, compared with what the batches left."""

    G: dict[str, Tensor]  # as the batches left it
    changed: bool = False  # .grad is something else now
    flags: dict[str, Tensor] = field(default_factory=dict)  # reason → True voids the step


class Accumulated:
    """Follows ``.grad`` from batch to batch and to the step. Of shards copies are always kept, so
    that all ranks look alike."""

    def __init__(self, world: World = ALONE) -> None:
        self._world, self.keeps_copies = world, True
        self._quiet = 0  # steps in a row in which nothing happened
        self._held: dict[str, Tensor] = {}  # gradients as they were noted
        self._versions: list[int] = []  # of these
        self._copies: dict[str, Tensor] = {}
        self._memory: dict[str, Tensor] = {}  # of the copies, used again
        self._samples: list[Sample] = []  # of the gradients,
        self._sample: list[Tensor] = []  # and what they were
        self._before: Tensor | None = None

    def forget(self) -> None:
        """Drop what was noted: the step is over, or was skipped."""
        self._held, self._versions = {}, []
        self._copies, self._samples, self._sample, self._before = {}, [], [], None

    def close(self) -> None:
        self.forget()
        self._memory = {}

    # Around a batch

    def thrown_away(self, params: Mapping[str, Tensor]) -> bool:
        """Were the gradients of the last batch cleared without an optimizer step?

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
        """Before a batch adds anything: flag gradients that are not from this step's batches."""
        grads = _gradients(params)
        if first:
            left = [g for g in grads.values() if g.numel()]
            found = left if self.keeps_copies else [x.read() for x in by_kind(left)]
            if found:
                self._raise_before(_any([x.any() for x in found]))
        elif self._held:
            if self._copies:
                own = {k: g for k, g in grads.items() if k in self._copies}
                flag = differ(list(own.values()), [self._copies[k] for k in own])
                self._raise_before(flag)
            elif self._touched(grads):
                self._raise_before(torch.ones((), dtype=torch.bool))
            else:
                self._raise_before(differ(self._read(grads), self._sample))

    def _raise_before(self, flag: Tensor) -> None:
        if self._before is not None:
            flag = flag.to(self._before.device) | self._before
        self._before = flag

    def note(self, params: Mapping[str, Tensor], scored: bool = True, audit: bool = False) -> None:
        """After a batch: keep a copy or a sample of .grad to compare with later."""
        grads = _gradients(params)
        self._held, self._versions = grads, list(map(version_of, grads.values()))
        self._copies, self._samples, self._sample = {}, [], []
        if scored and (self.keeps_copies or audit):
            self._copies = self._copied(grads)
        elif scored:
            self._memory = {}
            self._samples = by_kind(list(grads.values()))
            self._sample = [x.read() for x in self._samples]

    def _copied(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the gradients, in the memory of the last step's copies."""
        for k, g in grads.items():
            kept, kind = self._memory.get(k), (g.shape, g.dtype, g.device)
            if kept is None or (kept.shape, kept.dtype, kept.device) != kind:
                self._memory[k] = torch.empty_like(g)
        copies = {k: self._memory[k] for k in grads}
        if copies:
            foreach_copy_(list(copies.values()), list(grads.values()))
        return copies

    def _touched(self, grads: Mapping[str, Tensor]) -> bool:
        """Was a gradient replaced or written to since it was noted, as far as torch counts?"""
        held, versions = self._held, self._versions
        if list(grads) != list(held):  # only some of them
            if any(k not in held for k in grads):
                return True
            versions = [v for k, v in zip(held, versions, strict=True) if k in grads]
            held = {k: g for k, g in held.items() if k in grads}
            grads = {k: grads[k] for k in held}
        same = all(map(is_, grads.values(), held.values()))
        return not same or list(map(version_of, grads.values())) != versions

    def _read(self, grads: Mapping[str, Tensor]) -> list[Tensor]:
        """The sample of gradients that ``_touched`` found to be those that were noted."""
        every = len(grads) == len(self._held)
        return [x.read() for x in (self._samples if every else by_kind(list(grads.values())))]

    # At the step

    def compare(
        self, grads: Mapping[str, Tensor],
        sampled: Callable[[Sequence[Tensor]], Tensor | None] | None = None,
    ) -> Received:  # fmt: skip
        """Compare .grad at the step with what the last batch left. With copies this synchronises
        with the device. ``sampled`` gives sampled entries of gradients, if they are at hand."""
        found = Received(dict(grads))
        if self._before is not None:
            found.flags[BEFORE] = self._before
        touched = self._touched(grads) or len(grads) != len(self._held)
        if self._copies or not self._held:
            own = {k: self._copies[k] if k in self._copies else torch.zeros_like(g)
                   for k, g in grads.items()}  # fmt: skip
            changed = bool(differ(list(grads.values()), list(own.values())))
            found.changed = self._world.any_shard(changed)
            found.G = own if found.changed else found.G
        elif touched:
            found.flags[CHANGED] = torch.ones((), dtype=torch.bool)
        else:
            known = None
            if sampled is not None and len(self._samples) == 1:
                known = sampled(list(grads.values()))
            now = self._read(grads) if known is None else [known]
            found.flags[CHANGED] = differ(now, self._sample)
        self._quiet = 0 if touched or found.changed else self._quiet + 1
        self.keeps_copies = self._quiet < FIRST or self._world.shards is not None
        return found

    def suspect(self) -> None:
        """Something was done to the gradient: keep copies from now on."""
        self.keeps_copies, self._quiet = True, 0


def doubts(micros: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """By reason, a flag on the device: is it up, the owners of an operation's operands differ."""
    found: dict[str, list[Tensor]] = {}
    for name, flag in (doubt for m in micros for doubt in m.doubts):
        found.setdefault(f"rows of different examples meet in '{name}'", []).append(flag)
    return {reason: torch.stack(flags).any() for reason, flags in found.items()}


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Whether all entries are finite, as a tensor. One kernel on a GPU. On a CPU a finite sum is
    the fastest proof; a sum that is not finite may have overflowed, so then look at entries."""
    tensors = [t for t in tensors if t.numel()] or tensors[:1]
    if tensors[0].is_cuda and tensors[0].numel():
        return torch.stack(foreach_norm(tensors, math.inf)).isfinite().all()
    found = all(math.isfinite(t.sum()) or bool(t.isfinite().all()) for t in _joined(tensors))
    return torch.tensor(found, device=tensors[0].device)


def _joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The small ones of each type as one tensor, and the large ones: a call costs more than a
    few numbers."""
    found, small = list[Tensor](), dict[object, list[Tensor]]()
    for t in tensors:
        if t.numel() > _SMALL:
            found.append(t)
        else:
            small.setdefault((t.dtype, t.device), []).append(t)
    return found + [flatten_dense_tensors(some) for some in small.values()]


def tolerance_of(G: Iterable[Tensor], micros: Sequence[MicroBatch], coarse: bool = False) -> float:
    """How far values may be from adding up to what G says, relative to their size. ``coarse``: G
    was averaged over ranks in half precision."""
    dtypes = {g.dtype for g in G}
    half = any(m.autocast is not None and m.autocast[1] for m in micros)
    if half or coarse or dtypes & {torch.float16, torch.bfloat16}:
        return 0.05
    return 1e-3 if torch.float32 in dtypes else 1e-7


def differ(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Whether any entry differs between the lists, as a tensor on the first one's device."""
    if [(x.shape, x.dtype, x.device) for x in a] != [(x.shape, x.dtype, x.device) for x in b]:
        return torch.ones((), dtype=torch.bool)
    if not a:
        return torch.zeros((), dtype=torch.bool)
    return _any([(x != y).any() for x, y in zip(a, b, strict=True)])


def _any(flags: Sequence[Tensor]) -> Tensor:
    """Whether one of these flags is up, as a tensor on the first one's device."""
    if len(flags) == 1:
        return flags[0]
    return torch.stack([f.to(flags[0].device) for f in flags]).any()


def _gradients(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: g for k, p in params.items() if (g := p.grad) is not None}

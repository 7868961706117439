"""Watches the forward and backward pass of a batch and keeps per-example gradients as records.

What happens where:

    intercept.py    sees every call of a torch function
    mode.py         the mode that hands calls over, of registered autograd functions too
    inputs.py       finds the batch among the model's inputs
    outputs.py      derives what an operation's outputs are made of
    provenance.py   knows what each tensor is made of
    tensor_map.py   dictionaries with tensors as keys
    memo.py         caches the analysis of a call
    aside.py        takes the mode off where the rest of a forward pass is known
    plan.py         what is known of it
    graph.py        the autograd graph behind it, compared with that of each pass
    reading.py      takes what was remembered from the autograd graph of a known pass
    signals.py      loss, EL2N and margin of each example, from calls of classification losses
    later.py        the same of small classifiers, for many steps together
    site.py         analyses an operation in which parameters meet examples and builds its tap
    tap.py          the autograd functions that hand δ over in the backward pass
    micro_batch.py  keeps the records
    compiled/       puts the same taps into graphs of torch.compile
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from inrun.capture.compiled.backend import Backend
from inrun.capture.inputs import Inputs
from inrun.capture.intercept import Interceptor
from inrun.capture.later import Together
from inrun.capture.memo import Memo
from inrun.capture.micro_batch import Choice, Keeper, MicroBatch
from inrun.capture.mode import seen_functions
from inrun.capture.outputs import Outputs
from inrun.capture.provenance import Provenance
from inrun.capture.signals import read_node, watch_loss
from inrun.capture.site import Taps
from inrun.errors import BatchError, CaptureError, mixed_positions, nothing_recorded
from inrun.gradients import Form
from inrun.gradients.blocks import Blocks
from inrun.ranks.shards import Shards
from inrun.tensors.layout import tensors_in


class Replays(Protocol):
    """Stands in for passes of the model (replay/)."""

    def batch(self, micro: MicroBatch) -> AbstractContextManager[None]: ...

    def collect(self, micro: MicroBatch) -> None: ...


class Capture:
    """Records what happens inside ``batch``.

    Where a node meets a batched tensor, the output is tapped. The model's own operations and their
    backward kernels run unchanged (``training="bitwise"``), or, where per-example gradients of a
    weight are formed anyway, its gradient is their sum (``training="fast"``).

    Args:
        model: the user's model.
        params: the parameters to score, by name.
        batch_dim: the dimension of the examples in the model's inputs.
        form: force the ghost or the materialised form where an operation has both.
        fast: form weight gradients as sums of per-example gradients.
        directions: how many the records will be contracted with.
        probe: keep records only; no parameter receives a gradient.
        offload: keep records in host memory.
        check_memory: called with the bytes of every record that is kept.
        on_first_gradient: called in each batch before anything is added to .grad.
        shards: what FSDP made of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        *,
        batch_dim: int = 0,
        form: Form = "auto",
        fast: bool = False,
        directions: int = 1,
        probe: bool = False,
        offload: bool = False,
        check_memory: Callable[[int], None] = lambda new: None,
        on_first_gradient: Callable[[], None] = lambda: None,
        shards: Shards | None = None,
    ) -> None:
        self.model, self.shards = model, shards
        self.on_empty: Callable[[BatchError, bool], None] = _refuse  # a batch without a gradient
        self.trigger = torch.zeros((), requires_grad=True)  # puts taps into the graph
        self.blocks = Blocks()
        self.keeper = Keeper(directions, offload, check_memory, on_first_gradient)
        self.provenance = Provenance(list(model.modules()), params, batch_dim, shards)
        self.inputs, self.outputs = Inputs(self.provenance), Outputs(self.provenance)
        self.memo = Memo(self.provenance)
        self.taps = Taps(form, fast, directions, probe, self.blocks, self.trigger)
        self.interceptor = Interceptor(self.inputs, self.outputs, self.taps, self.keeper, self.memo)
        self.aside = self.inputs.aside = self.interceptor.aside
        if shards is not None:  # FSDP puts other parameters into modules during a pass
            self.aside.compiled()
        self.backend = Backend(self)
        self.params = params
        self.together = Together()
        self.replays: Replays | None = None

    def alike(self, params: Mapping[str, Tensor]) -> Capture:
        """A capture of other parameters of the model under the same names, with a mode that always
        looks."""
        taps, keeper = self.taps, self.keeper
        own = Capture(
            self.model, params, batch_dim=self.provenance.batch_dim, form=taps.form, fast=taps.fast,
            directions=taps.directions, offload=keeper.offload,
        )  # fmt: skip
        own.aside.compiled()
        return own

    @property
    def live(self) -> MicroBatch | None:
        """The micro-batch that is open."""
        return self.interceptor.micro

    @contextmanager
    def batch(
        self, B: int, owner: Tensor | None = None, tokens: bool = False
    ) -> Iterator[MicroBatch]:
        """Record the operations run inside, for B examples.

        ``owner`` has the leading dimensions of the model's inputs and says which example each
        entry of these belongs to; negative: to none. Without it, example k is row k. ``tokens``:
        keep a row for each position, an entry of these dimensions (``MicroBatch.slots``).
        """
        owner = None if owner is None else owner.long()
        if self.provenance.forget_maps():
            self._forget()
        choice = Choice(self.taps.form, self.taps.fast, self.taps.directions)
        micro = MicroBatch(B, choice=choice)
        on_positions = partial(self._by_position, micro, owner is None) if tokens else None
        self.provenance.new_batch(B, owner, on_positions)
        micro.owner = None if tokens else self.provenance.owner
        self.interceptor.open(micro)
        self.outputs.doubts = micro.doubts
        self.aside.new_batch(micro)
        read = partial(watch_loss, micro, self.provenance.find, self.aside.loss, self.together)
        self.interceptor.mode.on_loss = read
        self.aside.on_loss = partial(read_node, micro, self.together)
        try:
            with (
                self.blocks.undone_if_it_fails(),
                self.backend.stance(),
                seen_functions(),
                self._beside_shards(),
                self._replayed(micro),
                self.inputs.batch(),
                self.interceptor.mode,
            ):
                try:
                    yield micro
                finally:
                    self.aside.close()
            self._complete(micro)
        except CaptureError as error:
            if tokens:
                raise mixed_positions(error) from error
            raise
        finally:
            self.aside.forget()
            self.interceptor.open(None)
            self.provenance.new_batch(0)

    def _complete(self, micro: MicroBatch) -> None:
        """The passes are over: add what was only followed or replayed; was anything recorded?"""
        micro.void = self.aside.reason
        self.aside.collect()
        if self.replays is not None:
            self.replays.collect(micro)
        if not micro.fired and micro.void is None:
            shapes = [] if micro.met else self.provenance.shapes
            dim, slots = self.provenance.batch_dim, self.provenance.slots
            self.on_empty(nothing_recorded(micro.B, dim, slots, shapes), micro.backward)

    def _replayed(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """Recorded passes may stand in for the model's, where its rows are the examples."""
        usual = self.replays is not None and self.provenance.slots is None
        usual = usual and self.provenance.on_positions is None
        return self.replays.batch(micro) if usual and self.replays is not None else nullcontext()

    def _beside_shards(self) -> AbstractContextManager[None]:
        """How FSDP gathers parameters is not looked at; inputs that it passes on keep origins."""
        if self.shards is None:
            return nullcontext()

        def passed_on(before: Any, after: Any) -> None:
            pairs = zip(tensors_in(before), tensors_in(after), strict=True)
            for t, out in ((t, out) for t, out in pairs if t is not out):
                self.provenance.note(out, self.provenance.find(t))

        return self.shards.watched(passed_on)

    def _by_position(self, micro: MicroBatch, equal: bool, inputs: Tensor | None) -> None:
        """The positions of tokens=True are known; ``equal``: each example has as many."""
        micro.slots = self.provenance.owner
        micro.inputs = None if inputs is None else inputs.detach().clone()
        if equal and micro.slots is not None:
            micro.order = micro.slots.argsort(stable=True).view(micro.B, -1)

    def watch(self, params: Mapping[str, Tensor]) -> None:
        """The parameters to score, from the next batch on."""
        self.provenance.watch(params)
        self.params = params
        self._forget()

    def close(self) -> None:
        """Let go of the model and of memory."""
        self.backend.close()
        self._forget()
        self.blocks.free()

    def _forget(self) -> None:
        self.memo.clear()
        self.aside.clear()

    # For compiled graphs (compiled/)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which calls are run and not looked at."""
        mode = self.interceptor.mode
        before, mode.paused = mode.paused, True
        try:
            yield
        finally:
            mode.paused = before

    @property
    def is_paused(self) -> bool:
        return self.interceptor.mode.paused

    def planner(self, note: Callable[..., Tensor]) -> Interceptor:
        """An interceptor for a compiled graph: calls ``note`` in the place of taps.

        A compiled graph rounds differently with taps in it than without, whatever they do, so there
        is nothing to keep bit for bit and weight gradients are always sums.
        """
        taps = replace(self.taps, fast=True, blocks=None, apply=note, eager=False)
        planner = Interceptor(self.inputs, self.outputs, taps, self.keeper, memo=None)
        planner.open(self.live)
        return planner


def _refuse(error: BatchError, backward: bool) -> None:
    raise error

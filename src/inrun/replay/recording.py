"""One forward and backward pass of the model, recorded.

A recording repeats the kernels of a pass on the same memory: inputs are copied to where it reads
them, outputs and gradients from where it writes them, and what the capture has kept of the pass
(records, inputs and δ of operations) is always in the same place. It is made with a capture of its
own, which looks at this pass as at any other, and with twins of the parameters on the same memory.
Nothing of the training changes meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from inrun import kernels
from inrun.capture.capture import Capture
from inrun.capture.micro_batch import MicroBatch
from inrun.capture.provenance import Origin
from inrun.replay.around import host_state, put_back, settings
from inrun.replay.recorder import Recorder
from inrun.replay.trees import CannotRecordError, order_of, swapped, tensors_of
from inrun.tensors.autocast import uncached
from inrun.torch_compat import DisableTorchFunction, foreach_copy_, version_of
from inrun.validation.cuda_graph import twins

Backward = Callable[[], AbstractContextManager[Any]]
OTHERWISE = (
    "backward() through a recorded pass of the model otherwise than in the batches before: a "
    "second time, after a later pass, or from other outputs. Use watch(..., cuda_graphs=False)"
)


class Recording:
    """The recorded pass.

    Args:
        args, kwargs: of the model's call.
        like: the capture that looks at the training, paused.
        recorder: records.
        tensors: all that the pass may write to, parameters among them.
        arriving: which of the model's outputs receive a gradient.
        backward: context in which the training's backward passes run.
    """

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, like: Capture, recorder: Recorder,
        tensors: Sequence[Tensor], arriving: frozenset[int], backward: Backward,
    ) -> None:  # fmt: skip
        self.model, self.in_backward = model, backward
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.state = [t for t in tensors if not isinstance(t, nn.Parameter)]  # it may write to
        self.settings, self.uses = settings(), 0
        given = tensors_of((args, kwargs))
        self._order, self._inputs = order_of((args, kwargs)), [t.clone() for t in given]
        self._last: weakref.ref[Replay] | None = None  # its memory may still be in use
        args, kwargs = swapped((args, kwargs), given, self._inputs)
        examples = like.provenance.B

        def forward() -> Any:
            return model(*args, **kwargs)

        with twins(like.provenance.modules, self.params) as twin, uncached():
            of = dict(zip(map(id, self.params), twin, strict=True))
            capture = like.alike({k: of[id(p)] for k, p in like.params.items()})
            with put_back(tensors):
                fixed = [*self._inputs, *(t for t in tensors if isinstance(t, nn.Parameter))]
                _try(forward, twin, fixed, arriving, capture, examples, recorder, backward)
            with put_back(tensors), capture.batch(examples) as self.micro:
                self._record(forward, twin, capture, arriving, recorder)
            capture.close()
        nodes = map(like.provenance.nodes.get, map(id, self.params))
        self.micro.put_nodes(dict(zip(map(id, twin), nodes, strict=True)))

    def _record(
        self, forward: Callable[[], Any], twin: Sequence[Tensor], capture: Capture,
        arriving: frozenset[int], recorder: Recorder,
    ) -> None:  # fmt: skip
        out, self._forward = recorder.record(forward)
        outs = tensors_of(out)
        self.origins: list[Origin] = []
        for t in outs:
            origin = capture.provenance.known(t)
            if origin is None:
                raise CannotRecordError("it returns a tensor that none of its calls has made")
            self.origins.append(origin)
        self._at = [i for i, t in enumerate(outs) if t.requires_grad]
        self._wanted = [i in arriving for i in self._at]
        self.wanted = [i for i in self._at if i in arriving]
        some = [outs[i] for i in self.wanted]
        self.arriving = [torch.zeros_like(t) for t in some]  # their gradients
        with self.in_backward():
            self._grads, self._backward = recorder.record(
                lambda: gradients_of(some, twin, self.arriving)
            )
        self._outs = [t.detach() for t in outs]
        self._out = swapped(out, outs, self._outs)

    @property
    def free(self) -> bool:
        """Is the memory free? Not while the backward pass of the last replay may still come."""
        last = None if self._last is None else self._last()
        return last is None or last.done

    def fits(self, args: Any, kwargs: Any) -> bool:
        """Can these be copied to where the pass reads them?"""
        given = tensors_of((args, kwargs))
        return (
            order_of((args, kwargs)) == self._order
            and self.settings == settings()
            and not any(t.requires_grad for t in given)
            and all(
                t.shape == mine.shape and t.dtype == mine.dtype and t.device == mine.device
                for t, mine in zip(given, self._inputs, strict=True)
            )
        )

    def run(self, args: Any, kwargs: Any, begun: Callable[[], None]) -> Replayed:
        """Replay the forward pass; ``begun`` is called when the backward pass begins."""
        outs = self.forward(args, kwargs)
        replay = Replay(self, begun)
        self._last = weakref.ref(replay)
        own = _Replayed.apply(replay, [outs[i] for i in self._at], *self.params)
        for i, t in zip(self._at, own, strict=True):
            outs[i] = t
        return swapped(self._out, self._outs, outs), outs, replay

    def hand_over(self, micro: MicroBatch) -> None:
        """Give a batch what the capture has kept of the pass."""
        micro.take(self.micro)

    def forward(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that the model returns, without their graph."""
        for mine, t in zip(self._inputs, tensors_of((args, kwargs)), strict=True):
            mine.data.copy_(t, non_blocking=True)  # .data: its version stays
        self._forward()
        return [t.clone() for t in self._outs]

    def backward(self, given: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of all parameters, from those of the outputs that have one."""
        for mine, g in zip(self.arriving, given, strict=True):
            mine.data.copy_(g)  # perhaps the δ of a remembered operation
        self._backward()
        found: list[Tensor | None] = [None] * len(self._grads)
        kinds: dict[torch.dtype, list[int]] = {}
        for i, own in enumerate(self._grads):
            if own is not None:
                kinds.setdefault(own.dtype, []).append(i)
        for dtype, places in kinds.items():
            there = [own for i in places if (own := self._grads[i]) is not None]
            copies = kernels.alike(there, dtype)
            foreach_copy_(copies, there)
            for i, copied in zip(places, copies, strict=True):
                found[i] = copied
        return found

    def answered(self, replay: Replay, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The same for the backward pass of a replay, which comes once."""
        last = None if self._last is None else self._last()
        if last is not replay or replay.done or [g is not None for g in given] != self._wanted:
            raise RuntimeError(OTHERWISE)
        replay.done = True
        return self.backward([g for g in given if g is not None])


class Replay:
    """One replay of a recording."""

    def __init__(self, recording: Recording, begun: Callable[[], None]) -> None:
        self.recording, self.begun, self.done = recording, begun, False


Replayed = tuple[Any, list[Tensor], Replay]  # what the model returns, the tensors in it


class _Replayed(torch.autograd.Function):
    """The model's pass as one node of the training's autograd graph."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, outs: list[Tensor], *params: Tensor) -> Any:
        ctx.replay = replay
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        with DisableTorchFunction():
            found = ctx.replay.recording.answered(ctx.replay, given)
            ctx.replay.begun()
            return None, None, *found


class _Looked(torch.autograd.Function):
    """Outputs of the model's own pass; notes which of them receive a gradient."""

    @staticmethod
    def forward(ctx: Any, arrived: set[int], at: Sequence[int], *outs: Tensor) -> Any:
        ctx.arrived, ctx.at = arrived, at
        ctx.set_materialize_grads(False)
        return tuple([t.clone() for t in outs])

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        ctx.arrived.update(i for i, g in zip(ctx.at, given, strict=True) if g is not None)
        return None, None, *given


def look_at(arrived: set[int], at: Sequence[int], outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs with these numbers, copied; ``arrived`` gets the numbers of those that receive a
    gradient from what is made of the copies."""
    return tuple(_Looked.apply(arrived, at, *outs)) if outs else ()


def _try(
    forward: Callable[[], Any], twin: Sequence[Tensor], fixed: Sequence[Tensor],
    arriving: frozenset[int], capture: Capture, examples: int, recorder: Recorder,
    backward: Backward,
) -> None:  # fmt: skip
    """Run the pass as it will be recorded, to see whether it can be."""
    before = host_state(recorder.device)
    fixed = [*fixed, *twin]
    versions = list(map(version_of, fixed))
    with capture.batch(examples), recorder.tried():
        every = tensors_of(forward())
        outs = [t for i, t in enumerate(every) if i in arriving and t.requires_grad]
        if not outs or len(outs) != len(arriving):
            raise CannotRecordError("a part of its graph is none that the loss depends on")
        others = _leaves(outs).difference(map(id, twin))
        with backward():
            gradients_of(outs, twin, [torch.zeros_like(t) for t in outs])
    if host_state(recorder.device) != before:
        raise CannotRecordError("its forward pass draws random numbers on the host")
    if others:
        raise CannotRecordError("it uses tensors with gradients that are not its parameters")
    if list(map(version_of, fixed)) != versions:
        raise CannotRecordError("its forward pass writes to its inputs or parameters")


def gradients_of(
    outs: Sequence[Tensor], params: Sequence[Tensor], given: Sequence[Tensor]
) -> list[Tensor | None]:
    with DisableTorchFunction():
        return list(torch.autograd.grad(outs, params, given, allow_unused=True))


def _leaves(outs: Sequence[Tensor]) -> set[int]:
    """Ids of the tensors to which a backward pass adds gradients."""
    found, todo = set[int](), [t.grad_fn for t in outs if t.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                todo.append(behind)
    return found

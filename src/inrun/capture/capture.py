"""Watches the operations of a forward pass in which parameters meet examples.

A ``TorchFunctionMode`` (mode.py) sees every call while a batch is open, and the capture follows
what each tensor is made of (provenance.py).

Where a parametric tensor meets a batched one, the output is tapped: an identity in the autograd
graph whose backward receives δ and keeps a record per parametric operand (whole.py: for the
commonest operations in the node of the operation itself). The model's own operations and their
backward kernels run unchanged (``training="bitwise"``), or, where per-example gradients of a weight
are formed anyway, its gradient is their sum (``training="fast"``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inrun.capture.compiled.backend import Backend
from inrun.capture.inputs import CONSTANT, OUTSIDE, PAIRS
from inrun.capture.keeping import Keeper
from inrun.capture.meeting import (
    apart,
    has_pure_form,
    operate,
    prepare,
    shapes_suffice,
    summed_leaves,
)
from inrun.capture.mode import BACKWARD, PASSED_ON, Mode
from inrun.capture.pairs import halves
from inrun.capture.provenance import LIKE, Provenance
from inrun.capture.recall import Followed, Met, Recall
from inrun.capture.tap import (
    MicroBatch,
    Tapped,
    apply_tap,
    device_of,
    kept_by,
    put,
    tapped,
)
from inrun.capture.whole import run_whole, whole
from inrun.errors import nested, nothing_recorded, refusal
from inrun.gradients import Call, Form, op_rule, replay
from inrun.gradients.blocks import Blocks
from inrun.gradients.nodes import Node
from inrun.tensors.arguments import flatten, present
from inrun.tensors.autocast import Autocast, current
from inrun.tensors.layout import MIXED, Layout, Lost, in_place, name_of, tensors_in
from inrun.torch_compat import base_of, composite, functorch_transforms_active, saved_tensors_hooks


class Capture(Provenance):
    """The mode, and what it has recorded.

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
    ) -> None:
        super().__init__(list(model.modules()), params, batch_dim)
        self.model, self.form, self.fast, self.probe = model, form, fast, probe
        self.directions, self.blocks = directions, Blocks()
        self.keeper = Keeper(directions, offload, check_memory, on_first_gradient)
        self.trigger = torch.zeros((), requires_grad=True)  # puts taps into the graph
        self.tap: Callable[..., Tensor] = apply_tap
        self.calls, self.opened = 0, list[int]()  # calls seen, and composite ones among them
        self._eager_only, self._backend = False, Backend(self)
        self._mode = Mode(self.call)

    @contextmanager
    def batch(self, B: int) -> Iterator[MicroBatch]:
        """Record the operations run inside, for B examples."""
        self.live = MicroBatch(B)
        self._forget_tensors()
        try:
            with (
                self.blocks.undone_if_it_fails(),
                self._stance(),
                self.entries.batch(self.modules),
                self._mode,
            ):
                yield self.live
            if not self.live.fired:
                shapes = [] if self.live.met else self._shapes
                error = nothing_recorded(self.live.B, self.batch_dim, shapes)
                self.on_empty(error, self.live.backward)
        finally:
            self.live = None
            self._forget_tensors()

    def _stance(self) -> Any:
        """What is compiled goes through our backend, or runs eagerly where it cannot."""
        if self._eager_only:
            return torch.compiler.set_stance("force_eager")
        return torch.compiler.set_stance("default", force_backend=self._backend)

    def close(self) -> None:
        self._backend.close()
        self._recall = Recall(self._find)
        self.blocks.free()

    # For compiled graphs (compiled.py)

    def stay_eager(self, why: str) -> None:
        """From the next batch on, compiled code runs eagerly inside it."""
        self._eager_only = True
        warnings.warn(
            f"inrun cannot score inside this compiled graph ({why}). What is compiled runs eagerly "
            "inside run.batch from now on: the values are the same, the speed is not.",
            stacklevel=3,
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The mode looks away."""
        before, self._mode.paused = self._mode.paused, True
        try:
            yield
        finally:
            self._mode.paused = before

    @contextmanager
    def planning(self, note: Callable[..., Tensor]) -> Iterator[None]:
        """Calls are followed, and ``note`` is called in the place of taps.

        A compiled graph rounds differently with taps in it than without, whatever they do, so there
        is nothing to keep bit for bit and weight gradients are always sums.
        """
        before = self.tap, self._mode.paused, self.fast, self._planning
        self.tap, self._mode.paused, self.fast, self._planning = note, False, True, True
        try:
            yield
        finally:
            self.tap, self._mode.paused, self.fast, self._planning = before

    def info(self, t: Tensor) -> Any:
        """A ``Node``, a ``Layout`` or one of the kinds above."""
        return self._find(t)

    def note(self, t: Tensor, info: Any) -> None:
        if type(info) in (Layout, Lost) or info in (MIXED, PAIRS):
            self._remember(t, info)
        else:
            self._info[t] = info

    # The mode

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One intercepted call."""
        self.calls += 1
        if func in PASSED_ON:
            return func(*args, **kwargs)
        if func in BACKWARD:
            return self._run_backward(func, args, kwargs)
        assert self.live is not None
        if functorch_transforms_active():
            self._refuse_transformed(args, kwargs)
        key = known = None
        if not self._planning:
            state = self.live.B, torch.is_grad_enabled()
            key, known = self._recall.recognise(func, args, kwargs, *state)
        if type(known) is Met:
            return self._meet_again(func, args, kwargs, known)
        if type(known) is Followed:
            out = func(*args, **kwargs)
            if not self._note_again(out, known):
                self._note_batched(func, args, kwargs, out)
            return out
        return self._first_call(func, args, kwargs, key)

    def _first_call(self, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        """A call that is not known."""
        tensors = tensors_in(args, kwargs)
        infos = [self._find(t) for t in tensors]
        parametric = any(type(x) is Node for x in infos)
        if parametric and not self._any_batched(infos):
            infos = self._anchor_operands(func, tensors, infos)
        batched, name = self._any_batched(infos), name_of(func)
        if parametric and batched and name in LIKE:  # the other says no more than its type or shape
            parametric = type(infos[0]) is Node
            batched = not parametric or name not in ("to", "type_as")
        if parametric and torch.is_grad_enabled() and name == "setitem":
            return self._write_parameter(func, args, batched)
        if parametric and batched and torch.is_grad_enabled():
            return self._meet(func, args, kwargs, key)
        if parametric and batched:  # no gradients: the first pass of a reentrant checkpoint
            self._expect_recomputation()
        if batched and torch.is_grad_enabled():
            self._refuse_unseen(tensors, infos)
        before = self._before(func, args) if parametric and not batched else args
        out = func(*args, **kwargs)
        if batched:
            self._note_batched(func, args, kwargs, out)
            known = Followed.of(out, self._find) if key is not None and not parametric else None
            if known and not (in_place(func) and known.infos != infos[:1]):
                self._recall.learn(key, known)
        elif parametric:
            self._note_parametric(func, before, kwargs, out)
        elif any(x is OUTSIDE or type(x) is Layout for x in infos):
            self._note_data(func, args, kwargs, out)
        else:
            for t in tensors_in(out):
                self._set(t, CONSTANT)
            if self._by_storage is not None:
                self._revive(tensors)
        return out

    def _meet(self, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        """A parametric tensor meets the examples: run the operation and tap its output."""
        assert self.live is not None
        self.live.met = True
        rule = op_rule(func)
        if rule is None and (body := composite(func)) is not None:
            self.opened.append(self.calls - 1)
            with self._mode:
                return body(*args, **kwargs)
        leaves, spec = flatten(args, kwargs)
        nodes, layouts = self._operands(leaves)
        claims = {c: name_of(func) for x in layouts if x is not None for c in x.claims}
        self.live.claims.update(claims)
        if any(isinstance(x, Tensor) and x.is_nested for x in leaves):
            raise nested([n for n in nodes if n is not None])
        call = prepare(
            func, leaves, spec, nodes, layouts, self.live.B, self.form, self.fast, self.directions
        )
        detached = summed = summed_leaves(rule, call) if self.fast else ()
        if self.probe:
            detached = present(nodes)
        out = operate(func, apart(leaves, detached), spec)
        if not detached and not any(t.requires_grad for t in tensors_in(out)):
            self._note_batched(func, args, kwargs, out)
            return out
        if not isinstance(out, Tensor) or not has_pure_form(func):
            raise refusal(call, tensors_in(out), "it has no rule")
        of_pairs = self._of_pairs(func, args, kwargs, out)
        if not of_pairs:
            call = self._placed(call, func, args, kwargs, out)
        records = halves if of_pairs else rule.records if rule else replay
        met = Met(call.with_(leaves=(), shape=out.shape), records, present(nodes),
                  present(layouts), detached, summed, shapes_suffice(func),
                  rule.kept if rule else (), whole(call, func, summed))  # fmt: skip
        plain = spec.nested is None and not in_place(func) and not claims and not of_pairs
        if key is not None and plain:
            self._recall.learn(key, met)
        out = self._tap(out, call.with_(shape=out.shape), met, leaves, call.leaves)
        if of_pairs:
            self._set(out, PAIRS)
        return out

    def _meet_again(self, func: Any, args: Any, kwargs: Any, met: Met) -> Any:
        """The same call as before, with other numbers."""
        leaves = (*args, *kwargs.values())
        if met.whole is not None and not saved_tensors_hooks():
            autocast = current("cpu")
            if not autocast[1]:
                return self._meet_whole(leaves, met, autocast)
        given, saved = met.parted(leaves)
        out = operate(func, given, met.call.spec)
        if not met.detached and not out.requires_grad:
            self._note_batched(func, args, kwargs, out)
            return out
        call = met.call
        if out.shape != call.shape:
            call = self._placed(call.with_(leaves=saved), func, args, kwargs, out)
        return self._tap(out, call, met, leaves, saved)

    def _meet_whole(self, leaves: Sequence[Any], met: Met, autocast: Autocast) -> Tensor:
        """The same, with its tap in one piece."""
        assert self.live is not None
        self.live.met, self.live.autocast = True, autocast
        call = met.call.with_(leaves=leaves, autocast=autocast, blocks=self.blocks)
        tap = Tapped(met.rule, self.live, met.batched, met.detached, met.summed, self.receive)
        params = [leaves[i] for i in met.summed]
        out = run_whole(leaves[0], call, tap, met.whole, *params)
        self._remember(out, call.layout)
        return out

    def _operands(self, leaves: Sequence[Any]) -> tuple[list[Node | None], list[Layout | None]]:
        """Which arguments are parametric, and where the examples are in the batched ones."""
        infos = [self._find(x) if isinstance(x, Tensor) else None for x in leaves]
        nodes = [x if type(x) is Node else None for x in infos]
        layouts = [
            Layout(0) if x is PAIRS else self._layout(leaf) if isinstance(leaf, Tensor) else None
            for leaf, x in zip(leaves, infos, strict=True)
        ]
        return nodes, layouts

    def _placed(self, call: Call, func: Any, args: Any, kwargs: Any, out: Tensor) -> Call:
        """The call with its output's layout and shape."""
        layout = self._follow(func, args, kwargs, out)
        if not isinstance(layout, Layout):
            why = "the examples cannot be told apart in its output"
            if type(layout) is Lost and layout.by != name_of(func):
                why += f" since '{layout.by}'"
            raise refusal(call, [out], why)
        return call.with_(layout=layout, shape=out.shape)

    def _tap(
        self, out: Tensor, call: Call, met: Met, leaves: Sequence[Any], saved: Sequence[Any]
    ) -> Tensor:
        """The output with a tap, which gets what was ``saved`` of the leaves."""
        assert self.live is not None
        self.live.met = True
        device, packed = device_of(out), saved_tensors_hooks()
        if packed:
            self._expect_recomputation()
        self.live.autocast = current(device)
        blocks = self.blocks if device == "cpu" and not self._planning else None
        kept = () if blocks is None or packed else kept_by(out, met.kept)
        call = call.with_(leaves=saved, autocast=self.live.autocast, blocks=blocks, kept=kept)
        tap = Tapped(met.rule, self.live, met.batched, met.detached, met.summed, self.receive)
        extras = [self.trigger] if self.probe else [leaves[i] for i in met.summed]
        out = tapped(self.tap, out, call, tap, extras)
        self._remember(out, call.layout)
        return out

    def _write_parameter(self, func: Any, args: Any, batched: bool) -> None:
        """``target[index] = parameter``: as an operation that gives a new target."""
        target, index, value = args
        before = target.detach().clone()
        self._info[before] = self._find(target)
        func(target, index, value)
        pure = (before, index, value)
        if not batched:
            self._note_parametric(put, pure, {}, target)
            return
        layout = self._layout(before)
        leaves, spec = flatten(pure, {})
        nodes, layouts = self._operands(leaves)
        saved = tuple(x.detach() if isinstance(x, Tensor) else x for x in leaves)
        assert self.live is not None
        call = Call(
            put, spec, saved, tuple(nodes), tuple(layouts), layout or Layout(0), self.live.B,
            self.form, target.shape,
        )  # fmt: skip
        if layout is None or base_of(target) is not None:
            raise refusal(call, [target], "the examples cannot be told apart in the target")
        self.live.met = True
        tap = Tapped(replay, self.live, present(layouts), (), (), self.receive)
        self._remember(self.tap(target, call, tap), layout)

    def receive(
        self, tap: Tapped, call: Call, delta: Tensor, loose: Sequence[int]
    ) -> Sequence[Tensor | None]:
        """δ has arrived: keep the records; the gradients of what is summed."""
        self.keeper.first_gradient(tap.micro)
        pairs = tap.lasting(call, delta, loose)
        totals = [None] if self.probe else tap.totals(call, pairs)
        self.keeper.keep(tap.micro, call.name, pairs)
        return totals

    # Activation checkpointing recomputes in the autograd engine, which takes along the modes that
    # are on when it is called. Ours is on from the moment checkpointing is seen.

    def _expect_recomputation(self) -> None:
        if self._by_storage is None and not self._planning:
            self._note_storages()

    def _run_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        assert self.live is not None
        self.live.backward = True
        if self._by_storage is None:
            return func(*args, **kwargs)
        with self._mode:
            return composite(func)(*args, **kwargs)

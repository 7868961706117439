"""Compiled models: the same taps, inside the compiled graph.

``torch.compile`` hands the graphs it captures to a backend. While a batch is open that is ours
(``torch.compiler.set_stance(force_backend=...)``), whatever was compiled: the model, parts of it,
a function that calls it, before or after ``watch``. The first time a graph runs it is *planned*:
it runs like an eager forward pass, on tensors without data, to find its sites. Each of these then
gets its tap, and the graph goes to the backend the user chose.

A compiled graph cannot hand out what its backward pass computes on the way, except as gradients of
its inputs. So each record leaves through *outlets*: extra inputs of the record's shapes that hold
no memory and take no part in the forward pass, and whose gradients are the record's tensors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from inrun.capture.compiled.planner import (
    CompiledTap,
    Planner,
    UnplannableError,
    fix_numbers,
    insert_taps,
    is_number,
    note_output,
)
from inrun.capture.micro_batch import MicroBatch
from inrun.capture.provenance import Origin
from inrun.gradients.nodes import Node
from inrun.tensors.layout import Layout, tensors_in
from inrun.torch_compat import (
    DisableTorchFunction,
    HigherOrderOperator,
    compile_backend,
    gradients_in_any_layout,
    is_inductor,
    version_of,
)

if TYPE_CHECKING:
    from inrun.capture.capture import Capture

_VARIANTS = 4  # compiled forms of one graph (batch sizes, lengths); more run eagerly


class Backend:
    """The ``torch.compile`` backend that is in force while a batch is open."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.eager_only = False  # a graph could not be planned: run compiled code eagerly
        self._graphs: list[Graph] = []

    def close(self) -> None:
        """Drop references to the model: torch's caches keep compiled graphs, and these keep us."""
        for graph in self._graphs:
            graph.close()
        self._graphs = []

    def stance(self) -> Any:
        """For the time of a batch: compile with this backend, or run compiled code eagerly."""
        if self.eager_only:
            return torch.compiler.set_stance("force_eager")
        return torch.compiler.set_stance("default", force_backend=self)

    def stay_eager(self, why: str) -> None:
        """From the next batch on, run compiled code eagerly."""
        self.eager_only = True
        warnings.warn(
            f"inrun cannot score inside this compiled graph ({why}). What is compiled runs eagerly "
            "inside run.batch from now on: the values are the same, the speed is not.",
            stacklevel=3,
        )

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        inner = compile_backend()
        copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        graph = Graph(self.capture, copied, partial(_compile, inner))
        if is_inductor(inner):
            graph.aside = DisableTorchFunction  # cheaper; others may still run Python
        self._graphs.append(graph)
        return graph.call


def _compile(inner: Any, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    with gradients_in_any_layout():
        return inner(gm, list(inputs))


@dataclass
class Variant:
    """One graph with its taps, compiled for inputs of one kind."""

    run: Callable[..., Any]
    taps: tuple[CompiledTap, ...]
    outputs: tuple[Origin, ...]
    constants: tuple[Tensor, ...] = ()  # from which the graph's nodes are made, beside parameters

    @cached_property
    def claims(self) -> dict[str, str]:
        """What its layouts rest on, with the name of an operation."""
        operands = [(t.call, x) for t in self.taps for x in t.call.layouts if isinstance(x, Layout)]
        return {claim: call.name for call, x in operands for claim in x.claims}


class Graph:
    """One captured graph; chooses or makes the variant for its inputs."""

    def __init__(
        self, capture: Capture, gm: fx.GraphModule, compile: Callable[..., Callable[..., Any]]
    ) -> None:
        self.capture, self.gm, self.compile = capture, gm, compile
        self.aside: Callable[[], Any] = capture.paused  # calls are not looked at inside
        self.variants: dict[Any, Variant] = {}
        self._names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        self._taps: list[list[CompiledTap]] = []  # as the compiled graphs hold them

    def close(self) -> None:
        self.variants.clear()
        for taps in self._taps:
            taps.clear()
        del self.capture, self.aside

    def call(self, *inputs: Any) -> Any:
        self.capture.aside.compiled()
        if self.capture.live is None:
            return self.gm(*inputs)
        with DisableTorchFunction():
            self._anchor(inputs)
            key = self._key(inputs)
        if key not in self.variants:
            try:
                if len(self.variants) == _VARIANTS:
                    raise UnplannableError(f"it has run with {_VARIANTS} kinds of inputs already")
                with self.capture.paused():
                    self.variants[key] = self._make(inputs)
            except UnplannableError as why:
                self.capture.backend.stay_eager(f"{why}")
                return _Inline(self.gm).run(*inputs)
        with self.aside():
            return self._run(self.variants[key], inputs)

    def _anchor(self, inputs: Sequence[Any]) -> None:
        """Data that the graph takes is what the model receives."""
        given = [(n, x) for n, x in zip(self._names, inputs, strict=True) if type(x) is Tensor]
        self.capture.inputs.anchor([(f"{n} of the compiled graph", x) for n, x in given])

    def _key(self, inputs: Sequence[Any]) -> Any:
        assert self.capture.live is not None
        provenance = self.capture.provenance
        parts: list[Any] = [provenance.B, torch.is_grad_enabled(), provenance.watched]
        for x in inputs:
            if type(x) is nn.Parameter:  # the same each time: its identity says all
                parts.append((id(x), x.requires_grad))
            elif is_number(x):
                parts.append(x.item())
            elif isinstance(x, Tensor):
                origin = provenance.find(x)
                known = origin.name if isinstance(origin, Node) else origin
                own = id(x) if provenance.owns(x) else None  # a buffer that is not replaced
                parts.append((known, tuple(x.shape), x.requires_grad, own))
            else:
                parts.append(x)
        return tuple(parts)

    def _run(self, variant: Variant, inputs: Sequence[Any]) -> Any:
        capture, live = self.capture, self.capture.live
        assert live is not None
        outlets: tuple[Tensor, ...] = ()
        if variant.taps:
            live.met, live.autocast = True, variant.taps[0].call.autocast
            data = {x.data_ptr() for x in inputs if isinstance(x, Tensor) and not x.requires_grad}
            outlets = Receive.apply(capture.trigger, capture, live, variant.taps, data)
        live.claims.update(variant.claims)
        out = variant.run(*inputs, *outlets)
        live.fixed += [(t, version_of(t)) for t in variant.constants]
        for t, origin in zip(tensors_in(out), variant.outputs, strict=True):
            note_output(capture.provenance, t, origin)
            if t.requires_grad and outlets:
                t.register_hook(lambda g: capture.keeper.first_gradient(live))
        return out

    def _make(self, inputs: Sequence[Any]) -> Variant:
        taps, outputs = Planner(self.capture, self.gm).plan(inputs)
        gm = fx.GraphModule(self.gm, copy.deepcopy(self.gm.graph))
        fix_numbers(gm, inputs)
        self._taps += taps.values()
        outlets = insert_taps(gm, taps)
        zeros = [s.make().requires_grad_() for s in outlets]
        run = self.compile(gm, [*inputs, *zeros])
        all_taps = tuple(tap for here in taps.values() for tap in here)
        constants = [t for tap in all_taps for node, _ in tap.records for t in node.constants()]
        return Variant(run, all_taps, outputs, tuple(constants))


class Receive(torch.autograd.Function):
    """Makes the outlets; its backward gets their gradients, the records."""

    @staticmethod
    def forward(
        ctx: Any, trigger: Tensor, capture: Capture, micro: MicroBatch,
        taps: Sequence[CompiledTap], data: set[int],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.capture, ctx.micro, ctx.taps, ctx.data = capture, micro, taps, data
        zeros: dict[Any, Tensor] = {}
        made = []
        for outlet in (s for tap in taps for s in tap.outlets):
            kind = outlet.carrier, outlet.device
            if kind not in zeros:
                zeros[kind] = torch.zeros((), dtype=kind[0], device=kind[1])
            made.append(zeros[kind].expand(outlet.shape))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *tensors: Tensor | None) -> Any:
        left = iter(tensors)
        for tap in ctx.taps:
            given = [t for t in (next(left) for _ in tap.outlets) if t is not None]
            if len(given) < len(tap.outlets):
                continue  # nothing of the loss went through here
            with DisableTorchFunction(), torch.no_grad():
                # an input as it came: the next micro-batch may be written to its memory
                given = [t.clone() if t.data_ptr() in ctx.data else t for t in given]
                pairs = tap.arrived(given)
            positions = ctx.micro.positions(tap.call.layout, tap.call.B, given[0].device)
            call = tap.call.with_(positions=positions)
            ctx.capture.keeper.keep(ctx.micro, call, pairs)
        return None, None, None, None, None


class _Inline(fx.Interpreter):
    """Runs a graph node by node, also what is inside activation checkpoints."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, HigherOrderOperator) and isinstance(args[0], fx.GraphModule):
            return type(self)(args[0]).run(*args[1:])
        return super().call_function(target, args, kwargs)

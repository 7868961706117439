"""Compiled models: the same taps, inside the compiled graph.

``torch.compile`` hands the graphs it captures to a backend. While a batch is open that is ours
(``torch.compiler.set_stance(force_backend=...)``), whatever was compiled: the model, parts of it,
a function that calls it, before or after ``watch``. The first time a graph runs it is *planned*:
it is followed like an eager forward pass, on tensors without data, to find where parameters meet
examples. Each of these operations then gets its tap, and the graph goes to the backend the user
chose.

A compiled graph cannot hand out what its backward pass computes on the way, except as gradients of
its inputs. So each record leaves through *slots*: extra inputs of the record's shapes that hold no
memory and take no part in the forward pass, and whose gradients are the record's tensors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from inrun.arguments import flatten
from inrun.errors import CaptureError
from inrun.layout import Layout, tensors_in
from inrun.meeting import operate, prepare
from inrun.nodes import Node
from inrun.ops import Call, Record
from inrun.ops.records import Aligned, Dense, Lookup, Pair, wide_type
from inrun.tap import MicroBatch, Tap, Tapped, composite, tapped

if TYPE_CHECKING:
    from inrun.capture import Capture

_VARIANTS = 4  # compiled forms of one graph (batch sizes, lengths); more run eagerly


class UnplannableError(Exception):
    """Why a graph cannot be compiled with its taps. It then runs eagerly."""


@dataclass(frozen=True)
class Slot:
    """A tensor that leaves the backward pass. Whole numbers travel as float64."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def like(t: Tensor) -> Slot:
        return Slot(tuple(t.shape), t.dtype, t.device)

    @property
    def carrier(self) -> torch.dtype:
        return self.dtype if self.dtype.is_floating_point else torch.float64

    def make(self) -> Tensor:
        return torch.zeros((), dtype=self.carrier, device=self.device).expand(self.shape)


@dataclass(frozen=True)
class Meeting:
    """The ``index``-th call inside a node of the graph: parameters meet examples.

    ``records`` are templates without data; where one of them cannot be made of tensors alone (a
    ``Replay``), δ and the examples' operands leave instead (``raw``), and the rule runs outside.
    """

    index: int
    call: Call  # without the examples' tensors
    tap: Tapped
    opened: tuple[int, ...]  # composite calls of the node, whose inner calls count
    records: tuple[tuple[Node, Record], ...]
    raw: bool
    slots: tuple[Slot, ...]

    @cached_property
    def plain(self) -> bool:
        """Per-example gradients and nothing else."""
        return not self.raw and all(type(r) is Dense for _, r in self.records)

    def send(self, tap: Tapped, call: Call, delta: Tensor) -> list[Tensor]:
        """Inside the graph: gradients of what is summed, then of the slots."""
        pairs = tap.records(call, delta)
        tensors = [t for _, record in pairs for t in record.tensors()]
        if self.raw:
            tensors = [delta, *(call.leaves[i] for i in batched(call))]
        return [*tap.totals(call, pairs, _unrolled), *tensors]

    def arrived(self, tensors: Sequence[Tensor]) -> list[tuple[Node, Record]]:
        """Outside: the records again."""
        if self.plain:
            return [(r[0], Dense(t)) for r, t in zip(self.records, tensors, strict=True)]
        given = [t.to(s.dtype) for t, s in zip(tensors, self.slots, strict=True)]
        if self.raw:
            leaves = list(self.call.leaves)
            for i, x in zip(batched(self.call), given[1:], strict=True):
                leaves[i] = x
            return self.tap.records(replace(self.call, leaves=tuple(leaves)), given[0])
        left = iter(given)
        return [(node, record.map(lambda _: next(left))) for node, record in self.records]


def _unrolled(rows: Tensor) -> Tensor:
    """Σ_i rows_i as a chain of additions: the compiler makes one element-wise kernel of it, at
    twice the speed of its reduction over the first dimension."""
    total = rows[0].to(wide_type(rows.dtype))
    for row in rows[1:]:
        total = total + row
    return total


def batched(call: Call) -> list[int]:
    return [i for i, layout in enumerate(call.layouts) if layout is not None]


def backend_of(model: Any) -> Any:
    """What the user compiles the model with: a backend or its name."""
    context = getattr(model, "dynamo_ctx", None)
    found: Any = getattr(context, "callback", None)
    while hasattr(found, "_torchdynamo_orig_backend"):
        found = found._torchdynamo_orig_backend
    return found if callable(found) else "inductor"


class Backend:
    """The backend that is in force while a batch is open."""

    def __init__(self, capture: Capture, inner: Any) -> None:
        self.capture, self.inner = capture, inner

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        graph = Graph(self.capture, fx.GraphModule(gm, copy.deepcopy(gm.graph)), self.compile)
        if getattr(self.inner, "compiler_name", self.inner) == "inductor":
            graph.aside = torch._C.DisableTorchFunction  # cheaper; others may still run Python
        return graph.call

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if callable(self.inner):
            return self.inner(gm, list(inputs))
        if self.inner == "inductor":
            return torch._inductor.compile(gm, list(inputs))
        return torch._dynamo.lookup_backend(self.inner)(gm, list(inputs))


@dataclass
class Variant:
    """One graph with its taps, compiled for inputs of one kind."""

    run: Callable[..., Any]
    meetings: tuple[Meeting, ...]
    outputs: tuple[Any, ...]  # what is known of each


class Graph:
    """One captured graph; chooses or makes the variant for its inputs."""

    def __init__(
        self, capture: Capture, gm: fx.GraphModule, compile: Callable[..., Callable[..., Any]]
    ) -> None:
        self.capture, self.gm, self.compile = capture, gm, compile
        self.aside: Callable[[], Any] = capture.paused  # the mode looks away
        self.variants: dict[Any, Variant] = {}

    def call(self, *inputs: Any) -> Any:
        if self.capture.live is None:
            return self.gm(*inputs)
        with torch._C.DisableTorchFunction():
            key = self._key(inputs)
        if key not in self.variants:
            try:
                if len(self.variants) == _VARIANTS:
                    raise UnplannableError(f"it has run with {_VARIANTS} kinds of inputs already")
                with self.capture.paused():
                    self.variants[key] = self._make(inputs)
            except UnplannableError as why:
                self.capture.stay_eager(f"{why}")
                return _Inline(self.gm).run(*inputs)
        with self.aside():
            return self._run(self.variants[key], inputs)

    def _key(self, inputs: Sequence[Any]) -> Any:
        assert self.capture.live is not None
        parts: list[Any] = [self.capture.live.B, torch.is_grad_enabled(), self.capture.watched]
        for x in inputs:
            if type(x) is nn.Parameter:  # the same each time: its identity says all
                parts.append((id(x), x.requires_grad))
            elif isinstance(x, Tensor):
                info = self.capture.info(x)
                known = info.name if isinstance(info, Node) else info
                parts.append((known, tuple(x.shape), x.requires_grad))
            else:
                parts.append(x)
        return tuple(parts)

    def _run(self, variant: Variant, inputs: Sequence[Any]) -> Any:
        capture, live = self.capture, self.capture.live
        assert live is not None
        slots: tuple[Tensor, ...] = ()
        if variant.meetings:
            live.met, live.autocast = True, variant.meetings[0].call.autocast
            slots = Receive.apply(capture.trigger, capture, live, variant.meetings)
        out = variant.run(*inputs, *slots)
        for t, info in zip(tensors_in(out), variant.outputs, strict=True):
            capture.note(t, info)
            if t.requires_grad and slots:
                t.register_hook(lambda g: capture.first_gradient(live))
        return out

    def _make(self, inputs: Sequence[Any]) -> Variant:
        meetings, outputs = _Planner(self.capture, self.gm).plan(inputs)
        gm = fx.GraphModule(self.gm, copy.deepcopy(self.gm.graph))
        slots = _insert(gm, meetings)
        zeros = [s.make().requires_grad_() for s in slots]
        run = self.compile(gm, [*inputs, *zeros])
        return Variant(run, tuple(m for ms in meetings.values() for m in ms), outputs)


def _insert(gm: fx.GraphModule, meetings: dict[str, list[Meeting]]) -> list[Slot]:
    """Give the nodes their taps and the graph the inputs for them; returns these."""
    slots = [s for ms in meetings.values() for m in ms for s in m.slots]
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
        places = iter([gm.graph.placeholder(f"inrun_slot_{i}") for i in range(len(slots))])
    for node in [n for n in gm.graph.nodes if n.name in meetings]:
        here = meetings[node.name]
        own = [next(places) for m in here for _ in m.slots]
        target = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(_watched(target, here), (own, *node.args), node.kwargs)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    gm.recompile()
    return slots


def _watched(target: Any, meetings: Sequence[Meeting]) -> Callable[..., Any]:
    """The node's operation with its taps. Runs when the backend traces the graph."""

    def watched(slots: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        with _Taps(meetings, slots):
            return target(*args, **kwargs)

    return watched


class _Taps(TorchFunctionMode):
    """Counts calls as the planner did, and taps those that it marked."""

    def __init__(self, meetings: Sequence[Meeting], slots: Sequence[Tensor]) -> None:
        super().__init__()
        self.meetings = {m.index: m for m in meetings}
        self.opened = {i for m in meetings for i in m.opened}
        self.slots, self.count = iter(slots), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        index, self.count = self.count, self.count + 1
        meeting = self.meetings.get(index)
        if meeting is None:
            if index not in self.opened:
                return func(*args, **kwargs)
            with self:
                return composite(func)(*args, **kwargs)
        planned = meeting.call
        leaves, spec = flatten(args, kwargs)
        call = prepare(
            func, leaves, spec, planned.nodes, planned.layouts, planned.B, planned.form
        )  # fmt: skip
        call = call.with_(layout=planned.layout, autocast=planned.autocast, shape=planned.shape)
        summed = meeting.tap.summed
        out = operate(func, leaves, spec, meeting.tap.detached)
        slots = [next(self.slots) for _ in meeting.slots]
        tap = replace(meeting.tap, receive=meeting.send)
        return tapped(Tap.apply, out, call, tap, [*(leaves[i] for i in summed), *slots])


class Receive(torch.autograd.Function):
    """Makes the slots; its backward gets their gradients, the records."""

    @staticmethod
    def forward(
        ctx: Any, trigger: Tensor, capture: Capture, micro: MicroBatch, meetings: Sequence[Meeting]
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.capture, ctx.micro, ctx.meetings = capture, micro, meetings
        zeros: dict[Any, Tensor] = {}
        made = []
        for slot in (s for m in meetings for s in m.slots):
            kind = slot.carrier, slot.device
            if kind not in zeros:
                zeros[kind] = torch.zeros((), dtype=kind[0], device=kind[1])
            made.append(zeros[kind].expand(slot.shape))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *tensors: Tensor | None) -> Any:
        left = iter(tensors)
        for meeting in ctx.meetings:
            given = [next(left) for _ in meeting.slots]
            if any(t is None for t in given):
                continue  # nothing of the loss went through here
            with torch._C.DisableTorchFunction(), torch.no_grad():
                pairs = meeting.arrived(given)
            ctx.capture.keep(ctx.micro, meeting.call.name, pairs)
        return None, None, None, None


class _Inline(fx.Interpreter):
    """Runs a graph node by node, also what is inside activation checkpoints."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, HigherOrderOperator) and isinstance(args[0], fx.GraphModule):
            return type(self)(args[0]).run(*args[1:])
        return super().call_function(target, args, kwargs)


class _Planner(fx.Interpreter):
    """Follows a graph on tensors without data and notes where parameters meet examples."""

    def __init__(self, capture: Capture, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.capture = capture
        self.meetings: dict[str, list[Meeting]] = {}
        self.fixed: set[fx.Node] = set()  # the same in every step: made of no input
        self.node: fx.Node | None = None

    def plan(self, inputs: Sequence[Any]) -> tuple[dict[str, list[Meeting]], tuple[Any, ...]]:
        """The meetings by node, and what is known of each output."""
        self.garbage_collect_values = False
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        infos = [self.capture.info(x) if isinstance(x, Tensor) else None for x in inputs]
        given = []
        for x, info in zip(inputs, infos, strict=True):
            examples = type(info) is Layout or (info is not None and info.name != "constant")
            examples &= not isinstance(info, Node)
            given.append(fake.from_tensor(x, static_shapes=True) if examples else x)
        devices = {x.device for x in inputs if isinstance(x, Tensor) and x.is_cuda}
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(devices),
            self.capture.planning(self._note),
        ):
            warnings.simplefilter("ignore")  # torch's own, on tensors without data
            for x, info in zip(given, infos, strict=True):
                if isinstance(x, FakeTensor):
                    self.capture.note(x, info)
            try:
                out = self.run(*given)
            except (CaptureError, RuntimeError, NotImplementedError, TypeError) as e:
                raise UnplannableError(f"{type(e).__name__}: {e}") from e
            known = tuple(self.capture.info(t) for t in tensors_in(out))
        if any(isinstance(x, Node) for x in known):
            raise UnplannableError("it returns a tensor made of parameters alone")
        return self.meetings, known

    def run_node(self, n: fx.Node) -> Any:
        self.node, self.capture.calls, self.capture.opened = n, 0, []
        out = super().run_node(n)
        inputs = n.all_input_nodes
        if n.op not in ("placeholder", "get_attr") and all(a in self.fixed for a in inputs):
            self.fixed.add(n)
        if n.op.startswith("call") and isinstance(out, Tensor):
            self._refuse_stale(n, out)
        return out

    def _refuse_stale(self, n: fx.Node, out: Tensor) -> None:
        """A tensor made of parameters is made again when they are scored: from the same things."""
        if not isinstance(self.capture.info(out), Node):
            return
        for a in n.all_input_nodes:
            x = self.env[a]
            own = isinstance(x, Tensor) and isinstance(self.capture.info(x), Node)
            if not own and a not in self.fixed and a.op not in ("placeholder", "get_attr"):
                raise UnplannableError(
                    f"'{n.name}' mixes parameters with '{a.name}' before an example"
                )

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, HigherOrderOperator):
            raise UnplannableError(f"it contains '{target.name()}'")
        return super().call_function(target, args, kwargs)

    def _note(self, out: Tensor, call: Call, tap: Tapped, *extras: Tensor) -> Tensor:
        """In the place of a tap."""
        assert self.node is not None
        out = out.reshape(call.shape)
        device = out.device.type
        with torch._C.DisableTorchFunction(), torch.autocast(device, enabled=False):
            pairs = tap.records(call, torch.empty_like(out))
        raw = not all(isinstance(r, (Dense, Aligned, Pair, Lookup)) for _, r in pairs)
        constants = [x for i, x in enumerate(call.leaves) if i not in batched(call)]
        if raw and any(isinstance(x, FakeTensor) for x in constants):
            raise UnplannableError(f"'{call.name}' needs what is known only when it runs")
        sent = [t for _, r in pairs for t in r.tensors()]
        if raw:
            sent = [out, *(call.leaves[i] for i in batched(call))]
        index = self.capture.calls - 1
        slots = tuple(Slot.like(t) for t in sent)
        opened, records = tuple(self.capture.opened), tuple(_bare_record(p) for p in pairs)
        bare = replace(tap, micro=MicroBatch(call.B))
        meeting = Meeting(index, _bare(call), bare, opened, records, raw, slots)
        self.meetings.setdefault(self.node.name, []).append(meeting)
        return out


def _bare(call: Call) -> Call:
    """Without the tensors that have no data."""
    leaves = tuple(None if isinstance(x, FakeTensor) else x for x in call.leaves)
    return replace(call, leaves=leaves)


def _bare_record(pair: tuple[Node, Record]) -> tuple[Node, Record]:
    node, record = pair
    return node, record.map(lambda t: torch.empty(0))

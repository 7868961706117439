"""Planning a compiled graph: where its parameters meet examples, and the taps that go there.

See backend.py for how graphs come here and what outlets are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from inrun.capture.mode import opened
from inrun.capture.provenance import CONSTANT, Origin, Provenance, follows_rows
from inrun.capture.site import Site
from inrun.capture.tap import Tap, tapped
from inrun.errors import CaptureError
from inrun.gradients import Call, Record
from inrun.gradients.arguments import flatten
from inrun.gradients.call import operand
from inrun.gradients.embedding import Lookup
from inrun.gradients.linear import padded
from inrun.gradients.nodes import Node, value
from inrun.gradients.records import Aligned, Dense, Pair, short_by, wide_type
from inrun.tensors.layout import name_of, tensors_in
from inrun.torch_compat import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
)

if TYPE_CHECKING:
    from inrun.capture.capture import Capture


class UnplannableError(Exception):
    """Why a graph cannot be compiled with its taps. It then runs eagerly."""


@dataclass(frozen=True)
class Outlet:
    """A tensor that leaves the backward pass. Whole numbers travel as float64."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def like(t: Tensor) -> Outlet:
        return Outlet(tuple(t.shape), t.dtype, t.device)

    @property
    def carrier(self) -> torch.dtype:
        kept = self.dtype.is_floating_point or self.dtype.is_complex
        return self.dtype if kept else torch.float64

    def make(self) -> Tensor:
        return torch.zeros((), dtype=self.carrier, device=self.device).expand(self.shape)


@dataclass(frozen=True)
class CompiledTap:
    """A tap inside a compiled graph: its site is the ``index``-th call inside a node of the graph.

    ``call`` is the site's with the leaves that are known when the graph is planned. ``records`` are
    templates without data; where one of them cannot be made of tensors alone (a ``Replay``), δ and
    the examples' operands leave instead (``raw``), and the rule runs outside.
    """

    index: int
    site: Site
    call: Call
    opened: tuple[int, ...]  # composite calls of the node, whose inner calls count
    records: tuple[tuple[Node, Record], ...]
    raw: bool
    outlets: tuple[Outlet, ...]

    @cached_property
    def only_dense(self) -> bool:
        """Are its records per-example gradients and nothing else?"""
        return not self.raw and all(type(r) is Dense for _, r in self.records)

    def send(self, site: Site, call: Call, delta: Tensor, loose: Any = ()) -> list[Tensor]:
        """Inside the graph: gradients of the summed leaves, then of the outlets."""
        pairs = site.records(call, delta)
        tensors = [t for _, record in pairs for t in record.tensors()]
        if self.raw:
            tensors = [delta, *(call.leaves[i] for i in site.batched)]
        return [*site.totals(call, pairs, _unrolled), *tensors]

    def arrived(self, tensors: Sequence[Tensor]) -> list[tuple[Node, Record]]:
        """Outside: make records of the tensors that left through the outlets."""
        if self.only_dense:
            return [(r[0], _dense(t)) for r, t in zip(self.records, tensors, strict=True)]
        given = [t.to(s.dtype) for t, s in zip(tensors, self.outlets, strict=True)]
        if self.raw:
            leaves = list(self.call.leaves)
            for i, x in zip(self.site.batched, given[1:], strict=True):
                leaves[i] = x
            for i, node in enumerate(self.call.nodes):
                if node is not None:
                    leaves[i] = value(node)
            return self.site.records(self.call.with_(leaves=leaves), given[0])
        left = iter(given)
        filled = [(node, record.map(lambda _: next(left))) for node, record in self.records]
        return [(n, _dense(r.grads) if isinstance(r, Dense) else r) for n, r in filled]


def _dense(rows: Tensor) -> Dense:
    """The compiler may have left gaps, which only the first dimension should have."""
    return Dense(rows if rows.is_contiguous() or rows[0].is_contiguous() else rows.contiguous())


def _unrolled(rows: Tensor) -> Tensor:
    """Σ_i rows_i as a chain of additions: the compiler makes one element-wise kernel of it, at
    twice the speed of its reduction over the first dimension."""
    total = rows[0].to(wide_type(rows.dtype))
    for row in rows[1:]:
        total = total + row
    return total


def insert_taps(gm: fx.GraphModule, taps: dict[str, list[CompiledTap]]) -> list[Outlet]:
    """Give the nodes their taps and the graph the inputs for them; returns these."""
    outlets = [s for here in taps.values() for tap in here for s in tap.outlets]
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
        places = iter([gm.graph.placeholder(f"inrun_outlet_{i}") for i in range(len(outlets))])
    for node in [n for n in gm.graph.nodes if n.name in taps]:
        here = taps[node.name]
        own = [next(places) for tap in here for _ in tap.outlets]
        target = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
        may_pad = layout_unseen(node)
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(
                _with_taps(target, here, may_pad), (own, *node.args), node.kwargs
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    gm.recompile()
    return outlets


def layout_unseen(node: fx.Node) -> bool:
    """Does no consumer of the node's result depend on its memory layout?"""
    for user in node.users:
        name = user.target if isinstance(user.target, str) else name_of(user.target)
        if name in _PASSED_ON:
            if not layout_unseen(user):
                return False
        elif name not in _READ:
            return False
    return True


_PASSED_ON = ("flatten", "reshape", "getitem")
_READ = ("cross_entropy", "log_softmax", "softmax", "float", "contiguous")


def _with_taps(target: Any, taps: Sequence[CompiledTap], may_pad: bool) -> Callable[..., Any]:
    """The node's operation with its taps. Runs when the backend traces the graph. ``may_pad``:
    no consumer depends on the memory layout of its result."""

    def with_taps(outlets: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        with _InsertTaps(taps, outlets, may_pad):
            return target(*args, **kwargs)

    return with_taps


class _InsertTaps(TorchFunctionMode):
    """Counts calls as the planner did, and taps those that it marked."""

    def __init__(
        self, taps: Sequence[CompiledTap], outlets: Sequence[Tensor], may_pad: bool
    ) -> None:
        super().__init__()
        self.taps = {tap.index: tap for tap in taps}
        self.opened = {i for tap in taps for i in tap.opened}
        self.outlets, self.count, self.may_pad = iter(outlets), 0, may_pad

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        index, self.count = self.count, self.count + 1
        tap = self.taps.get(index)
        if tap is None:
            if index not in self.opened:
                return func(*args, **kwargs)
            with self:
                return opened(func)(*args, **kwargs)
        site = tap.site
        leaves, spec = flatten(args, kwargs)
        given, saved = site.arguments(leaves)
        call = tap.call.with_(leaves=saved, spec=spec)
        missing = _short_by(func, call) if self.may_pad else 0
        operation = partial(padded, missing=missing) if missing else func
        given_args, given_kwargs = spec.unflatten(given)
        out = operation(*given_args, **given_kwargs)
        outlets = [next(self.outlets) for _ in tap.outlets]
        extras = [*(leaves[i] for i in site.summed), *outlets]
        call = call.with_(shape=out.shape)
        out = tapped(Tap.apply, out, call, site, tap.send, None, extras)
        return out[..., :-missing] if missing else out


def _short_by(func: Any, call: Call) -> int:
    """How many outputs to add to a product with a vocabulary (``records.short_by``). Padding here
    serves all uses of the output; the compiler would pad for each of them, with a copy of the
    largest tensor of the step."""
    if name_of(func) != "linear" or (W := call.value(1, "weight")).ndim != 2:
        return 0
    return short_by(len(W), *operand(W))


class Planner(fx.Interpreter):
    """Runs a graph on tensors without data and notes its sites."""

    def __init__(self, capture: Capture, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.provenance = capture.provenance
        self.interceptor = capture.planner(self._note)
        self.taps: dict[str, list[CompiledTap]] = {}
        self.fixed: set[fx.Node] = set()  # the same whenever this plan is used
        self.made: set[fx.Node] = set()  # of these, made of numbers alone
        self.node: fx.Node | None = None

    def plan(
        self, inputs: Sequence[Any]
    ) -> tuple[dict[str, list[CompiledTap]], tuple[Origin, ...]]:
        """The taps by node of the graph, and the origin of each output."""
        self.garbage_collect_values = False
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        given = list(inputs)
        for i, x in enumerate(inputs):
            origin = self.provenance.find(x) if isinstance(x, Tensor) else CONSTANT
            if origin is not CONSTANT and not isinstance(origin, Node):
                given[i] = fake.from_tensor(x, static_shapes=True)
                note_output(self.provenance, given[i], origin)
        devices = {x.device for x in inputs if isinstance(x, Tensor) and x.is_cuda}
        with warnings.catch_warnings(), torch.random.fork_rng(devices), self.interceptor.mode:
            warnings.simplefilter("ignore")  # torch's own, on tensors without data
            try:
                out = self.run(*given)
            except UnplannableError as e:
                raise UnplannableError(str(e).splitlines()[0]) from None
            except (CaptureError, RuntimeError, NotImplementedError, TypeError) as e:
                raise UnplannableError(f"{type(e).__name__}: {str(e).splitlines()[0]}") from e
        origins = self.provenance.find_all(tensors_in(out))
        if any(isinstance(x, Node) for x in origins):
            raise UnplannableError("it returns a tensor made of parameters alone")
        return self.taps, tuple(origins)

    def run_node(self, n: fx.Node) -> Any:
        self.node, self.interceptor.calls, self.interceptor.opened = n, 0, []
        out = super().run_node(n)
        self._settle(n, out)
        if n.op.startswith("call") and isinstance(out, Tensor):
            self._refuse_stale(n, out)
        return out

    def _settle(self, n: fx.Node, out: Any) -> None:
        """Note whether the node is the same whenever this plan is used. Numbers are: a plan is
        chosen by them, so what is made of numbers alone is the same, too. The model's own tensors
        and views of them may change, but are then read anew."""
        inputs = n.all_input_nodes
        if n.op in ("placeholder", "get_attr"):
            made = not isinstance(out, Tensor) or is_number(out)
            owned = isinstance(out, Tensor) and self.provenance.owns(out)
        else:
            made = all(a in self.made for a in inputs)
            known = all(a in self.fixed for a in inputs) and isinstance(out, Tensor)
            owned = known and any(_view_of(out, self.env[a]) for a in inputs)
        if made:
            self.made.add(n)
        if made or owned:
            self.fixed.add(n)

    def _refuse_stale(self, n: fx.Node, out: Tensor) -> None:
        """Refuse a tensor made of parameters and of something that is not fixed: the tensor is
        computed again when the parameters are scored, and must come out the same."""
        if not isinstance(self.provenance.find(out), Node):
            return
        for a in n.all_input_nodes:
            x = self.env[a]
            own = isinstance(x, Tensor) and isinstance(self.provenance.find(x), Node)
            if not own and a not in self.fixed:
                raise UnplannableError(f"'{n.name}' mixes parameters with '{a.name}'")

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, HigherOrderOperator):
            raise UnplannableError(f"it contains '{target.name()}'")
        return super().call_function(target, args, kwargs)

    def _note(
        self, out: Tensor, call: Call, site: Site, receive: Any, trigger: Any, *extras: Tensor
    ) -> Tensor:
        """Called in the place of ``Tap.apply``: note the tap and what its outlets carry."""
        assert self.node is not None
        out = out.reshape(call.shape)
        device = out.device.type
        with DisableTorchFunction(), torch.autocast(device, enabled=False):
            pairs = site.records(call, torch.empty_like(out))
        raw = not all(isinstance(r, (Dense, Aligned, Pair, Lookup)) for _, r in pairs)
        constants = [x for i, x in enumerate(call.leaves) if i not in site.batched]
        if raw and any(isinstance(x, FakeTensor) for x in constants):
            raise UnplannableError(f"'{call.name}' needs what is known only when it runs")
        sent = [t for _, r in pairs for t in r.tensors()]
        if raw:
            sent = [out, *(call.leaves[i] for i in site.batched)]
        leaves = tuple(None if isinstance(x, FakeTensor) else x for x in call.leaves)
        tap = CompiledTap(
            index=self.interceptor.calls - 1,
            site=site,
            call=call.with_(leaves=leaves),
            opened=tuple(self.interceptor.opened),
            records=tuple((n, r.map(lambda t: torch.empty(0))) for n, r in pairs),
            raw=raw,
            outlets=tuple(Outlet.like(t) for t in sent),
        )
        self.taps.setdefault(self.node.name, []).append(tap)
        return out


def note_output(provenance: Provenance, t: Tensor, origin: Origin) -> None:
    """Note the origin of a tensor that enters or leaves a compiled graph. Constants may be in any
    memory, so only what is made of the batch is found again there when it is recomputed."""
    if follows_rows(origin):
        provenance.note(t, origin)
    else:
        provenance.assume(t, origin)


def is_number(x: Any) -> bool:
    """A plain number that travels as a tensor, as torch.compile(dynamic=True) has it."""
    return isinstance(x, Tensor) and x.ndim == 0 and x.device.type == "cpu" and not x.requires_grad


def fix_numbers(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Write such numbers where the graph asks for them: a plan is for these only."""
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    known = {n: x.item() for n, x in zip(places, inputs, strict=True) if is_number(x)}
    asked = [n for n in gm.graph.nodes if n.op == "call_method" and n.target == "item"]
    numbers = {n: known[n.args[0]] for n in asked if n.args[0] in known}
    for node in gm.graph.nodes if numbers else ():
        node.args = fx.map_arg(node.args, lambda n: numbers.get(n, n))
        node.kwargs = fx.map_arg(node.kwargs, lambda n: numbers.get(n, n))
    for node in numbers:
        gm.graph.erase_node(node)


def _view_of(out: Tensor, t: Any) -> bool:
    """The same memory, seen differently."""
    real = isinstance(t, Tensor) and not isinstance(t, FakeTensor)
    return (
        real
        and not isinstance(out, FakeTensor)
        and out.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
    )

"""The tap in the autograd graph, what it fills, and small questions about torch's tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from inrun.errors import refusal, written_to
from inrun.gradients import Call, Dense, Record
from inrun.gradients.cost import MANY
from inrun.gradients.nodes import Node
from inrun.gradients.records import Aligned, Lookup, wide_type
from inrun.tensors.autocast import Autocast, no_autocast
from inrun.tensors.layout import tensors_in
from inrun.torch_compat import (
    MODULE_ATTRIBUTES,
    SAVES_OUTPUT,
    DisableTorchFunction,
    FakeTensor,
    base_of,
    buffers_of,
    functorch_transforms_active,
    parameters_of,
    unsafe_view,
    version_of,
)


@dataclass
class MicroBatch:
    """The records of one ``with run.batch(ids)``."""

    B: int
    autocast: Autocast | None = None
    records: dict[Node, list[Record]] = field(default_factory=dict)
    fixed: list[tuple[Tensor, int]] = field(default_factory=list)  # not to be written to: versions
    met: bool = False  # did a parameter meet an example?
    claims: dict[str, str] = field(default_factory=dict)  # that a parameter met, and in what
    fired: bool = False  # did a gradient arrive?
    backward: bool = False  # did a backward pass run?
    _by_root: dict[str, list[Node]] | None = field(default=None, repr=False)
    _counted: int = 0

    def add(self, node: Node, record: Record, directions: int = 1) -> int:
        """Keep a record; the bytes that it takes. Materialised gradients of the same operand are
        summed, and for many directions look-ups are added to them: they would be looked up in
        every direction."""
        kept = self.records.setdefault(node, [])
        for i, other in enumerate(kept):
            if not isinstance(other, Dense):
                continue
            if isinstance(record, Dense):
                kept[i] = other + record
                return 0
            if isinstance(record, Lookup) and directions >= MANY and record.joins(other):
                record.add_to(other.grads)
                return 0
        kept.append(record)
        return record.bytes

    def nodes(self, names: Collection[str]) -> Iterator[tuple[Node, list[Record]]]:
        """The nodes that one of these parameters moves, with their records."""
        if any(version_of(t) != version for t, version in self.fixed):
            raise written_to()
        if self._by_root is None or self._counted != len(self.records):
            self._by_root, self._counted = {}, len(self.records)
            for node in self.records:
                for root in node.roots:
                    self._by_root.setdefault(root, []).append(node)
        if len(names) >= len(self._by_root):
            return iter([(n, r) for n, r in self.records.items() if not n.roots.isdisjoint(names)])
        found = dict.fromkeys(n for k in names for n in self._by_root.get(k, ()))
        return iter([(node, self.records[node]) for node in found])

    def energy(self) -> float:
        """Σ_i ‖g_i‖², up to a few per cent: see ``Record.energy``."""
        parts = [r.energy().double() for records in self.records.values() for r in records]
        return float(torch.stack([x.to(parts[0].device) for x in parts]).sum())


@dataclass(eq=False)
class Tapped:
    """What the tap needs when δ arrives.

    ``batched``: the leaves that belong to the examples. ``summed``: the parametric ones whose
    gradient is to be the sum of their per-example gradients. The operation saw them detached; their
    gradients come from the tap. ``detached``: all leaves that it saw so.
    """

    rule: Any
    micro: MicroBatch
    batched: tuple[int, ...]
    detached: tuple[int, ...]
    summed: tuple[int, ...]
    receive: Callable[[Tapped, Call, Tensor, Sequence[int]], Sequence[Tensor | None]]

    def records(self, call: Call, delta: Tensor) -> list[tuple[Node, Record]]:
        try:
            return list(self.rule(call, delta))
        except NotImplementedError as e:
            raise refusal(call, [delta], str(e)) from None

    def lasting(self, call: Call, delta: Tensor, loose: Sequence[int]) -> list[tuple[Node, Record]]:
        """Records that stay as they are whatever is written to the ``loose`` leaves: data and
        masks that are filled anew in place for the next micro-batch."""
        pairs = self.records(call, delta)
        if not loose or all(type(r) in (Dense, Aligned) for _, r in pairs):
            return pairs
        leaves = list(call.leaves)
        for i in loose:
            leaves[i] = leaves[i].clone()
        return self.records(call.with_(leaves=leaves), delta)

    def totals(
        self,
        call: Call,
        pairs: Sequence[tuple[Node, Record]],
        add: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """Σ_i g_i of the summed leaves, in at least float32."""
        found, add = [], add or added
        for leaf in self.summed:
            own = call.nodes[leaf]
            parts = [add(record.rows()) for node, record in pairs if node is own]
            found.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
        return found


def added(rows: Tensor) -> Tensor:
    """Σ_i rows_i."""
    return rows.sum(0, dtype=wide_type(rows.dtype))


class Tap(torch.autograd.Function):
    """The identity; its backward hands δ to the capture.

    Inputs that belong to the examples are saved the way autograd saves its own, so activation
    checkpointing drops and recomputes them like the rest. ``extras`` are inputs that take no part
    in the forward pass; the capture's answer is their gradients.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, call: Call, tap: Tapped, *extras: Tensor) -> Tensor:
        leaves = list(call.leaves)
        ctx.save_for_backward(*[leaves[i] for i in tap.batched])
        ctx.loose = _not_computed(leaves, call.nodes)
        for i in tap.batched:
            leaves[i] = None
        ctx.dtypes = [x.dtype for x in extras]
        ctx.tap, ctx.call, ctx.leaves = tap, call.with_(leaves=()), leaves
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        saved = ctx.saved_tensors  # may be recomputed here
        with DisableTorchFunction():
            return delta, None, None, *_received(ctx, saved, delta)


def _received(ctx: Any, saved: Sequence[Tensor], delta: Tensor) -> list[Tensor | None]:
    """δ has come to a tap: the gradients of its extras."""
    tap, leaves = ctx.tap, ctx.leaves.copy()
    for i, x in zip(tap.batched, saved, strict=True):
        leaves[i] = x.detach()
    call = ctx.call.with_(leaves=leaves)
    refuse_again(call, delta)
    with no_autocast(device_of(delta)):
        whole = delta if delta.shape == call.shape else delta.reshape(call.shape)
        given = tap.receive(tap, call, whole, ctx.loose)
    types = zip(given, ctx.dtypes, strict=True)
    return [g if g is None or g.dtype == t else g.to(t) for g, t in types]


def _not_computed(leaves: Sequence[Any], nodes: Sequence[Any]) -> list[int]:
    """The tensors among the leaves that are data or constants, which anybody may write to."""
    return [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor) and nodes[i] is None and not x.requires_grad
    ]


def refuse_again(call: Call, delta: Tensor) -> None:
    """A backward pass that is to be differentiated itself is refused."""
    if torch.is_grad_enabled():
        why = "its gradient is differentiated again (create_graph=True)"
        raise refusal(call, [delta], why)


def applied(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """``function.apply``, without what it does for torch.func where nobody uses that."""
    bare: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Tensor:
        return function.apply(*args) if functorch_transforms_active() else bare(*args)

    return apply


apply_tap = applied(Tap)


class Known:
    """What is known of tensors, as long as they live. (torch's own weak dictionary is slower.)"""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def get(self, t: Tensor) -> Any:
        entry = self._entries.get(id(t))
        return entry[1] if entry is not None and entry[0]() is t else None

    def __setitem__(self, t: Tensor, info: Any) -> None:
        self._entries[id(t)] = weakref.ref(t), info

    def alive(self) -> Iterator[tuple[Tensor, Any]]:
        for tensor, info in self._entries.values():
            if (t := tensor()) is not None:
                yield t, info


def own_tensors(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of parameters, buffers and whatever else they hold, tensors as plain attributes too:
    to ask each thing what it is would take longer. Short lists and dictionaries are looked into
    (peft keeps the tokens of its prompts in one)."""
    own: set[int] = set()
    for module in modules:
        held = vars(module)
        buffers, params = buffers_of(module).values(), parameters_of(module).values()
        own.update(map(id, params), map(id, buffers), map(id, held.values()))
        for name, x in held.items():
            if type(x) in _HOLDERS and 0 < len(x) <= _SHORT and name not in MODULE_ATTRIBUTES:
                own.update(map(id, tensors_in(x)))
    return own


_HOLDERS, _SHORT = (dict, list, tuple), 64


def put(target: Tensor, index: Any, value: Tensor) -> Tensor:
    """``target[index] = value`` as a function."""
    out = target.clone()
    out[index] = value
    return out


def shape_of(x: Tensor) -> Tensor:
    """A tensor of this shape and type that takes no memory."""
    return x.detach().new_zeros(()).expand(x.shape)


def tapped(
    tap: Callable[..., Tensor], out: Tensor, call: Call, tapping: Tapped, extras: Sequence[Tensor]
) -> Tensor:
    """The output with a tap.

    The tap marks its input as written to. A node that saved its own output needs a copy; what is
    only another shape of a fresh tensor (``F.linear`` of a sequence) is tapped there.
    """
    base = base_of(out)
    if base is not None and _same_numbers(out, base) and not _saves_output(base):
        return unsafe_view(tap(base, call, tapping, *extras), out.shape)
    fresh = base is None and not _saves_output(out)
    return tap(out if fresh else out.clone(), call, tapping, *extras)


def _same_numbers(out: Tensor, base: Tensor) -> bool:
    whole = out.numel() == base.numel() and out.dtype == base.dtype
    return whole and out.is_contiguous() and base.is_contiguous() and base.grad_fn is not None


def _saves_output(out: Tensor) -> bool:
    kind = type(out.grad_fn)
    if kind not in _SAVES_OUTPUT:
        _SAVES_OUTPUT[kind] = any(hasattr(kind, name) for name in SAVES_OUTPUT)
    return _SAVES_OUTPUT[kind]


_SAVES_OUTPUT: dict[type, bool] = {}


def sources(t: Tensor) -> tuple[str, list[Tensor]]:
    """The custom autograd function that a tensor comes from (else its last operation), and the
    leaves of its graph."""
    seen, left, leaves, name = {t.grad_fn}, [t.grad_fn], [], ""
    while left:
        node: Any = left.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        elif isinstance(node, BackwardCFunction):
            name = name or type(node).__name__
        new = {f for f, _ in node.next_functions if f is not None} - seen
        seen |= new
        left += new
    return name or t.grad_fn.name(), leaves  # type: ignore[union-attr]


def kept_by(out: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
    """What autograd keeps under these names for the operation that made the tensor, if all."""
    if not names:
        return ()
    kept = (getattr(out.grad_fn, name, None) for name in names)
    found = tuple(x for x in kept if x is not None)
    return found if len(found) == len(names) else ()


def device_of(t: Tensor) -> str:
    """``t.device.type``, sooner on a host."""
    return "cpu" if t.is_cpu else t.device.type


def storage_key(t: Tensor) -> Any:
    if isinstance(t, FakeTensor):
        return None
    try:
        return t.data_ptr(), tuple(t.shape), t.stride(), t.device
    except RuntimeError:  # a tensor without storage: inside vmap and the like
        return None

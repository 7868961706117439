"""A site: one operation in which nodes meet batched tensors, and the builder of its tap.

Every tap is built here, whether the model runs eagerly (``training="bitwise"`` or ``"fast"``, as a
fused op or not) or compiled:

1. ``Taps.site`` analyses the call before it runs. The form of its records is chosen and the leaves
   are marked: parametric, batched, detached, summed. The memo keeps the site for the next step.
2. ``Site.arguments`` says what to run the operation with, and what to save for its rule.
3. ``Taps.tap`` puts the tap on the output. It holds a ``Call``: the site's, with the saved leaves
   and what holds for this run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.capture.tap import (
    FusedOp,
    Receive,
    apply_tap,
    apply_tap_of_several,
    awaited,
    device_of,
    fused_op,
    run_fused,
    tapped,
)
from inrun.capture.tensor_map import Mark
from inrun.errors import refusal
from inrun.gradients import Call, Dense, Form, OpRule, Record, op_rule, replay
from inrun.gradients.arguments import Spec, present
from inrun.gradients.blocks import Blocks
from inrun.gradients.call import RuleFunction
from inrun.gradients.nodes import Node
from inrun.gradients.records import Aligned, wide_type
from inrun.gradients.use import Linear, linear_in
from inrun.tensors.autocast import Autocast, current
from inrun.tensors.layout import Layout, Spread, in_place, name_of, tensors_in
from inrun.tensors.owners import Owners

Pairs: TypeAlias = Sequence[tuple[Node, Record]]  # a record of each node that took part

_SHAPES_SUFFICE = ("add", "sub", "rsub")  # the derivative needs only the shapes of the operands


@dataclass(frozen=True, eq=False)
class Site:
    """What is the same each time the operation runs. Numbers are indices of leaves.

    ``call`` has everything but the leaves; nodes, layouts, form, and layout and shape of the
    output are there. ``rule`` turns δ into records.
    """

    call: Call
    rule: RuleFunction
    origin: Layout | Owners | None  # of the output
    parametric: tuple[int, ...]
    batched: tuple[int, ...]
    detached: tuple[int, ...]  # the operation sees them detached
    summed: tuple[int, ...]  # of these: the tap gives them Σ_i g_i as their gradient
    shapes_only: bool = False  # save the shapes of the operands alone
    writes: bool = False  # in place, to the first leaf
    kept: tuple[str, ...] = ()  # what the rule uses of autograd's own (``OpRule.kept``)
    fused: FusedOp | None = None  # operation and tap as one autograd node
    several: bool = False  # the rule takes δ of several outputs (``OpRule.several``)
    mark: Mark | None = None  # of the output, once the memo holds the site
    linear: Linear | None = None  # δ is remembered (gradients/use.py)

    def arguments(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The leaves to run the operation with, and those to save for its rule."""
        given, saved = list(leaves), list(leaves)
        for i in self.parametric:
            saved[i] = leaves[i].detach()
            if i in self.detached:
                given[i] = saved[i]
        if self.shapes_only:
            saved = [shape_of(x) if isinstance(x, Tensor) else x for x in saved]
        elif self.writes:
            saved[0] = saved[0].clone()
        return given, saved

    def records(self, call: Call, delta: Any) -> list[tuple[Node, Record]]:
        """What the rule makes of δ."""
        try:
            return list(self.rule(call, delta))
        except NotImplementedError as e:
            raise refusal(call, tensors_in(delta), str(e)) from None

    def lasting(self, call: Call, delta: Any, loose: Sequence[int]) -> list[tuple[Node, Record]]:
        """Records that stay as they are whatever is written to the ``loose`` leaves: data and
        masks that the loop may refill in place for the next micro-batch."""
        pairs = self.records(call, delta)
        if not loose or all(type(r) in (Dense, Aligned) for _, r in pairs):
            return pairs
        if self.several:  # too slow to do again
            memory = {call.leaves[i].untyped_storage().data_ptr() for i in loose}
            return [(node, record.map(partial(_own, memory))) for node, record in pairs]
        leaves = list(call.leaves)
        for i in loose:
            leaves[i] = leaves[i].clone()
        return self.records(call.with_(leaves=leaves), delta)

    def totals(
        self, call: Call, pairs: Pairs, add: Callable[[Tensor], Tensor] | None = None
    ) -> list[Tensor]:
        """Σ_i g_i of the summed leaves, in at least float32."""
        found, add = [], add or _sum_rows
        for leaf in self.summed:
            own = call.nodes[leaf]
            parts = [add(record.rows()) for node, record in pairs if node is own]
            found.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
        return found


def _own(memory: set[int], t: Tensor) -> Tensor:
    """The tensor, copied if it lies in one of these storages."""
    return t.clone() if t.untyped_storage().data_ptr() in memory else t


def _sum_rows(rows: Tensor) -> Tensor:
    """Σ_i rows_i: [B, *W] → [*W]."""
    return rows.sum(0, dtype=wide_type(rows.dtype))


@dataclass(frozen=True)
class Taps:
    """Builds sites and puts their taps into the autograd graph.

    Args:
        form: the form of records, where an operation has two.
        fast: weight gradients are sums of per-example gradients where these are materialised.
        directions: how many the records will be contracted with.
        probe: no parameter receives a gradient.
        blocks: memory for per-example gradients on a CPU.
        trigger: a tensor that requires a gradient; puts taps of a probe into the graph.
        apply: ``Tap.apply``, or what a planner does in its place.
        eager: operations run one by one, so that δ may be remembered; not in a compiled graph.
    """

    form: Form
    fast: bool
    directions: int
    probe: bool
    blocks: Blocks | None
    trigger: Tensor
    apply: Callable[..., Tensor] = apply_tap
    eager: bool = True

    def site(
        self, func: Any, leaves: Sequence[Any], spec: Spec, nodes: Sequence[Node | None],
        batched: Sequence[Layout | Owners | None], rows: int, micro: MicroBatch,
    ) -> Site:  # fmt: skip
        """Analyse a call before it runs. The output's layout and shape are not known yet: its
        positions are taken for those of the first batched leaf."""
        rule, writes = op_rule(func), in_place(func)
        pure = getattr(torch, name_of(func), None) if writes else func
        layouts = _layouts(batched, leaves, rows)
        call = Call(
            pure or func, spec, leaves, tuple(nodes), tuple(layouts), Layout(0), rows, self.form
        )
        for x, t in zip(batched, leaves, strict=True):
            if x is not None:
                n = rows_of(x, t.shape, rows)[1]
                call = call.with_(B=n, positions=micro.positions(x, n, t.device))
                break
        if rule is not None:
            call = rule.settled(call, self.fast, self.directions, self.eager)
        remembers = self.eager and not self.probe and not writes and self.form in ("auto", "ghost")
        linear = linear_in(rule, call, self.directions) if remembers else None
        summed = summed_leaves(rule, call) if self.fast and linear is None else ()
        return Site(
            call=call.with_(leaves=()),
            rule=rule.records if rule else replay,
            origin=None,
            parametric=present(nodes),
            batched=present(layouts),
            detached=present(nodes) if self.probe else summed,
            summed=summed,
            shapes_only=name_of(func) in _SHAPES_SUFFICE,
            writes=writes,
            kept=rule.kept if rule else (),
            fused=fused_op(call, func, summed) if self._fusable(call, summed) else None,
            several=rule is not None and rule.several,
            linear=linear,
        )

    def _fusable(self, call: Call, summed: tuple[int, ...]) -> bool:
        return bool(summed) and not self.probe and call.positions is None

    def written(
        self, func: Any, leaves: Sequence[Any], spec: Spec, nodes: Sequence[Node | None],
        batched: Sequence[Layout | Owners | None], B: int, layout: Layout,
    ) -> Site:  # fmt: skip
        """The site of ``target[index] = parameter``, given as a function of (target, index, value)
        that returns a new target. It has run already: nothing is detached."""
        layouts = _layouts(batched, leaves, B)
        call = Call(func, spec, (), tuple(nodes), tuple(layouts), layout, B, self.form,
                    leaves[0].shape)  # fmt: skip
        return Site(call, replay, layout, present(nodes), present(layouts), (), ())

    def root(self, root: Tensor, node: Node, origin: Owners) -> Site:
        """The site of a loss that is a node: δ is the gradient of the node itself."""
        spec = Spec(1, ())
        call = Call(
            torch.clone, spec, (), (node,), (None,), Layout(0), 1, self.form, tuple(root.shape)
        )
        return Site(call, _itself, origin, (0,), (), (), ())

    def tap(
        self, out: Tensor, site: Site, call: Call, leaves: Sequence[Any], saved: Sequence[Any],
        receive: Receive, packed: bool,
    ) -> tuple[Tensor, Call]:  # fmt: skip
        """Put a tap on the output of an operation that has run; returns it and the call.

        ``packed``: hooks pack what autograd saves, so nothing may be read from its nodes.
        """
        device = device_of(out)
        blocks = self.blocks if device == "cpu" else None
        kept = () if blocks is None or packed else kept_by(out.grad_fn, site.kept)
        call = call.with_(leaves=saved, autocast=current(device), blocks=blocks, kept=kept)
        if site.linear is not None and site.origin is not None and not packed:
            found = awaited(out, call, site, receive)  # packed: activations are not to be kept
            if found is not None:
                return found, call
        extras = () if self.probe else [leaves[i] for i in site.summed]
        trigger = self.trigger if self.probe else None
        return tapped(self.apply, out, call, site, receive, trigger, extras), call

    def tap_several(
        self, outs: tuple[Tensor, ...], site: Site, call: Call, receive: Receive
    ) -> tuple[tuple[Tensor, ...], Call]:
        """Put one tap on all outputs of an operation that has run; ``call`` has what is saved."""
        device = device_of(outs[0])
        blocks = self.blocks if device == "cpu" else None
        call = call.with_(autocast=current(device), blocks=blocks)
        trigger = self.trigger if self.probe else None
        return apply_tap_of_several(call, site, receive, trigger, *outs), call

    def fused(
        self, site: Site, leaves: Sequence[Any], receive: Receive, autocast: Autocast
    ) -> Tensor:
        """Run the operation and its tap as one autograd node."""
        call = site.call.with_(leaves=leaves, autocast=autocast, blocks=self.blocks)
        return run_fused(leaves[0], call, site, receive, *[leaves[i] for i in site.summed])


def _itself(call: Call, delta: Tensor) -> Iterator[tuple[Node, Record]]:
    """The rule of a node's own gradient."""
    yield call.nodes[0], Dense(delta[None])


def summed_leaves(rule: OpRule | None, call: Call) -> tuple[int, ...]:
    """Leaves whose gradients can be sums of per-example gradients that are formed anyway."""
    if rule is None:
        return ()
    arguments = rule.vectors
    if rule.weight is not None and call.form == "materialise":
        arguments = (rule.weight, *arguments)
    found = [leaf for a in arguments if (leaf := call.at(*a)) is not None]
    nodes = [call.nodes[leaf] for leaf in found]
    return tuple(
        leaf
        for leaf, node in zip(found, nodes, strict=True)
        if node is not None and nodes.count(node) == 1
    )


def _layouts(
    batched: Sequence[Layout | Owners | None], leaves: Sequence[Any], rows: int
) -> list[Layout | Spread | None]:
    """Where the positions are in each leaf."""
    given = zip(batched, leaves, strict=True)
    return [None if x is None else rows_of(x, t.shape, rows)[0] for x, t in given]


def rows_of(
    origin: Layout | Owners, shape: Sequence[int], rows: int
) -> tuple[Layout | Spread, int]:
    """Where the positions of a tensor are, and how many: its rows, for the rule of an operation."""
    if isinstance(origin, Layout):
        return origin, rows
    dims = origin.varying()
    n = origin.map.numel()
    if not dims:  # all of it belongs to one
        return Layout(0, shape[0] if len(shape) else 1), 1
    return (Layout(dims[0]) if len(dims) == 1 else Spread(tuple(dims))), n


def has_pure_form(func: Any) -> bool:
    """Is there a version of the operation that writes nothing?"""
    return not in_place(func) or hasattr(torch, name_of(func))


def shape_of(x: Tensor) -> Tensor:
    """A tensor of this shape and type that takes no memory."""
    return x.detach().new_zeros(()).expand(x.shape)


def kept_by(node: Any, names: Sequence[str]) -> tuple[Tensor, ...]:
    """The tensors that a node of the graph saved under these names; () unless all are there."""
    if not names:
        return ()
    found = [x for name in names if (x := getattr(node, name, None)) is not None]
    return tuple(found) if len(found) == len(names) else ()


def put(target: Tensor, index: Any, value: Tensor) -> Tensor:
    """``target[index] = value`` as a function."""
    out = target.clone()
    out[index] = value
    return out

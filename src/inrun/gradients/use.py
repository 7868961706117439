"""A use of parameters of which nothing is computed in the backward pass: its δ is remembered.

Most operations are linear in their parameters θ together (a weight and its bias). Then

    ⟨u, g_i⟩ = Σ over the numbers of example i of δ ⊙ op(x; u),

with op(x; u) the same operation with the direction u in the place of θ. So the backward pass only
keeps δ, a reference, and the contraction is one more run of the operation and a sum of products by
example. Whoever needs the per-example gradients themselves gets them from the operation's rule, as
if it had run in the backward pass (``Use.records``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from inrun.errors import overwritten
from inrun.gradients import cost
from inrun.gradients.arguments import present
from inrun.gradients.call import Affine, Call, OpRule
from inrun.gradients.owned import by_owner
from inrun.gradients.records import Record, wide
from inrun.tensors.autocast import no_autocast
from inrun.tensors.layout import Layout
from inrun.torch_compat import DisableTorchFunction, version_of

Pairs = list[tuple[Any, Record]]  # (node, record)


@dataclass(frozen=True, eq=False)
class Linear:
    """How an operation is linear in its parameters, the same each time it runs. Numbers are indices
    of leaves."""

    leaves: tuple[int, ...]  # linear in these together: parameters, perhaps a frozen bias
    operands: tuple[Any, ...]  # their nodes; None: it is frozen
    nodes: tuple[Any, ...]  # without None
    others: tuple[int, ...]  # tensors that are not parameters
    stacked: Callable[[Call], Tensor] | None  # runs several at once (``OpRule.stacked``)
    kind: Hashable  # equal for operations that differ in their numbers alone
    numbers: int  # of the largest tensor among the leaves
    affine: Affine | None  # where its arguments are, if it is a simple one
    # kept by whoever contracts uses, as long as the operation is known (scoring/uses.py)
    sorted_with: list[Any] = field(default_factory=list, init=False, repr=False)

    @staticmethod
    def of(call: Call, leaves: tuple[int, ...], rule: OpRule | None = None) -> Linear:
        operands = tuple([call.nodes[i] for i in leaves])
        nodes = tuple([n for n in operands if n is not None])
        others = [i for i, x in enumerate(call.leaves) if isinstance(x, Tensor) and i not in leaves]
        parts = [
            (x.shape, x.dtype, i in leaves) if isinstance(x, Tensor) else repr(x)
            for i, x in enumerate(call.leaves)
        ]
        kind = call.func, call.spec.positional, call.spec.keywords, call.B, *parts
        numbers = max(call.leaves[i].numel() for i in (*leaves, *others))
        stacked, affine = (None, None) if rule is None else (rule.stacked, rule.affine)
        simple = None if affine is None else affine(call)
        return Linear(leaves, operands, nodes, tuple(others), stacked, kind, numbers, simple)

    def with_nodes(self, other: Callable[[Any], Any]) -> Linear:
        """The same with ``other(node)`` in the place of each node."""
        operands = tuple([None if n is None else other(n) for n in self.operands])
        return replace(self, operands=operands, nodes=tuple(map(other, self.nodes)))

    def versions(self, leaves: Sequence[Any]) -> list[int]:
        """How often each input was written to."""
        return [version_of(leaves[i]) for i in self.others]


class Use:
    """One operation with parameters, and δ = ∂L/∂(output).

    Args:
        call: with its leaves, or what makes it when it is asked for: most uses are contracted
            from their inputs alone.
        inputs: the leaves that are no parameters (``Linear.others``).
        delta: of the output's shape.
        versions: of the inputs, when the operation ran.
        rule: makes records of δ.
        by_rows: are rows examples, and those of the output's shape one after the other?
    """

    __slots__ = (
        "B", "_call", "by_rows", "delta", "dtype", "inputs", "linear", "nodes", "rule", "versions",
    )  # fmt: skip

    def __init__(
        self, call: Call | Callable[[], Call], linear: Linear, B: int, inputs: Sequence[Tensor],
        delta: Tensor, versions: list[int], rule: Callable[[Call, Tensor], Pairs], by_rows: bool,
    ) -> None:  # fmt: skip
        self._call, self.linear, self.delta, self.rule = call, linear, delta, rule
        self.inputs, self.by_rows = inputs, by_rows
        self.versions = [version_of(delta), *versions]
        self.B, self.nodes, dtype = B, linear.nodes, delta.dtype
        # in which the operation runs again: the range of float16 is too small
        self.dtype = torch.float32 if dtype == torch.float16 else dtype

    @staticmethod
    def of(
        call: Call, linear: Linear, delta: Tensor, versions: list[int],
        rule: Callable[[Call, Tensor], Pairs],
    ) -> Use:  # fmt: skip
        inputs = [call.leaves[i] for i in linear.others]
        return Use(call, linear, call.B, inputs, delta, versions, rule, by_rows(call))

    @property
    def call(self) -> Call:
        if not isinstance(self._call, Call):
            with torch.no_grad(), DisableTorchFunction():
                self._call = self._call()
        return self._call

    def with_nodes(self, other: Callable[[Any], Any]) -> Use:
        """The same use with ``other(node)`` in the place of each node."""
        call = self.call.with_(nodes=tuple(map(other, self.call.nodes)))
        return Use.of(call, self.linear.with_nodes(other), self.delta, self.versions[1:], self.rule)

    @property
    def origin(self) -> object:
        """The same in every step."""
        return self.linear

    @property
    def affine(self) -> Affine | None:
        return self.linear.affine

    @property
    def x(self) -> Tensor:
        """The input of an affine operation,"""
        assert self.linear.affine is not None
        return self.inputs[self.linear.others.index(self.linear.affine.x)]

    @property
    def operands(self) -> tuple[Any, Any]:
        """and the nodes of its weight and bias; None where there is none or it is fixed."""
        a, nodes = self.linear.affine, self.call.nodes
        assert a is not None
        return nodes[a.weight], None if a.bias is None else nodes[a.bias]

    @property
    def bytes(self) -> int:
        return self.delta.nbytes + sum([x.nbytes for x in self.inputs])

    def check(self) -> None:
        """Refuse tensors that no longer hold what they held in the forward and backward pass."""
        if [version_of(self.delta), *map(version_of, self.inputs)] != self.versions:
            raise overwritten(self.call)

    @property
    def kind(self) -> Hashable:
        """Equal for uses that ``stacked`` runs at once; None: it runs alone."""
        linear, delta = self.linear, self.delta
        if linear.stacked is None:
            return None
        return linear.kind, delta.shape, delta.dtype, self.by_rows

    @property
    def numbers(self) -> int:
        """Of its largest tensor."""
        return max(self.delta.numel(), self.linear.numbers)

    def along(self, u: Mapping[Any, Tensor]) -> Tensor:
        """op(x; u) [*shape of the output]; ``u`` has directions of some nodes in ``dtype``, the
        others do not move."""
        call, leaves = self.call, self._leaves(u)
        args, kwargs = (leaves, {}) if not call.spec.keywords else call.spec.unflatten(leaves)
        out: Tensor = call.func(*args, **kwargs)
        return out

    @staticmethod
    def stacked(uses: Sequence[Use], u: Mapping[Any, Tensor]) -> Tensor:
        """The same for several uses of one kind, in one run of the operation: [n, *shape]."""
        linear, call, dtype = uses[0].linear, uses[0].call, uses[0].dtype
        given: list[Tensor] = []
        for k, i in enumerate(linear.leaves):
            each = [u.get(use.linear.operands[k]) for use in uses]
            given.append(torch.stack([_direction(call.leaves[i], x, dtype) for x in each]))
        return Use.run(uses, given)

    @staticmethod
    def run(uses: Sequence[Use], given: Sequence[Tensor]) -> Tensor:
        """The same; ``given`` are the directions, stacked, for each leaf that may move."""
        linear, call, dtype = uses[0].linear, uses[0].call, uses[0].dtype
        together = list(call.leaves)
        for i, x in zip(linear.leaves, given, strict=True):
            together[i] = x
        for k, i in enumerate(linear.others):
            together[i] = torch.stack([_in_type(use.inputs[k], dtype) for use in uses])
        assert linear.stacked is not None
        return linear.stacked(call.with_(leaves=together))

    def _leaves(self, u: Mapping[Any, Tensor]) -> list[Any]:
        """The leaves with directions in the place of parameters."""
        linear, dtype, call = self.linear, self.dtype, self.call
        leaves = list(call.leaves)
        for i in linear.leaves:
            leaves[i] = _direction(leaves[i], u.get(call.nodes[i]), dtype)
        for i in linear.others:
            leaves[i] = _in_type(leaves[i], dtype)
        return leaves

    def in_rows(self) -> bool:
        """Are the numbers of an example one after the other, and rows examples?"""
        return self.by_rows and self.delta.is_contiguous()

    def dots(self, y: Tensor) -> Tensor:
        """⟨δ_i, y_i⟩ for each row i of the records [rows], in at least float32."""
        call = self.call
        rows = (wide(call.split(y)) * wide(call.split(self.delta))).reshape(call.B, -1).sum(1)
        return rows if call.positions is None else call.positions.added(rows)

    def records(self) -> Pairs:
        """A record of each node, by the operation's rule."""
        self.check()
        with no_autocast(self.delta.device.type):
            pairs, positions = self.rule(self.call, self.delta), self.call.positions
        if positions is None:
            return pairs
        return [(node, by_owner(record, positions, False)) for node, record in pairs]


def by_rows(call: Call) -> bool:
    """Are rows examples, and those of the output's shape one after the other?"""
    if call.positions is not None or not isinstance(call.layout, Layout):
        return False
    return call.layout.dim == 0 and call.layout.outer == 1


def _direction(leaf: Tensor, u: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What is put in the place of a parameter: 0 if it does not move."""
    return torch.zeros_like(leaf, dtype=dtype) if u is None else u


def _in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An input in the type in which the operation runs again."""
    return x if x.dtype == dtype or not x.is_floating_point() else x.to(dtype)


def linear_in(rule: OpRule | None, call: Call, directions: int) -> Linear | None:
    """How a call is linear in its parameters, if it is better to remember its δ than to make
    records in the backward pass; else None.

    The cost model has decided between the forms of a product (``call.form``). Elsewhere records are
    small and δ is not: it is kept where it is small enough, and few directions make the operation
    run again.
    """
    if rule is None or rule.linear is None or call.form == "materialise":
        return None
    if rule.sizes is not None and rule.sizes(call) is None:  # replayed
        return None
    leaves, nodes = rule.linear(call), [n for n in call.nodes if n is not None]
    complex_ = any(isinstance(x, Tensor) and x.is_complex() for x in call.leaves)
    if call.spec.nested is not None or complex_ or len(set(nodes)) < len(nodes):
        return None
    if not leaves or not set(present(call.nodes)) <= set(leaves):
        return None
    if rule.weight is not None and call.node(*rule.weight) is None:  # a bias alone
        return None
    if call.form == "auto":
        kept = 2 * sum(call.leaves[i].nbytes for i in present(call.layouts))
        if not cost.remember(kept, directions):
            return None
    return Linear.of(call, leaves, rule)

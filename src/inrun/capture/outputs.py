"""Origins of the outputs of operations, from those of their inputs.

``Outputs.derive`` is the one place where an operation's output gets its layout: it asks the layout
rules of tensors/ and adds what these do not know: pairs, claims and a batch of one example.

*Pairs* are similarities of every example with every other, [B, B]: the logits of CLIP and SigLIP.
Each number is made of two examples. Where a parameter meets such numbers (a temperature, a bias),
its gradient through the number (i, j) is credited to i and to j, half each, so that the sum over
the examples is the whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from inrun.capture.provenance import (
    CONSTANT,
    OUTSIDE,
    PAIRS,
    Origin,
    Provenance,
    any_batched,
    follows_rows,
    has_rows,
)
from inrun.capture.site import shape_of
from inrun.errors import random_parameter, unseen_function
from inrun.gradients.arguments import flatten
from inrun.gradients.nodes import Node
from inrun.tensors.follow import follow
from inrun.tensors.indexing import written as written_layout
from inrun.tensors.layout import MIXED, Kind, Layout, Lost, in_place, lost, name_of, tensors_in
from inrun.tensors.moving import SUMS_PRODUCTS, Move, written
from inrun.tensors.moving import moved as apply_move
from inrun.tensors.owners import Owners, UnknownOwnerError, settled
from inrun.torch_compat import DisableTorchFunction, FakeTensor, base_of, tree_flatten

_COLLATED = ("stack", "cat", "concat", "concatenate", "vstack", "pad_sequence")
_RANDOM = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
           "feature_alpha_dropout", "bernoulli", "rrelu", "gumbel_softmax")  # fmt: skip
_DRAWN = frozenset(("randn", "rand", "randint", "normal", "randn_like", "rand_like", "randint_like",
                    "uniform", "exponential", "bernoulli", "multinomial"))  # fmt: skip
# Operations that leave a pair's number where it is, or at (j, i).
_PAIRS_STAY = frozenset((
    "add", "sub", "rsub", "subtract", "mul", "multiply", "div", "rdiv", "divide", "true_divide",
    "pow", "neg", "exp", "log", "tanh", "sigmoid", "logsigmoid", "clamp", "clip", "clone",
    "contiguous", "to", "type_as", "float", "double", "half", "bfloat16", "t", "T", "mT", "where",
    "masked_fill", "transpose",
))  # fmt: skip


class Outputs:
    """Notes in the provenance what operations make."""

    def __init__(self, provenance: Provenance) -> None:
        self.provenance = provenance
        self.by_content = False  # did what a tensor holds decide about the last output?
        self.doubts: list[tuple[str, Tensor]] = []  # flags on a device: owners did not agree in ...

    # Of operations on the batch

    def derive(
        self, func: Any, args: Any, kwargs: Any, out: Tensor, result: Any
    ) -> Layout | Owners | Kind:
        """Where the examples are in one output of an operation on the batch; ``result`` holds all
        of them."""
        B = self.provenance.B
        if out.is_nested:
            return lost("a nested tensor")
        if B == 1:  # all that is made of the batch belongs to its only example
            return Layout(0, out.shape[0] if out.ndim else 1)
        tensors = tensors_in(args, kwargs)
        origins = self.provenance.find_all(tensors)
        found = next((x for x in origins if type(x) is Lost), None)
        if self.of_pairs(func, args, kwargs, out):
            return PAIRS
        if found is None and PAIRS in origins:
            found = lost(name_of(func))
        if found is not None:
            return found
        find = self.provenance.layout
        moved = any(type(x) is Owners and not x.data for x in origins)
        if not moved and not any(find(t) is not None for t in tensors):
            return MIXED
        if not moved:
            layout = follow(func, args, kwargs, out, find, B)
            if isinstance(layout, Layout):
                return self._proved(layout)
            if not isinstance(layout, Lost):
                return layout
            if name_of(func) in SUMS_PRODUCTS and self.provenance.slots is None:
                return layout
        return self._moved(Move(func, args, kwargs, result, out, *self._ways(func)))

    def _ways(self, func: Any) -> tuple[Any, Any, Any, Tensor | None]:
        """How a ``Move`` finds owner maps and constants, where it leaves doubts, and whose rows
        are."""

        def constant(t: Tensor) -> bool:
            return self.provenance.find(t) is CONSTANT

        def doubt(flag: Tensor) -> None:
            self.doubts.append((name_of(func), flag))

        return self.provenance.owners, constant, doubt, self.provenance.owner

    def _moved(self, move: Move) -> Layout | Owners | Kind:
        """The same by owner maps: rows have moved, or move here."""
        by = name_of(move.func)
        if isinstance(move.out, FakeTensor):  # being planned: maps need data
            return lost(by)
        try:
            with DisableTorchFunction(), torch.no_grad():
                found = written(move, *move.args) if by == "setitem" else apply_move(move)
        except (UnknownOwnerError, ValueError, IndexError, TypeError, RuntimeError):
            return lost(by)
        finally:
            self.by_content = self.by_content or move.content
        if isinstance(found, Kind):
            return found
        rows = [x for x in self.provenance.find_all(move.asked) if has_rows(x)]
        static = not move.content and all(type(x) is Layout or x.static for x in rows)  # type: ignore[union-attr]
        claims = frozenset[str]().union(*(x.claims for x in rows))
        if move.beside and not all(x.claims for x in rows):
            self.provenance.claims.prove(claims)
        claims = frozenset(self.provenance.claims.unproven(claims))
        return settled(Owners(found, static, claims=claims), self.provenance.B)

    def _proved(self, found: Layout) -> Layout:
        """The layout, after noting which claims the operation has proven."""
        if found.proves:
            self.provenance.claims.prove(found.proves)
        if len(found.claims) > 1:
            self.provenance.claims.link(found.claims)
        return replace(found, proves=frozenset()) if found.proves else found

    def note_batched(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note the outputs of an operation on the batch."""
        name, self.by_content = name_of(func), False
        if name == "setitem":
            self._note_written(func, *args)
            return
        for t in tensors_in(out):
            if name.startswith("new_") or self._only_converted(name, args):
                self.provenance.note(t, CONSTANT)
                continue
            found = self.derive(func, args, kwargs, t, out)
            if (args and t is args[0]) or t is kwargs.get("out"):
                self._note_in_place(t, found)
            self.provenance.note(t, found)

    def _only_converted(self, name: str, args: Any) -> bool:
        """``positions.type_as(x)``: a constant stays one."""
        return (
            name in ("to", "type_as") and bool(args) and self.provenance.find(args[0]) is CONSTANT
        )

    def _note_written(self, func: Any, target: Tensor, index: Any, value: Any) -> None:
        """``target[index] = value``: a target without examples takes the value's."""
        provenance = self.provenance
        own = provenance.find(target)
        origin = provenance.find(value) if isinstance(value, Tensor) else CONSTANT
        if provenance.B == 1:
            provenance.note(target, Layout(0, target.shape[0] if target.ndim else 1))
            return
        indices = provenance.find_all(tensors_in(index))
        found: Layout | Owners | Kind = lost("setitem")
        if isinstance(own, Lost) or isinstance(origin, Lost):
            found = own if isinstance(own, Lost) else origin  # type: ignore[assignment]
        elif (layout := provenance.layout(value)) is not None:
            before = provenance.layout(target)
            if before is not None or own is CONSTANT or type(own) is Layout:
                made = written_layout(target, index, value, layout, before, provenance.B)
                found = found if made is None else self._proved(made)
        elif has_rows(own) and not own.data and not has_rows(origin):
            return  # the same for all examples, or no example's: they stay where they are
        elif not has_rows(origin) and not any(type(x) is Lost or has_rows(x) for x in indices):
            found = MIXED
        if isinstance(found, Lost) and found.by == "setitem" and has_rows(origin):
            move = Move(func, (target, index, value), {}, target, target, *self._ways(func))
            found = self._moved(move)
        self._note_in_place(target, found)
        provenance.note(target, found)

    def _note_in_place(self, t: Tensor, found: Origin) -> None:
        """A tensor is written to: others that share its memory now hold something else, too. What
        is the same for all examples moves none."""
        same = found == self.provenance.find(t) and not isinstance(found, Lost)
        if same or isinstance(t, FakeTensor):
            return
        memory = t.untyped_storage().data_ptr()
        for other, origin in list(self.provenance.alive()):
            if other is t or type(origin) is Node or _begin_of(other) != memory:
                continue
            if found is not MIXED:
                slice_of = origin is CONSTANT and other is base_of(t) and _slices(t, other, found)
                lost_rows = lost("an operation that writes in place")
                self.provenance.assume(other, found if slice_of else lost_rows)
            elif origin is CONSTANT:
                self.provenance.assume(other, MIXED)

    # Of operations on data that the model has not received, or on nothing that matters

    def note_data(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note outputs made of the loop's data: by the layout rules, else by the shape."""
        provenance = self.provenance
        for t in tensors_in(out):
            found: Layout | Owners | Kind | None = None
            if provenance.slots is None and (
                name_of(func) not in _COLLATED or provenance.as_data(t) is OUTSIDE
            ):
                found = follow(func, args, kwargs, t, provenance.data_layout, provenance.B)
            if not isinstance(found, Layout):
                found = provenance.as_data(t)
            provenance.assume(t, replace(found, data=True) if has_rows(found) else found)

    def note_constant(self, func: Any, tensors: Sequence[Tensor], out: Any) -> bool:
        """Note the outputs of an operation on constants; returns whether they are random."""
        drawn = self.provenance.drawn
        random = name_of(func) in _DRAWN or any(drawn.get(t) for t in tensors)
        for t in tensors_in(out):
            self.provenance.note(t, CONSTANT)
            if random:
                drawn[t] = True
        self.provenance.revive(tensors)
        return random

    # Of operations on parameters alone

    def before(self, func: Any, args: Any) -> Any:
        """The arguments of an operation on parameters as they are before it writes to the first."""
        if not in_place(func) or not torch.is_grad_enabled():
            return args
        if type(self.provenance.find(args[0])) is Node:
            return args
        target = args[0].detach().clone()
        self.provenance.assume(target, self.provenance.find(args[0]))
        return (target, *args[1:])

    def note_parametric(
        self, func: Any, args: Any, kwargs: Any, out: Any, planning: bool = False
    ) -> None:
        """Note outputs made of parameters alone: each is a node.

        ``planning``: the tensors have no data, and a compiled graph makes such outputs from the
        buffers of the moment (``MicroBatch.fixed``), so operands are kept as they are.
        """
        name = name_of(func)
        if name in _RANDOM and out is not args[0] and _is_random(args, kwargs):
            roots = [r for t in tensors_in(args[0]) for r in _roots(self.provenance.find(t))]
            raise random_parameter(name, roots)
        leaves, spec = flatten(args, kwargs)
        same, writes = [id(x) for x in leaves], in_place(func) and torch.is_grad_enabled()
        made: list[Any] | None = None
        operands = self.provenance.find_all(x for x in leaves if isinstance(x, Tensor))
        outside = any(x is OUTSIDE or (has_rows(x) and x.data) for x in operands)
        drawn = self.provenance.drawn
        outside = outside or any(drawn.get(x) for x in leaves if isinstance(x, Tensor))
        number = _with_number([x for x in leaves if isinstance(x, Tensor)], operands)
        for i, t in enumerate(tree_flatten(out)[0]):
            if not isinstance(t, Tensor) or (id(t) in same and not writes):
                continue  # ``W.to(same type)`` is W, and so is ``W.clamp_(...)`` under no_grad
            if not t.requires_grad:  # what is in this memory is a parameter still
                self.provenance.assume(t, CONSTANT)
                continue
            made = made or [self._kept(x, planning) for x in leaves]
            index = None if isinstance(out, Tensor) else i
            pure = getattr(torch, name, func) if writes else func
            node = Node.derived(pure, made, spec, index, name, t.device.type, outside, number)
            self.provenance.note(t, node)

    def _kept(self, x: Any, planning: bool) -> Any:
        """An operand of a node: its own node, or the tensor as it is now, which may be written to
        before the parameters are scored."""
        origin = self.provenance.find(x) if isinstance(x, Tensor) else None
        if type(origin) is Node:
            return origin
        if origin is None or planning:
            return x
        if x.ndim and follows_rows(origin) and origin is not MIXED:  # asked for its type or shape
            return shape_of(x)
        return x.detach().clone()

    def refuse_unseen(self, tensors: Sequence[Tensor], origins: Sequence[Origin]) -> None:
        """A tensor that seems constant and has a gradient: a custom autograd function made it."""
        nodes = self.provenance.nodes
        for t, origin in zip(tensors, origins, strict=True):
            if origin is CONSTANT and t.grad_fn is not None:
                function, leaves = _sources(t)
                names = [nodes[id(p)].name for p in leaves if id(p) in nodes]
                if names:
                    raise unseen_function(function, names)

    # Pairs

    def of_pairs(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> bool:
        """Is the output one of pairs: made of examples with examples, or of pairs?"""
        if out.is_nested:
            return False
        origins = self.provenance.find_all(tensors_in(args, kwargs))
        if PAIRS not in origins:
            return self._makes_pairs(func, args, out)
        others = any(follows_rows(x) for x in origins if x is not PAIRS)
        square = out.ndim == 2 and out.shape[0] == out.shape[1]
        return not others and square and name_of(func) in _PAIRS_STAY

    def _makes_pairs(self, func: Any, args: Any, out: Tensor) -> bool:
        """Is this a product of examples with examples: x [B, D] and y [D, B] (linear: [B, D])?"""
        B, operands = self.provenance.B, tensors_in(args)
        if B == 1 or out.shape != (B, B) or len(operands) != 2 or operands[0].ndim != 2:
            return False
        x, y = (self.provenance.layout(t) for t in operands)
        if x is None or y is None or any((z.outer, z.inner) != (1, 1) for z in (x, y)):
            return False
        name = name_of(func)
        if name == "einsum":
            first, second, result = _letters(args[0])
            if max(x.dim, y.dim) >= min(len(first), len(second)):
                return False
            pair = {first[x.dim], second[y.dim]}
            return len(pair) == 2 and pair == set(result)
        columns = {"matmul": 1, "mm": 1, "linear": 0}.get(name)
        return columns is not None and (x.dim, y.dim) == (0, columns)


def _letters(equation: Any) -> tuple[str, str, str]:
    """The indices of two operands and of the result of an einsum; empty if they are not given."""
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return "", "", ""
    inputs, result = equation.replace(" ", "").split("->")
    first, _, second = inputs.partition(",")
    return first, second, result


def _slices(t: Tensor, whole: Tensor, found: Origin) -> bool:
    """Is ``t`` a slice of a tensor along dimensions that do not tell the examples apart? Then what
    is written to it has the same places in the whole."""
    if not has_rows(found) or t.ndim != whole.ndim or t.stride() != whole.stride():
        return False
    dims = [found.dim] if isinstance(found, Layout) else found.varying()
    return all(t.shape[d] == whole.shape[d] for d in dims)


def _with_number(tensors: Sequence[Tensor], origins: Sequence[Origin]) -> bool:
    """Is one of them a number made of the batch: a loss?"""
    pairs = zip(tensors, origins, strict=True)
    return any(t.is_floating_point() and any_batched([x]) for t, x in pairs)


def _roots(origin: Origin) -> frozenset[str]:
    return origin.roots if isinstance(origin, Node) else frozenset()


def _is_random(args: Any, kwargs: Any) -> bool:
    """``dropout(x, p, training)`` does nothing when it is not training or p is 0."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and p != 0


def _begin_of(t: Tensor) -> int:
    """Where its memory begins; 0 where it has none of its own."""
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # inside vmap, sparse tensors
        return 0


def _sources(t: Tensor) -> tuple[str, list[Tensor]]:
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

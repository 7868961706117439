"""One operation in which a watched parameter took part, and the registry of rules for them.

A rule is a pure function ``rule(call, delta)`` that yields ``(node, record)`` pairs: for each
parametric operand of the call, its per-example gradients given δ = ∂L/∂(output). ``node`` says
which operand it is (see capture.py); records are in records.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from inrun.gradients import cost
from inrun.gradients.again import run_again
from inrun.gradients.arguments import Spec
from inrun.gradients.blocks import Blocks
from inrun.gradients.owned import Positions
from inrun.gradients.records import Aligned, Dense, Record, Replay, wide_type
from inrun.tensors.autocast import Autocast, as_it_was
from inrun.tensors.layout import Layout, Spread, name_of, to_rows

# "grouped": for gradients of groups of examples. Those of a product come as cheap from its ghost
# form; elsewhere the smaller form.
Form = Literal["auto", "ghost", "materialise", "grouped"]


@dataclass(frozen=True)
class Call:
    """``func(*args, **kwargs)`` with its arguments flattened into leaves.

    ``nodes`` marks the leaves that are parametric operands, ``layouts`` the batched ones;
    ``layout`` and ``shape`` are the output's. ``form`` is what was asked for until ``settled``.
    With ``positions`` the B rows are positions that belong to examples (owned.py).
    """

    func: Callable[..., Any]
    spec: Spec
    leaves: Sequence[Any]
    nodes: tuple[Any, ...]
    layouts: tuple[Layout | Spread | None, ...]
    layout: Layout | Spread
    B: int
    form: Form = "auto"
    shape: tuple[int, ...] = ()
    autocast: Autocast | None = None  # as it ran
    blocks: Blocks | None = None  # memory for per-example gradients
    kept: tuple[Tensor, ...] = ()  # what the rule asked for of autograd's own (``OpRule.kept``)
    positions: Positions | None = None  # whose the B rows are, where these are not the examples
    part: int = 0  # δ is the gradient of this one of several outputs

    def with_(self, **changed: Any) -> Call:
        """The same with some fields changed (``dataclasses.replace``, ten times as fast)."""
        new = object.__new__(Call)
        new.__dict__.update(self.__dict__)
        new.__dict__.update(changed)
        return new

    @property
    def name(self) -> str:
        return name_of(self.func)

    def at(self, position: int, keyword: str) -> int | None:
        """The leaf of an argument given by position or keyword; None if it was not given."""
        argument = self.spec.argument(position, keyword)
        if argument is None or self.spec.nested is None:
            return argument
        found = self.spec.place(argument)
        return found if isinstance(found, int) else None

    def places(self, position: int, keyword: str) -> list[int]:
        """The leaves of an argument that is a list."""
        argument = self.spec.argument(position, keyword)
        assert argument is not None
        return list(self.spec.place(argument))

    def channels(self, full: Tensor) -> Tensor:
        """[examples, C, …] summed to [B, C]; the examples may also be behind the channels."""
        if isinstance(self.layout, Spread):
            raise NotImplementedError("its examples lie in several dimensions")
        before = self.layout.outer * self.layout.inner if self.layout.dim == 0 else len(full)
        rows = self.split(full).reshape(self.B, before, full.shape[1], -1)
        return rows.sum((1, 3), dtype=wide_type(full.dtype))

    def value(self, position: int, keyword: str, default: Any = None) -> Any:
        """The value of an argument, whole (a list stays a list)."""
        argument = self.spec.argument(position, keyword)
        return default if argument is None else self.spec.value(argument, self.leaves)

    def node(self, position: int, keyword: str) -> Any:
        """The parametric operand at this argument, or None."""
        leaf = self.at(position, keyword)
        return None if leaf is None else self.nodes[leaf]

    def rows(self, position: int, keyword: str) -> Tensor:
        """A batched argument with the examples in front."""
        leaf = self.at(position, keyword)
        assert leaf is not None
        layout = self.layouts[leaf]
        assert layout is not None
        return to_rows(self.leaves[leaf], layout, self.B)

    def split(self, out: Tensor) -> Tensor:
        """The output, or a tensor of its shape, with the examples in front."""
        return to_rows(out, self.layout, self.B)

    def tokens(self, x: Tensor) -> Tensor:
        """[B, …, N] as [B, T, N]."""
        return x if x.ndim == 3 else x.reshape(self.B, -1, x.shape[-1])

    def batched(self, position: int, keyword: str) -> bool:
        leaf = self.at(position, keyword)
        return leaf is not None and self.layouts[leaf] is not None

    def run(self, leaf: int, value: Tensor) -> Tensor:
        """The operation again, with another value for one leaf."""
        leaves = list(self.leaves)
        leaves[leaf] = value
        args, kwargs = self.spec.unflatten(leaves)
        with as_it_was(self.autocast or (value.device.type, False, torch.bfloat16)):
            return run_again(self.func, args, kwargs)


RuleFunction = Callable[[Call, Tensor], Iterator[tuple[Any, Record]]]
Place = Callable[[Call], "tuple[Layout | Spread | None, int]"]


class Affine(NamedTuple):
    """An operation y = f(x) W + b over the last dimension of x [..., I], for kernels that compute
    many at once (scoring/uses_kernel.py). x, ``weight`` and ``bias`` are leaves.

    A matrix W is [O, I], or [I, O] if ``transposed``. A vector W [I] multiplies number by number;
    ``norm`` says what f does before: nothing, or it normalises as "layer_norm" or "rms_norm".
    """

    x: int
    weight: int
    bias: int | None = None
    transposed: bool = False
    matrix: bool = True
    norm: str = ""
    eps: float = 0.0


class Sizes(NamedTuple):
    """Numbers kept per example in either form; for a product of matrices its T, I and O.

    ``again``: in ghost form the operation runs once more for each direction, so that more numbers
    are worth keeping for many of them.
    """

    ghost: int
    dense: int
    product: tuple[int, int, int] | None = None
    again: bool = False


@dataclass(frozen=True)
class OpRule:
    """A rule, and for operations with a weight matrix where it is and when to materialise it.

    ``weight`` is the argument whose gradient is most of the backward pass: with
    ``training="fast"`` it is formed as the sum of the per-example gradients where these are
    materialised; that of ``vectors``, which always are, in any case.

    ``linear`` gives the leaves in which the operation is linear together (a weight and its bias),
    () where it is not or cannot be run again: then δ may be all that is kept (use.py).

    ``stacked`` runs several calls at once that differ in their numbers alone: the tensors of the
    call that it is given have one more dimension in front. ``affine`` says where the arguments of a
    simple operation are, None if the call is not that simple.

    ``kept`` names what autograd keeps for its own backward pass and the rule can use.

    ``several``: an operation that returns a tuple gives its rule a tuple, δ of each output (None
    where the loss does not depend on one). Without it such an operation is refused.

    ``place`` is for functions whose output may be the same for all examples (a loss) or several
    tensors. It gives the layout of the argument that holds the examples, which is all that the rule
    needs (None: they cannot be told apart there), and how many of the outputs have a gradient.
    """

    records: RuleFunction
    weight: tuple[int, str] | None = None
    vectors: tuple[tuple[int, str], ...] = ()
    sizes: Callable[[Call], Sizes | None] | None = None
    kept: tuple[str, ...] = ()
    several: bool = False
    place: Place | None = None
    linear: Callable[[Call], tuple[int, ...]] | None = None
    stacked: Callable[[Call], Tensor] | None = None
    affine: Callable[[Call], Affine | None] | None = None

    def settled(self, call: Call, fast: bool, directions: int, eager: bool = True) -> Call:
        """The call with its form chosen, where that was left to us.

        For products of matrices by the cost model, elsewhere the smaller one (but for ``again``).
        ``sizes`` is None for a call of a kind that is replayed. Once, before the operation runs: in
        the backward pass autocast is off, and the choice must be the same.
        """
        if self.sizes is None or call.form == "ghost":
            return call
        sizes = self.sizes(call)
        if sizes is None:
            return call.with_(form="ghost")
        if call.form == "materialise":
            return call
        dense = sizes.dense <= sizes.ghost * (min(directions, cost.MANY) if sizes.again else 1)
        if call.form == "grouped":
            dense = dense and sizes.product is None
        elif sizes.product is not None and self.weight is not None:
            W, (T, n_in, n_out) = call.value(*self.weight), sizes.product
            rows = call.B if call.positions is None else call.positions.rows
            T = call.B * T // rows
            layer = cost.Layer(rows, T, n_in, n_out, *operand(W), directions, eager)
            dense = cost.materialise(layer, fast)
        return call.with_(form="materialise" if dense else "ghost")


_OP_RULES: dict[Any, OpRule] = {}


def register_op(
    *funcs: Any,
    weight: tuple[int, str] | None = None,
    vectors: tuple[tuple[int, str], ...] = (),
    sizes: Callable[[Call], Sizes | None] | None = None,
    kept: tuple[str, ...] = (),
    several: bool = False,
    linear: Callable[[Call], tuple[int, ...]] | None = None,
    stacked: Callable[[Call], Tensor] | None = None,
    affine: Callable[[Call], Affine | None] | None = None,
) -> Callable[[RuleFunction], RuleFunction]:
    """Decorator: the function below gives the records of these operations.

    ``funcs`` are functions, or names that stand for all spellings of an operation; the rest are
    the fields of :class:`OpRule`.
    """

    def decorate(rule: RuleFunction) -> RuleFunction:
        for func in funcs:
            _OP_RULES[func] = OpRule(
                rule, weight, vectors, sizes, kept, several, linear=linear, stacked=stacked,
                affine=affine,
            )  # fmt: skip
        return rule

    return decorate


def together(*arguments: tuple[int, str]) -> Callable[[Call], tuple[int, ...]]:
    """For ``OpRule.linear``: the leaves of these arguments, where they are tensors."""

    def leaves(call: Call) -> tuple[int, ...]:
        found = [leaf for a in arguments if (leaf := call.at(*a)) is not None]
        return tuple(i for i in found if isinstance(call.leaves[i], Tensor))

    return leaves


def register_rule(func: Any, rule: OpRule) -> None:
    """The same as a function, for a rule that is there already."""
    _OP_RULES[func] = rule


def op_rule(func: Callable[..., Any]) -> OpRule | None:
    """The rule of an operation: its own, or that of its name."""
    return _OP_RULES.get(func) or _OP_RULES.get(name_of(func))


def operand(W: Tensor) -> tuple[torch.dtype, str]:
    """The type that the operation computes in, and the kind of device."""
    device = W.device.type
    on = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else W.dtype, device


def replay(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """The rule for every operation that has none: its own derivative along the direction."""
    for leaf, node in enumerate(call.nodes):
        if node is not None:
            yield node, replay_leaf(call, leaf, delta)


def replay_leaf(call: Call, leaf: int, delta: Tensor, linear: bool = False) -> Replay:
    held = tuple(
        x
        for i, x in enumerate(call.leaves)
        if isinstance(x, Tensor) and call.layouts[i] is not None
    )
    return Replay(
        apply=lambda W: call.run(leaf, W),
        split=call.split,
        delta=call.split(delta),
        value=call.leaves[leaf],
        linear=linear,
        held=held,
    )


def reduce_to(call: Call, full: Tensor, leaf: int) -> Record | None:
    """Gradients of the output's shape, summed over what a broadcast operand shares.

    None where the operand spans merged example dimensions (then the operation is replayed). A real
    operand among complex numbers has the real part.
    """
    if full.is_complex() and not call.leaves[leaf].is_complex():
        full = full.real
    W = call.leaves[leaf].shape
    missing = full.ndim - len(W)
    if call.B == 1:  # whatever dimension it is in
        return Dense(sum_to(full[None], (1, *W), missing))
    if isinstance(call.layout, Spread):
        return _spread(call, full, call.layout.dims, W)
    here = call.layout.dim - missing
    if here >= 0 and W[here] == full.shape[call.layout.dim] != 1:
        if call.layout.outer * call.layout.inner != 1:
            return None
        dim = call.layout.dim
        rows = call.split(full).reshape(call.B, *full.shape[:dim], *full.shape[dim + 1 :])
        shape = W[:here] + W[here + 1 :]
        return Aligned(sum_to(rows, (call.B, *shape), missing), here)
    merged = call.layout.outer * call.layout.inner
    shape = [call.B, *full.shape]
    shape[1 + call.layout.dim] = merged
    rows = call.split(full).reshape(shape)
    return Dense(sum_to(rows, (call.B, *W), missing))


def _spread(call: Call, full: Tensor, dims: Sequence[int], W: Sequence[int]) -> Record | None:
    """The same where the rows lie in several dimensions, if the operand has none of these."""
    missing = full.ndim - len(W)
    if any(d >= missing and W[d - missing] != 1 for d in dims):
        return None
    rows = call.split(full)
    kept = [n for d, n in enumerate(W) if d + missing not in dims]
    return Dense(sum_to(rows, (call.B, *kept), 0).reshape(call.B, *W))


def sum_to(rows: Tensor, shape: tuple[int, ...], missing: int) -> Tensor:
    """Sum [B, …] down to [B, *W]: the leading dimensions W lacks, and those where W has 1."""
    lead, dtype = rows.ndim - len(shape), wide_type(rows.dtype)
    if lead:
        rows = rows.sum(tuple(range(1, 1 + lead)), dtype=dtype)
    ones = tuple(d for d in range(1, len(shape)) if shape[d] == 1 != rows.shape[d])
    return (rows.sum(ones, keepdim=True, dtype=dtype) if ones else rows).reshape(shape)


__all__ = ["Call", "Form", "OpRule", "Sizes", "op_rule", "reduce_to", "register_op", "replay"]

"""Parameters and the tensors made of parameters alone, before they meet an example.

``W.t()``, a cast, a class token expanded over the batch, position embeddings looked up for
``arange(T)``: such a tensor is a *node*. It is treated as a parameter of its own, and a direction
u of the parameters is carried to it by its own derivative, u_node = (∂node/∂W) u, so per-example
gradients never have to be pulled back through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from inrun.gradients import embedding
from inrun.gradients.again import run_again
from inrun.gradients.arguments import Spec
from inrun.tensors.autocast import Autocast, as_it_was, current
from inrun.tensors.derivative import backward_twice, each, jvps
from inrun.tensors.layout import name_of
from inrun.torch_compat import tree_flatten


@dataclass(frozen=True, eq=False)
class Node:
    """A watched parameter (``param`` is set) or the result of ``func`` on nodes and constants."""

    name: str
    param: Tensor | None = None
    func: Callable[..., Any] | None = None
    leaves: tuple[Any, ...] = ()
    spec: Spec | None = None
    index: int | None = None  # which of several results
    roots: frozenset[str] = field(default_factory=frozenset)
    autocast: Autocast | None = None  # as it ran
    data: bool = False  # made with data of the loop that is not the batch
    beside: bool = False  # a number made of the batch (a loss) is added to it
    through: str = ""  # the operation in which its derivative depends on such a number

    @staticmethod
    def parameter(name: str, param: Tensor) -> Node:
        return Node(name, param=param, roots=frozenset([name]))

    @staticmethod
    def derived(
        func: Any, leaves: list[Any], spec: Spec, index: int | None, op: str, device: str,
        data: bool = False, number: bool = False,
    ) -> Node:  # fmt: skip
        """``leaves`` hold nodes where the operation had parametric operands. ``number``: another
        operand is a number made of the batch."""
        inner = [x for x in leaves if isinstance(x, Node)]
        roots = frozenset().union(*(x.roots for x in inner))
        name = f"{op}({', '.join(sorted(roots))})"
        kept = tuple(x.detach() if isinstance(x, Tensor) else x for x in leaves)
        data = data or any(x.data for x in inner)
        beside = number or any(x.beside for x in inner)
        through = next((x.through for x in inner if x.through), "")
        if beside and op not in ADDITIVE:
            divided = op in _DIVIDED and isinstance(leaves[0], Node)
            kept_slope = len(inner) == 1 and not number and (op in _SCALED or divided)
            through = through or ("" if kept_slope else op)
        return Node(
            name, None, func, kept, spec, index, roots, current(device), data, beside, through
        )

    def constants(self) -> Iterator[Tensor]:
        """The tensors that it is made of beside parameters."""
        for x in self.leaves:
            if isinstance(x, Node):
                yield from x.constants()
            elif isinstance(x, Tensor):
                yield x


# Operations whose derivative does not depend on the numbers: of all operands; of one with
# constants; the same if it is the first.
ADDITIVE = frozenset(("add", "sub", "rsub", "subtract", "stack", "cat", "concat", "sum", "mean"))
_SCALED = frozenset((
    "mul", "multiply", "neg", "negative", "clone", "to", "type_as", "float", "double", "half",
    "bfloat16", "view", "reshape", "squeeze", "unsqueeze", "contiguous", "getitem", "select",
))  # fmt: skip
_DIVIDED = frozenset(("div", "divide", "true_divide"))


def directions(node: Node, u: Mapping[str, Tensor]) -> Tensor:
    """The directions [Q, *node] of a node when the parameters move along ``u``, [Q, *W] each; some
    of its parameters are among them."""
    if node.param is not None:
        return u[node.name]
    params = _parameters(node)
    moving = [k for k in params if k in u]
    at = [params[k] for k in moving]
    rows = [u[k].to(x.dtype) for k, x in zip(moving, at, strict=True)]

    def value(*moved: Tensor) -> Tensor:
        return _evaluate(node, {**params, **dict(zip(moving, moved, strict=True))}, {})

    if _linear(node):
        # suppressed: a view that rows of other strides do not have
        with torch.no_grad(), suppress(RuntimeError):
            return each(lambda *us: (value(*us),), rows, lambda *us: (value(*us),))[0]
    if _own_gradient(node):
        with sdpa_kernel(SDPBackend.MATH):
            return torch.stack([backward_twice(value, at, u) for u in zip(*rows, strict=True)])
    return jvps(value, at, rows)


def _linear(node: Node) -> bool:
    """Is it one parameter looked up, cut or turned around? Its direction is made the same way."""
    if node.func is None:
        return True
    inner = [x for x in node.leaves if isinstance(x, Node)]
    known = name_of(node.func) in _LINEAR and _look_up(node) in (None, _PLAIN)
    return known and len(inner) == 1 and _linear(inner[0])


_LINEAR = ("embedding", "getitem", "select", "narrow", "slice", "index_select", "view", "reshape",
           "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "expand_as", "t", "T", "mT",
           "transpose", "permute", "movedim", "contiguous")  # fmt: skip
_PLAIN = embedding.Options(None, None, by_frequency=False, sparse=False)


def _own_gradient(node: Node) -> bool:
    """Is a table in it whose gradient is not that of its look-ups: padding gets none, say?"""
    asked = _look_up(node)
    own = asked is not None and (asked.padding is not None or asked.by_frequency)
    return own or any(_own_gradient(x) for x in node.leaves if isinstance(x, Node))


def _look_up(node: Node) -> embedding.Options | None:
    """What a look-up in a table does beside it."""
    spec, leaves = node.spec, node.leaves
    if spec is None or node.func is None or name_of(node.func) != "embedding":
        return None

    def value(position: int, keyword: str, default: Any) -> Any:
        argument = spec.argument(position, keyword)
        return default if argument is None else spec.value(argument, leaves)

    return embedding.options(node.func is F.embedding, value)


def pull_back(
    node: Node, rows: Tensor, at: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Per-example gradients [B, *node] as per-example gradients [B, *W] of each parameter, whose
    values are those of ``at``, or as they are now."""
    if node.param is not None:
        return {node.name: rows}
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        values = _parameters(node) | {k: v for k, v in (at or {}).items() if k in node.roots}
        inputs = {k: p.clone().requires_grad_() for k, p in values.items()}
        out = _evaluate(node, inputs, {})

        def back(g: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, list(inputs.values()), g, retain_graph=True)

        grads = each(back, [rows.to(out.dtype)], back)
    return dict(zip(inputs, grads, strict=True))


def value(node: Node) -> Tensor:
    """The node's tensor, from the parameters as they are now."""
    with torch.no_grad():
        return _evaluate(node, _parameters(node), {})


def _parameters(node: Node) -> dict[str, Tensor]:
    if node.param is not None:
        return {node.name: node.param.detach()}
    parts = [_parameters(n) for n in node.leaves if isinstance(n, Node)]
    return {k: p for part in parts for k, p in part.items()}


def _evaluate(node: Node, inputs: Mapping[str, Tensor], done: dict[int, Tensor]) -> Tensor:
    """The node's tensor again, from these values of the parameters."""
    if node.param is not None:
        return inputs[node.name]
    if id(node) not in done:
        assert node.func is not None and node.spec is not None
        leaves = [_evaluate(x, inputs, done) if isinstance(x, Node) else x for x in node.leaves]
        args, kwargs = node.spec.unflatten(leaves)
        with as_it_was(node.autocast):
            out = run_again(node.func, args, kwargs)
        done[id(node)] = out if node.index is None else tree_flatten(out)[0][node.index]
    return done[id(node)]

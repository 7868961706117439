"""Similarities of every example with every other, [B, B]: the logits of CLIP and SigLIP.

Each number is made of two examples. Where a parameter meets such numbers (a temperature, a bias),
its gradient through the number (i, j) is credited to i and to j, half each, so that the sum over
the examples is the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from inrun.gradients import Call, Record
from inrun.gradients.records import Replay
from inrun.tensors.layout import Layout, name_of, tensors_in

# Operations that leave a pair's number where it is, or at (j, i).
_KEPT = frozenset((
    "add", "sub", "rsub", "subtract", "mul", "multiply", "div", "rdiv", "divide", "true_divide",
    "pow", "neg", "exp", "log", "tanh", "sigmoid", "logsigmoid", "clamp", "clip", "clone",
    "contiguous", "to", "type_as", "float", "double", "half", "bfloat16", "t", "T", "mT", "where",
    "masked_fill", "transpose",
))  # fmt: skip


def made(func: Any, args: Any, out: Tensor, find: Callable[[Any], Layout | None], B: int) -> bool:
    """Is this the product of examples with examples: x [B, D] and y [D, B] (linear: [B, D])?"""
    name, operands = name_of(func), tensors_in(args)
    if B == 1 or out.shape != (B, B) or len(operands) != 2 or operands[0].ndim != 2:
        return False
    x, y = (find(t) for t in operands)
    if name == "einsum":
        first, second, result = _letters(args[0])
        if x is None or y is None or max(x.dim, y.dim) >= min(len(first), len(second)):
            return False
        pair = {first[x.dim], second[y.dim]}
        return _plain(x, y) and len(pair) == 2 and pair == set(result)
    columns = {"matmul": 1, "mm": 1, "linear": 0}.get(name)
    return columns is not None and _plain(x, y) and (x, y) == (Layout(0), Layout(columns))


def _plain(*layouts: Layout | None) -> bool:
    return all(x is not None and (x.outer, x.inner) == (1, 1) for x in layouts)


def _letters(equation: Any) -> tuple[str, str, str]:
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return "", "", ""
    inputs, result = equation.replace(" ", "").split("->")
    first, _, second = inputs.partition(",")
    return first, second, result


def kept(func: Any, out: Tensor, are_pairs: Sequence[bool], batched: Sequence[bool]) -> bool:
    """Is the output one of pairs again? ``are_pairs`` and ``batched`` say it of the operands."""
    if not any(are_pairs) or any(batched) or name_of(func) not in _KEPT:
        return False
    return out.ndim == 2 and out.shape[0] == out.shape[1]


def halves(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """The rule: the operation's own derivative, half of it for either example of a pair."""
    for leaf, node in enumerate(call.nodes):
        if node is not None:
            held = tuple(x for x in call.leaves if isinstance(x, Tensor))
            yield node, Replay(
                apply=lambda W, leaf=leaf: call.run(leaf, W),  # type: ignore[misc]
                split=_both, delta=_both(delta) / 2, value=call.leaves[leaf], held=held,
            )  # fmt: skip


def _both(x: Tensor) -> Tensor:
    """[B, B] as [B, 2, B]: the numbers that an example has a part in, by row and by column."""
    return torch.stack([x, x.t()], 1)

"""One operation in which parametric tensors meet examples: what is saved, what is summed, how it
runs. Shared by the capture of eager models and that of compiled ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inrun.capture.tap import shape_of
from inrun.gradients import Call, Form, OpRule, op_rule
from inrun.tensors.arguments import Spec
from inrun.tensors.layout import Layout, in_place, name_of


def prepare(
    func: Any, leaves: Sequence[Any], spec: Spec, nodes: Sequence[Any],
    layouts: Sequence[Layout | None], B: int, form: Form, fast: bool = False, directions: int = 1,
) -> Call:  # fmt: skip
    """Describe the call before it runs: what its rule will need, and its form."""
    saved = [x.detach() if n is not None else x for x, n in zip(leaves, nodes, strict=True)]
    if shapes_suffice(func):
        saved = [shape_of(x) if isinstance(x, Tensor) else x for x in saved]
    elif in_place(func):
        saved[0] = saved[0].clone()
    pure = getattr(torch, name_of(func), None) if in_place(func) else func
    call = Call(pure or func, spec, tuple(saved), tuple(nodes), tuple(layouts), Layout(0), B, form)
    rule = op_rule(func)
    return call if rule is None else rule.settled(call, fast, directions)


def shapes_suffice(func: Any) -> bool:
    """Does the derivative need no more of the operands than their shapes?"""
    return name_of(func) in ("add", "sub", "rsub")


def has_pure_form(func: Any) -> bool:
    """Is there a version of the operation that writes nothing?"""
    return not in_place(func) or hasattr(torch, name_of(func))


def summed_leaves(rule: OpRule | None, call: Call) -> tuple[int, ...]:
    """The leaves whose gradients can be sums of per-example gradients that are formed anyway."""
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


def apart(leaves: Sequence[Any], detached: Sequence[int]) -> list[Any]:
    """The leaves, those at the indices ``detached`` detached."""
    return [x.detach() if i in detached else x for i, x in enumerate(leaves)]


def operate(func: Any, leaves: Sequence[Any], spec: Spec) -> Any:
    """Run the operation."""
    args, kwargs = spec.unflatten(leaves)
    return func(*args, **kwargs)

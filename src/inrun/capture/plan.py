"""A plan: what a forward pass does with parameters, and the autograd graph that its taps stand on.

aside.py says what plans are for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from inrun.capture.inputs import Hook
from inrun.capture.site import Site
from inrun.tensors.layout import Layout

NUMBERS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_KNOWN_NODE = re.compile(r"(\w+Backward\d*|.*AccumulateGrad)$")


class OtherPlanError(Exception):
    """The autograd graph is another than planned, or a node of it does not say what it does."""


class Graph:
    """The autograd graph of a pass, as far as taps stand on it: one entry for each node, in the
    order in which they are first met. Taps have negative numbers."""

    def __init__(self, wanted: Sequence[Any] | None = None) -> None:
        self.entries: list[Any] = []  # (kind, names, values, edges)
        self.numbers: dict[Any, int] = {}
        self._wanted = wanted  # None: learn
        self.taps = 0

    def tapped(self, out: Tensor) -> None:
        """A tap was put on this tensor."""
        self.taps += 1
        self.numbers[out.grad_fn] = -self.taps

    def number(self, node: Any) -> int | None:
        """The number of a node, after what is behind it was noted or compared. Raises
        ``OtherPlanError`` where that cannot be done or differs."""
        if node is None:
            return None
        found = self.numbers.get(node)
        if found is not None:
            return found
        numbers, todo = self.numbers, [node]
        found = numbers[node] = len(numbers)
        while todo:
            node = todo.pop()
            edges = []
            for behind, output in node.next_functions:
                known = None
                if behind is not None:
                    known = numbers.get(behind)
                    if known is None:
                        known = numbers[behind] = len(numbers)
                        todo.append(behind)
                edges.append((known, output))
            self._entry(node, edges)
        return found

    def node(self, number: int) -> Any:
        """The node that has this number."""
        return next(node for node, own in self.numbers.items() if own == number)

    def _entry(self, node: Any, edges: list[Any]) -> None:
        kind, at = type(node), len(self.entries)
        if self._wanted is None:
            self.entries.append((kind, *_attributes(node), edges))
            return
        if at >= len(self._wanted):
            raise OtherPlanError
        want = self._wanted[at]
        if kind is not want[0] or edges != want[3]:
            raise OtherPlanError
        for name, value in zip(want[1], want[2], strict=True):
            own = getattr(node, name)
            if own is not value and (type(own) is not type(value) or own != value):
                raise OtherPlanError
        self.entries.append(want)


def _attributes(node: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """What a node says of how it moves what it gets: integers (sizes, dimensions, shifts), not
    tensors or factors."""
    if isinstance(node, BackwardCFunction) or not _KNOWN_NODE.fullmatch(node.name()):
        raise OtherPlanError
    if node.name().endswith("AccumulateGrad"):
        return ("variable",), (node.variable,)
    found, names = {}, set(dir(node))
    for name in sorted(names):
        # A saved tensor is not read: that may run hooks of the user's (checkpointing, offloading).
        if name.startswith("_saved_") and f"_raw{name}" not in names:
            value = getattr(node, name)
            parts = value if isinstance(value, (tuple, list)) else (value,)
            if all(isinstance(x, NUMBERS) and not isinstance(x, float) for x in parts):
                found[name] = value
    return tuple(found), tuple(found.values())


@dataclass(eq=False)
class Step:
    """One call of a plan in which watched parameters take part."""

    func: Any
    names: tuple[str, ...]  # of keyword arguments
    leaves: tuple[Any, ...]  # parameters, (shape, type, version) of other tensors, values
    roots: tuple[int | None, ...]  # numbers of the nodes behind the other tensors
    site: Site | None

    def same(self, other: Step) -> bool:
        return (
            self.func is other.func
            and self.site is other.site
            and (self.names, self.roots) == (other.names, other.roots)
            and len(self.leaves) == len(other.leaves)
            and all(map(_same_leaf, self.leaves, other.leaves))
        )


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return type(a) is type(b) and bool(a == b)


@dataclass(eq=False)
class Plan:
    """What a forward pass does with parameters, from the call of ``start`` on."""

    start: nn.Module
    stem: int  # sites before it
    steps: list[Step]
    entries: list[Any]
    outputs: list[tuple[Any, ...]]  # path, shape, type, number of the node, origin
    losses: list[tuple[int, Layout]]  # number of the node, origin of its logits
    passes: int = 1

    def same(self, other: Plan) -> bool:
        return (
            self.start is other.start
            and self.stem == other.stem
            and len(self.steps) == len(other.steps)
            and all(a.same(b) for a, b in zip(self.steps, other.steps, strict=True))
            and _same_entries(self.entries, other.entries)
            and self.outputs == other.outputs
            and self.losses == other.losses
        )


def _same_entries(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        x[0] is y[0] and x[1] == y[1] and x[3] == y[3] and all(map(_same_leaf, x[2], y[2]))
        for x, y in zip(a, b, strict=True)
    )


@dataclass
class Pass:
    """One call of the model under way, under the mode."""

    signature: Any
    steps: list[Step] = field(default_factory=list)
    # what happened, in order: a module was called; a call must be seen by the mode. Sites before.
    events: list[tuple[nn.Module | None, int]] = field(default_factory=list)
    # losses whose signals were read: sites before, node, origin of the logits (None: unreadable)
    losses: list[tuple[int, Any, Layout | None]] = field(default_factory=list)

    def read_after_all_sites(self, graph: Graph) -> list[tuple[int, Layout]] | None:
        """The losses that a followed pass has to read; None if it could not. The mode sees those
        before the last site."""
        found = []
        for before, node, origin in self.losses:
            if before >= len(self.steps):
                number = graph.numbers.get(node)
                if number is None or origin is None:
                    return None
                found.append((number, origin))
        return found


def start_of(learned: Pass) -> tuple[nn.Module, int] | None:
    """The first module that is called after all that the mode must see and before another site,
    and the sites before it; None if there is none."""
    sites, found, called = len(learned.steps), None, set[nn.Module]()
    for module, before in learned.events:
        if before >= sites:
            break
        if module is None:
            found = None
        elif found is None and module not in called:
            found = module, before
        called.add(module) if module is not None else None
    return found


def open_leaves(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The arguments of the model, containers opened."""

    def inside(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(tree, (list, tuple)):
            for i, x in enumerate(tree):
                yield from inside(x, f"{path}.{i}")
        elif isinstance(tree, dict):
            for k, x in tree.items():
                yield from inside(x, f"{path}.{k}")
        else:
            yield path, tree

    yield from inside(args, "")
    yield from inside(kwargs, "")


class Called(Hook):
    """The hook of all modules while a pass is learned."""

    def __init__(self, learned: Pass) -> None:
        self.learned = learned

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.learned.events.append((module, len(self.learned.steps)))

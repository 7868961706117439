"""A plan: what a forward pass does with parameters, and the autograd graph behind it (graph.py).

aside.py says what plans are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from inrun.capture.graph import Entry, Graph, Wanted
from inrun.capture.inputs import Hook
from inrun.capture.reading import OtherPlanError, Reads
from inrun.capture.site import Site
from inrun.tensors.layout import Layout


@dataclass(eq=False)
class Step:
    """One call of a plan in which watched parameters take part."""

    func: Any
    names: tuple[str, ...]  # of keyword arguments
    leaves: tuple[Any, ...]  # parameters, (shape, type, version) of other tensors, values
    site: Site | None
    reads: Reads | None = None  # how it is read from the graph; None: it reaches Python
    roots: tuple[int | None, ...] = ()  # numbers of the nodes behind the other tensors

    def same(self, other: Step) -> bool:
        return (
            self.func is other.func
            and self.site is other.site
            and (self.names, self.roots) == (other.names, other.roots)
            and self.reads == other.reads
            and len(self.leaves) == len(other.leaves)
            and all(map(_same_leaf, self.leaves, other.leaves))
        )

    @property
    def params(self) -> set[Tensor]:
        return {x for x in self.leaves if isinstance(x, Tensor)}


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
    entries: list[Entry]
    outputs: list[tuple[Any, ...]]  # path, shape, type, number of the node, origin
    losses: list[tuple[int, Layout]]  # number of the node, origin of its logits
    passes: int = 1

    def __post_init__(self) -> None:
        self.called = [s for s in self.steps[self.stem :] if s.reads is None]
        self.read = len(self.steps) - self.stem - len(self.called)
        self.params = set[Tensor]().union(*(s.params for s in self.called))
        read = [s.reads.option for s in self.steps[self.stem :] if s.reads is not None]
        self._options = [x for x in read if x is not None]

    @property
    def options_unchanged(self) -> bool:
        """Do modules have the options that the graph does not show?"""
        return all(space.get(name) == value for space, name, value in self._options)

    @cached_property
    def wanted(self) -> Wanted:
        return Wanted(self.entries)

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


def _same_entries(a: Sequence[Entry], b: Sequence[Entry]) -> bool:
    return len(a) == len(b) and all(
        x[0] is y[0] and x[1] == y[1] and x[3:] == y[3:] and all(map(_same_leaf, x[2], y[2]))
        for x, y in zip(a, b, strict=True)
    )


@dataclass(eq=False)
class Met:
    """A site that a learned pass has met."""

    step: Step
    node: Any  # of its output
    behind: tuple[Any, ...] = ()  # nodes of its other tensors
    source: Any = None  # the node of the operation itself, where that may be read


@dataclass
class Pass:
    """One call of the model under way, under the mode."""

    signature: Any
    sites: list[Met] = field(default_factory=list)
    # what happened, in order: a module was called; a call must be seen by the mode. Sites before.
    events: list[tuple[nn.Module | None, int]] = field(default_factory=list)
    # losses whose signals were read: sites before, node, origin of the logits (None: unreadable)
    losses: list[tuple[int, Any, Layout | None]] = field(default_factory=list)

    def plan(self, outputs: Sequence[tuple[Any, ...]]) -> Plan | None:
        """The plan of this pass, which has ended; None if there cannot be one. ``outputs``: path,
        shape, type, node and origin of each tensor that the model returns."""
        start = start_of(self)
        steps = [m.step for m in self.sites]
        params = set[Tensor]().union(*(s.params for s in steps))
        if start is None or any(type(p) is not nn.Parameter for p in params):
            return None
        read = {k for k, s in enumerate(steps) if k >= start[1] and s.reads is not None}
        try:
            while True:
                self._leave_called(read, start[1])
                graph, roots = self._walked(read, outputs)
                if read == {step for step, _ in graph.met}:
                    break
                read = {step for step, _ in graph.met}  # the loss does not depend on the others
            losses = self._read_after_all_sites(graph)
            found = [(k, shape, dtype, graph.numbers.get(node), origin)
                     for k, shape, dtype, node, origin in outputs]  # fmt: skip
        except OtherPlanError:
            return None
        steps = [
            replace(s, roots=roots[k], reads=s.reads if k in read else None)
            for k, s in enumerate(steps)
        ]
        return Plan(*start, steps, graph.entries, found, losses)

    def _leave_called(self, read: set[int], stem: int) -> None:
        """A parameter reaches Python in all its calls after the stem or in none."""
        steps, before = [m.step for m in self.sites], -1
        while before != len(read):
            before = len(read)
            called = [s.params for k, s in enumerate(steps) if stem <= k not in read]
            params = set[Tensor]().union(*called)
            read -= {k for k in read if not params.isdisjoint(steps[k].params)}

    def _walked(
        self, read: set[int], outputs: Sequence[tuple[Any, ...]]
    ) -> tuple[Graph, list[tuple[int | None, ...]]]:
        """The graph as a pass sees it that follows the plan, and the roots of each step."""
        graph = Graph()
        roots: list[tuple[int | None, ...]] = []
        for k, met in enumerate(self.sites):
            if k in read:
                graph.read[met.source] = k
                roots.append(())
                continue
            roots.append(tuple([graph.number(node) for node in met.behind]))
            if met.node is not None:
                graph.tapped(met.node)
        for _, _, _, node, _ in outputs:
            graph.number(node)
        return graph, roots

    def _read_after_all_sites(self, graph: Graph) -> list[tuple[int, Layout]]:
        """The losses that a followed pass has to read. The mode sees those before the last site."""
        found = []
        for before, node, origin in self.losses:
            if before >= len(self.sites):
                number = graph.numbers.get(node)
                if number is None or origin is None:
                    raise OtherPlanError
                found.append((number, origin))
        return found


def start_of(learned: Pass) -> tuple[nn.Module, int] | None:
    """The first module that is called after all that the mode must see and before another site,
    and the sites before it; None if there is none."""
    sites, found, called = len(learned.sites), None, set[nn.Module]()
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


class Start(Hook):
    """The forward pre-hook of the module from which on the plan holds."""

    def __init__(self, start: Callable[[], None]) -> None:
        self.start = start

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.start()


class Called(Hook):
    """The hook of all modules while a pass is learned."""

    def __init__(self, learned: Pass) -> None:
        self.learned = learned

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.learned.events.append((module, len(self.learned.sites)))

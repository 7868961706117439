"""The autograd graph of a forward pass, and its comparison with the graph of a plan (plan.py)."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from inrun.capture.reading import SHAPES, OtherPlanError

NUMBERS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_KNOWN_NODE = re.compile(r"(\w+Backward\d*|.*AccumulateGrad)$")
_FIRST, _SECOND = itemgetter(0), itemgetter(1)

# kind, names, values, edges, the step that is read there, the node's number, and how it was first
# reached: from which entry of the same walk, by which edge; None: the walk began there
Entry = tuple[
    Any, tuple[str, ...], tuple[Any, ...], list[Any], int | None, int, tuple[int, int] | None
]


class Graph:
    """The autograd graph of a pass, as far as taps stand on it: one entry for each node, in the
    order in which they are first met. Taps have negative numbers.

    ``read`` has the nodes of operations that are read from the graph (reading.py), with their steps
    of the plan; ``met`` those of them that were met.
    """

    def __init__(self, wanted: Wanted | None = None) -> None:
        self.entries: list[Entry] = []
        self.numbers: dict[Any, int] = {}
        self.read: dict[Any, int] = {}
        self.met: list[tuple[int, Any]] = []
        self._wanted = wanted  # None: learn
        self._compared = 0  # entries
        self._nodes: dict[int | None, Any] = {None: None}  # by number, while a plan is followed
        self.taps = 0

    def tapped(self, node: Any) -> None:
        """A tap was put on a tensor with this node."""
        self.taps += 1
        self.numbers[node] = -self.taps
        self._nodes[-self.taps] = node

    def number(self, node: Any) -> int | None:
        """The number of a node, after what is behind it was noted or compared. Raises
        ``OtherPlanError`` where that cannot be done or differs."""
        if node is None:
            return None
        found = self.numbers.get(node)
        if found is not None:
            return found
        if self._wanted is not None:
            return self._follow(self._wanted, node)
        numbers, todo = self.numbers, [node]
        found = numbers[node] = len(numbers)
        nodes: list[Any] = []
        edges: list[list[tuple[int | None, int]]] = []  # of each node
        while todo:
            node = todo.pop()
            nodes.append(node)
            own: list[tuple[int | None, int]] = []
            for behind, output in node.next_functions:
                known = None
                if behind is not None:
                    known = numbers.get(behind)
                    if known is None:
                        known = numbers[behind] = len(numbers)
                        todo.append(behind)
                own.append((known, output))
            edges.append(own)
        self._learn(nodes, edges)
        return found

    def node(self, number: int) -> Any:
        """The node that has this number in the plan that is followed."""
        return self._nodes[number]

    def _learn(self, nodes: Sequence[Any], edges: Sequence[list[Any]]) -> None:
        reached: dict[int | None, tuple[int, int]] = {}
        for i, own in enumerate(edges):
            for j, (number, _) in enumerate(own):
                reached.setdefault(number, (i, j))
        for node, own in zip(nodes, edges, strict=True):
            step, number = self.read.get(node), self.numbers[node]
            way = reached.get(number)
            self.entries.append((type(node), *_attributes(node), own, step, number, way))
            if step is not None:
                self.met.append((step, node))

    def _follow(self, wanted: Wanted, root: Any) -> int:
        """Walk from a node as the plan did, compare, and number the nodes as there."""
        at = self._compared
        nodes, nexts = wanted.walk(at, root)
        before, numbers = len(self.numbers), wanted.numbers[at : at + len(nodes)]
        self.numbers.update(zip(nodes, numbers, strict=True))
        self._nodes.update(zip(numbers, nodes, strict=True))
        if len(self.numbers) != before + len(nodes):  # one node in the place of two
            raise OtherPlanError
        self.met += wanted.compare(at, nodes, nexts, self._nodes)
        self._compared += len(nodes)
        return numbers[0]


class Wanted:
    """The graph of a plan, laid out so that a pass can be compared with it column by column: all
    that is done in Python for each node is to go there."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._kinds = [_KINDS[e[0]] for e in entries]
        self.numbers = [e[5] for e in entries]
        self._ways = [e[6] or (0, 0) for e in entries]
        begun = [i for i, e in enumerate(entries) if e[6] is None]
        self._ends = dict(zip(begun, [*begun[1:], len(entries)], strict=False))
        self._edges = [len(e[3]) for e in entries]  # of each node; and of all, where they lead
        self._begin = [0, *accumulate(self._edges)]
        self._to = [number for e in entries for number, _ in e[3]]
        self._outputs = [output for e in entries for _, output in e[3]]
        leaf = ("variable",)
        # numbers of nodes that say something: what they are asked, what they said
        asked = [(i, e[1], e[2]) for i, e in enumerate(entries) if e[1] and e[1] != leaf]
        self._asked = [i for i, _, _ in asked]
        self._ask = [attrgetter(*names) for _, names, _ in asked]
        self._said = [values if len(names) > 1 else values[0] for _, names, values in asked]
        leaves = [(i, e[2][0]) for i, e in enumerate(entries) if e[1] == leaf]
        self._leaves, self._variables = [i for i, _ in leaves], [x for _, x in leaves]
        reads = [(i, e[4]) for i, e in enumerate(entries) if e[4] is not None]
        self._reads, self._steps = [i for i, _ in reads], [step for _, step in reads]

    def walk(self, at: int, root: Any) -> tuple[list[Any], list[Any]]:
        """The nodes that the plan reached from the one of entry ``at``, on the same ways from
        ``root``, and what is behind each."""
        end = self._ends.get(at)
        if end is None:
            raise OtherPlanError
        nodes, nexts = [root], [root.next_functions]
        try:
            for i, j in self._ways[at + 1 : end]:
                node = nexts[i][j][0]
                nodes.append(node)
                nexts.append(node.next_functions)
        except (IndexError, AttributeError) as error:  # there is no such way
            raise OtherPlanError from error
        return nodes, nexts

    def compare(
        self, at: int, nodes: Sequence[Any], nexts: Sequence[Any], numbered: Mapping[Any, Any]
    ) -> Iterable[tuple[int, Any]]:
        """Compare the nodes from entry ``at`` on; returns those that are read, with their steps.
        Raises ``OtherPlanError`` where one differs. ``numbered``: all nodes met so far, which are
        different ones, by number."""
        end = at + len(nodes)
        if list(map(len, nexts)) != self._edges[at:end] or _kinds(nodes) != self._kinds[at:end]:
            raise OtherPlanError
        a, b = self._begin[at], self._begin[end]
        edges = list(chain.from_iterable(nexts))
        try:
            to = list(map(numbered.__getitem__, self._to[a:b]))
        except KeyError as error:
            raise OtherPlanError from error
        if not all(map(is_, map(_FIRST, edges), to)):
            raise OtherPlanError
        if list(map(_SECOND, edges)) != self._outputs[a:b]:
            raise OtherPlanError
        a, b = bisect_left(self._asked, at), bisect_left(self._asked, end)
        said = [ask(nodes[i - at]) for i, ask in zip(self._asked[a:b], self._ask[a:b], strict=True)]
        if said != self._said[a:b]:
            raise OtherPlanError
        a, b = bisect_left(self._leaves, at), bisect_left(self._leaves, end)
        variables = [nodes[i - at].variable for i in self._leaves[a:b]]
        if not all(map(is_, variables, self._variables[a:b])):
            raise OtherPlanError
        a, b = bisect_left(self._reads, at), bisect_left(self._reads, end)
        return zip(self._steps[a:b], [nodes[i - at] for i in self._reads[a:b]], strict=True)


# Two kinds of nodes only change a shape, and a linear layer ends in one or the other: under the
# mode its output is made to be no view (tap.py).
class _Kinds(dict[type, Any]):
    """What nodes of each type do. The types of autograd's own nodes last; those of functions in
    Python may be made anew."""

    def __missing__(self, kind: type) -> Any:
        found = SHAPES if kind.__name__ in SHAPES else kind
        if not issubclass(kind, BackwardCFunction):
            self[kind] = found
        return found


_KINDS = _Kinds()


def _kinds(nodes: Sequence[Any]) -> list[Any]:
    """What each node does."""
    return list(map(_KINDS.__getitem__, map(type, nodes)))


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

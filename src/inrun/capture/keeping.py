"""Keeps the records that the backward pass brings, and notes which parameters they cover."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from inrun.capture.tap import MicroBatch
from inrun.gradients import Record
from inrun.gradients.nodes import Node


class Keeper:
    """Stores records in their micro-batch.

    Args:
        directions: how many the records will be contracted with.
        offload: keep records in host memory.
        check_memory: called with the bytes of every record that is kept.
        on_first_gradient: called in each batch before anything is added to .grad.
    """

    def __init__(
        self, directions: int, offload: bool, check_memory: Callable[[int], None],
        on_first_gradient: Callable[[], None],
    ) -> None:  # fmt: skip
        self.directions, self.offload = directions, offload
        self.check_memory, self.on_first_gradient = check_memory, on_first_gradient
        self.coverage: dict[str, set[tuple[str, str]]] = {}  # operations and forms by parameter
        self._covered: set[Any] = set()

    def first_gradient(self, micro: MicroBatch) -> None:
        """Before anything is added to .grad."""
        if not micro.fired:
            micro.fired = True
            self.on_first_gradient()

    def keep(self, micro: MicroBatch, name: str, pairs: Sequence[tuple[Node, Record]]) -> None:
        """Add the records of the operation ``name`` to the micro-batch."""
        for node, record in pairs:
            kind = type(record)
            if (node.roots, name, kind) not in self._covered:
                self._covered.add((node.roots, name, kind))
                for root in node.roots:
                    self.coverage.setdefault(root, set()).add((name, kind.__name__.lower()))
            if self.offload:
                record = record.map(lambda t: t.to("cpu", non_blocking=False))
            self.check_memory(micro.add(node, record, self.directions))

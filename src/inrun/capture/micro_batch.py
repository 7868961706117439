"""The records of one micro-batch, and the keeper that fills it during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.errors import written_to
from inrun.gradients import Call, Dense, Record
from inrun.gradients.cost import MANY
from inrun.gradients.embedding import Lookup
from inrun.gradients.nodes import Node
from inrun.gradients.owned import Positions, by_owner
from inrun.tensors.autocast import Autocast
from inrun.tensors.layout import Layout
from inrun.tensors.owners import Owners, on_one_device
from inrun.torch_compat import version_of

if TYPE_CHECKING:
    from inrun.capture.site import Site


@dataclass
class MicroBatch:
    """The records of one ``with run.batch(ids)``."""

    B: int  # examples
    owner: Tensor | None = None  # [rows]: the example of each row that the capture follows
    autocast: Autocast | None = None
    records: dict[Node, list[Record]] = field(default_factory=dict)
    fixed: list[tuple[Tensor, int]] = field(default_factory=list)  # not to be written to: versions
    met: bool = False  # did a parameter meet an example?
    claims: dict[str, str] = field(default_factory=dict)  # that a parameter met, and in what
    fired: bool = False  # did a gradient arrive?
    backward: bool = False  # did a backward pass run?
    nobody: bool = False  # may records have a row more, for what belongs to no example?
    doubts: list[tuple[str, Tensor]] = field(default_factory=list)  # flags: owners disagree in ...
    _positions: dict[Any, Any] = field(default_factory=dict, repr=False)
    _by_root: dict[str, list[Node]] | None = field(default=None, repr=False)
    _counted: int = 0

    @property
    def columns(self) -> int:
        """Numbers of a product with the records: one per example, and one for nobody's part."""
        return self.B + self.nobody

    def positions(
        self, origin: Layout | Owners, rows: int, device: torch.device
    ) -> Positions | None:
        """Whose the positions of a tensor are; None if they are the examples in their order."""
        if isinstance(origin, Layout) and self.owner is None:
            return None
        key = id(origin), rows
        if key not in self._positions:
            flat = (
                torch.arange(rows, device="cpu")
                if isinstance(origin, Layout)
                else origin.map.flatten()
            )
            if self.owner is not None:
                owner, flat = on_one_device(self.owner, flat)
                flat = torch.where(flat < 0, flat, owner[flat.clamp(min=0)])
            found = Positions.of(flat, self.B, device)
            self._positions[key] = origin, found
        found = self._positions[key][1]
        self.nobody = self.nobody or found.rows > self.B
        return found

    def add(self, node: Node, record: Record, directions: int = 1) -> int:
        """Keep a record; returns the bytes that it adds.

        Materialised gradients of the same operand are summed. With many directions, look-ups are
        added to them too, because each direction would repeat the look-up.
        """
        kept = self.records.setdefault(node, [])
        for i, other in enumerate(kept):
            if not isinstance(other, Dense):
                continue
            if isinstance(record, Dense) and len(record.grads) == len(other.grads):
                kept[i] = other + record
                return 0
            if isinstance(record, Lookup) and directions >= MANY and record.joins(other):
                record.add_to(other.grads)
                return 0
        kept.append(record)
        return record.bytes

    def nodes(self, names: Collection[str]) -> Iterator[tuple[Node, list[Record]]]:
        """The nodes that depend on one of these parameters, with their records."""
        if any(version_of(t) != version for t, version in self.fixed):
            raise written_to()
        if self._by_root is None or self._counted != len(self.records):
            self._by_root, self._counted = {}, len(self.records)
            for node in self.records:
                for root in node.roots:
                    self._by_root.setdefault(root, []).append(node)
        if len(names) >= len(self._by_root):
            return iter([(n, r) for n, r in self.records.items() if not n.roots.isdisjoint(names)])
        found = dict.fromkeys(n for k in names for n in self._by_root.get(k, ()))
        return iter([(node, self.records[node]) for node in found])

    def energy(self) -> float:
        """Σ_i ‖g_i‖², up to a few per cent: see ``Record.energy``."""
        parts = [r.energy().double() for records in self.records.values() for r in records]
        return float(torch.stack([x.to(parts[0].device) for x in parts]).sum())


class Keeper:
    """Makes records of the δ that taps hand over, and stores them in their micro-batch.

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
        self._covered: set[tuple[frozenset[str], str, type[Record]]] = set()

    def receive(
        self, micro: MicroBatch, site: Site, call: Call, delta: Any, loose: Sequence[int]
    ) -> list[Tensor]:
        """Keep the records of one operation, given δ; returns the gradients of summed leaves."""
        self.first_gradient(micro)
        pairs = site.lasting(call, delta, loose)
        totals = site.totals(call, pairs)
        self.keep(micro, call, pairs)
        return totals

    def first_gradient(self, micro: MicroBatch) -> None:
        """Called before anything is added to .grad."""
        if not micro.fired:
            micro.fired = True
            self.on_first_gradient()

    def keep(self, micro: MicroBatch, call: Call, pairs: Sequence[tuple[Node, Record]]) -> None:
        """Add the records of an operation to the micro-batch."""
        name = call.name
        for node, record in pairs:
            if call.positions is not None:
                record = by_owner(record, call.positions, call.form == "materialise")
            kind = type(record)
            if (node.roots, name, kind) not in self._covered:
                self._covered.add((node.roots, name, kind))
                for root in node.roots:
                    self.coverage.setdefault(root, set()).add((name, kind.__name__.lower()))
            if self.offload:
                record = record.map(lambda t: t.to("cpu", non_blocking=False))
            self.check_memory(micro.add(node, record, self.directions))

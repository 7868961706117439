"""The records of one micro-batch, and the keeper that fills it during the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.capture.later import Deferred
from inrun.errors import written_to
from inrun.gradients import Call, Dense, Form, Record
from inrun.gradients.cost import MANY, Layer, materialise
from inrun.gradients.embedding import Bags, Lookup
from inrun.gradients.nodes import Node
from inrun.gradients.owned import Owned, Positions, by_owner
from inrun.gradients.records import Aligned, Pair, Replay
from inrun.gradients.use import Use
from inrun.tensors.autocast import Autocast
from inrun.tensors.layout import Layout
from inrun.tensors.owners import Owners, on_one_device
from inrun.torch_compat import version_of

if TYPE_CHECKING:
    from inrun.capture.site import Site
    from inrun.capture.tap import Awaited


OWN_NUMBERS = (Dense, Pair, Aligned, Lookup, Bags)  # records that hold all that they are made of


@dataclass(frozen=True)
class Choice:
    """How the form of records is chosen (cost.py)."""

    form: Form = "auto"
    fast: bool = False
    directions: int = 1

    def dense(self, record: Record, B: int) -> bool:
        """Would the gradients of B examples that have these rows be formed?"""
        if isinstance(record, Replay):  # an operand that varies along positions: δ is its gradient
            return B * math.prod(record.shape) <= record.delta.numel()
        if not isinstance(record, Pair) or self.form not in ("auto", "materialise"):
            return False
        N, T, I = record.a.shape  # noqa: E741
        O, a = record.delta.shape[-1], record.a  # noqa: E741
        layer = Layer(B, N * T // B, I, O, a.dtype, a.device.type, self.directions, eager=True)
        return self.form == "materialise" or materialise(layer, self.fast)


@dataclass
class MicroBatch:
    """The records of one ``with run.batch(ids)``."""

    B: int  # examples
    owner: Tensor | None = None  # [rows]: the example of each row that the capture follows
    slots: Tensor | None = None  # tokens=True: records have a row per position, and this is its
    # example [rows]; −1: nobody
    order: Tensor | None = None  # [B, T] the rows of each example, where all have as many
    inputs: Tensor | None = None  # of these positions: what the model received, if integers
    choice: Choice = field(default_factory=lambda: Choice())
    autocast: Autocast | None = None
    uses: list[Use] = field(default_factory=list)  # remembered, to be contracted as they are
    fixed: list[tuple[Tensor, int]] = field(default_factory=list)  # not to be written to: versions
    met: bool = False  # did a parameter meet an example?
    claims: dict[str, str] = field(default_factory=dict)  # that a parameter met, and in what
    fired: bool = False  # did a gradient arrive?
    backward: bool = False  # did a backward pass run?
    again: bool = False  # did another, or might one have?
    void: str | None = None  # why it cannot be scored
    nobody: bool = False  # may records have a row more, for what belongs to no example?
    signals: Tensor | Deferred | None = None  # [5, B] sums over the rows of losses (signals.py)
    together: list[tuple[str, frozenset[str]]] = field(default_factory=list)  # see Keeper
    doubts: list[tuple[str, Tensor]] = field(default_factory=list)  # flags: owners disagree in ...
    _records: dict[Node, list[Record]] = field(default_factory=dict)
    _awaited: list[Awaited] = field(default_factory=list, repr=False)
    _positions: dict[Any, Any] = field(default_factory=dict, repr=False)
    _by_root: dict[str, list[Node]] | None = field(default=None, repr=False)
    _roots: frozenset[str] = frozenset()  # of all nodes,
    _counted: int = 0  # when there were so many

    @property
    def records(self) -> dict[Node, list[Record]]:
        """What is known of each node, as records; those of uses are made now."""
        uses, self.uses = self.uses, []
        for use in uses:
            for node, record in use.records():
                self.add(node, record, self.choice.directions)
        return self._records

    @property
    def met_nodes(self) -> Collection[Node]:
        """The nodes that met an example."""
        return self._records.keys()

    def put_nodes(self, by_param: Mapping[int, Node | None]) -> None:
        """Other nodes in the place of those of parameters, found by the parameter's ``id``."""

        def other(node: Any) -> Any:
            found = by_param.get(id(node.param)) if isinstance(node, Node) else None
            return node if found is None else found

        self._records = {other(node): records for node, records in self._records.items()}
        self.uses = [use.with_nodes(other) for use in self.uses]

    def take(self, other: MicroBatch) -> None:
        """Add what another micro-batch with the same examples keeps; numbers that are read later
        are copied."""
        self.uses += other.uses
        for node, records in other._records.items():
            self._records.setdefault(node, []).extend(records)
        self.fixed += other.fixed
        self.together += other.together
        self.doubts += [(name, flag.clone()) for name, flag in other.doubts]
        self.claims |= other.claims
        self.nobody = self.nobody or other.nobody
        if self.signals is None and other.signals is not None:
            known = other.signals
            self.signals = known.clone() if isinstance(known, Tensor) else known

    def forget(self) -> None:
        """Let go of all that is kept."""
        self._records.clear()
        self.uses.clear()
        for x in self._awaited:
            x.drop()
        self._awaited.clear()

    @property
    def rows(self) -> int:
        """Rows of the records without nobody's: examples, or positions (tokens=True)."""
        return self.B if self.slots is None else len(self.slots)

    @property
    def columns(self) -> int:
        """Numbers of a product with the records: one per row, and one for nobody's part."""
        return self.rows + self.nobody

    def positions(
        self, origin: Layout | Owners, rows: int, device: torch.device
    ) -> Positions | None:
        """Whose the positions of a tensor are; None if they are the examples in their order."""
        if isinstance(origin, Layout) and self.owner is None:
            return None
        key = id(origin), rows, device
        if key not in self._positions:
            flat = (
                torch.arange(rows, device="cpu")
                if isinstance(origin, Layout)
                else origin.map.flatten()
            )
            if self.owner is not None:
                owner, flat = on_one_device(self.owner, flat)
                flat = torch.where(flat < 0, flat, owner[flat.clamp(min=0)])
            found = None
            if not self._in_order(flat):
                found = Positions.of(flat, self.rows, device)
            self._positions[key] = origin, found
        found = self._positions[key][1]
        self.nobody = self.nobody or (found is not None and found.rows > self.rows)
        return found

    def _in_order(self, flat: Tensor) -> bool:
        """Are these all positions in their order, each a row of its own?"""
        n = self.rows
        if self.slots is None or not flat.is_cpu or len(flat) != n:
            return False
        return torch.equal(flat, torch.arange(n, device="cpu"))

    def add(self, node: Node, record: Record, directions: int = 1) -> int:
        """Keep a record; returns the bytes that it adds.

        Materialised gradients of the same operand are summed. With many directions, look-ups are
        added to them too, because each direction would repeat the look-up.
        """
        kept = self._records.setdefault(node, [])
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

    def remember(self, use: Use, awaited: Awaited | None = None) -> None:
        """Keep a use."""
        records = self._records
        for node in use.nodes:
            if node not in records:
                records[node] = []
        self.uses.append(use)
        if awaited is not None:
            self._awaited.append(awaited)

    def nodes(self, names: Collection[str]) -> Iterator[tuple[Node, list[Record]]]:
        """The nodes that depend on one of these parameters, with their records (without uses)."""
        if any(version_of(t) != version for t, version in self.fixed):
            raise written_to()
        if self._counted != len(self._records):
            self._by_root, self._counted = None, len(self._records)
            self._roots = frozenset[str]().union(*[n.roots for n in self._records])
        if len(names) >= len(self._roots):
            known = self._records.items()
            return iter([(n, r) for n, r in known if r and not n.roots.isdisjoint(names)])
        if self._by_root is None:
            self._by_root = {}
            for node in self._records:
                for root in node.roots:
                    self._by_root.setdefault(root, []).append(node)
        found = dict.fromkeys(n for k in names for n in self._by_root.get(k, ()))
        return iter([(node, r) for node in found if (r := self._records[node])])

    def by_example(
        self, params: Collection[str] | None = None, derived: bool = False
    ) -> Iterator[tuple[Node, list[Record]]]:
        """The records (of these parameters themselves, or also of what is ``derived`` from them)
        with a row per example, and perhaps one for nobody's part: where they have one per position,
        those that would have been kept without tokens=True."""
        for node, records in self._of(params, derived):
            if self.slots is not None:
                micro = MicroBatch(self.B)
                for record in records:
                    micro.add(node, self._merged(record), self.choice.directions)
                records = micro.records[node]
            yield node, records

    def _of(
        self, params: Collection[str] | None, derived: bool
    ) -> Iterator[tuple[Node, list[Record]]]:
        """The records of these parameters (None: of everything). Those of uses are made
        for this time only: the uses stay."""
        found = {
            n: list(records)
            for n, records in self._records.items()
            if params is None
            or not n.roots.isdisjoint(params if derived or n.param is not None else ())
        }
        for use in self.uses:
            if any(node in found for node in use.linear.nodes):
                for node, record in use.records():
                    if node in found:
                        found[node].append(record)
        yield from found.items()

    def _merged(self, record: Record) -> Record:
        """The positions of each example added up."""
        assert self.slots is not None
        if self.order is not None and isinstance(record, (Pair, Lookup)):
            own = self.order
            record = record.map(lambda t: t[own.to(t.device)].flatten(1, 2))
            if isinstance(record, Pair) and self.choice.dense(record, self.B):
                return Dense(record.rows(), own=True)
            return record
        rows = torch.cat([self.slots, self.slots.new_full((1,), -1)])  # the last row is nobody's
        if isinstance(record, Owned):
            whole = Positions.of(rows, self.B, record.positions.owner.device)
            positions = Positions(whole.owner[record.positions.owner], self.B + 1)
            return by_owner(record.record, positions, self.choice.dense(record.record, self.B))
        n = len(record.grads) if isinstance(record, Dense) else self.rows
        positions = Positions.of(rows[:n], self.B, record.tensors()[0].device)
        return by_owner(record, positions, self.choice.dense(record, self.B))

    def energy(self, params: Collection[str]) -> float:
        """Σ_i ‖g_i‖² of these parameters, up to a few per cent: see ``Record.energy``."""
        found = self.by_example(params, derived=True)
        parts = [r.energy().double() for _, records in found for r in records]
        return float(torch.stack([x.to(parts[0].device) for x in parts]).sum()) if parts else 0.0


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
        self._covered: set[tuple[frozenset[str], str, str]] = set()

    def receive(
        self, micro: MicroBatch, site: Site, call: Call, delta: Any, loose: Sequence[int],
        awaited: Awaited | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Keep the records of one operation, given δ; returns the gradients of summed leaves."""
        self.first_gradient(micro)
        if awaited is not None and not self.offload:
            use = awaited.use(delta)
            self._cover(call.name, "remembered", use.linear.nodes)
            micro.remember(use, awaited)
            self.check_memory(use.bytes)
            return []
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
        self._note_together(micro, call, pairs)
        for node, record in pairs:
            if call.positions is not None:
                record = by_owner(record, call.positions, call.form == "materialise")
            self._cover(call.name, type(record).__name__.lower(), [node])
            if self.offload:
                record = record.map(lambda t: t.to("cpu", non_blocking=False))
            self.check_memory(micro.add(node, record, self.directions))

    def _note_together(
        self, micro: MicroBatch, call: Call, pairs: Sequence[tuple[Node, Record]]
    ) -> None:
        """Note parameters that must be whole at the same time: those of an operation of which a
        record may run it again."""
        nodes = [node for node in call.nodes if node is not None]
        if len(nodes) > 1 and any(not isinstance(record, OWN_NUMBERS) for _, record in pairs):
            roots = frozenset().union(*(node.roots for node in nodes))
            micro.together.append((call.name, roots))

    def _cover(self, name: str, form: str, nodes: Sequence[Node]) -> None:
        """Note the operation in which nodes were met, and the form of what is kept."""
        for node in nodes:
            if (node.roots, name, form) not in self._covered:
                self._covered.add((node.roots, name, form))
                for root in node.roots:
                    self.coverage.setdefault(root, set()).add((name, form))

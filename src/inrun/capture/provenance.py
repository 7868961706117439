"""The origin of each tensor of a forward pass: what it is made of, as far as scoring needs it.

The origin of a tensor is one of

* *batched*: made of the batch; a ``Layout`` says where its examples are, an ``Owners`` map whose
  its numbers are where rows have moved or several dimensions tell the examples apart;
* *data*: the loop's own, not yet received by the model; a ``Layout`` with ``data`` set if it has
  one entry per example, OUTSIDE if not (a whole dataset, of which a part may be the batch);
* *parametric*: a watched parameter or made of parameters alone (a ``Node``);
* *mixed* (MIXED): made of the batch and the same for all examples (a mean over it, a loss);
* *pairs* (PAIRS): similarities [B, B] of every example with every other (outputs.py);
* *lost* (``Lost``): made of the batch, and where the examples are in it is not known;
* *constant* (CONSTANT): everything else: the model's own tensors and what is made of nothing. That
  a constant was made of data costs time, never a value: what it makes of parameters is treated as
  parametric.

Inputs of the model get theirs in inputs.py, outputs of operations in outputs.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from inrun.capture.claims import Claims
from inrun.capture.tensor_map import Mark, Origins, TensorMap, memory_of, own_tensors
from inrun.errors import no_positions
from inrun.gradients.nodes import ADDITIVE, Node
from inrun.ranks.shards import Shards, is_sharded
from inrun.tensors.layout import MIXED, Kind, Layout, Lost, lost
from inrun.tensors.owners import Owners, UnknownOwnerError, of_layout, settled
from inrun.torch_compat import (
    in_backward,
)

Origin: TypeAlias = Node | Layout | Owners | Kind  # ``Lost`` is a Kind, too

CONSTANT, OUTSIDE, PAIRS = Kind("constant"), Kind("outside"), Kind("pairs")

_MOST = 10_000  # maps of layouts that are kept
_MOST_BYTES = 2**28  # of static maps: batches of ever new shapes would fill the memory

OnPositions: TypeAlias = Callable[[Tensor | None], None]  # gets integers that the model receives


def any_batched(origins: Iterable[Origin]) -> bool:
    """Is one of them made of the batch?"""
    return any(
        x is MIXED or x is PAIRS or type(x) is Lost or (has_rows(x) and not x.data) for x in origins
    )


def has_rows(origin: Origin | None) -> TypeGuard[Layout | Owners]:
    """Is it known which numbers belong to which example?"""
    return type(origin) is Layout or type(origin) is Owners


def lasts(origin: Layout | Owners) -> bool:
    """Is it the same object in the next step?"""
    return type(origin) is Layout or (type(origin) is Owners and origin.static)


def shared_by_all(name: str, tensors: Sequence[Tensor], origins: Sequence[Origin], B: int) -> bool:
    """Are all operands made of the batch the same for every example, and either without a gradient
    (which experts were chosen) or one number (a loss)? With parameters they make something made of
    parameters. Of a batch of one example every number is such a loss where a penalty is added to
    it; a parameter itself is taken for the bias of a model's one output."""
    mixed = [(t, x) for t, x in zip(tensors, origins, strict=True) if any_batched([x])]
    if B == 1 and name in ADDITIVE:
        bias = any(type(x) is Node and x.param is not None for x in origins)
        return not bias and not any(t.ndim for t, _ in mixed)
    alike = all(x is MIXED for _, x in mixed)
    return alike and all(t.numel() == 1 or not t.is_floating_point() for t, _ in mixed)


def follows_rows(origin: Origin) -> bool:
    """Is it made of the batch or of data with one entry per example?"""
    return type(origin) in (Layout, Owners, Lost) or origin is MIXED or origin is PAIRS


class Provenance:
    """The origins of the tensors of one batch.

    Args:
        modules: the user's model and all modules in it.
        params: the parameters to score, by name.
        batch_dim: the dimension of the examples in the model's inputs.
        shards: what FSDP made of the model.
    """

    def __init__(
        self, modules: Sequence[nn.Module], params: Mapping[str, Tensor], batch_dim: int,
        shards: Shards | None = None,
    ) -> None:  # fmt: skip
        self.modules, self.batch_dim, self.shards = modules, batch_dim, shards
        self.held: Collection[int] = ()  # ids of the parameters that the optimizer trains
        self.outsiders: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.claims = Claims()
        self.on_unseen: Callable[[], None] = lambda: None  # a tensor of the batch that no call made
        self._layouts: dict[tuple[Any, ...], Layout | Owners] = {}
        self._maps: dict[tuple[Any, ...], Tensor] = {}  # of layouts
        self._held = 0  # bytes of static maps
        self.watch(params)
        self.new_batch(0)

    def new_batch(
        self, B: int, owner: Tensor | None = None, on_positions: OnPositions | None = None
    ) -> None:
        """Forget all tensors. A batch of B examples begins (0: none is open).

        With ``owner``, a row is a *slot*: an entry of the leading dimensions of the model's inputs,
        which ``owner`` has, too; it says whose the slot is. ``on_positions`` (tokens=True) is
        called when the model receives the batch; without ``owner``, rows become slots then.
        """
        self.B, self.on_positions = B, on_positions
        self.slots: tuple[int, ...] | None = None
        self.owner: Tensor | None = None
        if owner is not None:
            self._follow_slots(owner)
        self.anchored = False  # is it known which tensors are the batch?
        self.inside = False  # does a module of the user's run that has received the batch?
        self.shapes: list[tuple[int, ...]] = []  # of data without an entry for each example
        self.origins: Origins[Origin] = Origins(self._marked)
        self.drawn: TensorMap[bool] = TensorMap()  # constants made of random numbers
        self._by_memory: dict[Any, Origin] | None = None  # where something is recomputed
        self._own: set[int] | None = None  # ids of the model's own tensors
        self.claims.new_batch()

    def _follow_slots(self, owner: Tensor) -> None:
        self.B, self.slots, self.owner = owner.numel(), tuple(owner.shape), owner.flatten()

    def received(self, name: str, t: Tensor, origin: Layout | Owners) -> Layout | Owners:
        """This tensor is the batch of tokens=True; returns its origin now. Its two leading
        dimensions are the positions, unless ``owner`` was given: what is known of the loop's data
        is where its examples are, so find out again where its positions are."""
        tell, self.on_positions = self.on_positions, None
        if isinstance(origin, Layout) and self.slots is None:
            whole = origin.dim < 2 <= t.ndim and origin.outer == origin.inner == 1
            if not whole or (t.ndim == 2 and t.is_floating_point()):
                raise no_positions(name, tuple(t.shape), t.dtype)
            size = (-1, 1) if origin.dim == 0 else (1, -1)
            self._follow_slots(torch.arange(self.B, device="cpu").view(size).expand(t.shape[:2]))
            for other, known in list(self.alive()):
                if known is OUTSIDE or (has_rows(known) and known.data):
                    self.assume(other, self.as_data(other))
            origin = self.as_data(t)  # type: ignore[assignment]
        assert self.slots is not None and tell is not None
        tell(t if not t.is_floating_point() and tuple(t.shape) == self.slots else None)
        return origin

    def watch(self, params: Mapping[str, Tensor]) -> None:
        """The parameters to score, from the next batch on."""
        self.nodes = {id(p): Node.parameter(name, p) for name, p in params.items()}
        if self.shards is not None:  # examples meet gathered parameters, found when they are seen
            self.nodes = {}
        self.watched = frozenset(params)
        self._marked: Origins[Origin] = Origins()

    # Reading

    def find(self, t: Tensor) -> Origin:
        """The origin of a tensor; of one that is not known yet, by what it is."""
        entry = self.origins.entries.get(id(t))
        return entry[1] if entry is not None and entry[0]() is t else self._first_seen(t)

    def find_all(self, tensors: Iterable[Tensor]) -> list[Origin]:
        """The origin of each."""
        entries, found = self.origins.entries, []
        for t in tensors:
            entry = entries.get(id(t))
            known = entry is not None and entry[0]() is t
            found.append(entry[1] if known else self._first_seen(t))  # type: ignore[index]
        return found

    def known(self, t: Tensor) -> Origin | None:
        """The origin of a tensor that has been seen; else None."""
        return self.origins.get(t)

    def alive(self) -> Iterator[tuple[Tensor, Origin]]:
        return self.origins.alive()

    def layout(self, t: Any) -> Layout | None:
        """The layout of a batched tensor without the claims that are proven; else None."""
        origin = self.find(t) if isinstance(t, Tensor) else None
        if type(origin) is not Layout or (origin.data and self.anchored):
            return None
        if not origin.claims:
            return origin
        unproven = frozenset(self.claims.unproven(origin.claims))
        return origin if unproven == origin.claims else replace(origin, claims=unproven)

    def owners(self, t: Any) -> Tensor | None:
        """The owner map of a tensor made of the batch; None if it has no examples or is the same
        for all. Raises ``UnknownOwnerError`` where it is not known."""
        origin = self.find(t) if isinstance(t, Tensor) else None
        if type(origin) is Lost or origin is PAIRS:
            raise UnknownOwnerError
        if not has_rows(origin) or (origin.data and self.anchored):
            return None
        return self.map_of(origin, t.ndim)

    def map_of(self, origin: Layout | Owners, ndim: int) -> Tensor:
        """The owner map of a tensor with this origin and so many dimensions."""
        if isinstance(origin, Owners):
            return origin.map
        key = origin.dim, origin.outer, origin.inner, ndim, self.B
        if key not in self._maps:
            if len(self._maps) > _MOST:
                self._maps.clear()
            self._maps[key] = of_layout(origin, ndim, self.B)
        return self._maps[key]

    def data_layout(self, t: Any) -> Layout | None:
        """The layout of a batched tensor or of data; else None."""
        origin = self.find(t) if isinstance(t, Tensor) else None
        return origin if type(origin) is Layout else None

    def operands(
        self, leaves: Sequence[Any]
    ) -> tuple[list[Node | None], list[Layout | Owners | None]]:
        """Which arguments are parametric, and where the examples are in the batched ones."""
        nodes: list[Node | None] = []
        batched: list[Layout | Owners | None] = []
        for x in leaves:
            origin = self.find(x) if isinstance(x, Tensor) else None
            nodes.append(origin if type(origin) is Node else None)
            if type(origin) is Owners:
                batched.append(None if origin.data and self.anchored else origin)
            else:
                batched.append(Layout(0) if origin is PAIRS else self.layout(x))
        return nodes, batched

    def owns(self, t: Tensor) -> bool:
        """Is it one of the model's own tensors?"""
        if self._own is None:
            self._own = own_tensors(self.modules)
        return id(t) in self._own

    def is_parameter(self, t: Tensor) -> bool:
        """Is it a watched parameter or one of the model's own tensors?"""
        return id(t) in self.nodes or self.owns(t)

    # A tensor that no operation in the batch has made

    def _first_seen(self, t: Tensor) -> Origin:
        origin: Origin | None = self.nodes.get(id(t))
        if self.shards is not None and origin is None and isinstance(t, nn.Parameter):
            name = self.shards.name_of(t)
            if name in self.watched and not is_sharded(t):
                origin = self.nodes[id(t)] = Node.parameter(name, t)
        if not isinstance(origin, Node) or origin.param is not t:
            origin = self.one(self._classify(t))
        self.origins[t] = origin
        return origin

    def _classify(self, t: Tensor) -> Origin:
        if self.owns(t):
            return CONSTANT
        if isinstance(t, nn.Parameter) or id(t) in self.held:  # of a teacher, a criterion: no data
            gathered = self.shards is not None and self.shards.name_of(t) is not None
            if t.requires_grad and not gathered:
                self.outsiders[id(t)] = t
            return CONSTANT
        if self._by_memory is not None and in_backward():
            known = self._by_memory.get(memory_of(t))
            if known is not None and (type(known) is not Node or t.requires_grad):
                return known
        if self.anchored and t.requires_grad and not t.is_leaf:
            self.on_unseen()
            return lost("a function that torch does not show")
        if t.ndim == 0 or self.inside:
            return CONSTANT
        return self.as_data(t)

    def as_data(self, t: Tensor) -> Layout | Owners | Kind:
        """The loop's own tensor: it may be the batch if it has an entry for each row."""
        if t.is_nested:
            return lost("a nested tensor")
        if self.slots is not None:
            if tuple(t.shape[: len(self.slots)]) == self.slots:
                rows = torch.arange(self.B, device="cpu").view(
                    *self.slots, *[1] * (t.ndim - len(self.slots))
                )
                return settled(Owners(rows, data=True), self.B)
        elif t.ndim > self.batch_dim and t.shape[self.batch_dim] == self.B:
            return Layout(self.batch_dim, data=True)
        self.shapes.append(tuple(t.shape))
        return OUTSIDE

    # Writing

    def note(self, t: Tensor, origin: Origin) -> None:
        """The origin of a tensor that an operation has made."""
        self.note_all((t,), (self.one(origin),))

    def note_all(self, tensors: Sequence[Tensor], origins: Sequence[Origin]) -> None:
        """The same for several tensors and origins that this object has handed out."""
        for t, origin in zip(tensors, origins, strict=True):
            self.origins[t] = origin
            if self._by_memory is not None:
                self._note_memory(t, origin)

    def note_known(self, t: Tensor, mark: Mark) -> bool:
        """The same for an output whose mark the memo knows; False if it has another shape."""
        if t.shape != mark.shape:
            return False
        if t.dtype is mark.dtype:
            self.origins.put(t, mark)
        else:  # autocast was turned on or off
            self.origins[t] = mark.origin
        if self._by_memory is not None:
            self._note_memory(t, mark.origin)
        return True

    def note_mark(self, t: Tensor, mark: Mark) -> None:
        """The memo has given a mark to a tensor; that of a parameter holds in all batches."""
        self.origins.put(t, mark)
        if type(mark.origin) is Node:
            self._marked.put(t, mark)

    def assume(self, t: Tensor, origin: Origin) -> None:
        """The origin of a tensor that none of the operations in the batch has made."""
        self.origins[t] = self.one(origin)

    def one(self, origin: Origin) -> Origin:
        """One object for all equal layouts and static maps: its id is part of the memo's keys."""
        key: tuple[Any, ...]
        if type(origin) is Layout:
            key = (origin.dim, origin.outer, origin.inner, origin.data, origin.claims)
        elif type(origin) is Owners and origin.static and origin.known:
            content = origin.map.numpy().tobytes()
            key = (tuple(origin.map.shape), content, origin.data, origin.claims)
            if key not in self._layouts:
                self._held += 2 * len(content)
        else:
            return origin
        return self._layouts.setdefault(key, origin)

    def forget_maps(self) -> bool:
        """Let go of layouts and static maps between two batches, if they have become too many.
        Returns whether it did: their ids mean nothing then."""
        if self._held <= _MOST_BYTES:
            return False
        self._layouts, self._maps, self._held = {}, {}, 0
        return True

    # Activation checkpointing: what is recomputed begins with other tensors in the same memory

    @property
    def expects_recomputation(self) -> bool:
        return self._by_memory is not None

    def expect_recomputation(self) -> None:
        """From now on note where tensors are in memory, and that of all that exist already."""
        if self._by_memory is not None:
            return
        self._by_memory = {}
        for t, origin in self.origins.alive():
            self._note_memory(t, origin)
        for node in self.nodes.values():
            if node.param is not None:
                self._note_memory(node.param, node)

    def _note_memory(self, t: Tensor, origin: Origin) -> None:
        assert self._by_memory is not None
        if t.numel():
            self._by_memory[memory_of(t)] = origin

    def revive(self, tensors: Sequence[Tensor]) -> None:
        """A reentrant checkpoint detaches its inputs and has them require gradients again."""
        if self._by_memory is None:
            return
        for t in tensors:
            if t.requires_grad and t.is_leaf and self.origins.get(t) is CONSTANT:
                known = self._by_memory.get(memory_of(t))
                self.origins[t] = known if type(known) is Node else CONSTANT

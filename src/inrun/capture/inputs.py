"""Which tensors are the batch: what the user's modules receive (see anchors.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from inrun.capture.anchors import Claims, Entries, lists, named_tensors
from inrun.capture.tap import Known, MicroBatch
from inrun.errors import list_of_examples, two_dimensions, unproven_rows
from inrun.tensors.layout import Kind, Layout
from inrun.torch_compat import in_backward

CONSTANT, OUTSIDE, PAIRS = Kind("constant"), Kind("outside"), Kind("pairs")


class Inputs:
    """Notes the inputs of the modules that the loop calls."""

    modules: Sequence[nn.Module]
    batch_dim: int
    live: MicroBatch | None
    claims: Claims
    entries: Entries
    nodes: dict[int, Any]
    _info: Known
    if TYPE_CHECKING:

        def owns(self, t: Tensor) -> bool: ...
        def _one(self, info: Any) -> Any: ...
        def _as_data(self, t: Tensor) -> Layout | Kind: ...

    def __init__(self) -> None:
        self._first: str | None = None  # the model's input that is certain to be the batch

    def forget_inputs(self) -> None:
        self._inside: list[nn.Module] = []  # module calls that are under way
        self.anchored = False  # is it known which tensors are the batch?
        self.received = False  # has a module of the user's received them?
        self.claims.new_batch()

    def entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module of the user's is called."""
        whole = module is self.modules[0]
        if in_backward():  # recomputed
            return
        if self.live is None:
            if whole:
                self._note_sizes([*named_tensors(args, "input"), *named_tensors(kwargs)])
            return
        self._inside.append(module)
        if len(self._inside) > 1:
            return
        if self.entries.called is not None:
            self.entries.called.add(module)
        given = [*named_tensors(args, "input"), *named_tensors(kwargs)]
        if whole:
            self._note_sizes(given)
        else:
            given = [(f"{k} of {type(module).__name__}", t) for k, t in given]
        self._refuse_moved(given)
        self._refuse_lists((args, kwargs))
        self.anchor(given, first=whole)
        self.received = self.received or any(type(self._info.get(t)) is Layout for _, t in given)

    def left(self, module: nn.Module) -> None:
        if self._inside and self._inside[-1] is module:
            self._inside.pop()

    def _note_sizes(self, given: Sequence[tuple[str, Tensor]]) -> None:
        """How long each input is beside the batch: what has the same length in batches of two
        sizes holds a row per example, what has not does not. In a validation pass the batch is
        the input that it was in training."""
        sized = {k: t.shape[self.batch_dim] for k, t in given if t.ndim > self.batch_dim}
        if self.live is None:
            batch = sized.get(self._first) if self._first else None
        else:
            rows = [k for k, t in given if k in sized and self._has_rows(t)]
            batch = self.live.B if rows else None
            if rows:
                self._first = rows[0] if sized[rows[0]] == batch else None
            sized.update(dict.fromkeys(rows, self.live.B))
        for k, n in sized.items():
            if batch is not None and k != self._first:
                self.claims.seen(k, batch, n)

    def _has_rows(self, t: Tensor) -> bool:
        """Is it made of the batch, or does it have an entry for each example?"""
        assert self.live is not None
        info = self._info.get(t)
        own = id(t) in self.nodes or self.owns(t)
        return type(info) is Layout or (
            info is None and not own and t.shape[self.batch_dim] == self.live.B
        )

    def _refuse_moved(self, given: Sequence[tuple[str, Tensor]]) -> None:
        """The loop has moved the dimensions of its tensor, and two may be the examples'."""
        assert self.live is not None
        for name, t in given:
            info = self._info.get(t)
            if type(info) is not Layout or not info.data or info.dim == self.batch_dim:
                continue
            if t.shape[self.batch_dim] != self.live.B:
                self.claims.dims[name] = info.dim
            elif self.claims.dims.get(name) != info.dim:
                raise two_dimensions(name, tuple(t.shape), self.batch_dim, info.dim)

    def _refuse_lists(self, given: tuple[Any, Any]) -> None:
        """A list of B tensors, of which each has one entry per example or is one of them."""
        assert self.live is not None
        B, dim = self.live.B, self.batch_dim
        for name, tensors in [*lists(given[0], "input"), *lists(given[1])]:
            if not all(t.ndim > dim and t.shape[dim] == B for t in tensors):
                continue
            known = any(type(x := self._info.get(t)) is Layout and not x.data for t in tensors)
            alike = len({(t.ndim, t.dtype) for t in tensors}) == 1
            if len(tensors) != B or known or not alike:
                self.claims.columns.add(name)
            elif B > 1 and name not in self.claims.columns:
                raise list_of_examples(name, B, dim)

    def anchor(self, given: Sequence[tuple[str, Tensor]], first: bool = False) -> None:
        """The model receives these: data with an entry for each example is the batch. ``first``:
        the first of them is certain to be; of others that is claimed, as of all that come after
        something made of the batch."""
        first = first or not self.anchored
        for name, t in given:
            info = self._info.get(t)
            if info is None and t.ndim and id(t) not in self.nodes and not self.owns(t):
                info = self._info[t] = self._one(self._as_data(t))
            if type(info) is not Layout:
                continue
            if not info.data:  # made of the batch: what comes after it is another input
                first = False
                continue
            claims = frozenset() if first else frozenset([self.claims.named(name)])
            self._info[t] = self._one(replace(info, data=False, claims=claims))
            if not first and self.claims.shared(name):
                self._info[t] = CONSTANT
            first, self.anchored = False, True

    def settle_claims(self, micros: Sequence[MicroBatch], validate: Callable[[], Any]) -> None:
        """Refuse inputs that were taken for one row per example because of their length alone, if
        the sizes of the validation batches do not prove it either."""
        claims = {c: operation for micro in micros for c, operation in micro.claims.items()}
        if self.claims.unproven(claims):
            with self.entries.validation():
                validate()
            for claim in self.claims.unproven(claims):
                raise unproven_rows(claim, claims[claim])

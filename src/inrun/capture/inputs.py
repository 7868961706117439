"""Which tensors are the batch: what the user's modules receive (see anchors.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from inrun.capture.anchors import Claims, Entries, named_tensors
from inrun.capture.tap import Known, MicroBatch
from inrun.errors import unproven_rows
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

    def entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook of a module: its inputs may be the batch."""
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
            rows = (k for k, t in given if self._has_rows(t))
            self._first = next(rows, self._first)
            self._note_sizes(given)
            self.anchor(given, first=True)
        else:
            self.anchor([(f"{k} of {type(module).__name__}", t) for k, t in given])

    def left(self, module: nn.Module) -> None:
        if self._inside and self._inside[-1] is module:
            self._inside.pop()

    def _note_sizes(self, given: Sequence[tuple[str, Tensor]]) -> None:
        """How long each input is beside the batch: what has the same length in batches of two
        sizes holds a row per example, what has not does not."""
        sizes = {k: t.shape[self.batch_dim] for k, t in given if t.ndim > self.batch_dim}
        if self._first is None or (batch := sizes.pop(self._first, None)) is None:
            return
        for k, n in sizes.items():
            self.claims.seen(k, batch, n)

    def _has_rows(self, t: Tensor) -> bool:
        """Does it have an entry for each example?"""
        assert self.live is not None
        return t.ndim > self.batch_dim and t.shape[self.batch_dim] == self.live.B

    def anchor(self, given: Sequence[tuple[str, Tensor]], first: bool = False) -> None:
        """The model receives these: data with an entry for each example is the batch. ``first``:
        the first of them is certain to be; of others that is claimed, if something came before."""
        first = first or not self.anchored
        for name, t in given:
            info = self._info.get(t)
            if info is None and t.ndim and id(t) not in self.nodes and not self.owns(t):
                info = self._info[t] = self._one(self._as_data(t))
            if type(info) is not Layout or not info.data:
                continue
            claims = frozenset() if first else frozenset([name])
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

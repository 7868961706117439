"""What the model receives: row k of its inputs is example k of the batch.

The calls of the user's modules from outside any other of them are watched by a forward pre-hook.
The first of their tensors that has one entry per example is the batch (``Inputs.anchor``: the one
place where an input gets its layout). Of another input with as many entries that is a claim
(``provenance.Claims``); a batch in which a parameter has met an unproven claim is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from inrun.capture.micro_batch import MicroBatch
from inrun.capture.provenance import CONSTANT, Provenance, has_rows
from inrun.errors import list_of_examples, two_dimensions, unproven_rows
from inrun.tensors.layout import Layout
from inrun.torch_compat import DisableTorchFunction, in_backward

_DEPTH = 4  # of containers and objects that hold inputs


class Aside(Protocol):
    """Told of the calls of the model from outside any of its modules (aside.py)."""

    def entered(self, args: Any, kwargs: Any) -> None: ...

    def left(self, out: Any) -> None: ...


class Inputs:
    """Notes the inputs of the modules that the loop calls.

    Which of them it calls is not known at first: all are watched until a batch has shown it.
    """

    def __init__(self, provenance: Provenance) -> None:
        self.provenance, self.claims = provenance, provenance.claims
        self._model = provenance.modules[0]
        self._called: set[nn.Module] | None = None  # by the last batch; None: not known
        self._first: str | None = None  # the model's input that is certain to be the batch
        self._inside: list[nn.Module] = []  # module calls that are under way
        self._received = False  # has a module of the user's received the batch?
        self.aside: Aside | None = None  # told of the model's own calls

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Watch the modules during the forward and backward pass of a batch."""
        watched = self.provenance.modules
        if self._called is not None:
            watched = list({self._model, *self._called})
        self._called, self._inside, self._received = set(), [], False
        try:
            with self._hooked(watched):
                yield
        finally:
            self._called = self._called or None

    @contextmanager
    def _hooked(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        hooks: list[Any] = []
        try:
            for module in modules:
                hooks.append(module.register_forward_pre_hook(Entry(self), with_kwargs=True))
                hooks.append(module.register_forward_hook(Exit(self), always_call=True))
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module of the user's is called."""
        is_model = module is self.provenance.modules[0]
        if in_backward():  # recomputed
            return
        if not self.provenance.B:  # a validation pass
            if is_model:
                self._note_sizes([*named_tensors(args, "input"), *named_tensors(kwargs)])
            return
        self._inside.append(module)
        self.provenance.inside = self._received
        if len(self._inside) > 1:
            return
        if self._called is not None:
            self._called.add(module)
        given = [*named_tensors(args, "input"), *named_tensors(kwargs)]
        if not is_model:
            given = [(f"{k} of {type(module).__name__}", t) for k, t in given]
        if self.provenance.slots is None:
            if is_model:
                self._note_sizes(given)
            self._refuse_moved(given)
            self._refuse_lists((args, kwargs))
        self.anchor(given, first=is_model)
        known = self.provenance.known
        self._received = self._received or any(has_rows(known(t)) for _, t in given)
        self.provenance.inside = self._received
        if is_model and self.aside is not None:
            self.aside.entered(args, kwargs)

    def left(self, module: nn.Module, out: Any) -> None:
        """A call of a user's module is over."""
        if self._inside and self._inside[-1] is module:
            self._inside.pop()
            self.provenance.inside = self._received and bool(self._inside)
            if not self._inside and module is self._model and self.aside is not None:
                self.aside.left(out)

    def _note_sizes(self, given: Sequence[tuple[str, Tensor]]) -> None:
        """Compare the length of each input with the batch's. An input that has the batch's length
        in batches of two sizes holds a row per example, another does not. In a validation pass the
        batch is the input that it was in training."""
        B, dim = self.provenance.B, self.provenance.batch_dim
        sized = {k: t.shape[dim] for k, t in given if t.ndim > dim}
        if not B:
            batch = sized.get(self._first) if self._first else None
        else:
            rows = [k for k, t in given if k in sized and self._has_rows(t)]
            batch = B if rows else None
            if rows:
                self._first = rows[0] if sized[rows[0]] == batch else None
            sized.update(dict.fromkeys(rows, B))
        for k, n in sized.items():
            if batch is not None and k != self._first:
                self.claims.seen(k, batch, n)

    def _has_rows(self, t: Tensor) -> bool:
        """Is it made of the batch, or does it have an entry for each example?"""
        provenance = self.provenance
        origin = provenance.known(t)
        return type(origin) is Layout or (
            origin is None
            and not provenance.is_parameter(t)
            and t.shape[provenance.batch_dim] == provenance.B
        )

    def _refuse_moved(self, given: Sequence[tuple[str, Tensor]]) -> None:
        """The loop has moved the dimensions of its tensor, and two may be the examples'."""
        dim = self.provenance.batch_dim
        for name, t in given:
            origin = self.provenance.known(t)
            if type(origin) is not Layout or not origin.data or origin.dim == dim:
                continue
            if t.shape[dim] != self.provenance.B:
                self.claims.dims[name] = origin.dim
            elif self.claims.dims.get(name) != origin.dim:
                raise two_dimensions(name, tuple(t.shape), dim, origin.dim)

    def _refuse_lists(self, given: tuple[Any, Any]) -> None:
        """A list of B tensors, of which each has one entry per example or is one of them."""
        B, dim = self.provenance.B, self.provenance.batch_dim
        for name, tensors in [*lists(given[0], "input"), *lists(given[1])]:
            if not all(t.ndim > dim and t.shape[dim] == B for t in tensors):
                continue
            origins = [self.provenance.known(t) for t in tensors]
            known = any(type(x) is Layout and not x.data for x in origins)
            alike = len({(t.ndim, t.dtype) for t in tensors}) == 1
            if len(tensors) != B or known or not alike:
                self.claims.columns.add(name)
            elif B > 1 and name not in self.claims.columns:
                raise list_of_examples(name, B, dim)

    def anchor(self, given: Sequence[tuple[str, Tensor]], first: bool = False) -> None:
        """The model receives these tensors: data with an entry for each example is the batch.

        ``first``: the first of them is certain to be. Of the others, and of all that come after a
        tensor made of the batch, it is a claim.
        """
        provenance = self.provenance
        first = first or not provenance.anchored
        for name, t in given:
            origin = provenance.known(t)
            if origin is None and t.ndim and not provenance.is_parameter(t):
                origin = provenance.as_data(t)
                provenance.assume(t, origin)
            if not has_rows(origin):
                continue
            if not origin.data:  # made of the batch: what comes after it is another input
                first = False
                continue
            if provenance.on_positions is not None:
                origin = provenance.received(name, t, origin)
            claims = frozenset() if first else frozenset([self.claims.named(name)])
            shared = not first and self.claims.shared(name)
            provenance.assume(t, CONSTANT if shared else replace(origin, data=False, claims=claims))
            first, provenance.anchored = False, True

    def settle_claims(self, micros: Sequence[MicroBatch], validate: Callable[[], Any]) -> None:
        """Refuse inputs that were taken for one row per example because of their length alone, if
        the sizes of the validation batches do not prove it either."""
        claims = {c: operation for micro in micros for c, operation in micro.claims.items()}
        if self.claims.unproven(claims):
            with self._hooked([self._model]):
                validate()
            for claim in self.claims.unproven(claims):
                raise unproven_rows(claim, claims[claim])


class Hook:
    """A hook of a module. Copies of the module get one that does nothing."""

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _nothing_at_all, ()


class Entry(Hook):
    """The forward pre-hook of the user's modules."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = weakref.ref(inputs)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if (inputs := self._inputs()) is not None:
            with DisableTorchFunction():
                inputs.entered(module, args, kwargs)


class Exit(Entry):
    """The forward hook of the user's modules: the call is over."""

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if (inputs := self._inputs()) is not None:
            with DisableTorchFunction():
                inputs.left(module, out)


def _nothing(*args: Any) -> None:
    """A hook that does nothing."""


def _nothing_at_all() -> Any:
    return _nothing


def named_tensors(tree: Any, path: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """The tensors of arguments in order, each with its path: lists, dictionaries, dataclasses and
    objects with attributes."""
    if isinstance(tree, Tensor):
        if not tree.is_nested:  # these have no shape
            yield path, tree
        return
    for key, value in _members(tree) if depth else ():
        yield from named_tensors(value, f"{path}.{key}" if path else str(key), depth - 1)


def lists(tree: Any, path: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, list[Tensor]]]:
    """The lists of tensors inside arguments, each with its path."""
    for key, value in _members(tree) if depth else ():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, (list, tuple)) and value and all(isinstance(t, Tensor) for t in value):
            yield name, [t for t in value if not t.is_nested]
        yield from lists(value, name, depth - 1)


def _members(tree: Any) -> Iterable[tuple[Any, Any]]:
    """The members of a container or object, by name."""
    if tree is None or isinstance(tree, (str, bytes, int, float, nn.Module, Tensor)):
        return ()
    if isinstance(tree, Mapping):
        return tree.items()
    if isinstance(tree, (list, tuple)):
        return enumerate(tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(f.name, getattr(tree, f.name, None)) for f in fields(tree)]
    if hasattr(tree, "__dict__") and not isinstance(tree, type):
        return list(vars(tree).items())
    return ()

"""What the model receives: row k of its inputs is example k of the batch.

The calls of the user's modules from outside any other of them are watched by a forward pre-hook.
The first of their tensors that has one entry per example is the batch. Another input may have as
many entries by chance (a memory of 8 slots in a batch of 8): until an operation lays its rows
beside the batch's, or it has been seen with batches of two sizes, its layout is a *claim*, and a
batch in which a parameter has met an unproven claim is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inrun.torch_compat import DisableTorchFunction

_DEPTH = 4  # of containers and objects that hold inputs
_CALL = " (call "  # in the name of a claim, after the input's


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
    """What a container or object holds, by name."""
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


class Claims:
    """Which inputs hold one row per example, as far as has been shown."""

    def __init__(self) -> None:
        self._leader: dict[str, str] = {}  # claims that stand and fall together
        self._proven: set[str] = set()
        self._sizes: dict[str, set[tuple[int, int]]] = {}  # of a batch, and of the input
        self._called: dict[str, int] = {}  # in this batch: two calls may mean different things
        self.columns: set[str] = set()  # lists whose tensors have a row for each example
        self.dims: dict[str, int] = {}  # where an input that the loop has moved holds the examples

    def _find(self, name: str) -> str:
        while (leader := self._leader.get(name, name)) != name:
            name = leader
        return name

    def link(self, names: frozenset[str]) -> None:
        """Their rows lie beside each other: all are true or none."""
        first, *rest = {self._find(n) for n in names}
        for other in rest:
            self._leader[other] = first
            if other in self._proven:
                self._proven.add(first)

    def prove(self, names: Iterable[str]) -> None:
        self._proven.update(self._find(n) for n in names)

    def proven(self, name: str) -> bool:
        """By an operation, for the tensor of this call; or by sizes, for the input of all calls."""
        return self._find(name) in self._proven or self._by_size(name.partition(_CALL)[0])

    def new_batch(self) -> None:
        self._called = {}

    def named(self, name: str) -> str:
        """A claim of its own for each tensor of a batch that comes as this input."""
        self._called[name] = count = self._called.get(name, 0) + 1
        return name if count == 1 else f"{name}{_CALL}{count})"

    def seen(self, name: str, batch: int, size: int) -> None:
        """An input of this size came with a batch of that."""
        self._sizes.setdefault(name, set()).add((batch, size))

    def _by_size(self, name: str) -> bool:
        sizes = self._sizes.get(name, ())
        return len(sizes) > 1 and all(b == n for b, n in sizes)

    def shared(self, name: str) -> bool:
        """Has it been seen with another size than the batch's? One row may be meant for each."""
        return any(n not in (b, 1) for b, n in self._sizes.get(name, ()))

    def unproven(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not self.proven(name)]


class Entries:
    """Tells a receiver when the loop calls one of the user's modules.

    Which of them it calls is not known at first: all are watched until a batch has shown it.
    """

    def __init__(self, receiver: Any, model: nn.Module) -> None:
        self._receiver, self._model = weakref.ref(receiver), model
        self.called: set[nn.Module] | None = None  # by the last batch; None: not known

    @contextmanager
    def batch(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Around the forward and backward pass of a batch."""
        watched = modules if self.called is None else {self._model, *self.called}
        self.called = set()
        try:
            with self._hooked(watched):
                yield
        finally:
            self.called = self.called or None

    def validation(self) -> AbstractContextManager[None]:
        """Around validation passes: what sizes do the model's inputs have there?"""
        return self._hooked([self._model])

    @contextmanager
    def _hooked(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        hooks: list[Any] = []
        receiver = self._receiver()
        try:
            for module in modules:
                hooks.append(module.register_forward_pre_hook(Entry(receiver), with_kwargs=True))
                hooks.append(module.register_forward_hook(Exit(receiver), always_call=True))
            yield
        finally:
            for handle in hooks:
                handle.remove()


class Entry:
    """The forward pre-hook of the user's modules. Copies of a module get one that does nothing."""

    def __init__(self, receiver: Any) -> None:
        self._receiver = weakref.ref(receiver)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if (receiver := self._receiver()) is not None:
            with DisableTorchFunction():
                receiver.entered(module, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _nothing_at_all, ()


class Exit(Entry):
    """The forward hook beside it."""

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if (receiver := self._receiver()) is not None:
            receiver.left(module)


def _nothing(*args: Any) -> None:
    """A hook that does nothing."""


def _nothing_at_all() -> Any:
    return _nothing

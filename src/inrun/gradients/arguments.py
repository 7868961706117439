"""The arguments of a call as a flat list of leaves, and as arguments again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inrun.tensors.layout import tensors_in
from inrun.torch_compat import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Spec:
    """How leaves become arguments again.

    ``nested`` has, for each argument that is a container of tensors, where its leaves begin.
    """

    positional: int
    keywords: tuple[str, ...]
    nested: Mapping[int, tuple[int, TreeSpec]] | None = None

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        n = self.positional
        if self.nested is not None:
            leaves = [self._argument(i, leaves) for i in range(n + len(self.keywords))]
        return tuple(leaves[:n]), dict(zip(self.keywords, leaves[n:], strict=True))

    def argument(self, position: int, keyword: str) -> int | None:
        """The number of the argument given by position or keyword; None if it was not given."""
        if position < self.positional:
            return position
        if keyword in self.keywords:
            return self.positional + self.keywords.index(keyword)
        return None

    def place(self, argument: int) -> Any:
        """Its leaf, or its leaves in their container."""
        return self._argument(argument, range(2**30))

    def value(self, argument: int, leaves: Sequence[Any]) -> Any:
        return leaves[argument] if self.nested is None else self._argument(argument, leaves)

    def _argument(self, i: int, leaves: Sequence[Any]) -> Any:
        if self.nested is None:
            return leaves[i]
        if i in self.nested:
            start, spec = self.nested[i]
            return tree_unflatten(list(leaves[start : start + spec.num_leaves]), spec)
        before = [spec.num_leaves - 1 for j, (_, spec) in self.nested.items() if j < i]
        return leaves[i + sum(before)]


def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Spec]:
    """The arguments as a flat list of leaves, and how to put them together again.

    Like torch's pytree, but an argument that holds no tensors stays as it is: nearly every call is
    then its arguments in a row, and taking it apart costs next to nothing.
    """
    leaves: list[Any] = []
    nested: dict[int, tuple[int, TreeSpec]] = {}
    for i, x in enumerate((*args, *kwargs.values())):
        if isinstance(x, (list, tuple, dict)) and tensors_in(x):
            inner, spec = tree_flatten(x)
            nested[i] = len(leaves), spec
            leaves += inner
        else:
            leaves.append(x)
    return leaves, Spec(len(args), tuple(kwargs), nested or None)


def present(of_leaves: Sequence[Any]) -> tuple[int, ...]:
    """Indices of the entries that are not None."""
    return tuple(i for i, x in enumerate(of_leaves) if x is not None)

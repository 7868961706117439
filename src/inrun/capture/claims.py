"""Which inputs of the model hold one row per example, as far as has been shown."""

from __future__ import annotations

from collections.abc import Iterable

_CALL = " (call "  # in the name of a claim, after the input's


class Claims:
    """Which inputs hold one row per example, as far as has been shown.

    An input may have as many entries as the batch has examples by chance (a memory of 8 slots in a
    batch of 8). Its layout is a *claim* until an operation lays its rows beside the batch's, or it
    has been seen with batches of two sizes.
    """

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
        """An operation aligned the rows of these inputs: all claims are true or none is."""
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

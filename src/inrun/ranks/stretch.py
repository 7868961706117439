"""Coordinates side by side."""

from __future__ import annotations

from typing import NamedTuple


class Stretch(NamedTuple):
    """Coordinates of a flat parameter side by side: where they begin in it, where they begin among
    those that a rank has, and how many."""

    at: int
    own: int
    n: int

    def between(self, start: int, stop: int) -> Stretch:
        """What of it lies between two coordinates, counted from the first of them."""
        a, b = max(self.at, start), min(self.at + self.n, stop)
        return Stretch(a - start, self.own + a - self.at, max(0, b - a))

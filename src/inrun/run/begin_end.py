"""``run.begin(ids)`` and ``run.end()``, for loops that cannot use ``with run.batch(ids)``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from inrun.errors import BatchError


class _DroppedError(Exception):
    """Ends an open batch of which nothing is to be kept."""


class BeginEnd:
    """The two calls of a run; ``batch`` does the work."""

    _open: AbstractContextManager[None] | None = None  # the batch between begin and end

    if TYPE_CHECKING:

        def batch(self, ids: Any, owner: Any, tokens: bool) -> AbstractContextManager[None]: ...

    def begin(
        self,
        ids: Sequence[int] | Sequence[str] | np.ndarray | Tensor,
        owner: Tensor | None = None,
        tokens: bool = False,
    ) -> None:
        """Begin a batch: as entering ``with run.batch(ids, owner, tokens)``, for loops whose
        forward and backward pass are in different functions. :meth:`end` ends it, in the same
        thread and inside the same ``with`` blocks."""
        if self._open is not None:
            self._drop_open_batch()
            raise BatchError(
                "run.begin(ids) while a batch is open: call run.end() after backward(), before the "
                "next begin. If an exception ended the last batch, call run.end(drop=True) where "
                "it is caught. (The open batch was dropped: nobody is credited for it.)"
            )
        block = self.batch(ids, owner, tokens)
        block.__enter__()
        self._open = block

    def end(self, drop: bool = False) -> None:
        """End the batch that :meth:`begin` began, after ``backward()`` and before
        ``optimizer.step()``. ``drop``: keep nothing of it, because an exception ended it; then it
        does not matter whether a batch is open."""
        if drop:
            self._drop_open_batch()
            return
        if self._open is None:
            raise BatchError("run.end() without run.begin(ids): no batch is open")
        block, self._open = self._open, None
        block.__exit__(None, None, None)

    def _drop_open_batch(self) -> None:
        if self._open is None:
            return
        block, self._open = self._open, None
        dropped = _DroppedError()
        block.__exit__(type(dropped), dropped, None)

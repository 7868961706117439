"""Signals of small classifiers on a CPU, worked on when many steps are there.

A call of NumPy takes as long as some hundred numbers. So what a batch with few logits leaves is a
copy of its log-probabilities and labels; the signals (signals.py) of all that wait are computed
together when these are ``MOST`` numbers or ``BATCHES``, or when somebody asks for one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inrun.torch_compat import DisableTorchFunction

MOST, BATCHES = 2**15, 64  # log-probabilities that wait, and of how many batches
PIECE = 2**16  # that are worked on at a time: they fit into the cache
_NONE = torch.empty(0, device="cpu")


class Together:
    """Batches of which the signals are not computed yet."""

    def __init__(self) -> None:
        self._waiting: list[Deferred] = []
        self._numbers = 0
        self._lock = threading.Lock()  # tables may be asked for in another thread

    def add(self, kept: Deferred) -> None:
        """Compute this one's signals with those of others."""
        with self._lock:
            self._waiting.append(kept)
            self._numbers += kept.logp.numel()
            if self._numbers >= MOST or len(self._waiting) >= BATCHES:
                self._work()

    def work(self) -> None:
        """Compute the signals of all that wait."""
        with self._lock:
            self._work()

    def _work(self) -> None:
        alike: dict[Any, list[Deferred]] = {}
        for kept in self._waiting:
            alike.setdefault((kept.logp.shape[1], kept.logp.dtype), []).append(kept)
        for some in alike.values():
            with torch.no_grad(), DisableTorchFunction():
                logp, labels = (
                    torch.cat([k.logp for k in some]),
                    torch.cat([k.labels for k in some]),
                )
            ignored = np.repeat([k.ignore for k in some], [k.B for k in some])
            found = means(rows_of(logp, labels, ignored).astype(np.float64)).astype(np.float32)
            start = 0
            for kept in some:
                kept.is_now(found[:, start : start + kept.B])
                start += kept.B
        self._waiting, self._numbers = [], 0


class Deferred:
    """[4, B]: loss, EL2N, margin and label of the examples of a batch, of whose loss row k is the
    only one of example k. ``np.asarray`` computes them; they never change."""

    __slots__ = ("B", "ignore", "labels", "logp", "signals", "together", "waits")

    def __init__(self, logp: Tensor, labels: Tensor, ignore: int, together: Together) -> None:
        self.logp, self.labels = logp, labels  # [B, C], [B] int64
        self.ignore = ignore  # the label that does not count
        self.B, self.together, self.waits = len(labels), together, False
        self.signals: np.ndarray | None = None

    def own(self) -> None:
        """Copy what the training loop may write to later."""
        self.logp, self.labels = self.logp.detach().clone(), self.labels.clone()

    def wait(self) -> None:
        """No loss will be added to this one."""
        if not self.waits:
            self.waits = True
            self.together.add(self)

    def is_now(self, signals: np.ndarray) -> None:
        """They are computed; what they were made of is not kept."""
        self.signals = signals
        self.logp = self.labels = _NONE

    @property
    def shape(self) -> tuple[int, ...]:
        return 4, self.B

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return 16 * self.B

    def rows(self) -> Tensor:
        """[5, B] sums over rows, as ``signals.row_signals`` makes them."""
        return torch.from_numpy(rows_of(self.logp, self.labels, self.ignore))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.signals is None:
            self.wait()
            self.together.work()
        return np.array(self.signals, dtype, copy=copy)


class Several:
    """The same of a step of several batches."""

    def __init__(self, parts: Sequence[Deferred]) -> None:
        self.parts = parts
        self.shape: tuple[int, ...] = (4, sum(k.B for k in parts))
        self.nbytes = sum(k.nbytes for k in parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(np.concatenate([np.asarray(k) for k in self.parts], axis=1), dtype)


Later = Deferred | Several


def rows_of(logp: Tensor, y: Tensor, ignore: int | np.ndarray) -> np.ndarray:
    """[5, N] of log-probabilities [N, C] and labels [N] on a CPU: log p_y, EL2N, the highest
    log-probability of another label, y, and 1 where the label counts (0 in all five otherwise).

    NumPy's exponential is the faster one, torch's maximum; both work on pieces in the cache. A call
    right after the passes of a model is slow, whatever it does: these are as few as possible.
    """
    with DisableTorchFunction():
        z, labels = logp.detach().numpy(), y.numpy()
        N, C = z.shape
        some, row = max(1, PIECE // C), _numbers(N)
        ignored = (labels == ignore).nonzero()[0]
        at = labels
        if len(ignored):
            at = labels.copy()
            at[ignored] = 0
        found, other = np.empty((5, N), z.dtype), []
        masked = torch.empty(min(N, some), C, dtype=logp.dtype, device="cpu")
        others = masked.numpy()
        for i in range(0, N, some):
            n = min(some, N - i)
            p = others[:n]
            p[:] = z[i : i + n]
            p[row[:n], at[i : i + n]] = -np.inf
            other.append(masked[:n].amax(1))
            np.exp(p, out=p)
            np.einsum("nc,nc->n", p, p, out=found[1, i : i + n])
        torch.cat(other, out=torch.from_numpy(found[2]))
    own = z[row, at]
    found[0], found[3], found[4] = own, labels, 1
    np.expm1(own, out=own)
    own *= own
    own += found[1]
    np.sqrt(own, out=found[1])
    if len(ignored):
        found[:, ignored] = 0
    return found


@lru_cache(maxsize=4)
def _numbers(n: int) -> np.ndarray:
    """0, 1, …, n − 1, not to be written to."""
    return np.arange(n)


def means(sums: np.ndarray) -> np.ndarray:
    """[4, B] from [5, B]: loss, EL2N, margin and label, the means over the rows of each example."""
    if (sums[4] == 1).all():
        found = np.empty((4, sums.shape[1]), sums.dtype)
        found[0], found[1], found[2], found[3] = -sums[0], sums[1], sums[0] - sums[2], sums[3]
        return found
    count = np.where(sums[4] > 0, sums[4], np.nan)
    own, el2n, other, label = sums[:4] / count
    return np.stack([-own, el2n, own - other, np.where(sums[4] == 1, label, np.nan)])

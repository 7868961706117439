"""What a run keeps an eye on while it trains: ids, skipped batches, memory, running sums."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from inrun.errors import BatchError
from inrun.gradients import Form
from inrun.ledger.entries import Ledger, StepEntry, step_row
from inrun.ledger.steady import step_agreement
from inrun.ledger.tables import harm_of
from inrun.ranks.memory import free_bytes
from inrun.scoring.carry import Window
from inrun.scoring.conclude import Pending, StepResult


@dataclass(frozen=True)
class Config:
    """The choices of a run that its numbers depend on."""

    estimator: tuple[str, ...]
    point: str | None
    training: str
    audit_every: int
    per_step: int | str | None
    every: int
    batch_dim: int
    ignore: tuple[str, ...]
    form: Form
    seed: int
    step_together: bool = True  # with several optimizers: their steps make one step
    window: int | None = None  # of "carry": steps for which a batch is followed
    smooth: float = 0.0  # running mean of the validation gradient
    halves_every: int = 0  # steps, in one of which values by two halves of the rows are measured
    cuda_graphs: bool = False  # passes of equal batches are recorded and replayed

    def saved(self) -> dict[str, Any]:
        """For run.json; a run without a window, smoothing or graphs is described as before there
        were any."""
        found = asdict(self)
        if not self.cuda_graphs:
            del found["cuda_graphs"]
        if self.window is None:
            del found["window"]
        if not self.smooth:
            del found["smooth"]
        return found

    def scores(self, step: int) -> bool:
        """Is this step scored? True with probability 1/every, the same for all its batches."""
        if self.every == 1:
            return True
        coin = np.random.default_rng((self.seed, step))
        return int(coin.integers(self.every)) == 0


def as_ids(ids: Any, kind: type | None, empty: bool = False) -> tuple[np.ndarray, type | None]:
    """Ids as an array and their type, which must be the same in the whole run (``kind``).
    ``empty``: there may be none.

    Integers fit into 64 bits with a sign (int64), strings can be written as UTF-8: what comes out
    of the tables is what went in.
    """
    whole = _integers(ids)
    if whole is not None and kind is not str:
        return whole, int
    plain = _as_list(ids)
    if empty and not plain:
        return np.empty(0, np.int64), kind
    if not plain:
        raise BatchError("run.batch got no ids: pass one per example")
    found: list[int] | list[str] = [_id(x, i, len(plain)) for i, x in enumerate(plain)]
    kinds: dict[type, int] = {}  # type → position where it occurs first
    for i, x in enumerate(found):
        kinds.setdefault(type(x), i)
    if len(kinds) > 1 or (kind is not None and kind not in kinds):
        here = ", ".join(f"{k.__name__} at position {i}" for k, i in kinds.items())
        before = "" if kind is None else f", and {kind.__name__} in the batches before"
        raise BatchError(
            "ids must be all integers or all strings, the same in the whole run, but here are "
            f"{here}{before}. Make them all strings with str(id)"
        )
    kind = type(found[0])
    kept = np.empty(len(found), dtype=np.int64 if kind is int else object)
    kept[:] = found
    return kept, kind


def as_owner(owner: Any, examples: int) -> Tensor | None:
    """``owner`` of ``run.batch``, checked as far as that needs no wait for a device."""
    if owner is None:
        return None
    owner = torch.as_tensor(owner)
    if owner.ndim == 0 or not owner.numel() or owner.is_floating_point() or owner.is_complex():
        raise BatchError(
            f"owner must hold integers of the leading dimensions of the model's inputs, but it is "
            f"{owner.dtype} of shape {tuple(owner.shape)}. inrun.packing makes it from "
            "cu_seqlens, position_ids or seq_idx"
        )
    if owner.is_cpu and not -1 <= int(owner.min()) <= int(owner.max()) < examples:
        raise BatchError(
            f"owner holds numbers from {int(owner.min())} to {int(owner.max())}, but there are "
            f"{examples} ids: owner[...] = k stands for ids[k], from 0 to {examples - 1}, and -1 "
            "for nobody"
        )
    return owner.detach().long()


def _integers(ids: Any) -> np.ndarray | None:
    """Ids as int64 if they are a one-dimensional integer array (the usual case); else None."""
    if isinstance(ids, Tensor) and str(ids.dtype).startswith(("torch.int", "torch.uint")):
        ids = ids.cpu().numpy()
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not len(ids):
        return None
    fits = ids.dtype.kind == "i" or (ids.dtype.kind == "u" and ids.dtype.itemsize < 8)
    return ids.astype(np.int64) if fits else None


def _as_list(ids: Any) -> list[Any]:
    """The ids as a list, one per example; refuses what has no order."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise BatchError(
            f"run.batch got {ids!r}, a single {type(ids).__name__}: pass a list of ids, one per "
            "example"
        )
    if isinstance(ids, (Mapping, Set)):
        raise BatchError(
            f"run.batch got ids in a {type(ids).__name__}, which does not say which id is whose: "
            "pass a list, one per example, in the order of the batch"
        )
    if isinstance(ids, (Tensor, np.ndarray)):
        if ids.ndim != 1:
            raise BatchError(
                f"run.batch got ids of shape {tuple(ids.shape)}: pass one per example, shape [B]"
            )
        return ids.tolist()
    return [x.item() if isinstance(x, Tensor) and x.ndim == 0 else x for x in ids]


def _id(x: Any, position: int, n: int) -> Any:
    """An id as the ledger keeps it: a plain int or str."""
    if isinstance(x, str):
        text = str.__str__(x)  # of a subclass (numpy's, an enum's): its characters
        if text.isascii() or _encodable(text):
            return text
        problem = f"is {text!r}, half a surrogate pair, which no file can hold: mend the text it "
        problem += "was read from (errors='replace'), or number the examples"
    elif isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        number = int(x)
        if -(2**63) <= number < 2**63:
            return number
        problem = f"is {number}, which does not fit into 64 bits with a sign: pass such ids as "
        problem += "strings, str(id), in the whole run"
    else:
        problem = f"is {x!r} ({type(x).__name__}). Ids are integers or strings: "
        if isinstance(x, bytes):
            problem += "decode it, id.decode()"
        elif x is None or (pd.api.types.is_scalar(x) and pd.isna(x)):
            problem += "every example needs an id of its own; leave out rows without one, or name "
            problem += "them"
        else:
            problem += "make it an integer, int(id), or a string, str(id)"
    raise BatchError(f"the id at position {position} of {n} {problem}")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class EmptyBatches:
    """Counts ``run.batch`` blocks that recorded nothing. Without a backward pass the batch does not
    count (a loop may skip those whose loss is not finite); with one it is a mistake."""

    def __init__(self) -> None:
        self.count = 0

    def ended(self, error: BatchError, backward: bool) -> None:
        """A block recorded nothing: raise ``error`` if ``backward()`` ran in it, else warn once."""
        if backward:
            raise error
        self.count += 1
        if self.count == 1:
            warnings.warn(
                "a run.batch(ids) block ended without a backward(): the batch does not count. That "
                "is right for a batch that the loop skips; otherwise call loss.backward() inside "
                "the block. (Said once.)",
                stacklevel=7,
            )


class MemoryLimit:
    """Counts the bytes of the records that are kept until ``optimizer.step()``.

    ``limit``: in bytes; None means the memory of ``device()`` that is free when the first record
    is kept (of the host with ``offload``).
    """

    def __init__(
        self, limit: int | None, offload: bool, device: Callable[[], torch.device]
    ) -> None:
        self.limit, self.offload, self.device = limit, offload, device
        self.held = 0  # bytes
        self.batches = 0  # of this step that came before the one being captured

    def add(self, new: int) -> None:
        """Count ``new`` bytes; raises MemoryError beyond the limit."""
        if self.limit is None:
            self.limit = free_bytes(self.device(), self.offload)
        self.held += new
        if self.held > self.limit:
            raise MemoryError(
                "what inrun must keep until optimizer.step() takes more than "
                f"{self.limit / 2**30:.2f} GiB already (after {self.batches} earlier "
                "batches of this step). Use smaller or fewer micro-batches per step, "
                "watch(..., offload=True) to keep it in host memory, ignore=[...] for the largest "
                "layers, or raise memory_limit."
            )


class EntryQueue:
    """Steps on their way to the ledger, in order: some wait for values that are still on a device.

    ``on_result`` is called with the result of each step when its values are there. With ``carry``
    a step then waits until its values are complete, some steps later.
    """

    def __init__(
        self, ledger: Ledger, tally: Tally, on_result: Callable[[StepResult], None],
        carry: Window | None = None,
    ) -> None:  # fmt: skip
        self._ledger, self._tally, self._on_result = ledger, tally, on_result
        self._carry = carry
        self._waiting: deque[tuple[StepEntry, Pending]] = deque()
        self._lock = threading.RLock()  # tables may be asked for in another thread

    def add(self, entry: StepEntry, result: StepResult | Pending) -> None:
        """Append a step to the ledger, or have it wait until its values are on the host."""
        with self._lock:
            self.settle()
            if isinstance(result, Pending):  # copied to the host while the next step runs
                self._waiting.append((entry, result))
            else:
                self._append(entry, result)

    def settle(self) -> None:
        """Wait for the values still on the device and append their steps to the ledger."""
        with self._lock:
            while self._waiting:
                entry, pending = self._waiting.popleft()
                self._append(entry, pending.settle())

    def _append(self, entry: StepEntry, result: StepResult) -> None:
        self._on_result(result)
        done = replace(
            entry, values=result.values, void=result.void, audit=result.audit,
            missed=result.missed, nobody=result.nobody, tokens=result.tokens, sums=result.sums,
            moved=result.moved, signals=result.signals, bend=result.bend,
            halves=result.halves,
        )  # fmt: skip
        self._record([done] if self._carry is None else self._carry.settled(done))

    def _record(self, entries: Iterable[StepEntry]) -> None:
        for entry in entries:
            self._ledger.append(entry)
            self._tally.add(entry)

    def incomplete(self) -> list[StepEntry]:
        """The steps that wait for carried values, with what they were credited so far."""
        with self._lock:
            return [] if self._carry is None else self._carry.so_far()

    def replace(self, entries: Iterable[StepEntry]) -> None:
        """Drop the steps that wait and record these instead: the run goes back to a checkpoint."""
        with self._lock:
            self._waiting.clear()
            if self._carry is not None:
                self._carry.forget()
            self._record(entries)

    def finish(self) -> None:
        """The run is over: record all steps that wait, with what they were credited."""
        with self._lock:
            self.settle()
            if self._carry is not None:
                self._record(self._carry.flush())


class Tally:
    """Running sums over the steps of a run, of its first estimator. ``adds_up``: its values do, to
    a loss change that can be measured."""

    def __init__(self, adds_up: bool = True) -> None:
        self.adds_up = adds_up
        self.listeners: list[Callable[[Tally], None]] = []
        self.closers: list[Callable[[], None]] = []
        self.by_id: dict[Any, float] | None = None  # kept only when somebody asks for ids
        self.harm_by_id: dict[Any, float] | None = None  # likewise
        self.reset()

    def reset(self) -> None:
        self.last, self.steps, self.scored, self.void, self.rows = -1, 0, 0, 0, 0
        self.total = 0.0  # sum of all values
        self.audited, self.credited, self.batch, self.momentum = 0, 0.0, 0.0, 0.0
        self.whole = False  # "carry": the whole steps are explained, not the batches' share
        self.loss = float("nan")
        self.halved, self._agreed, self._counted = 0, 0.0, 0  # steps with values by halves
        if self.by_id is not None:
            self.by_id = {}
        if self.harm_by_id is not None:
            self.harm_by_id = {}

    @property
    def explained(self) -> float:
        """Sum of values and nobody's part / batch share over the audited steps; NaN before the
        first audit. For "carry": the drop along the steps / the measured one."""
        measured = self.batch + self.momentum if self.whole else self.batch
        return self.credited / measured if measured and self.adds_up else float("nan")

    def add(self, entry: StepEntry) -> None:
        if entry.step <= self.last:  # the run went back to a checkpoint
            self.reset()
        row = step_row(entry, 0)
        self.last, self.steps = entry.step, self.steps + 1
        self.void += entry.void is not None
        if entry.values is not None:
            self.scored += 1
            self.rows += len(entry.ids)
            self.total += row["sum"] * entry.weight
            if entry.halves is not None and (r := step_agreement(*entry.halves[0])) is not None:
                n = len(entry.ids) - 1
                self.halved, self._counted = self.halved + 1, self._counted + n
                self._agreed += r * n
            if entry.audit is not None:
                self.audited += 1
                self.whole = bool(np.isfinite(row["drop"]))
                self.credited += row["drop"] if self.whole else row["sum"] + row["nobody"]
                self.batch += row["batch_share"]
                self.momentum += row["momentum_share"]
                self.loss = row["loss"]
            if self.by_id is not None:
                values = entry.values[0].mean(axis=0) * entry.weight
                for key, value in zip(entry.ids.tolist(), values.tolist(), strict=True):
                    self.by_id[key] = self.by_id.get(key, 0.0) + value
            if self.harm_by_id is not None:
                counted, harms = harm_of(entry.values[0])
                for key, harm in zip(entry.ids[counted].tolist(), harms.tolist(), strict=True):
                    self.harm_by_id[key] = self.harm_by_id.get(key, 0.0) + harm
        for listener in self.listeners:
            listener(self)

    def close(self) -> None:
        for closer in self.closers:
            closer()
        self.listeners, self.closers = [], []

    def suspects(self, n: int) -> list[tuple[Any, float, float]]:
        """The n examples of most harm so far: id, harm, value. The first rows of ``run.harm()``."""
        ranked = sorted((self.harm_by_id or {}).items(), key=lambda item: -item[1])
        return [(key, harm, (self.by_id or {}).get(key, 0.0)) for key, harm in ranked[:n]]

    def lowest(self, n: int) -> list[tuple[Any, float]]:
        """The n examples of lowest value so far."""
        return sorted((self.by_id or {}).items(), key=lambda item: item[1])[:n]

    def line(self) -> str:
        """How the run is doing, in one line."""
        if not self.steps:
            return "nothing recorded yet"
        parts = [f"step {self.last}", f"{self.rows:,} rows scored", f"sum {self.total:.4g}"]
        if self.audited:
            parts.append(f"validation loss {self.loss:.4g}")
        if np.isfinite(self.explained):
            share = "loss drop" if self.whole else "batch share"
            parts.append(f"explained {self.explained:.1%} of the {share}")
        if self.halved:
            r = self._agreed / self._counted
            of = f"({self.halved:,} step{'s' * (self.halved > 1)})"
            parts.append(f"halves of the validation rows agree by {r:.2f} {of}")
        if self.void:
            parts.append(f"{self.void:,} void")
        return " · ".join(parts)

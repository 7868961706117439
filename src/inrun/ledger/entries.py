"""What a ledger holds, one entry per optimizer step, and the ledger in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa

from inrun.ledger import LedgerError
from inrun.ledger.audits import audit_columns
from inrun.ledger.signals import SIGNALS, WHOLE, Later, Window
from inrun.ledger.steady import Steadiness
from inrun.ledger.tables import (
    STEP_COLUMNS,
    LedgerTables,
    Scan,
    check_targets,
)
from inrun.ledger.tokens import Tokens, arrays, fields

_ARRAYS = ("nobody", "sums", "moved", "signals", "bend", "halves")  # of an entry, perhaps None
ELSEWHERE = "the step is void on another rank"


@dataclass(frozen=True)
class Audit:
    """Validation losses measured at one step, per target (length Q), on the batch that scored."""

    before: np.ndarray  # ℓ(w_t)
    without_batch: np.ndarray  # U(∅): momentum and decay alone
    with_batch: np.ndarray  # U(B): the step as it was taken


@dataclass(frozen=True)
class StepEntry:
    """One optimizer step.

    ``values`` has shape [E estimators, Q targets, B examples], in validation-loss units,
    unweighted; it is None for a step that was not scored (``every=k``) or is void (``void`` says
    why).
    ``nobody`` [E, Q] is what belongs to no example of the batch (a penalty on weights, padding of
    a packed row), None for nothing. ``tokens`` are the values of single positions, where these
    were asked for. ``sums`` [E, Q] are those of the values of all ranks, where several train one
    model; ``nobody`` and the audit are then of all of them, too. ``signals`` [4, B] are loss, EL2N,
    margin and label of the examples in this step (ledger/signals.py), NaN where not known, None
    where none is. ``moved`` [E, 2, Q] belongs to "carry" (NaN for other estimators): how far the
    loss fell along the step, by the gradient halfway, and weight decay's part of that.
    ``bend`` [E] is how far the secant's values were off where orders of the examples were sampled
    instead (relative; NaN for other estimators), None where they were not.
    ``halves`` [E, 2, B] are values by two halves of the step's validation rows (means over targets;
    NaN for "carry"), None where they were not measured (ledger/steady.py).
    ``weight`` is 1/p, p the probability with which the step was chosen for scoring.
    """

    step: int
    ids: np.ndarray  # [B] int64, or object holding str
    values: np.ndarray | None
    lr: float
    weight: float = 1.0
    void: str | None = None
    audit: Audit | None = None
    missed: float = 0.0  # part of the update that no example is credited with (Muon's first steps)
    nobody: np.ndarray | None = None
    tokens: Tokens | None = None
    sums: np.ndarray | None = None
    moved: np.ndarray | None = None
    signals: np.ndarray | Later | None = None
    bend: np.ndarray | None = None
    halves: np.ndarray | None = None


class Ledger(Protocol):
    """Where entries go and tables come from. ``estimator`` is an index into the run's list."""

    @property
    def last_step(self) -> int:
        """The last step on record, -1 if there is none."""

    def name(self) -> str:
        """What error messages call this ledger."""

    def update_info(self, **sections: Any) -> None:
        """Keep a description of the run (model, optimizer, coverage) where the ledger has a place
        for it."""

    def restart(self, run: str | None = None) -> None:
        """Forget everything: a new run begins, called ``run`` where several ranks share it."""

    def append(self, entry: StepEntry) -> None: ...
    def truncate(self, step: int) -> None:
        """Forget every entry from this step on (resuming from an older checkpoint)."""

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must carry for this ledger to continue."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def values(self, estimator: int, window: Window = WHOLE) -> pd.DataFrame: ...
    def history(self, estimator: int, window: Window = WHOLE) -> pd.DataFrame: ...
    def harm(
        self, estimator: int, targets: Sequence[str] | None = None, window: Window = WHOLE
    ) -> pd.DataFrame: ...
    def epochs(self, estimator: int) -> pd.DataFrame: ...
    def suspects(
        self, estimator: int, window: Window = WHOLE, values: bool = True
    ) -> pd.DataFrame: ...
    def steps(self, estimator: int) -> pd.DataFrame: ...
    def steadiness(
        self, estimator: int, window: Window = WHOLE, validation: Any = None
    ) -> Steadiness: ...
    def tokens(self, estimator: int, id: Any = None, step: int | None = None) -> pd.DataFrame: ...


class MemoryLedger(LedgerTables):
    """The ledger of ``out=None``: a list of entries.

    A table is made of the entries that were there when it was asked for: another thread may append.
    """

    threads = 1  # so that a table is the same, to the last bit, each time it is made

    def __init__(self, targets: Sequence[str]) -> None:
        self.targets = check_targets(targets)
        self._entries: list[StepEntry] = []

    def __iter__(self) -> Iterator[StepEntry]:
        return iter(self._entries)

    @property
    def last_step(self) -> int:
        return self._entries[-1].step if self._entries else -1

    def name(self) -> str:
        return "the ledger in memory"

    def update_info(self, **sections: Any) -> None: ...

    def restart(self, run: str | None = None) -> None:
        self._entries = []

    def append(self, entry: StepEntry) -> None:
        self._entries.append(entry)

    def truncate(self, step: int) -> None:
        self._entries = [e for e in self._entries if e.step < step]

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"records": [as_state(e) for e in list(self._entries)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "records" not in state:
            raise LedgerError(
                "this checkpoint was made with a ledger on disk: pass watch the same out= as then, "
                "or leave the run's state out to begin a new run"
            )
        self._entries = [from_state(d) for d in state["records"]]

    def scans(self, n: int) -> list[Scan]:
        entries = list(self._entries)
        return [partial(_scan, entries, self.id_type())] * n if entries else []

    def has_signals(self) -> bool:
        return any(e.signals is not None for e in list(self._entries))

    def id_type(self) -> pa.DataType:
        first = next((e.ids[0] for e in list(self._entries) if len(e.ids)), 0)
        return pa.string() if isinstance(first, str) else pa.int64()

    def steps(self, estimator: int) -> pd.DataFrame:
        """One row per step, with the audit where there was one (means over targets)."""
        rows = [step_row(e, estimator) for e in list(self._entries)]
        return pd.DataFrame(rows, columns=list(STEP_COLUMNS))

    def token_batches(self, estimator: int) -> Iterator[pa.RecordBatch]:
        for e in list(self._entries):
            if e.tokens is not None:
                V = e.tokens.values[estimator]
                own = replace(e.tokens, values=V)
                names = [name for name, _ in fields([str(q) for q in range(len(V))])]
                head = [pa.array(np.full(len(e.ids), e.step)), pa.array(e.ids, self.id_type())]
                lists = arrays([(len(e.ids), own)], len(V))
                yield pa.record_batch([*head, *lists], names=["step", "id", *names])


def _scan(
    entries: Sequence[StepEntry],
    id_type: pa.DataType,
    estimator: int,
    targets: Sequence[int],
    rows: int,
) -> Iterator[pa.RecordBatch]:
    """The rows of these entries, as ``tables.Scan`` describes them."""
    names = ["step", "id", "weight", *(f"x{q}" for q in targets)]
    start = 0
    while start < len(entries):
        stop, size = start, 0
        while stop < len(entries) and (stop == start or size + len(entries[stop].ids) <= rows):
            size, stop = size + len(entries[stop].ids), stop + 1
        some, start = entries[start:stop], stop
        sizes = [len(e.ids) for e in some]
        step = np.array([e.step for e in some], np.int64)
        weight = np.array([np.nan if e.values is None else e.weight for e in some], np.float64)
        V = [_columns(e, estimator, targets) for e in some]
        columns = [
            pa.array(np.repeat(step, sizes)),
            pa.array(np.concatenate([e.ids for e in some]), id_type),
            pa.array(np.repeat(weight, sizes), from_pandas=True),
            *(pa.array(v, from_pandas=True) for v in np.concatenate(V, axis=1)),
        ]
        batch = pa.record_batch(columns, names=names)
        for first in range(0, batch.num_rows, rows):
            yield batch.slice(first, rows)


def _columns(entry: StepEntry, estimator: int, targets: Sequence[int]) -> np.ndarray:
    """The values of these targets, signals behind them: [targets, B]."""
    if entry.signals is None:
        signals = np.full((len(SIGNALS), len(entry.ids)), np.nan)
    else:
        signals = np.asarray(entry.signals)
    Q = max(targets, default=0) + 1 if entry.values is None else entry.values.shape[1]
    V = np.full((Q, len(entry.ids)), np.nan) if entry.values is None else entry.values[estimator]
    if entry.halves is None or entry.values is None:
        halves = np.full((2, len(entry.ids)), np.nan)
    else:
        halves = entry.halves[estimator]
    return np.concatenate([V, signals, halves])[list(targets)].astype(np.float64)


def step_row(entry: StepEntry, estimator: int) -> dict[str, Any]:
    """One row of ``steps()``: what the values add up to, and what was measured."""
    V, audit = entry.values, entry.audit  # V: [E, Q, B]
    total = nobody = np.nan
    if V is not None:  # sum over examples of the mean over targets
        total = float(V[estimator].astype(np.float64).mean(axis=0).sum())
        if entry.sums is not None:
            total = float(np.mean(entry.sums[estimator]))
        nobody = 0.0 if entry.nobody is None else float(np.mean(entry.nobody[estimator]))
    row: dict[str, Any] = dict.fromkeys(STEP_COLUMNS, np.nan)
    row |= {"step": entry.step, "lr": entry.lr, "examples": len(entry.ids), "sum": total}
    row |= {"nobody": nobody, "missed": entry.missed, "void": entry.void}
    if entry.moved is not None and V is not None:
        row["drop"], row["decay"] = entry.moved[estimator].mean(axis=1)
    if entry.bend is not None and V is not None:
        row["bend"] = float(entry.bend[estimator])
    if audit is not None:
        losses = (audit.before, audit.without_batch, audit.with_batch)
        before, without, after = (float(np.mean(x)) for x in losses)
        row |= audit_columns(total, nobody, before, without, after, row["drop"])
    return row


def as_state(entry: StepEntry) -> dict[str, Any]:
    """An entry as a checkpoint holds it."""
    if entry.signals is not None:
        entry = replace(entry, signals=np.asarray(entry.signals))
    found: dict[str, Any] = _arrays_as_lists(asdict(entry))
    return found


def _arrays_as_lists(x: Any) -> Any:
    """Replace arrays by lists, so that a checkpoint holds nothing that needs pickle."""
    if isinstance(x, np.ndarray):
        return x.tolist()
    if isinstance(x, dict):
        return {k: _arrays_as_lists(v) for k, v in x.items()}
    return x


def from_state(d: dict[str, Any]) -> StepEntry:
    """Returns an entry from its form in ``state_dict``."""
    ids = d["ids"]
    return StepEntry(
        step=d["step"],
        ids=np.asarray(ids, dtype=object if ids and isinstance(ids[0], str) else np.int64),
        values=None if d["values"] is None else np.asarray(d["values"], dtype=np.float64),
        lr=d["lr"],
        weight=d["weight"],
        missed=d["missed"],
        void=d["void"],
        audit=None if d["audit"] is None else Audit(**_as_arrays(d["audit"])),
        tokens=None if d.get("tokens") is None else _tokens_from_state(d["tokens"]),
        **{k: np.asarray(d[k], np.float64) for k in _ARRAYS if d.get(k) is not None},
    )


def _as_arrays(d: dict[str, Any]) -> dict[str, Any]:
    return {k: np.asarray(v) for k, v in d.items()}


def _tokens_from_state(d: dict[str, Any]) -> Tokens:
    inputs = None if d["inputs"] is None else np.asarray(d["inputs"], dtype=np.int64)
    sizes, values = np.asarray(d["sizes"], dtype=np.int64), np.asarray(d["values"], np.float32)
    return Tokens(sizes, values, inputs)

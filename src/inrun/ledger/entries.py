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
from inrun.ledger.audits import AUDITED, FORECASTS, audit_columns
from inrun.ledger.signals import SIGNALS, WHOLE, Window
from inrun.ledger.tables import (
    STEP_COLUMNS,
    LedgerTables,
    Scan,
    check_targets,
)
from inrun.ledger.tokens import Tokens, arrays, fields

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
    signals: np.ndarray | None = None
    bend: np.ndarray | None = None


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
    def tokens(self, estimator: int, id: Any = None, step: int | None = None) -> pd.DataFrame: ...


class RunTables:
    """The tables of a run, live or read from disk. Estimators go by name; None is the first."""

    _ledger: Ledger
    _names: Sequence[str]  # of the estimators

    def _settled(self) -> Ledger:
        """Returns the ledger when everything that was recorded is in it."""
        return self._ledger

    def _index(self, estimator: str | None) -> int:
        """Returns the position of an estimator in the run's list."""
        if estimator is None:
            return 0
        if estimator not in self._names:
            raise LedgerError(
                f"estimator {estimator!r} was not recorded; this run has {', '.join(self._names)}"
            )
        return list(self._names).index(estimator)

    def values(
        self, estimator: str | None = None, *, since: int | None = None, until: int | None = None,
        half_life: float | None = None,
    ) -> pd.DataFrame:  # fmt: skip
        """One row per example: id, value (the mean over targets), one column per named target,
        and how often it was seen (``steps``) and scored. Never scored is NaN. Where the training
        loss is a classification loss, loss, EL2N and margin as means over the visits.

        Only of the steps since ≤ step < until, where these are given: an example that was not seen
        there has no row. ``half_life``: values of older steps count less, half for each so many
        steps. ``epochs()`` has the steps of each epoch.
        """
        window = Window(since, until, half_life)
        return self._settled().values(self._index(estimator), window)

    def history(
        self, estimator: str | None = None, *, since: int | None = None, until: int | None = None
    ) -> pd.DataFrame:
        """One row per scored step and example: step, id, value, one column per named target, and
        loss, EL2N and margin where known. ``since``, ``until``: only these steps."""
        return self._settled().history(self._index(estimator), Window(since, until))

    def harm(
        self, estimator: str | None = None, *, since: int | None = None, until: int | None = None
    ) -> pd.DataFrame:
        """One row per example: id, harm: how often and how far it was among the harmful of its
        batch, summed over steps and targets. Says whom it hurt; see docs/method.md."""
        window = Window(since, until)
        return self._settled().harm(self._index(estimator), window=window)

    def epochs(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per epoch: its steps (``since`` ≤ step < ``until``), visits (``examples``), the
        sum of values and the means of loss, EL2N and margin. A step is of epoch k if half of its
        examples or more have been seen k times before."""
        return self._settled().epochs(self._index(estimator))

    def suspects(
        self, estimator: str | None = None, *, since: int | None = None, until: int | None = None,
        values: bool = True,
    ) -> pd.DataFrame:  # fmt: skip
        """One row per example, the most suspicious label first: id, suspicion, confidence,
        disagreed, the means of loss, EL2N and margin over a window of visits, visits, label and,
        with several targets, the target whose loss its values raised most (``hurts``).

        ``suspicion`` is the share of examples that are no more suspicious: ranked by how badly the
        model fitted them, more so in labels whose badly fitted examples were harmful, and by harm
        where one label stands out (docs/method.md). ``confidence``: of the examples up to this one
        at least this share is wrong, as their values say; NaN without values. ``disagreed`` is the
        share of the visits at which the model preferred another label: no probability that the
        label is wrong, a hard example looks the same.
        ``values=False``: by the fit alone, where validation labels are not to be trusted or of
        another kind of data. The window is chosen by what the run shows, unless ``since`` or
        ``until`` are given; ``suspects().attrs["window"]`` says which it is and why, and what the
        values said.
        """
        window = Window(since, until)
        return self._settled().suspects(self._index(estimator), window, values)

    def steps(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per optimizer step: lr, sum of values, nobody's part, and where it was audited
        the loss, batch share, momentum share, residual and explained ratio (means over targets).
        For "carry" also how far the loss fell along the step (``drop``, by the gradient halfway)
        and weight decay's part of it; residual and explained then compare that with the whole
        measured drop. "influence" does not add up to a loss change: it has no audit."""
        index = self._index(estimator)
        found = self._settled().steps(index)
        if self._names[index].startswith(FORECASTS):
            found[list(AUDITED)] = np.nan
        return found

    def tokens(
        self, id: int | str | None = None, step: int | None = None, estimator: str | None = None
    ) -> pd.DataFrame:
        """One row per step and position of an example that was trained on in
        ``run.batch(ids, tokens=True)``: step, id, position, input (what the model received there,
        where it takes integers), value (the mean over targets), one column per named target.

        Without ``id`` or ``step``: of all of them. The values of an example's positions add up to
        its value in that step; the weight of ``every=k`` is not in them.
        """
        return self._settled().tokens(self._index(estimator), id, step)


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
    signals = entry.signals
    if signals is None:
        signals = np.full((len(SIGNALS), len(entry.ids)), np.nan)
    Q = max(targets, default=0) + 1 if entry.values is None else entry.values.shape[1]
    V = np.full((Q, len(entry.ids)), np.nan) if entry.values is None else entry.values[estimator]
    return np.concatenate([V, signals])[list(targets)].astype(np.float64)


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
        nobody=None if d.get("nobody") is None else np.asarray(d["nobody"], dtype=np.float64),
        tokens=None if d.get("tokens") is None else _tokens_from_state(d["tokens"]),
        sums=None if d.get("sums") is None else np.asarray(d["sums"], dtype=np.float64),
        moved=None if d.get("moved") is None else np.asarray(d["moved"], dtype=np.float64),
        signals=None if d.get("signals") is None else np.asarray(d["signals"], dtype=np.float64),
        bend=None if d.get("bend") is None else np.asarray(d["bend"], dtype=np.float64),
    )


def _as_arrays(d: dict[str, Any]) -> dict[str, Any]:
    return {k: np.asarray(v) for k, v in d.items()}


def _tokens_from_state(d: dict[str, Any]) -> Tokens:
    inputs = None if d["inputs"] is None else np.asarray(d["inputs"], dtype=np.int64)
    sizes, values = np.asarray(d["sizes"], dtype=np.int64), np.asarray(d["values"], np.float32)
    return Tokens(sizes, values, inputs)

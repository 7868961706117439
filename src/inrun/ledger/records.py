"""What a run records, one record per optimizer step, and the tables made of it.

This file holds the record itself, the ledger in memory and the arithmetic of the tables. A ledger
on disk keeps the same records and answers the same questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Audit:
    """Validation losses measured at one step, per target (length Q), on the batch that scored."""

    before: np.ndarray  # ℓ(w_t)
    without_batch: np.ndarray  # U(∅): momentum and decay alone
    with_batch: np.ndarray  # U(B): the step as it was taken


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    ``values`` has shape [E estimators, Q targets, B examples], in validation-loss units,
    unweighted; it is None for a step that was not scored (``every=k``) or is void (``void`` says
    why).
    ``weight`` is 1/p of the step having been chosen for scoring.
    """

    step: int
    ids: np.ndarray  # [B] int64, or object holding str
    values: np.ndarray | None
    lr: float
    weight: float = 1.0
    void: str | None = None
    audit: Audit | None = None
    missed: float = 0.0  # part of the update that no example is credited with (Muon's first steps)


class LedgerError(RuntimeError):
    """A ledger cannot be written, read or continued; the message says which, why, what to do."""


class Ledger(Protocol):
    """Where records go and tables come from. ``estimator`` is an index into the run's list."""

    def append(self, record: StepRecord) -> None: ...
    def truncate(self, step: int) -> None:
        """Forget every record from this step on (resuming from an older checkpoint)."""

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must carry for this ledger to continue."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def values(self, estimator: int) -> pd.DataFrame: ...
    def history(self, estimator: int) -> pd.DataFrame: ...
    def harm(self, estimator: int) -> pd.DataFrame: ...
    def steps(self, estimator: int) -> pd.DataFrame: ...


class Tables:
    """The tables of a run, live or read from disk. Estimators go by name; None is the first."""

    _ledger: Ledger
    _names: Sequence[str]

    def _index(self, estimator: str | None) -> int:
        return estimator_index(self._names, estimator)

    def values(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per example: id, value (the mean over targets), one column per named target,
        and how often it was seen (``steps``) and scored. Never scored is NaN."""
        return self._ledger.values(self._index(estimator))

    def history(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per scored step and example: step, id, value, one column per named target."""
        return self._ledger.history(self._index(estimator))

    def harm(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per example: id, harm: how often and how far it was among the harmful of its
        batch, summed over steps and targets. Ranks suspects; see docs/method.md."""
        return self._ledger.harm(self._index(estimator))

    def steps(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per optimizer step: lr, sum of values, and where it was audited the loss, batch
        share, momentum share, residual and explained ratio (means over targets)."""
        return self._ledger.steps(self._index(estimator))


def estimator_index(names: Sequence[str], name: str | None) -> int:
    """Which of the recorded estimators is meant."""
    if name is not None and name not in names:
        raise LedgerError(f"estimator {name!r} was not recorded; this run has {', '.join(names)}")
    return 0 if name is None else list(names).index(name)


ROUNDING = 1e-6  # of the largest value of a batch: a smaller spread is no spread


class MemoryLedger:
    """The ledger of ``out=None``: a list of records.

    A table is made of the records that were there when it was asked for: another thread may append.
    """

    def __init__(self, targets: Sequence[str], records: Sequence[StepRecord] = ()) -> None:
        self.targets = check_targets(targets)
        self._records: list[StepRecord] = list(records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    def truncate(self, step: int) -> None:
        self._records = [r for r in self._records if r.step < step]

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        records = [asdict(r) | {"ids": r.ids.tolist()} for r in list(self._records)]
        return {"records": _plain(records)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "records" not in state:
            raise LedgerError("this checkpoint was made with a ledger on disk (out=...)")
        self._records = [_record(r) for r in state["records"]]

    def history(self, estimator: int) -> pd.DataFrame:
        """One row per step and example: step, id, value and one column per named target."""
        records = list(self._records)
        scored = [r for r in records if r.values is not None]
        V = np.concatenate(
            [np.empty((0, len(self.targets))), *(_values(r)[estimator].T for r in scored)]
        )  # [rows, Q]
        step = np.array([r.step for r in scored], dtype=np.int64)
        ids = _stack_ids(scored if scored else records[:1])[: len(V)]
        return history_table(np.repeat(step, [len(r.ids) for r in scored]), ids, V, self.targets)

    def values(self, estimator: int) -> pd.DataFrame:
        """One row per example: id, value, one column per named target, steps seen and scored."""
        records = list(self._records)
        history = MemoryLedger(self.targets, records).history(estimator)
        columns = value_columns(self.targets)
        weight = pd.Series({r.step: r.weight for r in records}, dtype=float)
        weighted = history[columns].mul(history["step"].map(weight), axis=0)
        by_id = weighted.groupby(history["id"])
        seen = pd.Series(_stack_ids(records), name="id").value_counts(sort=False)
        table = by_id.sum(min_count=1).reindex(seen.index)
        table["steps"] = seen
        table["scored"] = by_id.size().reindex(seen.index).fillna(0).astype("int64")
        return table.rename_axis("id").reset_index().sort_values("id", ignore_index=True)

    def harm(self, estimator: int) -> pd.DataFrame:
        """One row per example: id, harm.

        Each step's values are divided by their standard deviation within the batch and target;
        the negative parts are summed over steps and targets. Steps whose examples are all alike
        (one example, or copies that differ by rounding only) have no spread and do not count.
        """
        now = MemoryLedger(self.targets, self._records)
        history = now.history(estimator)
        targets = value_columns(self.targets)[1:] or ["value"]
        finite = history[targets].where(np.isfinite(history[targets]))
        by_step = finite.groupby(history["step"])
        spread, size = by_step.transform("std", ddof=0), finite.abs().groupby(history["step"])
        z = finite / spread.where(spread > ROUNDING * size.transform("max"))
        hurt = z.clip(upper=0).abs().sum(axis=1, min_count=1)
        table = hurt.groupby(history["id"]).sum(min_count=1).rename("harm")
        seen = now.values(estimator)["id"]
        return table.reindex(seen).rename_axis("id").reset_index()

    def steps(self, estimator: int) -> pd.DataFrame:
        """One row per step, with the audit where there was one (means over targets)."""
        return pd.DataFrame(
            [step_row(r, estimator) for r in list(self._records)], columns=list(STEP_COLUMNS)
        )


RESERVED = ("step", "id", "value", "steps", "scored", "weight", "harm")


def check_targets(targets: Sequence[str]) -> list[str]:
    """Target names become columns: at least one, all different, none that a table already uses."""
    names = [str(t) for t in targets]
    if not names or len(set(names)) < len(names):
        raise LedgerError(f"targets need different names, at least one; got {names}")
    if len(names) > 1 and (taken := [t for t in names if t in RESERVED]):
        raise LedgerError(f"a target cannot be called {taken[0]!r}: the tables use that name")
    return names


def value_columns(targets: Sequence[str]) -> list[str]:
    """The columns of a table of values: the mean over targets, then each target if several."""
    return ["value", *(targets if len(targets) > 1 else [])]


def history_table(
    step: np.ndarray, ids: np.ndarray, V: np.ndarray, targets: Sequence[str]
) -> pd.DataFrame:
    """``history()`` from its columns; V has shape [rows, Q]."""
    frame = pd.DataFrame({"step": step, "id": ids, "value": V.mean(axis=1)})
    if len(targets) > 1:
        frame = pd.concat([frame, pd.DataFrame(V, columns=list(targets))], axis=1)
    return frame


STEP_COLUMNS = (
    "step", "lr", "examples", "sum", "loss", "batch_share", "momentum_share", "residual",
    "explained", "missed", "void",
)  # fmt: skip


def step_row(r: StepRecord, estimator: int) -> dict[str, Any]:
    """One row of ``steps()``: what the values add up to, and what was measured."""
    total = np.nan if r.values is None else _total(r.values[estimator])
    row: dict[str, Any] = dict.fromkeys(STEP_COLUMNS, np.nan)
    row |= {"step": r.step, "lr": r.lr, "examples": len(r.ids), "sum": total, "void": r.void}
    row["missed"] = r.missed
    if r.audit is not None:
        before, without, after = (
            float(np.mean(x)) for x in (r.audit.before, r.audit.without_batch, r.audit.with_batch)
        )
        share = without - after
        row |= {
            "loss": before,
            "batch_share": share,
            "momentum_share": before - without,
            "residual": share - total,
            "explained": total / share if share else np.nan,
        }
    return row


def _total(V: np.ndarray) -> float:
    """Sum over examples of the mean over targets; V has shape [Q, B]."""
    return float(V.astype(np.float64).mean(axis=0).sum())


def audit_summary(steps: pd.DataFrame) -> dict[str, float]:
    """Do the values add up? The audited steps of ``steps()`` summed, and their ratio ``explained``.

    A ratio of sums, not a mean of ratios: a step whose batch share is near zero says little.
    """
    audited = steps[steps["batch_share"].notna() & steps["sum"].notna()]
    total, share = float(audited["sum"].sum()), float(audited["batch_share"].sum())
    return {
        "audited": len(audited),
        "sum": total,
        "batch_share": share,
        "momentum_share": float(audited["momentum_share"].sum()),
        "residual": share - total,
        "explained": total / share if share else float("nan"),
    }


def _stack_ids(records: Sequence[StepRecord]) -> np.ndarray:
    return np.concatenate([r.ids for r in records]) if records else np.empty(0, np.int64)


def _values(r: StepRecord) -> np.ndarray:
    assert r.values is not None
    return r.values


def _plain(x: Any) -> Any:
    """Arrays as lists, so that a checkpoint holds nothing that needs pickle."""
    if isinstance(x, np.ndarray):
        return x.tolist()
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_plain(v) for v in x]
    return x


def _record(d: dict[str, Any]) -> StepRecord:
    ids = d["ids"]
    return StepRecord(
        step=d["step"],
        ids=np.asarray(ids, dtype=object if ids and isinstance(ids[0], str) else np.int64),
        values=None if d["values"] is None else np.asarray(d["values"], dtype=np.float64),
        lr=d["lr"],
        weight=d["weight"],
        missed=d["missed"],
        void=d["void"],
        audit=None
        if d["audit"] is None
        else Audit(**{k: np.asarray(v) for k, v in d["audit"].items()}),
    )

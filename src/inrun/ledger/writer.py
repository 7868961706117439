"""The ledger on disk: a folder of Parquet files that any table tool reads as it is.

    run.json                      what the run was: config, versions, targets, coverage, ...
    manifest.json                 the parts that count, in order of steps, with their checksums
    values/part-000007.parquet    step, id, weight, one column per estimator and target (tokens.py)
    steps/part-000007.parquet     step, lr, examples, weight, scored, void, sums, losses, nobody's
    damaged/                      what ``inrun repair`` has set aside

A row of ``values`` says that an example was seen at a step; ``weight`` and the values are NULL
where that step was not scored. Columns are called ``secant``, or ``secant:math`` where a run has
several targets. They are float64: what was recorded comes back bit for bit, also from a float64
run, and the zero low bits of float32 values compress away.

Every change (flush, truncate, compact) writes new files, replaces the manifest in one rename and
only then deletes what the new manifest names as replaced; nothing else is ever deleted. A process
killed anywhere leaves the folder as it was before or after that change; the next writer removes the
leftovers.

Recording may fail, training may not: ``append`` only warns if the disk refuses (see ``Outage``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

from inrun.ledger import LedgerError, files
from inrun.ledger.committed import Committed, before, tell_lost
from inrun.ledger.entries import StepEntry
from inrun.ledger.folder import (
    VERSION,
    begin,
    check,
    fixed_entries,
    no_strangers,
    read_info,
    write_info,
)
from inrun.ledger.lock import WriterLock
from inrun.ledger.manifest import KINDS, Part, part_name, read_manifest
from inrun.ledger.outage import Outage, void_entry
from inrun.ledger.parts import BufferedEntry, arrow_ids, buffered, steps_table, values_table

FIXED = ("format", "version", "config", "targets", "estimators", "run")  # of run.json
SMALL_PARTS = 64  # more small parts than this at the end of the ledger are merged
_WRITING: WeakSet[Store] = WeakSet()  # the ledgers that this process writes


class Store(Committed):
    """A ledger in a folder: ``Store.create`` writes, one writer at a time, ``Store.open`` reads.

    Any thread may append or read. A forked child never writes.
    """

    flush_seconds = 5.0
    flush_rows = 1_000_000
    flush_bytes = 256 << 20

    def __init__(self, path: Path, info: dict[str, Any], lock: WriterLock | None) -> None:
        super().__init__(path, info)
        self.outage = Outage(path)
        self._lock, self._pid = lock, os.getpid()
        self._guard = threading.RLock()  # around the buffer and everything that writes
        self._buffer: list[BufferedEntry] = []
        self._rows = self._bytes = 0  # of the buffer
        self._info_due = False  # run.json is to be written with the next flush
        self._flushed = time.monotonic()
        self._merge_above = SMALL_PARTS

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], config: dict[str, Any], targets: Sequence[str],
        estimators: Sequence[str], overwrite: bool = False, run: str | None = None,
    ) -> Any:  # fmt: skip
        """Start a ledger in ``path``, or continue the one that a run with this config left there.

        A continued ledger keeps all its entries until ``load_state_dict`` (or ``truncate``) says
        where the run goes on, or ``restart`` forgets them. ``overwrite`` accepts a ledger of a
        run with another config, to be restarted. ``run``: of the rank whose run this is part of.
        """
        folder = Path(path).absolute()  # the training may change its working directory
        fixed = fixed_entries(config, targets, estimators)
        check(folder, fixed, overwrite, run)
        with files.disk(folder, "nothing was recorded"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(folder)
        try:
            with files.disk(folder, "nothing was recorded"):
                store = cls._begin(folder, fixed, lock, overwrite, run)
        except BaseException:
            lock.release()
            raise
        _WRITING.add(store)
        atexit.register(store.close)
        return store

    @classmethod
    def _begin(cls, folder: Path, fixed: Any, lock: WriterLock, overwrite: bool, run: Any) -> Any:
        info = check(folder, fixed, overwrite, run)
        for kind in KINDS:
            (folder / kind).mkdir(exist_ok=True)
        version = VERSION if info is None else info["version"]
        if info is None:
            info = begin(fixed, run)
            write_info(folder, info)
        elif overwrite:
            info = info | fixed
        store = cls(folder, info | {"version": version}, lock)
        known, draft = store._manifest, part_name(store._manifest.next)
        no_strangers(folder, {*(p.name for p in known.parts), *known.replaced, draft})
        if version < VERSION or not (folder / "manifest.json").exists():
            known.write(folder)
        store.info = info | {"version": VERSION}
        if version < VERSION and not overwrite:  # after the manifest: killed here, both are valid
            write_info(folder, store.info)
        store._clean(draft)
        tell_lost(folder, known.lost)
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Any:
        """Read a ledger, also while another process writes it."""
        folder = Path(path)
        if not folder.is_dir():
            raise LedgerError(f"{folder}: no such folder")
        info = read_info(folder)
        if info is None:
            raise LedgerError(f"{folder} is not a ledger of inrun: it has no run.json")
        store = cls(folder, info, None)
        tell_lost(folder, store._manifest.lost)
        return store

    def restart(self, run: str | None = None) -> None:
        """Forget everything: this is a new run in an old folder."""
        if self.outage.forked(self._pid):
            return
        with self._guard:
            self._writable()
            self.info = begin({key: self.info[key] for key in FIXED if key != "run"}, run)
            self._hold([])
            self._ids = None
            self._restarting = self._info_due = True
            self._attempt()

    def update_info(self, **sections: Any) -> None:
        """Put sections (model, optimizer, coverage, ...) into run.json, replacing it atomically."""
        if fixed := [key for key in sections if key in FIXED]:
            raise LedgerError(f"{fixed[0]!r} of run.json is fixed when the ledger is created")
        if self.outage.forked(self._pid):
            return
        with self._guard:
            self._writable()
            self.info = self.info | files.json_value(sections, "run.json")
            self._info_due = True
            self._attempt()

    def close(self) -> None:
        """Flush, merge small files and let the next writer in."""
        if not self._writing:
            return
        with self._guard:
            self.flush()  # if that fails, nothing is given up: close again
            assert self._lock is not None
            try:
                self._merge(above=1)
            finally:
                atexit.unregister(self.close)
                self._lock.release()
                self._lock = None
            self.outage.tell_dropped()

    # -- writing ----------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """The last step on record, -1 if there is none."""
        return self._buffer[-1].entry.step if self._buffer else self._committed

    def append(self, entry: StepEntry) -> None:
        """Record one step. It reaches the disk with the first step after ``flush_seconds``.

        If the disk refuses, this warns and keeps the entry; ``flush``, ``state_dict`` and
        ``close`` raise.
        """
        if self.outage.forked(self._pid):
            return
        with self._guard:
            new = self._checked(entry)
            if self.outage.full(self._bytes + new.bytes):
                new = void_entry(entry)
            self._ids = str(new.ids.type) if len(new.ids) else self._ids
            self._buffer.append(new)
            self._rows, self._bytes = self._rows + len(new.ids), self._bytes + new.bytes
            if self._due():
                self._attempt()

    def _checked(self, entry: StepEntry) -> BufferedEntry:
        self._writable()
        if entry.step <= self.last_step:
            raise LedgerError(
                f"{self.path} already has steps up to {self.last_step} and step {entry.step} came "
                "again: continue from a checkpoint with run.load_state_dict(), or start over in "
                "another folder"
            )
        ids = arrow_ids(entry.ids)
        kind = str(ids.type)
        if len(ids) and self._ids not in (None, kind):
            raise LedgerError(
                f"ids of this run are {self._ids} and step {entry.step} brought {kind}: use one "
                "kind of id, int or str, throughout"
            )
        return buffered(entry, ids, self.columns)

    def _due(self) -> bool:
        """Is it time to write? After a failure only by the clock, less and less often."""
        waited = time.monotonic() - self._flushed
        if self.outage.since is not None:
            return waited >= self.outage.pause
        much = self._rows >= self.flush_rows or self._bytes >= self.flush_bytes
        return much or waited >= self.flush_seconds

    def _hold(self, waiting: list[BufferedEntry]) -> None:
        self._buffer = waiting
        self._rows, self._bytes = sum(len(e.ids) for e in waiting), sum(e.bytes for e in waiting)

    def _attempt(self) -> None:
        """Flush; if the disk refuses, say so and go on."""
        try:
            self.flush()
        except LedgerError as error:
            self.outage.tell(error)

    def flush(self) -> None:
        """Write what is buffered: on disk, fsynced and committed when this returns.

        If the disk refuses, the entries stay in memory and the next flush tries again.
        """
        if not self._writing:
            return
        with self._guard:
            self._flushed = time.monotonic()
            if not (self._buffer or self._restarting or self._info_due):
                return
            waiting = self._buffer
            self._hold([])
            try:
                with files.disk(
                    self.path, f"{len(waiting)} steps wait in memory for the next flush"
                ):
                    self._settle()
                    if new := [e for e in waiting if e.entry.step > self._committed]:
                        values = values_table(new, self.columns, self._ids)
                        part = self._write_part([values], [steps_table(new, self.columns)])
                        self._commit([*self._parts, part])
            except BaseException as error:
                self._hold(waiting + self._buffer)
                if isinstance(error, LedgerError):
                    self.outage.failed(self.flush_seconds)
                raise
            self.outage.over()
            self._merge(self._merge_above)

    def _settle(self) -> None:
        """Before a change: check that the folder is still ours and finish what was interrupted."""
        assert self._lock is not None
        if not self._lock.valid():
            self._take_again(self._lock)
        if self._attempted is not None:
            if read_manifest(self.path, VERSION) == self._attempted:
                self._manifest = self._attempted
            self._attempted = None
        if self._restarting:
            self._commit([], lost=())
            self._restarting = False
        if self._info_due:
            write_info(self.path, self.info)
            self._info_due = False

    def _take_again(self, lock: WriterLock) -> None:
        """Lock again after ``.lock`` was deleted or the folder moved, if all is as we left it."""
        info = read_info(self.path) if self.path.is_dir() else None
        now = None if info is None else read_manifest(self.path, VERSION)
        if now is None or now not in (self._manifest, self._attempted):
            raise LedgerError(
                f"{self.path} is not as this run left it: the folder was moved, deleted or written "
                "by another process. Put it back; the steps since then wait in memory"
            )
        lock.retake()

    def truncate(self, step: int) -> None:
        """Forget every entry from this step on (resuming from an older checkpoint)."""
        with self._guard:
            self._writable()
            self._hold([e for e in self._buffer if e.entry.step < step])
            with files.disk(self.path, f"the ledger still holds the steps from {step} on"):
                self._settle()
                kept = [p for p in self._parts if p.last < step]
                lost = self._lost_before(step)
                if len(kept) == len(self._parts) and lost == self._manifest.lost:
                    return
                for part in self._parts:
                    if part.first < step <= part.last:
                        values, steps = (
                            (before(table, step) for table in self._tables(kind, [part]))
                            for kind in KINDS
                        )
                        kept.append(self._write_part(values, steps))
                self._commit(kept, lost)

    def compact(self) -> None:
        """Merge the small parts at the end of the ledger into one."""
        with self._guard:
            self._writable()
            self.flush()
            if len(small := self._small()) > 1:
                with files.disk(self.path, "nothing is lost, the small files stay as they are"):
                    values, steps = (self._tables(kind, small) for kind in KINDS)
                    merged = self._write_part(values, steps)
                    self._commit([*self._parts[: -len(small)], merged])

    def _merge(self, above: int) -> None:
        """``compact`` if there are more than ``above`` small parts; a failure only warns."""
        if len(small := self._small()) <= above:
            return
        try:
            self.compact()
            self._merge_above = SMALL_PARTS
        except LedgerError as error:
            self._merge_above = len(small) + SMALL_PARTS
            warnings.warn(f"small files were not merged: {error}", stacklevel=3)

    def state_dict(self) -> dict[str, Any]:
        """Flushed and fsynced before it returns: a checkpoint never runs ahead of its ledger."""
        with self._guard:
            if self._lock is not None and not self._writing:
                raise LedgerError(f"{self.path} is written by process {self._pid}: ask it")
            self.flush()
            steps, _ = self._steps_before(self.last_step + 1)
            return {"run": self.info.get("run"), "last_step": self.last_step, "steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to the checkpoint: what was recorded after it is removed."""
        with self._guard:
            self.flush()
            if "last_step" not in state:
                raise LedgerError("this checkpoint was made with a ledger in memory (out=None)")
            if state.get("run") != self.info.get("run"):
                raise LedgerError(f"{self.path}: the checkpoint belongs to another ledger")
            last = int(state["last_step"])
            steps, sure = self._steps_before(last + 1)
            if not self._fits(steps, state["steps"], sure):
                raise LedgerError(
                    f"{self.path} holds {steps} steps up to step {last}, the checkpoint was made "
                    f"with {state['steps']}: it belongs to another ledger"
                )
            self.truncate(last + 1)

    # -- parts ------------------------------------------------------------------------------

    def steady(self) -> contextlib.AbstractContextManager[Any]:
        return self._guard

    def sources(self) -> list[Part]:
        """The parts to read now: a writer flushes first, a reader looks at the manifest again."""
        with self._guard:
            if self._writing:
                self.flush()
            else:
                self._load()
            return self._parts

    @property
    def _writing(self) -> bool:
        """Open for writing, in the process that opened it."""
        return self._lock is not None and self._pid == os.getpid()

    def _writable(self) -> None:
        if not self._writing:
            raise LedgerError(f"{self.path} is closed, or open for reading only")

    def after_fork(self) -> None:
        """Called in a forked child: another thread of the parent may have held the guard."""
        self._guard = threading.RLock()
        if self._lock is not None:
            self._lock.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [*map(Store.after_fork, list(_WRITING))])

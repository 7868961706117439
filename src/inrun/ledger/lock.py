"""The lock of a ledger's folder, which lets in one writer at a time."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import IO
from weakref import WeakSet

from filelock import FileLock, Timeout

from inrun.ledger import LedgerError, files

WAIT_FOR_DEAD = 15.0  # seconds that loader workers may outlive a killed writer and hold its lock


_HELD: WeakSet[WriterLock] = WeakSet()  # the locks that this process holds


class WriterLock:
    """``.lock`` is locked by the folder's only writer; ``.writer`` says which process that is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pid = folder, os.getpid()
        self._lock = FileLock(str(folder / ".lock"), thread_local=False)
        self._acquire()

    def _acquire(self) -> None:
        for name in (".lock", ".writer"):
            _refuse_link(self.folder / name)
        pid, started = _holder(self.folder)
        try:
            self._lock.acquire(timeout=0 if _alive(pid) else WAIT_FOR_DEAD if pid else 1.0)
        except Timeout:
            who = f"process {pid}" if pid else "another process"
            raise LedgerError(
                f"{self.folder} is being written by {who}: one writer at a time"
            ) from None
        if self._still_written(pid, started):
            self._lock.release()
            raise LedgerError(
                f"{self.folder} is being written by process {pid} though its .lock was deleted: "
                "one writer at a time. Wait for that process or end it; if it writes elsewhere, "
                f"delete {self.folder / '.writer'}"
            )
        self._identity = self._found()
        text = f"{self.pid} {_started(self.pid)}".strip()

        def write(file: IO[bytes]) -> None:
            file.write(text.encode())

        try:
            files.replace(self.folder / ".writer", write)
        except BaseException:
            self._lock.release()
            raise
        _HELD.add(self)

    def _still_written(self, pid: int, started: str) -> bool:
        """We have the lock; does another writer go on regardless, because .lock was deleted?"""
        if pid == self.pid:
            return any(x is not self and x.folder == self.folder for x in _HELD)
        return started != "" and _started(pid) == started

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self.folder / ".lock")
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def valid(self) -> bool:
        """Is the file that we locked still the one in the folder?"""
        return self._found() == self._identity

    def retake(self) -> None:
        """Lock the folder again after somebody deleted ``.lock``, if nobody else has."""
        _HELD.discard(self)
        self._lock.release()
        self._lock = FileLock(str(self.folder / ".lock"), thread_local=False)
        self._identity = (-1, -1)  # not ours before it is acquired
        self._acquire()

    def release(self) -> None:
        _HELD.discard(self)
        with contextlib.suppress(OSError):
            if _holder(self.folder)[0] == self.pid:
                (self.folder / ".writer").unlink(missing_ok=True)
        self._lock.release()

    def disown(self) -> None:
        """In a forked child: give up our copy of the descriptor; the parent's lock stays."""
        context = getattr(self._lock, "_context", None)
        fd = getattr(context, "lock_file_fd", None)  # None where filelock has closed it already
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)
            context.lock_file_fd = None  # type: ignore[union-attr]


def _refuse_link(file: Path) -> None:
    """Refuse a link under one of our names: it would choose which file we write."""
    try:
        mode = os.lstat(file).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "no plain file"
        raise LedgerError(f"{file} is {what}: inrun did not make it so. Delete it and try again")


def _holder(folder: Path) -> tuple[int, str]:
    """Returns process and start time of the last writer; 0 if ``.writer`` is missing or broken."""
    try:
        with (folder / ".writer").open("rb") as file:
            words = file.read(64).decode("ascii").split()
    except (OSError, ValueError):
        return 0, ""
    if not words or not words[0].isdigit() or not 0 < int(words[0]) < 2**31:
        return 0, ""
    return int(words[0]), words[1] if len(words) > 1 else ""


def _started(pid: int) -> str:
    """When a process started, in ticks since boot: tells it from a later one of the same number.

    Empty for a process that has ended, and where the system does not say (no /proc).
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if words[0] in (b"Z", b"X") else words[19].decode()


def _alive(pid: int) -> bool:
    if pid <= 0 or os.name != "posix" or _started(pid):
        return pid > 0
    if Path(f"/proc/{pid}").exists():  # ended; its parent has not waited for it yet
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

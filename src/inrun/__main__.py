"""``inrun`` and ``python -m inrun``: handles Ctrl-C before anything slow is imported."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from types import FrameType
from typing import Any

STOPPED = 130  # the exit code of a command that Ctrl-C ended


def main(command: str = "inrun.cli.app:app") -> None:
    """Run a command of the command line; Ctrl-C ends it without a traceback, at any moment."""
    try:
        run = _load(*command.split(":"))
        warnings.showwarning = _show_warning
        run()
    except KeyboardInterrupt:
        print("\ninrun: stopped", file=sys.stderr)
        raise SystemExit(STOPPED) from None


def _load(module: str, name: str) -> Any:
    """Import the command. This takes seconds, and Ctrl-C may interrupt a library's import.

    Some libraries turn it into an error of their own. Nothing is open yet, so the process ends at
    once instead.
    """
    from importlib import import_module

    before = signal.getsignal(signal.SIGINT)
    heard = before is signal.default_int_handler  # not under nohup
    if heard:
        signal.signal(signal.SIGINT, _stop)
    try:
        return getattr(import_module(module), name)
    finally:
        if heard:
            signal.signal(signal.SIGINT, before)


def _stop(number: int = 0, frame: FrameType | None = None) -> None:
    os.write(2, b"\ninrun: stopped\n")
    os._exit(STOPPED)


def _show_warning(message: Any, *about: Any, **more: Any) -> None:
    from inrun.console import safe

    print("inrun: " + safe(" ".join(str(message).split())), file=sys.stderr)


if __name__ == "__main__":
    main()

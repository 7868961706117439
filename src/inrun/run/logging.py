"""One line that says how a run is doing, and the same numbers for TensorBoard and W&B.

``Run`` keeps running sums (``Tally``), so that nothing here reads the ledger during training.
"""

from __future__ import annotations

import html
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from inrun.run.bookkeeping import Tally

if TYPE_CHECKING:
    from inrun.run.run import Run


class Summary:
    """Shows a run as one line: ``print(run)``, or ``run`` in a notebook cell."""

    tally: Tally  # running sums since the run began, or was resumed

    def __repr__(self) -> str:
        return f"<inrun: {self.tally.line()}>"

    def _repr_html_(self) -> str:
        return f"<code>inrun</code> {html.escape(self.tally.line())}"


def log(
    run: Run,
    *,
    every: int = 50,
    line: bool | None = None,
    tensorboard: Any = None,
    wandb: Any = None,
    lowest: int = 5,
) -> Run:
    """Say every so many steps how the run is doing. Call it once, after ``watch``.

    Args:
        run: the run that ``watch`` returned.
        every: steps between two messages.
        line: print one line, kept up to date in a terminal or notebook; by default if there is
            nothing else to log to.
        tensorboard: a folder, or your own ``SummaryWriter``.
        wandb: True for the current Weights & Biases run (or a new one), or your own run.
        lowest: how many of the lowest ids to name; 0 none. Logged are the explained share, the
            sum of values, batch and momentum share, the validation loss and these ids.

    Returns:
        The run, so that ``run = inrun.log(inrun.watch(...))`` works.
    """
    if every < 1:
        raise ValueError(f"every={every} must be at least 1")
    tally, sinks = run.tally, []
    if tensorboard is not None:
        writer, ours = _tensorboard(tensorboard)
        sinks.append(lambda t: _to_tensorboard(writer, t, lowest))
        tally.closers.append(writer.close if ours else writer.flush)
    if wandb is not None and wandb is not False:
        target = _wandb() if wandb is True else wandb
        sinks.append(lambda t: target.log(_scalars(t) | _named(t, lowest)))
    if sinks and lowest and tally.by_id is None:
        tally.by_id = {}
    if line or (line is None and not sinks):
        printer = LinePrinter(sys.stdout)
        sinks.append(lambda t: printer.show(t.line()))
        tally.closers.append(lambda: printer.end(tally.line()))

    def listen(t: Tally) -> None:
        if t.steps % every == 0:
            for sink in sinks:
                sink(t)

    tally.listeners.append(listen)
    return run


class LinePrinter:
    """One line that is written over in a terminal or notebook; a line each in a log file."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.width = stream, 0
        self.live = stream.isatty() or type(stream).__module__.startswith("ipykernel")

    def show(self, text: str) -> None:
        if self.live:
            self.stream.write("\r" + text.ljust(self.width))
            self.width = len(text)
        else:
            self.stream.write(text + "\n")
        self.stream.flush()

    def end(self, text: str) -> None:
        self.show(text)
        if self.live:
            self.stream.write("\n")


def _scalars(t: Tally) -> dict[str, float]:
    scalars = {"inrun/step": float(t.last), "inrun/sum of values": t.total}
    if t.audited:
        scalars |= {
            "inrun/explained": t.explained,
            "inrun/batch share": t.batch,
            "inrun/momentum share": t.momentum,
            "inrun/validation loss": t.loss,
        }
    return {k: v for k, v in scalars.items() if np.isfinite(v)}


def _named(t: Tally, n: int) -> dict[str, Any]:
    """The lowest ids as text, and the lowest value."""
    found = t.lowest(n)
    if not found:
        return {}
    from inrun.console import safe  # Weights & Biases prints its last words in the terminal

    names = ", ".join(f"{safe(key, 100)} ({value:.2g})" for key, value in found)
    return {"inrun/lowest ids": names, "inrun/lowest value": found[0][1]}


def _to_tensorboard(writer: Any, t: Tally, lowest: int) -> None:
    for name, value in (_scalars(t) | _named(t, lowest)).items():
        if isinstance(value, str):
            writer.add_text(name, value, t.last)
        elif name != "inrun/step":
            writer.add_scalar(name, value, t.last)


def _tensorboard(target: Any) -> tuple[Any, bool]:
    """A writer, and whether we opened it and so must close it."""
    if not isinstance(target, (str, Path)):
        return target, False
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise ImportError(
            "TensorBoard is not installed: pip install 'inrun[tensorboard]'"
        ) from None
    return module.SummaryWriter(str(target)), True


def _wandb() -> Any:
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        raise ImportError("Weights & Biases is not installed: pip install 'inrun[wandb]'") from None
    return wandb.run or wandb.init()

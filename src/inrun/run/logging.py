"""One line that says how a run is doing, and the same numbers for TensorBoard, W&B, MLflow and
trackio, with a table of suspects.

``Run`` keeps running sums (``Tally``), so that nothing here reads the ledger during training.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from inrun.ledger.display import run_html
from inrun.ledger.entries import Ledger
from inrun.run.bookkeeping import Tally

if TYPE_CHECKING:
    from inrun.run.run import Run

FEW = 2_000_000  # rows of a ledger that are read when a notebook shows the run


class Summary:
    """Shows a run as one line: ``print(run)``; ``run`` in a notebook cell: with both ends of its
    values."""

    tally: Tally  # running sums since the run began, or was resumed
    _settled: Callable[[], Ledger]  # of RunTables

    def __repr__(self) -> str:
        return f"<inrun: {self.tally.line()}>"

    def _repr_html_(self) -> str:
        few = 0 < self.tally.rows <= FEW  # scored by this process
        line = self.tally.line()
        if not few:
            return run_html(line)
        return run_html(line, self._settled(), self.steadiness())  # type: ignore[attr-defined]

    def log_to(self, **options: Any) -> Any:
        """``run.log_to(wandb=True)``: the same as ``inrun.log(run, wandb=True)``."""
        return log(self, **options)  # type: ignore[arg-type]


def log(
    run: Run,
    *,
    every: int = 50,
    line: bool | None = None,
    total: int | None = None,
    tensorboard: Any = None,
    wandb: Any = None,
    mlflow: Any = None,
    trackio: Any = None,
    lowest: int = 5,
    suspects: int = 10,
) -> Run:
    """Say every so many steps how the run is doing. Call it once, after ``watch``.

    Args:
        run: the run that ``watch`` returned.
        every: steps between two messages.
        line: print one line, kept up to date in a terminal or notebook; by default if there is
            nothing else to log to.
        total: steps of the whole training: the line then begins with the share that is done and
            the time that is left.
        tensorboard: a folder, or your own ``SummaryWriter``.
        wandb: True for the current Weights & Biases run (or a new one), or your own run.
        mlflow: True for MLflow's active run (or a new one).
        trackio: True for trackio's current run, or the name of a project to begin one in.
        lowest: how many of the lowest ids to name; 0 none. Logged are the explained share, the
            sum of values, batch and momentum share, the validation loss and these ids.
        suspects: rows of the live table of suspects, the examples of most harm so far with their
            harm and value; 0 none.

    Returns:
        The run, so that ``run = inrun.log(inrun.watch(...))`` works.
    """
    if every < 1:
        raise ValueError(f"every={every} must be at least 1")
    tally = run.tally
    sinks = _trackers(tally, tensorboard, wandb, mlflow, trackio, lowest, suspects)
    if sinks and (lowest or suspects) and tally.by_id is None:
        tally.by_id = {}
    if sinks and suspects and tally.harm_by_id is None:
        tally.harm_by_id = {}
    if line or (line is None and not sinks):
        printer, progress = LinePrinter(sys.stdout), Progress(total)
        sinks.append(lambda t: printer.show(progress.of(t) + t.line()))
        tally.closers.append(lambda: printer.end(tally.line()))

    def listen(t: Tally) -> None:
        if t.steps % every == 0:
            for sink in sinks:
                sink(t)

    tally.listeners.append(listen)
    return run


def _trackers(
    tally: Tally, tensorboard: Any, wandb: Any, mlflow: Any, trackio: Any, lowest: int,
    suspects: int,
) -> list[Callable[[Tally], None]]:  # fmt: skip
    """What writes a message to each experiment tracker that was named."""
    sinks: list[Callable[[Tally], None]] = []
    if tensorboard is not None:
        writer, ours = _tensorboard(tensorboard)
        sinks.append(lambda t: _to_tensorboard(writer, t, lowest, suspects))
        tally.closers.append(writer.close if ours else writer.flush)
    for sink in (_of_wandb(wandb), _of_mlflow(mlflow), _of_trackio(trackio)):
        if sink is not None:
            sinks.append(partial(sink, lowest=lowest, suspects=suspects))
    return sinks


class Progress:
    """The share of ``total`` steps that is done, and the time left at the pace so far."""

    def __init__(self, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.clock = total, clock
        self.began, self.last = (0.0, 0), -1  # when and after how many steps; the last one

    def of(self, t: Tally) -> str:
        done, now = t.last + 1, self.clock()
        if self.last < 0 or done <= self.last:  # the first, or back at a checkpoint
            self.began = now, done
        self.last = done
        if not self.total:
            return ""
        since, first = self.began
        text = f"{min(done / self.total, 1):.0%}"
        if first < done < self.total:
            left = round((now - since) / (done - first) * (self.total - done))
            text += f", {timedelta(seconds=left)} left"
        return f"{text} · "


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


COLUMNS = ["id", "harm", "value"]  # of the table of suspects
Sink = Callable[..., None]  # (tally, lowest=, suspects=)


def _rows(t: Tally, n: int) -> list[list[Any]]:
    from inrun.console import safe

    return [[safe(key, 100), harm, value] for key, harm, value in t.suspects(n)]


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|---|"]
    for key, harm, value in rows:
        name = str(key).replace("|", "\\|")
        lines.append(f"| {name} | {harm:.3g} | {value:.3g} |")
    return "\n".join(lines)


def _to_tensorboard(writer: Any, t: Tally, lowest: int, suspects: int) -> None:
    for name, value in (_scalars(t) | _named(t, lowest)).items():
        if isinstance(value, str):
            writer.add_text(name, value, t.last)
        elif name != "inrun/step":
            writer.add_scalar(name, value, t.last)
    if rows := _rows(t, suspects):
        writer.add_text("inrun/suspects", _markdown(rows), t.last)


def _tensorboard(target: Any) -> tuple[Any, bool]:
    """A writer, and whether we opened it and so must close it."""
    if not isinstance(target, (str, Path)):
        return target, False
    module = _library("torch.utils.tensorboard", "TensorBoard", "tensorboard")
    return module.SummaryWriter(str(target)), True


def _of_wandb(target: Any) -> Sink | None:
    if target is None or target is False:
        return None
    if target is True:
        wandb = _library("wandb", "Weights & Biases", "wandb")
        target = wandb.run or wandb.init()
    return _with_table(target.log, "wandb")


def _of_trackio(target: Any) -> Sink | None:
    if target is None or target is False:
        return None
    if target is True or isinstance(target, str):
        trackio = _library("trackio", "trackio", "trackio")
        target = trackio if target is True else trackio.init(project=target)
    return _with_table(target.log, "trackio")


def _with_table(send: Callable[[dict[str, Any]], Any], library: str) -> Sink:
    """For a ``log`` that takes numbers, texts and the library's own ``Table``."""

    def sink(t: Tally, lowest: int, suspects: int) -> None:
        content = _scalars(t) | _named(t, lowest)
        if rows := _rows(t, suspects):
            table = getattr(sys.modules.get(library), "Table", None)
            keyed = [[str(key), harm, value] for key, harm, value in rows]
            shown = _markdown(rows) if table is None else table(columns=COLUMNS, data=keyed)
            content["inrun/suspects"] = shown
        send(content)

    return sink


def _of_mlflow(target: Any) -> Sink | None:
    if target is None or target is False:
        return None
    mlflow = _library("mlflow", "MLflow", "mlflow") if target is True else target

    def sink(t: Tally, lowest: int, suspects: int) -> None:
        content = _scalars(t) | _named(t, lowest)
        scalars = {k: v for k, v in content.items() if not isinstance(v, str) and "step" not in k}
        mlflow.log_metrics(scalars, step=t.last)
        if rows := _rows(t, suspects):
            mlflow.log_text(_markdown(rows), "inrun/suspects.md")  # replaces the one before

    return sink


def _library(module: str, name: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"{name} is not installed: pip install 'inrun[{extra}]'") from None

"""An experiment is a list of named parts; what is finished is not done again.

Each part is a function of its own settings. Its result is a JSON file in the output folder, written
in one piece; running again does only the missing parts. ``summary.json`` is made of the parts and
says on which machine, versions and commit they were measured.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
SIZES = ("tiny", "smoke", "paper")  # seconds (tests), minutes on two cores, one GPU
CPU = "cpu"  # of some experiments: what a GPU has not measured, smaller, in half an hour of a core
COMMITTED = ("smoke", CPU, "paper")

Settings = dict[str, Any]
Results = dict[str, Any]  # by part


@dataclass(frozen=True)
class Experiment:
    """One table or figure.

    Args:
        name: on the command line.
        claim: what the paper says, with its number, in a line.
        parts: the parts of a size: settings by name. Settings are plain JSON.
        measure: one part, from its settings; returns plain JSON.
        summarise: what is committed and shown, from the results of the parts that are there.
        headline: a few lines about a summary for the terminal.
        tables: Markdown tables for the docs by name, each from the committed results by size.
        figures: pictures for the docs by file name, each from the same.
        needs: which parts have to be done before one, from its settings.
        sizes: those it has parts of.
    """

    name: str
    claim: str
    parts: Callable[[str], dict[str, Settings]]
    measure: Callable[[Settings, Context], Any]
    summarise: Callable[[Results], dict[str, Any]]
    headline: Callable[[dict[str, Any]], str]
    tables: dict[str, Callable[[dict[str, Any]], str]] = field(default_factory=dict)
    figures: dict[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    needs: Callable[[Settings], Sequence[str]] = lambda settings: ()
    sizes: Sequence[str] = SIZES

    @property
    def folder(self) -> Path:
        """Where the committed results are."""
        return ROOT / "experiments" / self.name.replace("-", "_") / "results"

    def committed(self) -> dict[str, Any]:
        """Committed results by size."""
        files = ((size, self.folder / f"{size}.json") for size in COMMITTED)
        return {size: json.loads(f.read_text("utf-8")) for size, f in files if f.exists()}


@dataclass
class Context:
    """Where a part runs, how it says how far it is, and what earlier parts found."""

    device: torch.device
    data: Path | None = None
    say: Callable[[int, int], None] = lambda done, total: None
    result: Callable[[str], Any] = lambda part: None
    out: Path | None = None  # the output folder, for what one part makes and others use

    def track(self, total: int) -> Iterator[int]:
        """``range(total)`` with progress."""
        for i in range(total):
            yield i
            self.say(i + 1, total)


def reproduce(
    experiment: Experiment,
    size: str = "smoke",
    out: Path | None = None,
    data: Path | None = None,
    only: Sequence[str] = (),
    device: str | None = None,
    show: Callable[[str], None] = print,
    jobs: int = 1,
) -> dict[str, Any]:
    """Do the parts that are missing in ``out``, so many ``jobs`` at a time in processes of their
    own, and return the summary, also written there.

    Where only some parts are asked for, a summary that cannot be made here (of what is not
    installed) is no failure.
    """
    parts = select(experiment, size, only)
    if data is not None and not data.is_dir():
        raise ValueError(f"--data {data} is not a folder")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out = out or Path("runs") / "reproduce" / f"{experiment.name}-{size}"
    out.mkdir(parents=True, exist_ok=True)
    if jobs > 1:
        from experiments.common.jobs import Jobs

        given = {"--data": data and data.resolve(), "--device": device}
        options = [str(x) for option in given.items() if option[1] for x in option]
        Jobs(experiment, size, out, options, show).run(parts, jobs)
        parts = {}
    with progress(len(parts)) as (begin, tick, finish):
        for name, settings in parts.items():
            begin(name)
            if finished(out, name, settings) is None:
                context = Context(where, data, tick, earlier(experiment, size, out), out)
                start = time.perf_counter()
                with own_precision():
                    result = experiment.measure(settings, context)
                record = {
                    "part": name, "settings": settings, "result": result,
                    "seconds": round(time.perf_counter() - start, 1),
                    "environment": environment(where, data),
                }  # fmt: skip
                write(out / "parts" / f"{name}.json", record)
            finish()
    try:
        return summarise(experiment, size, out, show)
    except (ImportError, ValueError) as error:
        if not only:
            raise
        show(f"the parts are saved in {out}, but there is no summary: {error}")
        return {}


def summarise(
    experiment: Experiment, size: str, out: Path, show: Callable[[str], None] = print
) -> dict[str, Any]:
    """The summary of the finished parts, also of those that an earlier call did."""
    parts = experiment.parts(size)
    records = {n: r for n, s in parts.items() if (r := finished(out, n, s)) is not None}
    summary = {
        "experiment": experiment.name,
        "size": size,
        "missing": [n for n in parts if n not in records],
        "environment": merged([r["environment"] for r in records.values()]),
        "seconds": {n: r["seconds"] for n, r in records.items()},
        "settings": {n: r["settings"] for n, r in records.items()},
        "summary": experiment.summarise({n: r["result"] for n, r in records.items()}),
    }
    write(out / "summary.json", summary)
    show(f"{experiment.name} ({size}): {experiment.claim}")
    if summary["missing"]:
        show(f"{len(summary['missing'])} of {len(parts)} parts are missing: run again to do them")
    show(experiment.headline(summary["summary"]))
    show(f"{out / 'summary.json'}")
    return summary


def select(experiment: Experiment, size: str, only: Sequence[str] = ()) -> dict[str, Settings]:
    """The parts of a size, or of these those that are named, or begin with the name where none has
    just this one."""
    if size not in experiment.sizes:
        raise ValueError(f"--size {size!r} is not known: use {', '.join(experiment.sizes)}")
    parts = experiment.parts(size)
    if unknown := [o for o in only if not any(n.startswith(o) for n in parts)]:
        raise ValueError(
            f"{experiment.name} has no part {unknown[0]!r} at size {size}: see "
            f"`inrun reproduce {experiment.name} --size {size} --list`"
        )
    chosen = {n for o in only for n in ([o] if o in parts else parts) if n.startswith(o)}
    return {n: s for n, s in parts.items() if not only or n in chosen}


def finished(out: Path, name: str, settings: Settings) -> dict[str, Any] | None:
    """The record of a part that was done with these very settings."""
    try:
        record = json.loads((out / "parts" / f"{name}.json").read_text("utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record if record.get("settings") == json.loads(json.dumps(settings)) else None


def earlier(experiment: Experiment, size: str, out: Path) -> Callable[[str], Any]:
    """Results of other parts, for a part that builds on them."""
    parts = experiment.parts(size)

    def result(part: str) -> Any:
        record = finished(out, part, parts[part])
        if record is None:
            raise ValueError(
                f"part {part} has to be done first: `inrun reproduce {experiment.name} --size "
                f"{size} --only {part}`, with the same --out"
            )
        return record["result"]

    return result


def write(path: Path, data: Any) -> None:
    """JSON, in one piece: a reader or a kill never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}.tmp")
    new.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", "utf-8")
    new.replace(path)


def packed(values: np.ndarray) -> str:
    """Ten thousand numbers in a line of a JSON file."""
    return " ".join(f"{v:.4g}" for v in values.ravel())


def unpacked(text: str) -> np.ndarray:
    return np.array(text.split(), np.float64)


def environment(device: torch.device, data: Path | None) -> dict[str, Any]:
    import inrun
    from inrun.bench.machine import commit

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": name, "cores": os.cpu_count(), "torch": torch.__version__,
        "python": platform.python_version(), "inrun": inrun.__version__, "commit": commit() or "",
        "data": "given folder" if data else "pydoc_data and scikit-learn's digits",
    }  # fmt: skip


def merged(environments: list[dict[str, Any]]) -> dict[str, Any]:
    """One value per entry, or the list of the different ones."""
    found: dict[str, Any] = {}
    for key in environments[0] if environments else ():
        values = list(dict.fromkeys(e[key] for e in environments))
        found[key] = values[0] if len(values) == 1 else values
    return found


@contextmanager
def own_precision() -> Iterator[None]:
    """Parts choose their own precision; whatever they set ends with them."""
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_float32_matmul_precision(before[1])


Bars = tuple[Callable[[str], None], Callable[[int, int], None], Callable[[], None]]


@contextmanager
def progress(parts: int) -> Iterator[Bars]:
    """Two bars, parts and steps; plain lines where rich is missing or nobody is looking."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    except ImportError:
        yield (lambda name: print(name, flush=True)), (lambda done, total: None), (lambda: None)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        line = lambda name: print(name, file=sys.stderr, flush=True)  # noqa: E731
        yield line, (lambda done, total: None), (lambda: None)
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        outer, inner = bar.add_task("parts", total=parts), bar.add_task("", total=None)
        yield (
            lambda name: bar.reset(inner, description=name, total=None),
            lambda done, total: bar.update(inner, completed=done, total=total),
            lambda: bar.advance(outer),
        )

"""`inrun ask`: questions to a trained model, and the examples that taught it the answers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.padding import Padding
from rich.progress import Progress
from rich.text import Text

from inrun import open as open_run
from inrun.cli.shared import Examples, RunPath
from inrun.console import Force, Json, console, excerpt, safe, say
from inrun.errors import CaptureError
from inrun.ledger import LedgerError
from inrun.ledger.saved import SavedRun
from inrun.report.answers import FOLDER, SHOWN, answers_of, entries, write_answers

WANTED, OPTIONAL = ("model", "data", "queries"), ("loss", "damping", "examples", "batch_dim",
                                                  "memory_limit")  # fmt: skip
LETTERS = 600  # of a text in the terminal
SHADES = {True: (85, 195, 176), False: (240, 138, 101)}  # of what taught it, and spoke against it


def ask(
    run: RunPath,
    setup: Annotated[
        str | None,
        typer.Argument(
            metavar="[SETUP]",
            help="my_file.py:function or module:function, called with the path RUN: returns model, "
            "data and queries of inrun.ask in a dict, and loss if need be. Without it: answers "
            "that are there.",
        ),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Folder of the answers; RUN/answers by default.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Score single positions of the examples found, too.")
    ] = False,
    n: Annotated[int, typer.Option("-n", min=1, help="Examples of each question.")] = SHOWN,
    worst: Annotated[
        bool, typer.Option("--worst", help="Lowest scores first: what spoke against it.")
    ] = False,
    examples: Examples = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Of the input ids: a folder or name of transformers, or bytes."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write them as one HTML page, too.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Which training examples taught the model this? Questions that come after the training.

    With SETUP one pass over the training data scores every example for all questions; it is
    written to a folder as it goes, and goes on there when it is run again. Without SETUP the
    answers of that folder are shown. The run needs estimator="influence". The score of an example
    estimates by how much the question's loss would rise, had it not been trained on: trust the
    order more than the size. With --tokens and
    the words of --tokenizer, or of a column "tokens" of the examples, texts are shaded word by
    word. `inrun report RUN` shows the answers in RUN/answers, too.
    """
    saved = open_run(run)
    if setup is not None:
        _answer(
            saved, _called(setup, run), answers or run / FOLDER, tokens, console(stderr=as_json)
        )
    elif tokens:
        raise LedgerError("--tokens needs SETUP: the model, the data and the questions")
    found = answers_of(saved, answers)
    if found is None:
        raise LedgerError(f"{run} has no answers yet: give SETUP, or --answers FOLDER")
    shown = entries(found, n, worst, examples, tokenizer)
    if output is not None:
        write_answers(output, found, examples, n=n, tokenizer=tokenizer, replace=force)
    say(as_json, {"examples": found.examples, "questions": shown}, _told(shown, output))


def _called(setup: str, run: Path) -> dict[str, Any]:
    """What the function with this name, ``file.py:function`` or ``module:function``, returns."""
    place, _, name = setup.rpartition(":")
    if not place or not name.isidentifier():
        raise LedgerError(f"SETUP is my_file.py:function or module:function, not {setup!r}")
    try:
        function: Callable[[Path], Any] | None = getattr(_loaded(place), name, None)
        if not callable(function):
            raise LedgerError(f"{place} has no function {name!r}")
        found = function(run)
    except LedgerError:
        raise
    except Exception as error:  # the user's own code: with its traceback
        raise RuntimeError(f"{setup} failed") from error
    if not isinstance(found, Mapping) or not all(k in found for k in WANTED):
        raise LedgerError(f"{setup} must return a dict with {', '.join(WANTED)}")
    if other := [k for k in found if k not in WANTED + OPTIONAL]:
        raise LedgerError(f"{setup} returned {other[0]!r}, which is none of "
                          f"{', '.join(WANTED + OPTIONAL)}")  # fmt: skip
    return dict(found)


def _loaded(place: str) -> Any:
    """A Python file or a module, with imports beside it as `python file.py` has them."""
    file = Path(place)
    if file.suffix != ".py":
        sys.path.insert(0, "")
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not (place + ".").startswith(error.name + "."):
                raise  # an import inside it
            raise LedgerError(f"there is no module {place!r}") from None
    if not file.is_file():
        raise LedgerError(f"there is no file {file}")
    sys.path.insert(0, str(file.parent.resolve()))
    name = file.stem if file.stem not in sys.modules else f"inrun_setup_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _answer(saved: SavedRun, given: dict[str, Any], folder: Path, tokens: bool, shown: Any) -> None:
    """The pass over the training data, and one over those that hold the examples found."""
    from inrun.asking.ask import ask as asked

    data = given.pop("data")
    if tokens and iter(data) is data:
        raise LedgerError(
            "--tokens goes through the data twice, and an iterator can be read only once: return a "
            "list of batches, a DataLoader, or an object with __iter__"
        )
    try:
        with Progress(console=shown, transient=True) as bar:
            asked(data=_counted(data, bar, "Asking"), run=saved, out=folder, **given)
            if tokens:
                told = _counted(data, bar, "Word by word")
                asked(data=told, run=saved, out=folder, tokens=True, **given)
    except CaptureError as error:
        raise LedgerError(str(error)) from error


def _counted(data: Any, bar: Progress, what: str) -> Iterator[Any]:
    task = bar.add_task(what, total=len(data) if hasattr(data, "__len__") else None)
    for item in data:
        yield item
        bar.advance(task)


def _told(shown: list[dict[str, Any]], output: Path | None) -> Group:
    """The questions and their examples, for a terminal."""
    lines: list[Text | Padding] = []
    for question in shown:
        lines.append(Text(safe(question["question"]), "bold underline"))
        lines.append(Text(f"loss {question['loss']:.3g}", "dim italic"))
        for e in question["examples"]:
            lines.append(Text.assemble((f"{e['score']:9.3g}  ", ""), (safe(e["id"], 200), "bold")))
            text = _shaded(e["pieces"]) if e.get("words") else Text(excerpt(e.get("text", "")))
            if text:
                lines.append(Padding(text, (0, 0, 0, 2)))
        lines.append(Text())
    if output is not None:
        lines.append(Text(f"Page: {safe(output)}"))
    return Group(*lines)


def _shaded(pieces: list[list[Any]]) -> Text:
    """The words, the larger what they did the fuller their colour."""
    most = max(abs(v) for _, v, _ in pieces) or 1.0
    found = Text()
    for piece, value, _ in pieces:
        part = round(4 * abs(value) / most) / 4
        colour = ",".join(str(round(40 + part * (c - 40))) for c in SHADES[value > 0])
        said = " " * piece[:1].isspace() + excerpt(piece) + " " * piece[-1:].isspace()
        found.append(said, f"black on rgb({colour})" if part > 0.25 else "")
        if len(found) > LETTERS:
            return found.append(" …")
    return found

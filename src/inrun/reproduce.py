"""``inrun reproduce``: the folder experiments/ of a checkout, on the command line."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which experiment; --list shows them.")
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            help="smoke: minutes on two cores; paper: one GPU; tiny: seconds; cpu: what a GPU has "
            "not measured, in half an hour of a core (source-identification)."
        ),
    ] = "smoke",
    data: Annotated[
        Path | None,
        typer.Option(envvar="INRUN_DATA", help="Folder of larger data; without it, none needed."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the parts; runs/reproduce/NAME-SIZE by default.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only parts whose names begin so; may be repeated.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="A GPU by default, where there is one.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Parts at a time, each in a process of its own.")
    ] = 1,
    show: Annotated[bool, typer.Option("--list", help="Show experiments, or the parts.")] = False,
) -> None:
    """Measure a claim of the paper again. Needs a checkout of the repository.

    An experiment is a list of parts; finished parts are kept, and running again does only what is
    missing. The summary is summary.json in the output folder.
    """
    experiments = _experiments()
    if name is None and not show:
        raise ValueError("which experiment? `inrun reproduce --list` shows them")
    if name is None:
        for each in experiments.EXPERIMENTS:
            typer.echo(f"{each:22} {experiments.load(each).claim}")
        return
    experiment = experiments.load(name)
    parts = import_module("experiments.common.parts")
    if show:
        typer.echo("\n".join(parts.select(experiment, size, only or ())))
        return
    parts.reproduce(experiment, size, out, data, only or (), device, typer.echo, jobs)


def _experiments() -> Any:
    """The folder experiments/ of the checkout that this package is in."""
    root = Path(__file__).parents[2]
    if not (root / "experiments" / "__init__.py").exists():
        raise ValueError(
            "the experiments are not part of the installed package: clone the repository and run "
            "`pip install -e '.[experiments]'` in it"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module("experiments")

"""The command line: thin wrappers around ``open_run``, ``metrics`` and ``report``."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inrun import __version__, metrics
from inrun import open as open_run
from inrun.bench.command import bench
from inrun.examples import load_examples
from inrun.ledger import LedgerError

if TYPE_CHECKING:
    from inrun.store import SavedRun

app = typer.Typer(
    name="inrun",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="What each training example did to your model, from the ledger of a watched run. "
    "Start with `inrun info RUN`, then `inrun report RUN`.",
)
P = ParamSpec("P")


class By(str, Enum):
    value = "value"
    harm = "harm"


class Which(str, Enum):
    bottom = "bottom"
    top = "top"
    random = "random"


class Task(str, Enum):
    digits = "digits"
    text = "text"


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Ledger folder: watch(..., out=RUN).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Estimator = Annotated[
    str | None, typer.Option(help="One of the run's estimators; the first by default.")
]
Examples = Annotated[
    Path | None,
    typer.Option(help="What the ids stand for: .jsonl, .csv, .parquet, .npz or a dataset folder."),
]
Rank = Annotated[
    By, typer.Option(help="value: credit for the loss; harm: how often and much it hurt.")
]


def plain_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Bad input is one line on stderr and exit code 2, never a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (LedgerError, ValueError, OSError) as error:
            typer.echo("inrun: " + " ".join(str(error).split()), err=True)
            raise typer.Exit(2) from None

    return run


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"inrun {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@plain_errors
def info(run: RunPath, estimator: Estimator = None, as_json: Json = False) -> None:
    """What was run, how much is on record, and whether the values add up.

    explained = sum of values / batch share over the audited steps: 100 % means that the values add
    up to what the batches did. The momentum share is what momentum and decay did; nobody gets it.
    """
    from inrun.report.facts import describe, facts_of

    saved = open_run(run)
    facts = facts_of(saved, estimator)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=Text(str(run)))
    table.title_justify = "left"
    for name, text in describe(facts).items():
        table.add_row(Text(name, "dim"), text)
    _say(as_json, facts | {"info": saved.info}, table)


@app.command()
@plain_errors
def top(
    run: RunPath,
    n: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 20,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest values first.")] = False,
    by: Rank = By.value,
    target: Annotated[str | None, typer.Option(help="Only this target.")] = None,
    examples: Examples = None,
    estimator: Estimator = None,
    as_json: Json = False,
) -> None:
    """The examples that helped most, with --worst those that hurt most.

    --by harm lists the suspects: most harm first, with or without --worst. Harm adds up, over steps
    and targets, how far below its batch an example was; a suspect is a reason to look, not a proof.
    """
    saved = open_run(run)
    table = saved.top(n, by.value, target, worst, estimator)
    if examples is not None and len(table):
        shown = load_examples(examples, table["id"].tolist()).drop(columns="image")
        shown = shown.dropna(axis=1, how="all").astype({"id": table["id"].dtype})
        table = table.merge(shown, on="id", how="left")
    names = [c for c in table.columns if c != "scored"]
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        words = name in ("id", "text", "label", "group")
        grid.add_column(name, justify="left" if words else "right", no_wrap=name != "text")
    for row in table[names].itertuples(index=False):
        grid.add_row(*(Text(_cell(x)) for x in row))
    _say(as_json, table.to_dict("records"), grid)


@app.command()
@plain_errors
def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="May be the same folder.")],
    k: Annotated[int | None, typer.Option("-k", help="Bottom k; a tenth by default.")] = None,
    by: Rank = By.value,
    estimator: Annotated[str | None, typer.Option(help="Estimator of RUN_A (and RUN_B).")] = None,
    estimator_b: Annotated[str | None, typer.Option(help="Estimator of RUN_B, if another.")] = None,
    as_json: Json = False,
) -> None:
    """Do two runs agree? Pearson, Spearman and the overlap of the bottom k examples.

    Over the examples that both scored. With --by harm the bottom are those of most harm. By chance
    the overlap would be k divided by the number of examples.
    """
    a, b = (
        _scores(open_run(path), by, name).dropna()
        for path, name in ((run_a, estimator), (run_b, estimator_b or estimator))
    )
    if a["id"].dtype != b["id"].dtype:
        raise LedgerError(f"{run_a} and {run_b} have different kinds of ids (int and str)")
    both = a.merge(b, on="id", suffixes=("_a", "_b"))
    if len(both) < 2:
        raise LedgerError(f"{run_a} and {run_b} share {len(both)} scored examples: too few")
    x, y = both["score_a"], both["score_b"]
    count = k if k is not None else max(1, len(both) // 10)
    result = {
        "examples": len(both),
        "pearson": metrics.pearson(x, y),
        "spearman": metrics.spearman(x, y),
        "k": count,
        "bottom_overlap": metrics.bottom_overlap(x, y, count),
        "bottom_overlap_by_chance": count / len(both),
    }
    _say(
        as_json,
        result,
        f"{len(both):,} examples in both\nPearson   {result['pearson']:.3f}\n"
        f"Spearman  {result['spearman']:.3f}\nbottom {count:,} in common: "
        f"{result['bottom_overlap']:.1%} (by chance {result['bottom_overlap_by_chance']:.1%})",
    )


@app.command()
@plain_errors
def prune(
    run: RunPath,
    ratio: Annotated[float, typer.Option(help="Share of the examples to remove, in (0, 1).")],
    which: Annotated[Which, typer.Option(help="Which end to remove.")] = Which.bottom,
    by: Rank = By.value,
    seed: Annotated[int, typer.Option(help="For --which random.")] = 0,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Ids to keep: .parquet, .csv, .json or .txt.")
    ] = Path("keep.parquet"),
    estimator: Estimator = None,
    as_json: Json = False,
) -> None:
    """Write the ids to keep after removing the worst (best, random) share of the examples.

    With --by harm, bottom removes those of most harm. Examples that were never scored are kept:
    nothing is known against them.
    """
    if not 0 < ratio < 1:
        raise LedgerError(f"--ratio must lie between 0 and 1, not {ratio:g}")
    if output.suffix not in (".parquet", ".csv", ".json", ".txt"):
        raise LedgerError(f"{output}: write .parquet, .csv, .json or .txt")
    table = _scores(open_run(run), by, estimator)
    wanted = round(ratio * len(table))
    if which is Which.random:
        known = table["score"].dropna().index.to_numpy()
        pool = np.random.default_rng(seed).permutation(known)
    else:
        order = table["score"].sort_values(ascending=which is Which.bottom, kind="stable")
        pool = order.dropna().index.to_numpy()
    keep = table[~table.index.isin(pool[:wanted])][["id"]]
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".parquet":
        keep.to_parquet(output, index=False)
    elif output.suffix == ".csv":
        keep.to_csv(output, index=False)
    elif output.suffix == ".json":
        output.write_text(json.dumps(keep["id"].tolist(), ensure_ascii=False), "utf-8")
    else:
        output.write_text("".join(f"{x}\n" for x in keep["id"]), "utf-8")
    removed = len(table) - len(keep)
    how = "at random" if which is Which.random else f"{which.value}, by {by.value}"
    result = {"examples": len(table), "removed": removed, "kept": len(keep), "output": str(output)}
    _say(
        as_json,
        result,
        f"{removed:,} of {len(table):,} examples removed ({how}); "
        f"{len(keep):,} ids to keep in {output}",
    )


@app.command()
@plain_errors
def report(
    run: RunPath,
    examples: Examples = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file.")] = Path(
        "report.html"
    ),
    estimator: Estimator = None,
    as_json: Json = False,
) -> None:
    """One HTML file to look at the run: best, worst and suspect examples, and does it add up?

    Self-contained: no network, opens from disk, can be mailed. With --examples it shows the text or
    image, label and group of each id.
    """
    from inrun.report import write_report

    size = write_report(open_run(run), output, examples, estimator)
    _say(as_json, {"output": str(output), "bytes": size}, f"{output} ({size / 1e6:.1f} MB)")


@app.command()
@plain_errors
def demo(
    task: Annotated[Task, typer.Option(help="What to train.")] = Task.digits,
    out: Annotated[
        Path | None, typer.Option(help="Ledger folder; runs/demo-TASK by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of data, model and order.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="digits: mean over so many seeds.")] = 1,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the training data.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a small model, watched, and see what its examples did. One or two minutes.

    digits: a ConvNet on handwritten digits, a tenth of whose labels were flipped. Who finds them,
    and does it help to remove the suspects? text: a small GPT on the documentation of Python. Which
    passages taught it the answer to a question? Both write a ledger and a report to look at.
    """
    from inrun.demo import run_demo

    console = Console(stderr=as_json, highlight=False)
    result = run_demo(task.value, out, seed=seed, seeds=seeds, epochs=epochs, console=console)
    if as_json:
        typer.echo(json.dumps(_clean(result), ensure_ascii=False, indent=1))


app.command()(plain_errors(bench))


@app.command()
@plain_errors
def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which experiment; --list shows them.")
    ] = None,
    size: Annotated[
        str, typer.Option(help="smoke: minutes on two cores; paper: one GPU; tiny: seconds.")
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
    parts.reproduce(experiment, size, out, data, only or (), device, typer.echo)


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


@app.command()
@plain_errors
def variants(
    sources: Annotated[
        Path, typer.Argument(help=".txt (one per line, id = line from 0) or .jsonl (id, text).")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Grows by one line per source; resumes.")
    ] = Path("variants.jsonl"),
    model: Annotated[str | None, typer.Option(help="As the endpoint calls it.")] = None,
    base_url: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_BASE_URL", help="OpenAI-compatible endpoint; OpenAI if none."),
    ] = None,
    key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the key.")
    ] = "OPENAI_API_KEY",
    k: Annotated[int, typer.Option("-k", min=1, help="Variants per category.")] = 3,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Only so many sources, drawn by --seed.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every draw, and sent with the requests.")] = 0,
    entities: Annotated[
        str, typer.Option(help="auto (spaCy if installed), capitals, or a spaCy pipeline.")
    ] = "auto",
    window: Annotated[
        list[str] | None,
        typer.Option(metavar="CATEGORY=LOW:HIGH", help="Jaccard overlap with the source."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Most requests per source, while too few variants pass.")
    ] = 5,
    workers: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds per request.")] = 120,
    retries: Annotated[
        int, typer.Option(min=0, help="After rate limits, timeouts and server errors.")
    ] = 5,
    request: Annotated[
        str, typer.Option(metavar="JSON", help="More request fields; null leaves one out.")
    ] = "{}",
    cache: Annotated[
        Path | None, typer.Option(help="Every reply; OUTPUT with .cache.jsonl by default.")
    ] = None,
    keep_short: Annotated[
        bool, typer.Option("--keep-short", help="Write sources that lack variants, too.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="SOURCES holds variants: which pass the filter?")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask a language model for variants of your examples: the queries of the paper's Table 2.

    For each source: a partial copy, paraphrases, substantial rewritings and sentences on a similar
    topic, by the paper's prompts, kept if they pass its lexical filter. Safe to stop and to run
    again: nothing is asked twice. Exit code 1: some sources are short or had no reply.
    """
    from inrun.variants import Endpoint, command

    if check:
        found = command.check_variants(sources, entities, window or (), k)
    else:
        if model is None:
            raise ValueError("--model is missing: the name of a model that the endpoint serves")
        try:
            found = command.make_variants(
                sources, output, Endpoint(model, base_url, key_env, timeout, retries),
                k=k, seed=seed, sample=sample, entities=entities, window=window or (),
                request=request, cache=cache, rounds=rounds, workers=workers, keep_short=keep_short,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            typer.echo(f"inrun: stopped. {stop}", err=True)
            raise typer.Exit(130) from None
    _say(as_json, found.facts, found.shown)
    raise typer.Exit(found.code)


def _scores(saved: SavedRun, by: By, estimator: str | None) -> pd.DataFrame:
    """id and score, where higher is better: value, or minus harm."""
    if by is By.harm:
        table = saved.harm(estimator)
        return pd.DataFrame({"id": table["id"], "score": -table["harm"]})
    table = saved.values(estimator)
    return pd.DataFrame({"id": table["id"], "score": table["value"]})


def _cell(x: Any) -> str:
    if isinstance(x, float):
        return "" if math.isnan(x) else f"{x:.4g}"
    printable = (c if c.isprintable() else " " for c in str("" if x is None else x)[:2000])
    text = " ".join("".join(printable).split())  # what is in the data never steers the terminal
    return text if len(text) <= 200 else text[:199] + "…"


def _say(as_json: bool, data: Any, shown: Any) -> None:
    """Print for machines or for people."""
    if as_json:
        typer.echo(json.dumps(_clean(data), ensure_ascii=False, indent=1))
    else:
        Console().print(shown, highlight=False, markup=False, soft_wrap=isinstance(shown, str))


def _clean(x: Any) -> Any:
    """JSON has no NaN: null instead."""
    if isinstance(x, dict):
        return {k: _clean(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_clean(v) for v in x]
    if isinstance(x, np.generic):
        return _clean(x.item())
    return None if isinstance(x, float) and not math.isfinite(x) else x

"""The command line: thin wrappers around ``open_run``, ``metrics`` and ``report``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pandas as pd
import typer
from rich.table import Table
from rich.text import Text

from inrun import __version__
from inrun import open as open_run
from inrun.bench.command import bench
from inrun.cli.asking import ask
from inrun.cli.shared import (
    Estimator,
    Examples,
    HalfLife,
    RunPath,
    Since,
    Until,
    grid,
    with_examples,
)
from inrun.cli.suspects import epochs, prune, suspects
from inrun.console import Force, Json, console, plain_errors, safe, say
from inrun.console import as_json as json_text
from inrun.ledger import LedgerError
from inrun.ledger.command import repair_command
from inrun.ledger.signals import Window
from inrun.output import check_output
from inrun.report import metrics
from inrun.report.noise import steadiness
from inrun.reproduce import reproduce
from inrun.variants.command import variants

if TYPE_CHECKING:
    from inrun.ledger.saved import SavedRun

app = typer.Typer(
    name="inrun",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="What each training example did to your model, from the ledger of a watched run. "
    "Start with `inrun info RUN`, then `inrun report RUN`.",
)


class By(str, Enum):
    value = "value"
    harm = "harm"
    loss = "loss"
    el2n = "el2n"
    margin = "margin"


class Task(str, Enum):
    digits = "digits"
    text = "text"


Rank = Annotated[
    By,
    typer.Option(
        help="value: credit for the loss; harm: how often and much it hurt; loss, el2n, margin: "
        "how badly the model fitted it, a mean over visits."
    ),
]


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
    Where a loss has a part that belongs to no example (a penalty on weights), what it did is
    nobody's part of the batch share, and explained counts it with the values.
    """
    from inrun.report.facts import describe, facts_of

    saved = open_run(run)
    facts = facts_of(saved, estimator)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=Text(safe(run)))
    table.title_justify = "left"
    for name, text in describe(facts).items():
        table.add_row(Text(name, "dim"), Text(safe(text)))
    say(as_json, facts | {"info": saved.info}, table)


@app.command()
@plain_errors
def top(
    run: RunPath,
    n: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 20,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest values first.")] = False,
    by: Rank = By.value,
    target: Annotated[str | None, typer.Option(help="Only this target.")] = None,
    since: Since = None,
    until: Until = None,
    half_life: HalfLife = None,
    examples: Examples = None,
    estimator: Estimator = None,
    as_json: Json = False,
) -> None:
    """The examples that helped most, with --worst those that hurt most.

    --by harm lists those that hurt, most harm first, with or without --worst: it adds up, over
    steps and targets, how far below its batch an example was. --by loss, el2n or margin lists what
    the model fitted worst. For labels that may be wrong see `inrun suspects`.
    """
    saved = open_run(run)
    table = saved.top(
        n, by.value, target, worst, estimator, since=since, until=until, half_life=half_life
    )
    table, lines = with_examples(table, examples), Table.grid()
    lines.add_row(grid(table))
    if not as_json and by is By.value and target is None:
        steady = steadiness(saved, estimator, Window(since, until, half_life))
        lines.add_row(Text(safe(steady), "dim"))
    say(as_json, table.to_dict("records"), lines)


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

    Over the examples that both scored. With --by harm the bottom are those of most harm, with
    --by loss, el2n or margin those that the model fitted worst. By chance
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
    say(
        as_json,
        result,
        f"{len(both):,} examples in both\nPearson   {result['pearson']:.3f}\n"
        f"Spearman  {result['spearman']:.3f}\nbottom {count:,} in common: "
        f"{result['bottom_overlap']:.1%} (by chance {result['bottom_overlap_by_chance']:.1%})",
    )


@app.command()
@plain_errors
def report(
    run: RunPath,
    examples: Examples = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="HTML file; report.html by default.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Of the input ids, where the run has values of positions: a folder or name of "
            "transformers, or bytes."
        ),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Folder of `inrun ask`; RUN/answers by default.")
    ] = None,
    since: Since = None,
    until: Until = None,
    half_life: HalfLife = None,
    force: Force = False,
    estimator: Estimator = None,
    as_json: Json = False,
) -> None:
    """One HTML file to look at the run: best, worst and suspect examples, and does it add up?

    Self-contained: no network, opens from disk, can be mailed. With --examples it shows the text or
    image, label and group of each id. Steps of run.batch(ids, tokens=True) show texts shaded by the
    value of each position, in the words of --tokenizer or of a column "tokens" of the examples
    (a list of strings). Answers of `inrun ask` come with it. --since, --until and --half-life are
    of values, harm and suspects; audits and epochs are those of the whole run. An earlier
    report.html is replaced, any other file only with --force.
    """
    from inrun.report import is_report, write_report

    file = output or Path("report.html")
    ours = is_report if output is None else lambda path: False
    check_output(file, inputs=[examples], force=force, ours=ours)
    window = Window(since, until, half_life)
    size = write_report(
        open_run(run),
        file,
        examples,
        estimator,
        force or output is None,
        tokenizer,
        answers,
        window,
    )
    say(as_json, {"output": str(file), "bytes": size}, f"{safe(file)} ({size / 1e6:.1f} MB)")


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

    shown = console(stderr=as_json)
    result = run_demo(task.value, out, seed=seed, seeds=seeds, epochs=epochs, console=shown)
    if as_json:
        typer.echo(json_text(result))


app.command()(plain_errors(ask))
app.command()(plain_errors(suspects))
app.command()(plain_errors(prune))
app.command()(plain_errors(epochs))
app.command()(plain_errors(bench))
app.command("repair")(plain_errors(repair_command))
app.command()(plain_errors(reproduce))
app.command()(plain_errors(variants))


def _scores(saved: SavedRun, by: By, estimator: str | None) -> pd.DataFrame:
    """id and score, where higher is better: value, margin, or minus harm, loss or EL2N."""
    if by is By.harm:
        table = saved.harm(estimator)
        return pd.DataFrame({"id": table["id"], "score": -table["harm"]})
    if by is By.value:
        table = saved.values(estimator)
        return pd.DataFrame({"id": table["id"], "score": table["value"]})
    table = saved.top(2**31, by.value, estimator=estimator)
    score = table[by.value] if by is By.margin else -table[by.value]
    return pd.DataFrame({"id": table["id"], "score": score})

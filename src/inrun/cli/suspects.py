"""`inrun suspects`, `inrun prune` and `inrun epochs`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from rich.table import Table
from rich.text import Text

from inrun import keeplist
from inrun import open as open_run
from inrun.cli.shared import Estimator, Examples, RunPath, Since, Until, grid, with_examples
from inrun.console import Force, Json, safe, say
from inrun.ledger import LedgerError
from inrun.ledger.suspects import SURE, by_values, removed
from inrun.output import check_output, write_output
from inrun.report.examples import load_examples


class Rule(str, Enum):
    auto = "auto"
    noisy = "noisy"
    clean = "clean"
    harm = "harm"
    value = "value"


class Which(str, Enum):
    bottom = "bottom"
    top = "top"
    random = "random"


def suspects(
    run: RunPath,
    n: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 20,
    since: Since = None,
    until: Until = None,
    examples: Examples = None,
    estimator: Estimator = None,
    values: Annotated[
        bool, typer.Option(help="Use what values say, too: for right validation labels.")
    ] = True,
    as_json: Json = False,
) -> None:
    """The examples whose labels are most probably wrong.

    Ranked by how badly the model fitted them while it learned (EL2N and margin over a window of
    visits, which is shown), more so in labels whose badly fitted examples were harmful, and by harm
    where one label stands out or where hard examples help. confidence: of the examples up to this
    one at least this share is wrong, as their values say. disagreed: share of the visits at which
    the model preferred another label; a hard example looks the same. hurts: the target whose loss
    the example's values raised most. A suspect is a reason to look, not a proof.
    """
    table = open_run(run).suspects(estimator, since=since, until=until, values=values)
    window, sure = table.attrs["window"], int((table["confidence"] >= SURE).sum())
    shown = with_examples(table.head(n).drop(columns="label" if examples else []), examples)
    lines = Table.grid()
    lines.add_row(Text(f"visits: steps {window['since']:,} to {window['until'] - 1:,}, "
                       f"{safe(window['why'])}"))  # fmt: skip
    lines.add_row(Text(by_values(window, sure)))
    lines.add_row(grid(shown))
    data = {"window": window, "sure": sure, "examples": len(table)}
    say(as_json, data | {"suspects": shown.to_dict("records")}, lines)


def epochs(run: RunPath, estimator: Estimator = None, as_json: Json = False) -> None:
    """What each epoch did: its steps, the sum of values, mean loss, EL2N and margin.

    Give its steps to --since and --until of `inrun top` to rank by one epoch alone.
    """
    table = open_run(run).epochs(estimator)
    say(as_json, table.to_dict("records"), grid(table))


def prune(
    run: RunPath,
    ratio: Annotated[float, typer.Option(help="Share of the examples to remove, in (0, 1).")],
    by: Annotated[
        Rule,
        typer.Option(
            help="auto: the suspects that are wrong by the values, then the easiest of each label, "
            "or a tenth of suspects and then at random if others may be wrong, too; "
            "noisy: the suspects; "
            "clean: the easiest of each label; harm, value: one end of that ranking."
        ),
    ] = Rule.auto,
    which: Annotated[
        Which, typer.Option(help="random, or which end to remove (--by harm or value).")
    ] = Which.bottom,
    seed: Annotated[int, typer.Option(help="Of what is removed at random.")] = 0,
    groups: Annotated[
        Path | None,
        typer.Option(help="Near-duplicates that you found (id, group): all but one of a group go."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Ids to keep: .parquet, .csv, .json or .txt.")
    ] = Path("keep.parquet"),
    force: Force = False,
    estimator: Estimator = None,
    as_json: Json = False,
) -> None:
    """Write the ids to keep after removing a share of the examples.

    By default the suspects go first as far as values say that they are wrong (of clean data hardly
    any). Then the examples that the model fitted most easily, an equal share of each label. If
    values do not say that the others are right, the most suspicious tenth where values are steady,
    then at random, since without easy examples the share of wrong ones rises. --by noisy is for no
    more than the share of wrong labels.
    --by value removes those of lowest value, for comparison only: on clean SST-2 that was worse
    than --which random.
    --groups names near-duplicates, which a run does not know: of each group all but the least
    suspicious go before the easiest.
    Examples that were never scored are kept: nothing is known against them.
    """
    _check_prune(ratio, output, by, which, groups)
    check_output(output, force=force)
    saved = open_run(run)
    values = saved.values(estimator)
    n = round(ratio * len(values))
    gone, how = _to_remove(saved, values, n, by, which, seed, estimator, groups)
    keep = values["id"][~values["id"].isin(gone)].tolist()
    write_output(output, keeplist.write_ids(keep, output.suffix), force)
    n = len(values) - len(keep)  # examples that were never scored stay
    result: dict[str, Any] = {"examples": len(values), "removed": n, "kept": len(keep)}
    say(
        as_json,
        result | {"output": str(output)},
        f"{n:,} of {len(values):,} examples removed ({how}); "
        f"{len(keep):,} ids to keep in {safe(output)}",
    )


def _check_prune(
    ratio: float, output: Path, by: Rule, which: Which, groups: Path | None
) -> None:  # fmt: skip
    """Refuse options that mean nothing, alone or together."""
    if not 0 < ratio < 1:
        raise LedgerError(f"--ratio must lie between 0 and 1, not {ratio:g}")
    if output.suffix not in keeplist.SUFFIXES:
        raise LedgerError(f"{output}: write .parquet, .csv, .json or .txt")
    if which is Which.top and by not in (Rule.harm, Rule.value):
        raise LedgerError(f"--which top goes with --by harm or value, not {by.value}")
    if groups is not None and (by not in (Rule.auto, Rule.clean) or which is Which.random):
        raise LedgerError("--groups goes with --by auto or clean")


def _to_remove(
    saved: Any, values: pd.DataFrame, n: int, by: Rule, which: Which, seed: int,
    estimator: str | None, groups: Path | None,
) -> tuple[np.ndarray, str]:  # fmt: skip
    """The ids of n examples, and how they were chosen."""
    if which is Which.random:
        known = values["id"][values["value"].notna()].to_numpy()
        return np.random.default_rng(seed).permutation(known)[:n], "at random"
    if by in (Rule.harm, Rule.value):
        return _ends(saved, by, which, estimator)[:n], f"{which.value}, by {by.value}"
    table = saved.suspects(estimator)
    twins = None if groups is None else _groups(groups, table["id"])
    return table["id"].to_numpy()[removed(table, n, by.value, seed, twins)], f"by {by.value}"


def _groups(file: Path, ids: pd.Series) -> pd.Series:
    """The group of each id, null where the file names none."""
    found = load_examples(file, ids.tolist(), show=())
    group = found["group"].set_axis(found["id"])
    if group.isna().all():
        raise LedgerError(f"{file}: a column 'id' and a column 'group' are needed")
    return group.reindex(ids)


def _ends(saved: Any, by: Rule, which: Which, estimator: str | None) -> np.ndarray:
    """Ids by value or harm, the first to go first."""
    table: pd.DataFrame = saved.harm(estimator) if by is Rule.harm else saved.values(estimator)
    score = -table["harm"] if by is Rule.harm else table["value"]
    order = score.sort_values(ascending=which is Which.bottom, kind="stable").dropna().index
    return table["id"].to_numpy()[order.to_numpy()]

"""The folder of answers: what is in it, and reading it.

    asked.json            what was asked, by how many ranks; signed
    part-00000.parquet    a piece of the pass: id, and for each question a column q0, q1, … of
                          ⟨u, ∇ℓ_i⟩. A part is complete or not there
    done.json             the pass is complete: rows and SHA-256 of each part; signed
    tokens.parquet        if asked for, positions of the examples that were found: id, position,
                          input, q0, q1, …
    rank-00003/           the same of rank 3, where several ranks asked

A folder may come from somebody else. Nothing in it is executed, and a file is read only if it has
the columns, the size and the numbers that it must have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.ledger import LedgerError, files
from inrun.ledger.ranks import rank_folder

FORMAT = "inrun-asked"
ABOUT, DONE, TOKENS = "asked.json", "done.json", "tokens.parquet"
CELLS = 1 << 30  # numbers of a part: a file that claims more is not ours
RANKS = 1 << 16


@dataclass(frozen=True)
class Answers:
    """What :func:`inrun.ask` has left in a folder.

    ``scores``: id, and a column for each question. ``tokens``: id, position, input, and the same
    columns, for the examples that were found; None if they were not asked for.
    """

    path: Path
    run: str
    questions: list[str]
    losses: list[float]
    examples: int
    scores: pd.DataFrame
    tokens: pd.DataFrame | None

    def __repr__(self) -> str:
        return f"<answers {str(self.path)!r}: {len(self.questions)} questions>"


def open_answers(folder: str | Path) -> Answers:
    """The answers that ``inrun.ask(..., out=folder)`` has written, when its pass is complete."""
    root = Path(folder)
    about = read_about(root)
    if about is None:
        raise LedgerError(f"{root} holds no answers: inrun.ask(..., out={str(root)!r}) writes them")
    tables, examples = [], 0
    for rank in range(about["ranks"]):
        own = rank_folder(root, rank)
        done = _signed(own / DONE)
        if done is None or read_about(own) is None:
            raise LedgerError(
                f"{root} holds a pass that is not complete: ask again with the same arguments, and "
                "it goes on there"
            )
        examples = _whole(done.get("examples"), own / DONE)
        tables += _parts(own, done, len(about["questions"]))
    scores = summed(tables, about["questions"], examples)
    found = root / TOKENS
    tokens = None
    if found.exists():
        table = read_part(found, len(about["questions"]), before=("id", "position", "input"))
        tokens = table.to_pandas()
        numbers = tokens.columns[3:]
        tokens[numbers] = tokens[numbers].astype(float) / examples
        tokens.columns = pd.Index(["id", "position", "input", *about["questions"]])
    return Answers(
        root, about["run"], about["questions"], about["losses"], examples, scores, tokens
    )


def summed(tables: list[pa.Table], questions: list[str], examples: int) -> pd.DataFrame:
    """One row for each id, in their order: an id that came more than once has the sum."""
    raw = pa.concat_tables(tables).to_pandas()
    total = raw.groupby("id", sort=False, as_index=False).sum()
    scores = total.drop(columns="id").astype(float) / examples
    scores.columns = pd.Index(questions)
    return pd.concat([total[["id"]], scores], axis=1)


def read_about(folder: Path) -> dict[str, Any] | None:
    """What was asked; None if nothing was."""
    file = folder / ABOUT
    found = _signed(file) if folder.is_dir() else None
    if found is None:
        return None
    names, losses = found.get("questions"), found.get("losses")
    good = (
        found.get("format") == FORMAT
        and isinstance(names, list) and names and all(isinstance(x, str) for x in names)
        and len(set(names)) == len(names)
        and isinstance(losses, list) and len(losses) == len(names)
        and all(isinstance(x, float) and math.isfinite(x) for x in losses)
        and isinstance(found.get("run"), str)
        and 1 <= _whole(found.get("ranks"), file) <= RANKS
    )  # fmt: skip
    if not good:
        raise LedgerError(f"{file} is not a file of inrun.ask")
    return found


def read_part(
    file: Path, questions: int, rows: int | None = None, before: tuple[str, ...] = ("id",)
) -> pa.Table:
    """The table of a file: the columns of ``before``, then q0, q1, … of finite numbers."""
    files.stay_inside(file, file.parent)
    try:
        source = pq.ParquetFile(pa.OSFile(str(file)), page_checksum_verification=True)
        count, schema = source.metadata.num_rows, source.schema_arrow
        wrong = _wrong(schema, questions, before)
        if wrong is None and (count * len(schema) > CELLS or rows not in (None, count)):
            wrong = f"{count} rows"
        if wrong is None:
            table = source.read()
            columns = [table[name].to_numpy() for name in schema.names[len(before) :]]
            if all(np.isfinite(x).all() for x in columns) and not table["id"].null_count:
                return table
            wrong = "scores that are not finite, or an id that is missing"
    except (OSError, ValueError, pa.ArrowException) as error:
        wrong = " ".join(str(error).split())
    raise LedgerError(f"{file} is damaged ({wrong}): delete it, and ask again")


def _wrong(schema: pa.Schema, questions: int, before: tuple[str, ...]) -> str | None:
    """Why these are not the columns of a part."""
    names = [*before, *(f"q{q}" for q in range(questions))]
    if schema.names != names:
        return f"columns {schema.names[:5]}, not {names[:5]}"
    for field in schema:
        good = field.type in (pa.int64(), pa.string())
        if field.name == "position":
            good = field.type == pa.int64()
        elif field.name.startswith("q"):
            good = field.type in (pa.float32(), pa.float64())
        elif field.name == "input":
            good = field.type in (pa.int64(), pa.null())
        if not good:
            return f"a column {field.name} of {field.type}"
    return None


def _parts(folder: Path, done: dict[str, Any], questions: int) -> list[pa.Table]:
    parts = done.get("parts")
    if not isinstance(parts, list) or not all(isinstance(x, dict) for x in parts):
        raise LedgerError(f"{folder / DONE} is not a file of inrun.ask")
    found = []
    for i, part in enumerate(parts):
        file = part_file(folder, i)
        if not file.is_file() or files.sha256_of(file) != part.get("sha256"):
            raise LedgerError(f"{file} is missing or damaged: ask again with another folder")
        found.append(read_part(file, questions, _whole(part.get("rows"), folder / DONE)))
    return found


def part_file(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.parquet"


def _signed(file: Path) -> dict[str, Any] | None:
    files.stay_inside(file, file.parent)
    found = files.read_json(file)
    if found is not None and found.get(files.CHECK) != files.checksum(found):
        raise LedgerError(f"{file} is damaged or was edited: choose another folder")
    return found


def _whole(x: Any, file: Path) -> int:
    if not isinstance(x, int) or isinstance(x, bool) or x < 0:
        raise LedgerError(f"{file} is not a file of inrun.ask")
    return x

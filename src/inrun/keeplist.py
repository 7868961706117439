"""Lists of ids in files, as ``inrun prune`` writes them: .parquet, .csv, .json or .txt.

Read again with ``read_ids``, each gives the ids that went in.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from inrun.console import safe
from inrun.ledger import LedgerError

SUFFIXES = (".parquet", ".csv", ".json", ".txt")
# A spreadsheet takes a cell that begins like this for a formula. It gets an apostrophe, which marks
# text; so does one that begins with an apostrophe, so that reading can undo it.
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n", "'")


def write_ids(ids: Sequence[int] | Sequence[str], suffix: str) -> bytes:
    """The content of a file with these ids."""
    if suffix == ".parquet":
        file = io.BytesIO()
        pd.DataFrame({"id": list(ids)}).to_parquet(file, index=False)
        return file.getvalue()
    if suffix == ".json":
        return json.dumps(list(ids), ensure_ascii=False).encode()
    if suffix == ".csv":
        return _csv(ids).encode()
    if suffix == ".txt":
        return "".join(f"{_line(x)}\n" for x in ids).encode()
    raise LedgerError(f"ids are written as {', '.join(SUFFIXES)}, not {suffix or 'without suffix'}")


def read_ids(path: str | Path) -> list[int] | list[str]:
    """The ids of a file that ``inrun prune`` wrote.

    A .txt file does not say whether 7 is a number or a text: there, ids that are all whole numbers
    are numbers.
    """
    file = Path(path)
    if file.suffix == ".parquet":
        return pd.read_parquet(file)["id"].tolist()
    if file.suffix == ".json":
        return json.loads(file.read_text("utf-8"))
    if file.suffix not in SUFFIXES:
        raise LedgerError(f"{file}: ids are read from {', '.join(SUFFIXES)}")
    text = file.read_bytes().decode()
    if file.suffix == ".txt":
        return _numbers([json.loads(x) if x[:1] == '"' else x for x in text.split("\n")[:-1]])
    rows = [row[0] for row in csv.reader(io.StringIO(text, newline=""))][1:]
    quoted = text.startswith('"', len("id\n"))  # every text is quoted, no number is
    return [x.removeprefix("'") for x in rows] if quoted else [int(x) for x in rows]


def _csv(ids: Sequence[Any]) -> str:
    rows = ["id"]
    for x in ids:
        cell = str(x)
        if isinstance(x, str):
            if "\0" in x:
                raise LedgerError(
                    f"the id {x!r} holds a NUL character, which no .csv can hold: write .parquet "
                    "or .json"
                )
            cell = "'" + x if x.startswith(FORMULA) else x
            cell = '"' + cell.replace('"', '""') + '"'
        rows.append(cell)
    return "".join(f"{row}\n" for row in rows)


def _line(x: Any) -> str:
    """An id as one line: as it is, or in the quotes and with the escapes of JSON where need be."""
    plain = not isinstance(x, str) or (x and x == x.strip() == safe(x) and x[0] != '"')
    return str(x) if plain else json.dumps(x)


def _numbers(lines: list[str]) -> list[int] | list[str]:
    try:
        numbers = [int(x) for x in lines]
    except ValueError:
        return lines
    return numbers if [str(x) for x in numbers] == lines else lines

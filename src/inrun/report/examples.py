"""Training examples for display: text or image, label and group by id, from common files."""

from __future__ import annotations

import base64
import importlib
import json
import struct
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from inrun.ledger import LedgerError

ID = ("id", "ids", "idx", "uid")
TEXT = ("text", "content", "sentence", "prompt", "question", "input", "document", "code")
IMAGE = ("image", "images", "img", "x", "data", "pixels")
LABEL = ("label", "labels", "y", "target", "class")
GROUP = ("group", "groups", "source", "domain", "category", "subset")
TOKENS = ("tokens", "words", "pieces")
COLUMNS = ["id", "text", "image", "label", "group"]


def load_examples(
    path: str | Path, ids: Collection[Any], show: Collection[Any] | None = None
) -> pd.DataFrame:
    """A frame with id, text, image (a PNG data URI), label and group for the run's examples.

    ``path`` is jsonl, csv, parquet, npz (arrays of images and labels) or the folder of a Hugging
    Face dataset. Ids come from an ``id`` column, else they are row numbers. Label and group come
    for all ``ids``; text and image, which are large, only for those in ``show`` (None: all).
    """
    file = Path(path)
    raw = _read(file)
    columns = {
        "id": _find(raw, ID),
        "text": _find(raw, TEXT),
        "image": _find(raw, IMAGE),
        "label": _find(raw, LABEL),
        "group": _find(raw, GROUP),
    }
    if columns["text"] is None:  # any other text is better than none
        rest = [c for c in raw if c not in columns.values() and len(raw[c])]
        columns["text"] = next((c for c in rest if isinstance(raw[c][0], str)), None)
    found = raw[columns["id"]] if columns["id"] else list(range(_length(raw)))
    row = _match(list(ids), list(found), file)
    shown = set(row if show is None else show)
    frame = pd.DataFrame({"id": pd.Series(list(row), dtype=object)})
    for name in COLUMNS[1:]:
        frame[name] = pd.Series([None] * len(row), dtype=object)
        column = columns[name]
        if column is None:
            continue
        if name == "image" and not _is_image(raw[column]):
            continue
        large = name in ("text", "image")
        frame[name] = pd.Series(
            [
                _show(name, raw[column][i]) if not large or key in shown else None
                for key, i in row.items()
            ],
            dtype=object,
        )
    return frame


def load_tokens(path: str | Path, ids: Collection[Any]) -> dict[Any, list[str]]:
    """The strings of the positions of these examples, from a column ``tokens`` that holds a list
    for each; none where there is no such column."""
    file = Path(path)
    raw = _read(file)
    column, key = _find(raw, TOKENS), _find(raw, ID)
    if column is None:
        return {}
    found = raw[key] if key else list(range(_length(raw)))
    rows = _match(list(ids), list(found), file)
    lists = {i: raw[column][row] for i, row in rows.items()}
    return {
        i: [_show("text", s) or "" for s in x]
        for i, x in lists.items()
        if isinstance(x, list | tuple | np.ndarray)
    }


def thumbnail(pixels: np.ndarray, side: int = 64) -> str:
    """A PNG data URI of an image [H, W], [H, W, C] or [C, H, W], shrunk to at most ``side``.

    Bytes are taken as they are; other numbers are scaled from their own range to black and white.
    """
    x = np.asarray(pixels)
    if x.ndim == 3 and x.shape[0] in (1, 3) and x.shape[2] not in (1, 3, 4):
        x = np.moveaxis(x, 0, -1)
    if x.ndim == 3 and x.shape[2] == 1:
        x = x[:, :, 0]
    if x.ndim not in (2, 3) or 0 in x.shape or (x.ndim == 3 and x.shape[2] not in (3, 4)):
        raise LedgerError(f"an image must be H×W, H×W×3 or 3×H×W, got shape {x.shape}")
    if x.dtype != np.uint8:
        x = np.nan_to_num(x.astype(np.float64))
        low, high = x.min(), x.max()
        x = np.round((x - low) / ((high - low) or 1.0) * 255).astype(np.uint8)
    stride = max(1, -(-max(x.shape[:2]) // side))
    return "data:image/png;base64," + base64.b64encode(_png(x[::stride, ::stride])).decode()


def _png(x: np.ndarray) -> bytes:
    """The smallest PNG writer: 8 bits, grey or colour, no filter."""
    height, width = x.shape[:2]
    colour = {2: 0, 3: 2, 4: 6}[2 if x.ndim == 2 else x.shape[2]]
    rows = np.ascontiguousarray(x).reshape(height, -1)
    body = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()

    def chunk(tag: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))

    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(body, 9)), chunk(b"IEND", b"")]
    )


def _read(file: Path) -> Any:
    """A mapping of columns; each is indexed by row."""
    kind = file.suffix.lower()
    try:
        if file.is_dir():
            return _hugging_face(file)
        if not file.exists():
            raise LedgerError(f"{file}: no such file")
        if kind in (".jsonl", ".ndjson"):
            return _json_lines(file)
        if kind == ".csv":
            return pd.read_csv(file, dtype=str, keep_default_na=False)  # "NA" may be a label
        if kind == ".parquet":
            return pd.read_parquet(file).reset_index(drop=True)
        if kind == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
    except LedgerError:
        raise
    except Exception as error:  # whatever a parser makes of a broken file
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise LedgerError(f"{file} cannot be read as {kind[1:]}: {first}") from error
    raise LedgerError(
        f"{file}: examples come from .jsonl, .csv, .parquet, .npz or a Hugging Face dataset folder"
    )


def _json_lines(file: Path) -> dict[str, list[Any]]:
    rows: list[dict[str, Any]] = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is not an object")
                rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _hugging_face(folder: Path) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise LedgerError(
            f"{folder} is a folder: to read a Hugging Face dataset, pip install 'inrun[datasets]'"
        ) from None
    data = datasets.load_from_disk(str(folder))
    if isinstance(data, datasets.DatasetDict):
        raise LedgerError(
            f"{folder} holds several splits: name one, as {folder / next(iter(data))}"
        )
    frame = {name: data.with_format("numpy")[name] for name in data.column_names}
    for name, feature in data.features.items():
        if isinstance(feature, datasets.ClassLabel):
            frame[name] = np.array(feature.names, dtype=object)[np.asarray(frame[name])]
    return frame


def _find(raw: Any, names: tuple[str, ...]) -> str | None:
    by_name = {str(c).lower(): str(c) for c in raw}
    return next((by_name[n] for n in names if n in by_name), None)


def _length(raw: Any) -> int:
    first = next(iter(raw), None)
    return 0 if first is None else len(raw[first])


def _is_image(column: Any) -> bool:
    first = np.asarray(column[0]) if len(column) else np.empty(0)
    return first.ndim in (2, 3) and first.dtype.kind in "uifb"


def _match(ids: list[Any], found: list[Any], file: Path) -> dict[Any, int]:
    """Where each of the run's ids is in the file; 7 and "7" are the same id."""
    rows = {str(x): i for i, x in enumerate(found)}
    row = {key: rows[str(key)] for key in ids if str(key) in rows}
    if not row:
        raise LedgerError(
            f"no id of the run is in {file}: the run has {_some(ids)}, the file {_some(found)}"
        )
    return row


def _some(ids: list[Any]) -> str:
    return ", ".join(repr(getattr(x, "item", lambda x=x: x)()) for x in ids[:3]) + (
        ", ..." if len(ids) > 3 else ""
    )


def _show(name: str, value: Any) -> str | None:
    if name == "image":
        return thumbnail(np.asarray(value))
    if value is None or value == "" or (isinstance(value, float) and np.isnan(value)):
        return None
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).encode("utf-8", "replace").decode()  # half a surrogate pair is no text

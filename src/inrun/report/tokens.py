"""Texts whose positions are shaded by value: what ``run.batch(ids, tokens=True)`` recorded.

The strings of the positions come from a column ``tokens`` of the examples, or from a tokenizer and
the input ids on record. Without either the input ids themselves are shown.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inrun.ledger import LedgerError
from inrun.ledger.saved import SavedRun

TEXTS = 6  # shown of the highest values, and of the lowest
LONGEST = 1000  # positions of a text; the rest is cut, with a note
PIECE = 100  # characters of a position
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # of bytes that are no character yet

Decode = Callable[[list[int]], str]
Tokenizer = str | os.PathLike[str] | Decode


@dataclass(frozen=True)
class Text:
    """The positions of an example in one step."""

    id: Any
    step: int
    values: np.ndarray  # [T]
    inputs: list[int] | None

    @property
    def value(self) -> float:
        return float(self.values.sum())


def shaded(
    saved: SavedRun,
    estimator: str | None,
    tokenizer: Tokenizer | None,
    strings: Callable[[Sequence[Any]], Mapping[Any, list[str]]],
) -> dict[str, Any] | None:
    """The texts that helped and hurt most in their step, ready for JSON; None if the run has no
    values of positions. ``strings`` gives those of the examples with these ids, where known."""
    found, count = _extremes(saved, estimator)
    if not found:
        return None
    decode = None if tokenizer is None else decoder(tokenizer)
    known = strings([text.id for text in found])
    shown = []
    for text in found:
        shown.append({
            "id": text.id if isinstance(text.id, int) else str(text.id)[:200],
            "step": text.step,
            "value": float(f"{text.value:.5g}"),
        } | shortened(pieces(text, known.get(text.id), decode)))  # fmt: skip
    words = all(text.id in known or (decode and text.inputs) for text in found)
    return {"texts": shown, "count": count, "words": bool(words)}


def _extremes(saved: SavedRun, estimator: str | None) -> tuple[list[Text], int]:
    """The texts of the highest values and those of the lowest, best first; and how many there
    are."""
    kept: list[Text] = []
    count = 0
    for batch in saved.token_batches(estimator):
        rows = batch.filter(batch.column(3).is_valid())
        count += rows.num_rows
        step, ids, inputs, *V = rows.columns
        for i in range(rows.num_rows):
            values = np.stack([v[i].values.to_numpy() for v in V]).astype(np.float64).mean(axis=0)
            own = inputs[i].as_py()
            kept.append(Text(ids[i].as_py(), step[i].as_py(), values, own))
        kept.sort(key=lambda t: -t.value)
        if len(kept) > 2 * TEXTS:
            kept = kept[:TEXTS] + kept[-TEXTS:]
    return kept, count


def shortened(found: list[tuple[str, float, int]]) -> dict[str, Any]:
    """Pieces of a text, ready for JSON; ``length``: how many there are, if some are cut."""
    return {
        "pieces": [[s[:PIECE], float(f"{v:.4g}"), t] for s, v, t in found[:LONGEST]],
        "length": len(found) if len(found) > LONGEST else 0,
    }


def pieces(
    text: Text, strings: Sequence[str] | None, decode: Decode | None
) -> list[tuple[str, float, int]]:
    """A string, its value and its position; several positions may make one character."""
    values, n = text.values.tolist(), len(text.values)
    if strings is not None:
        found = [(str(s), v, t) for t, (s, v) in enumerate(zip(strings, values, strict=False))]
        rest = sum(values[len(found) :])  # of padding
        return [*found, (" …", rest, len(found))] if rest else found
    if text.inputs is None or decode is None:
        shown = text.inputs or range(n)
        return [(f"{s} ", v, t) for t, (s, v) in enumerate(zip(shown, values, strict=True))]
    found, start = [], 0
    for t in range(n):
        piece = decode(text.inputs[start : t + 1])
        if not piece.endswith(UNFINISHED) or t - start == 3 or t == n - 1:
            found.append((piece, sum(values[start : t + 1]), start))
            start = t + 1
    return found


def decoder(tokenizer: Tokenizer) -> Decode:
    """Text of token ids: of ``"bytes"``, of a tokenizer of transformers (a folder or a name), or
    a function of the user's."""
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    if str(tokenizer) == "bytes":
        return _from_bytes
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise LedgerError(
            "--tokenizer needs transformers: pip install transformers, or give --examples with a "
            "column 'tokens', the strings of each example's positions"
        ) from None
    try:
        known = transformers.AutoTokenizer.from_pretrained(os.fspath(tokenizer))
    except Exception as error:  # whatever its readers raise
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise LedgerError(f"the tokenizer {tokenizer} cannot be loaded: {first}") from error

    def decode(ids: list[int]) -> str:
        text = str(known.decode(ids, clean_up_tokenization_spaces=False))
        first = known.convert_ids_to_tokens(ids[0])
        space = isinstance(first, str) and first.startswith("▁") and not text.startswith(" ")
        return " " + text if space else text

    return decode


def _from_bytes(ids: list[int]) -> str:
    if not all(0 <= i < 256 for i in ids):
        wrong = next(i for i in ids if not 0 <= i < 256)
        raise LedgerError(f"the model received {wrong}, which is no byte: name its tokenizer")
    return bytes(ids).decode("utf-8", "replace")

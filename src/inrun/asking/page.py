"""Answers as one HTML page: each question, the examples that taught it, their words shaded.

The page has no script and loads nothing; all text is escaped.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from inrun.output import check_output, write_output

SHADES = 8  # of each colour
LONGEST = 4000  # characters of a text
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;
color:#1b1b1f;background:#fff}h1{font-size:1.5rem}h2{font-size:1.1rem;margin:2rem 0 .3rem}
article{border:1px solid #ddd;border-radius:8px;padding:.6rem .9rem;margin:.6rem 0}
article p{white-space:pre-wrap;margin:.3rem 0 0;overflow-wrap:anywhere}
small{color:#555}i{font-style:normal;border-radius:3px}"""


def write_answers(
    file: str | os.PathLike[str],
    scores: pd.DataFrame,
    questions: Mapping[str, str],
    texts: Mapping[Any, str],
    *,
    top: int = 5,
    tokens: pd.DataFrame | None = None,
    strings: Mapping[Any, Sequence[str]] | None = None,
    replace: bool = False,
) -> int:
    """Write the page; returns its size in bytes.

    Args:
        scores: what :func:`inrun.ask` returned.
        questions: the text of each question, by its name.
        texts: the text of each example, by its id.
        top: examples of each question.
        tokens: what ``inrun.ask(..., tokens=True)`` returned for some of them; with ``strings``,
            the strings of their positions, they are shaded: blue taught it, red spoke against it.
        replace: a file that is there may be replaced.
    """
    path = Path(file)
    check_output(path, force=replace)
    if unknown := [name for name in questions if name not in scores.columns]:
        raise ValueError(f"there are no scores of the question {unknown[0]!r}")
    sections = [
        _section(name, text, scores, texts, top, tokens, strings or {})
        for name, text in questions.items()
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta http-equiv='
        "\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Who taught it this?</title><style>{STYLE}{_colours()}</style></head><body>"
        "<h1>Who taught it this?</h1><p>For each question, the training examples without which its "
        "loss would be highest. The number is by how much it would rise, to first order.</p>"
        f"{''.join(sections)}</body></html>\n"
    )
    return write_output(path, page.encode("utf-8", "replace"), replace)


def _section(
    name: str, text: str, scores: pd.DataFrame, texts: Mapping[Any, str], top: int,
    tokens: pd.DataFrame | None, strings: Mapping[Any, Sequence[str]],
) -> str:  # fmt: skip
    parts = [f"<h2>{html.escape(text)}</h2>"]
    for key, score in scores.nlargest(top, name)[["id", name]].itertuples(index=False):
        own = None if tokens is None else tokens.loc[tokens["id"] == key, name].to_numpy()
        known = strings.get(key)
        if own is not None and len(own) and known is not None:
            body = _shaded(known, own)
        else:
            body = html.escape(str(texts.get(key, ""))[:LONGEST])
        label = html.escape(str(key)[:200])
        parts.append(f"<article><b>{label}</b> <small>{score:.3g}</small><p>{body}</p></article>")
    return f"<section>{''.join(parts)}</section>"


def _shaded(strings: Sequence[str], values: np.ndarray) -> str:
    """The strings of positions, the larger their value the darker."""
    largest = float(np.abs(values).max()) or 1.0
    found = []
    for piece, value in zip(strings, values, strict=False):
        level = round(SHADES * abs(float(value)) / largest)
        shown = html.escape(str(piece)[:200])
        kind = "h" if value > 0 else "c"
        title = html.escape(f"{value:.3g}")
        found.append(f'<i class="{kind}{level}" title="{title}">{shown}</i>' if level else shown)
    return "".join(found)


def _colours() -> str:
    rules = [
        f".{kind}{n}{{background:rgba({rgb},{0.6 * n / SHADES:.2f})}}"
        for kind, rgb in (("h", "40,110,220"), ("c", "215,60,50"))
        for n in range(1, SHADES + 1)
    ]
    return "".join(rules)

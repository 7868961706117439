"""The report: one HTML file that contains everything and loads nothing.

Data are embedded as JSON that cannot end its script element, and reach the page as text only; the
content security policy allows this page's own script and style, by hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from inrun.ledger.saved import SavedRun
from inrun.ledger.signals import WHOLE, Window
from inrun.output import check_output, write_output
from inrun.report.data import payload
from inrun.report.tokens import Tokenizer

GENERATOR = b'<meta name="generator" content="inrun report">'
SCRIPTS = ("charts.js", "table.js", "tokens.js", "page.js")
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def write_report(
    run: SavedRun,
    output: str | Path,
    examples: str | Path | None = None,
    estimator: str | None = None,
    replace: bool = True,
    tokenizer: Tokenizer | None = None,
    window: Window = WHOLE,
) -> int:
    """Write the report of a run, at once or not at all; returns its size in bytes.

    ``tokenizer`` gives the text of input ids where the run has values of positions: "bytes", a
    tokenizer of transformers (folder or name), or a function of a list of ids. ``window``: values,
    harm and suspects of these steps alone.

    A file that is there is replaced, unless ``replace=False``; never the examples or a file of a
    ledger.
    """
    file = Path(output)
    inputs = [] if examples is None else [Path(examples)]
    check_output(file, inputs=inputs, force=replace)
    page = render(payload(run, examples, estimator, tokenizer, window)).encode(
        "utf-8", "replace"
    )  # half a surrogate
    return write_output(file, page, replace)


def is_report(path: Path) -> bool:
    """Is this file a report that we wrote?"""
    try:
        with path.open("rb") as file:
            return GENERATOR in file.read(1 << 12)
    except OSError:
        return False


def render(data: dict[str, Any]) -> str:
    """The page for a payload."""
    style = _file("style.css")
    script = '"use strict";\n' + "\n".join(_file(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": html.escape(policy),
        "title": html.escape(str(data["title"])),
        "style": style,
        "data": embed(data),
        "script": script,
    }
    page = _file("page.html")
    pieces = page.split("%%")  # text, name, text, name, ...: values are never scanned again
    return "".join(parts[p] if i % 2 else p for i, p in enumerate(pieces))


def embed(data: Any) -> str:
    """JSON that is inert inside a script element, whatever the strings hold."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _file(name: str) -> str:
    return resources.files("inrun.report").joinpath(name).read_text("utf-8")

"""One HTML file that contains everything and loads nothing.

Data are embedded as JSON that cannot end its script element, and reach the page as text only; the
content security policy allows this page's own script and style, by hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

SCRIPTS = ("charts.js", "shell.js", "table.js", "shaded.js", "tokens.js", "answers.js", "page.js")
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(data: dict[str, Any], page: str = "page.html", scripts: Sequence[str] = SCRIPTS) -> str:
    """The page for a payload."""
    style = _file("style.css")
    script = '"use strict";\n' + "\n".join(_file(name) for name in scripts)
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
        "answers": _file("answers_section.html"),
    }
    pieces = _file(page).split("%%")  # text, name, text, name, ...: values are never scanned again
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

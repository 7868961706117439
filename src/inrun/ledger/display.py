"""How a run looks as the last line of a notebook cell: one line, and both ends of its values."""

from __future__ import annotations

import html
from typing import Any

import pandas as pd

ROWS = 5  # of each table


def run_html(line: str, ledger: Any = None, steady: Any = None) -> str:
    """A line, and tables of the examples that hurt and that helped most, side by side, with what is
    known of their steadiness."""
    head = f"<code>inrun</code> {html.escape(line)}"
    tables = "" if ledger is None else _ends(ledger)
    if not tables:
        return head
    if steady is not None:
        head += f"<br>Steadiness: {_cell(str(steady), 1000)}"
    return f'<div>{head}</div><div style="display:flex;gap:3em">{tables}</div>'


def _ends(ledger: Any) -> str:
    lowest, highest = (ledger.top(0, ROWS, worst=worst) for worst in (True, False))
    hurt, helped = lowest[lowest["value"] < 0], highest[highest["value"] > 0]
    return _table("hurt most", hurt) + _table("helped most", helped)


def _table(title: str, rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    head = f"<tr><th>{title}</th><th>value</th><th>steps</th></tr>"
    body = "".join(
        f"<tr><td>{_cell(key)}</td><td>{value:.4g}</td><td>{steps:,}</td></tr>"
        for key, value, steps in zip(rows["id"], rows["value"], rows["steps"], strict=True)
    )
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _cell(key: Any, length: int = 60) -> str:
    from inrun.console import safe  # ids of somebody else's data

    return html.escape(safe(key, length))

"""Runs the code cells of a notebook in this process, as Jupyter does; IPython is not needed."""

from __future__ import annotations

import ast
import json


def run_cells(path, smaller):
    """The names that the cells leave, and what each cell shows. ``smaller``: code to replace, each
    of which must be there."""
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    sources, shown = ["".join(c["source"]) for c in cells], []
    for old, new in smaller.items():
        assert sum(source.count(old) for source in sources) == 1, old
        sources = [source.replace(old, new) for source in sources]
    names = {"__name__": "__main__"}
    for k, source in enumerate(sources):
        tree, where = ast.parse(source), f"{path.name}, cell {k}"
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, where, "exec"), names)
        value = (
            None
            if last is None
            else eval(compile(ast.Expression(last.value), where, "eval"), names)
        )
        shown.append(None if value is None else display(value))
    return names, shown


def display(value):
    """HTML where there is some, else text."""
    html = getattr(value, "_repr_html_", lambda: None)()
    return repr(value) if html is None else html

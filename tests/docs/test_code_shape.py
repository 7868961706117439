"""Functions and files stay short enough to be read at once. (ruff counts the branches.)"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "inrun"
FUNCTION_LINES = 50  # signature included, docstring not
FILE_LINES = 400


def code_lines(function):
    """Lines of a function without its docstring."""
    last_of_docstring = function.body[0].end_lineno if ast.get_docstring(function) else 0
    first_of_docstring = function.body[0].lineno if last_of_docstring else 1
    docstring = last_of_docstring - first_of_docstring + 1
    return function.end_lineno - function.lineno + 1 - docstring


def sources():
    return [(path.relative_to(PACKAGE), path.read_text()) for path in PACKAGE.rglob("*.py")]


def test_functions_are_short():
    long = [
        f"{path}:{node.lineno} {node.name} has {n} lines"
        for path, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (n := code_lines(node)) > FUNCTION_LINES
    ]
    assert not long, f"over {FUNCTION_LINES} lines: {long}"


def test_files_are_short():
    long = [f"{path} has {n}" for path, text in sources() if (n := text.count("\n")) > FILE_LINES]
    assert not long, f"over {FILE_LINES} lines: {long}"


def test_docstrings_are_not_counted():
    long, short = ast.parse('def f():\n    """One.\n\n    Two."""\n    return 1\n'), "def f(): ..."
    assert code_lines(long.body[0]) == 2
    assert code_lines(ast.parse(short).body[0]) == 1

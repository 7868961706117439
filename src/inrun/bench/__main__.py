"""``python -m inrun.bench``: the command by itself, which needs torch but no ledger on disk."""

from __future__ import annotations

import sys

import typer

from inrun.bench.command import bench

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(bench)

if __name__ == "__main__":
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"inrun: {error}", file=sys.stderr)
        sys.exit(2)

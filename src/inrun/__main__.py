"""``python -m inrun``."""

from inrun.cli import app

app()

"""transformers 4 leaves its precision and its compiler in the environment, where the next trainer
of this process finds them."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_of_accelerate_are_left(monkeypatch):
    for name in [n for n in os.environ if n.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    yield
    for name in [n for n in os.environ if n.startswith("ACCELERATE_")]:
        del os.environ[name]

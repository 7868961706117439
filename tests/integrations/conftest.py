"""Accelerate keeps its settings for the whole process, and transformers 4 leaves its precision and
its compiler in the environment: each test begins without those of the tests before it."""

import os
import sys

import pytest


def _forget_settings():
    for name in [n for n in os.environ if n.startswith("ACCELERATE_")]:
        del os.environ[name]
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)


@pytest.fixture(autouse=True)
def _no_settings_of_accelerate_are_left():
    _forget_settings()
    yield
    _forget_settings()

"""Two lines for the loops that people use, each over the public surface of inrun only.

``inrun.integrations.hf`` (transformers' and TRL's trainers), ``inrun.integrations.lightning``.
Accelerate needs none: ``inrun.watch`` takes what ``accelerator.prepare`` returns.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["hf", "lightning"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"inrun.integrations.{name}")
    raise AttributeError(f"module 'inrun.integrations' has no attribute {name!r}")

"""``inrun bench``: what watching costs, beside plain training and the paper's Direct baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inrun.bench.options import Options
    from inrun.bench.run import run_bench

__all__ = ["Options", "run_bench"]


def __getattr__(name: str) -> Any:  # imported when used: see inrun/__init__.py
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'inrun.bench' has no attribute {name!r}")
    return getattr(import_module(f"inrun.bench.{'options' if name == 'Options' else 'run'}"), name)

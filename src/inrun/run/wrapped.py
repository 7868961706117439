"""Optimizers that libraries wrap and pass every step on to."""

from __future__ import annotations

from typing import Any

# The wrapper's package and class: its ``optimizer`` is torch's, whose step() it calls unchanged.
_WRAPPERS = {("accelerate", "AcceleratedOptimizer"), ("lightning", "LightningOptimizer"),
             ("pytorch_lightning", "LightningOptimizer")}  # fmt: skip


def unwrapped(optimizer: Any, scaler: Any) -> tuple[Any, Any]:
    """The optimizer inside Accelerate's or Lightning's wrapper (each of a list), and the
    ``GradScaler`` that steps it, if the caller named none."""
    if isinstance(optimizer, (list, tuple)):
        inner = [unwrapped(o, scaler) for o in optimizer]
        return type(optimizer)(o for o, _ in inner), next(
            (s for _, s in inner if s is not None), scaler
        )
    kinds = {(c.__module__.partition(".")[0], c.__name__) for c in type(optimizer).__mro__}
    if not kinds & _WRAPPERS:
        return optimizer, scaler
    found = getattr(optimizer, "scaler", None)
    return unwrapped(optimizer.optimizer, found if scaler is None else scaler)

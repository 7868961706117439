"""The errors users meet. Each says what, where, why and what to do."""

from __future__ import annotations


class CaptureError(RuntimeError):
    """A parameter cannot be scored: the message names it, the operation and the ways out."""


class BatchError(ValueError):
    """Ids that do not fit the batch, or a batch used in the wrong place."""


class ValidationError(ValueError):
    """The validation data or its loss cannot be used."""

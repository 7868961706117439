"""Table look-ups: g_i has δ_it in the row of token t and zeros elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from inrun.gradients.call import Call, Sizes, register_op
from inrun.gradients.records import Dense, Lookup, Record


def _sizes(call: Call) -> Sizes:
    a, b = call.value(0, "input"), call.value(1, "weight")
    ids, W = (b, a) if a.is_floating_point() else (a, b)
    return Sizes(ids.numel() // call.B * W.shape[1], W.numel())


class Options(NamedTuple):
    """What a look-up does beside looking up."""

    max_norm: float | None  # it changes the table
    padding: int | None  # a row without a gradient
    by_frequency: bool  # gradients are divided by how often a row occurs
    sparse: bool


def options(functional: bool, value: Callable[..., Any]) -> Options:
    """Of ``F.embedding`` (``functional``) or ``torch.embedding``; ``value(position, keyword,
    default)`` is an argument."""
    padding = value(2, "padding_idx", None)
    if not functional:
        padding = None if padding == -1 else padding
        return Options(
            None, padding, value(3, "scale_grad_by_freq", False), value(4, "sparse", False)
        )
    by_frequency, sparse = value(5, "scale_grad_by_freq", False), value(6, "sparse", False)
    return Options(value(3, "max_norm", None), padding, by_frequency, sparse)


@register_op("embedding", sizes=_sizes)
def embedding(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """``F.embedding(ids, weight)`` and ``torch.embedding(weight, ids)``."""
    functional = not call.value(0, "input").is_floating_point()
    ids, weight = ((0, "input"), (1, "weight")) if functional else ((1, "indices"), (0, "weight"))
    asked = options(functional, call.value)
    if asked.max_norm is not None:
        raise NotImplementedError("max_norm rewrites the table during the forward pass")
    if asked.by_frequency:
        raise NotImplementedError("scale_grad_by_freq mixes the examples' gradients")
    if asked.sparse:
        raise NotImplementedError("its gradient is sparse; make the embedding with sparse=False")
    W = call.value(*weight)
    rows = call.rows(*ids).reshape(call.B, -1)
    d = call.tokens(call.split(delta))
    if asked.padding is not None:
        d = d.masked_fill((rows == asked.padding % W.shape[0])[..., None], 0.0)
    record = Lookup(rows, d, W.shape[0])
    yield call.node(*weight), Dense(record.rows()) if call.form == "materialise" else record

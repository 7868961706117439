"""Table look-ups: g_i has δ_it in the row of token t and zeros elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from inrun.ops.call import Call, Sizes, register_op
from inrun.ops.records import Dense, Lookup, Record


def _sizes(call: Call) -> Sizes:
    a, b = call.value(0, "input"), call.value(1, "weight")
    ids, W = (b, a) if a.is_floating_point() else (a, b)
    return Sizes(ids.numel() // call.B * W.shape[1], W.numel())


@register_op("embedding", sizes=_sizes)
def embedding(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """``F.embedding(ids, weight)`` and ``torch.embedding(weight, ids)``."""
    functional = not call.value(0, "input").is_floating_point()
    ids, weight = ((0, "input"), (1, "weight")) if functional else ((1, "indices"), (0, "weight"))
    if functional and call.value(3, "max_norm") is not None:
        raise NotImplementedError("max_norm rewrites the table during the forward pass")
    if call.value(5 if functional else 3, "scale_grad_by_freq", False):
        raise NotImplementedError("scale_grad_by_freq mixes the examples' gradients")
    if call.value(6 if functional else 4, "sparse", False):
        raise NotImplementedError("its gradient is sparse; make the embedding with sparse=False")
    W = call.value(*weight)
    rows = call.rows(*ids).reshape(call.B, -1)
    d = call.tokens(call.split(delta))
    padding = call.value(2, "padding_idx")
    if padding is not None and padding != -1:
        padding = padding % W.shape[0]
        d = d.masked_fill((rows == padding)[..., None], 0.0)
    record = Lookup(rows, d, W.shape[0])
    yield call.node(*weight), Dense(record.rows()) if call.form == "materialise" else record

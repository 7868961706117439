"""Attention with a learned bias (T5's relative positions) in the place of a mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from inrun.gradients.call import Call, register_op, replay
from inrun.gradients.records import Record


@register_op("scaled_dot_product_attention")
def attention(call: Call, delta: Tensor) -> Iterator[tuple[Any, Record]]:
    """Replayed with torch's math kernel: the fused ones cannot be differentiated forwards."""
    if call.value(4, "dropout_p", 0.0) > 0:
        raise NotImplementedError("dropout on attention weights cannot be replayed")
    yield from replay(replace(call, func=_math_kernel), delta)


def _math_kernel(*args: Any, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)

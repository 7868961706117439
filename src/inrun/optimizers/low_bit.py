"""Adam and AdamW whose state is kept in 8, 4 or fp8 bits: torchao's and bitsandbytes'.

Both widen the state to float32, take Adam's step with it and quantise the state afterwards. So the
rule is Adam's on the widened state: exact for the step itself, up to rounding in float32. What
quantising loses counts from the next step on, whose state it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inrun.optimizers import adam
from inrun.optimizers.base import UpdateMap, register_optimizer
from inrun.optimizers.common import Options, State, decoupled_decay, no_decay

_BLOCK = 256  # numbers that share a scale in bitsandbytes


def torchao_state(s: State) -> dict[str, Any]:
    """``OptimState8bit`` and its relatives as plain tensors."""
    quantised = {k for k, x in s.items() if type(x).__name__.startswith("OptimState")}
    return {k: x.dequantize() if k in quantised else x for k, x in s.items()}


def bitsandbytes_state(s: State) -> dict[str, Any]:
    """Codes, look-up tables and scales (or float32, for small tensors) under Adam's names."""
    found: dict[str, Any] = {"step": s.get("step", 0)}
    for i, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        x = s.get(f"state{i}")
        if x is not None:
            found[name] = x
            if x.dtype == torch.uint8:
                found[name] = _widened(x, s[f"qmap{i}"], s[f"absmax{i}"])
    return found


def _widened(codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """qmap[code] · absmax of its block."""
    flat = table[codes.flatten().long()]
    of_each = scales.repeat_interleave(_BLOCK)[: flat.numel()]
    return (flat * of_each).view(codes.shape)


def _through(
    function: UpdateMap, state: Callable[[State], dict[str, Any]], options: Options
) -> UpdateMap:
    """A function of adam.py on the widened state, with the options that the library leaves out."""

    def widened(g: Tensor, w: Tensor, s: State, o: Options) -> Tensor:
        return function(g, w, _like(g, state(s)), {**o, **options})

    return widened


def _like(g: Tensor, s: dict[str, Any]) -> dict[str, Any]:
    """The state in the precision of the gradient, which may be more than float32."""
    wide = {k: x for k, x in s.items() if isinstance(x, Tensor) and x.shape == g.shape}
    return s | {k: x.to(g.dtype) for k, x in wide.items() if k != "step"}


def _register(name: str, state: Any, decoupled: bool, **options: Any) -> None:
    given = {"maximize": False, "decoupled_weight_decay": decoupled, **options}
    through = partial(_through, state=state, options=given)
    register_optimizer(
        name, decay=decoupled_decay if decoupled else no_decay, factor=through(adam.factor),
        derivative=through(adam.derivative),
    )(through(adam.adam))  # fmt: skip


for _bits in ("8bit", "4bit", "Fp8"):
    # they compute bias corrections from a float32 tensor, as torch.optim does with capturable
    _register(f"torchao.Adam{_bits}", torchao_state, False, capturable=True)
    _register(f"torchao.AdamW{_bits}", torchao_state, True, capturable=True)
for _paged in ("", "Paged"):
    for _kind in ("Adam", "AdamW"):  # both decouple the decay
        for _bits in ("", "8bit", "32bit"):
            _name = f"bitsandbytes.{_paged}{_kind}{_bits}"
            _register(_name, bitsandbytes_state, True, amsgrad=False)

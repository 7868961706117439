"""Sees every call of torch's functions while a batch is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from inrun.torch_compat import get_eval_frame_callback, skip_code

# Not followed: questions whose answers are no tensors.
PASSED_ON = {
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.stride, Tensor.is_contiguous,
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device", "dtype", "is_cuda")),
}  # fmt: skip
BACKWARD = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}


class Mode(TorchFunctionMode):
    """Hands each call to ``follow``, unless it is paused."""

    def __init__(self, follow: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.paused, self.follow = False, follow
        # Where torch.compile starts in the middle of eager code, our own is no part of a graph.
        self.hidden = torch.compiler.disable(follow)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.compile traces through here; its graph reaches us in compiled/backend.py
        if torch.compiler.is_dynamo_compiling() or self.paused:
            return func(*args, **(kwargs or {}))
        follow = self.follow if get_eval_frame_callback() is None else self.hidden
        return follow(func, args, kwargs or {})


skip_code(Mode.__torch_function__.__code__)

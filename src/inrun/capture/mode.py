"""The mode through which every call of a torch function passes while a batch is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from inrun.torch_compat import get_eval_frame_callback, skip_code


class Mode(TorchFunctionMode):
    """Hands each call to ``call``, unless it is paused."""

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.paused, self.call = False, call
        # Where torch.compile starts in the middle of eager code, our own is no part of a graph.
        self.hidden = torch.compiler.disable(call)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.compile traces through here; its graph reaches us in compiled/backend.py
        if torch.compiler.is_dynamo_compiling() or self.paused:
            return func(*args, **(kwargs or {}))
        call = self.call if get_eval_frame_callback() is None else self.hidden
        return call(func, args, kwargs or {})


skip_code(Mode.__torch_function__.__code__)

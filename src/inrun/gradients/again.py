"""An operation of the forward pass, run a second time: it may not write to anything.

A derivative along a direction is found by running the operation again. Some operations write to
their arguments as well: BatchNorm in training mode updates its running statistics, an embedding
with ``max_norm`` its table, ``copy_`` its target. The second run must leave them alone, and its
result must not depend on what the first run wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.errors import CaptureError
from inrun.tensors.layout import in_place, name_of, tensors_in
from inrun.torch_compat import version_of

# Where running mean, running variance and the flag for the batch's own statistics are, and what
# the flag is by default.
_STATISTICS = {
    F.batch_norm: (1, 2, 5, False), F.instance_norm: (1, 2, 5, True),
    torch.batch_norm: (3, 4, 5, False), torch.instance_norm: (3, 4, 5, True),
    torch.native_batch_norm: (3, 4, 5, False),
}  # fmt: skip
_NAMES, _OWN = ("running_mean", "running_var"), "use_input_stats"
_MAX_NORM = {F.embedding: 3, F.embedding_bag: 4}


def run_again(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``func(*args, **kwargs)`` without its side effects."""
    args, kwargs = list(args), dict(kwargs)
    if func in _STATISTICS:
        _without_statistics(args, kwargs, *_STATISTICS[func])
    elif func in _MAX_NORM:  # the rows were shortened by the first run
        _leave_out(args, kwargs, _MAX_NORM[func], "max_norm")
    elif in_place(func) and args and isinstance(args[0], Tensor):
        args[0] = args[0].clone()
    kwargs.pop("out", None)
    given = tensors_in(args, kwargs)
    before = list(map(version_of, given))
    result = func(*args, **kwargs)
    if not in_place(func) and list(map(version_of, given)) != before:
        raise CaptureError(
            f"the operation '{name_of(func)}' of the forward pass writes to one of its arguments "
            f"(of shape {[tuple(t.shape) for t in given]}), so it cannot be run a second time "
            "to score the parameters in it. Leave these out with watch(..., ignore=[...])."
        )
    return result


def _without_statistics(
    args: list[Any], kwargs: dict[str, Any], mean: int, var: int, flag: int, default: bool
) -> None:
    """Where the batch's own statistics are used, the running ones are only written to."""
    own = args[flag] if len(args) > flag else kwargs.get("training", kwargs.get(_OWN, default))
    if own:
        for place, name in zip((mean, var), _NAMES, strict=True):
            _leave_out(args, kwargs, place, name)


def _leave_out(args: list[Any], kwargs: dict[str, Any], place: int, name: str) -> None:
    if len(args) > place:
        args[place] = None
    elif name in kwargs:
        kwargs[name] = None

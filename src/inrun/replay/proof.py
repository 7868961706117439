"""Is a replay the model's own pass? Compared before a recording is used.

1. The model's own pass runs, with gradients drawn at random that arrive at its outputs: outputs,
   gradients of all parameters, and what it leaves in buffers and in the random generator.
2. All is put back, the recording is replayed with the same inputs, random state and arriving
   gradients, and all is put back again.

Both must be the same: on a CPU to the bit. On a GPU kernels that add in any order differ, so the
own pass runs twice, and a difference is one of more than what it differs from itself by and what
the precision explains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inrun.replay.around import device_state, put_back
from inrun.replay.recording import Recording, gradients_of
from inrun.replay.trees import tensors_of
from inrun.tensors.autocast import current
from inrun.validation.cuda_graph import twins

_TIMES = 4  # so often the difference of two own passes
_LOW, _FLOAT32 = 2e-2, 2e-3  # relative; of float32 with TF32
_SHARE = 1e-3  # of the norm of all gradients: what a gradient may be that is nothing but rounding

Found = dict[str, list[Tensor | None]]


def difference(
    recording: Recording, args: Any, kwargs: Any, modules: Sequence[Any], exact: bool
) -> str | None:
    """What a replay has otherwise than the model's own pass; None: nothing."""
    generator = torch.Generator(recording.arriving[0].device).manual_seed(0)
    arriving = [
        torch.empty_like(t).normal_(generator=generator).mul_(t.numel() ** -0.5)
        for t in recording.arriving
    ]
    wanted = recording.wanted

    def own() -> tuple[list[Tensor], list[Tensor | None]]:
        with twins(modules, recording.params) as twin:
            outs = tensors_of(recording.model(*args, **kwargs))
            some = [outs[i] for i in wanted]
            with recording.in_backward():
                return [t.detach().clone() for t in outs], gradients_of(some, twin, arriving)

    def replayed() -> tuple[list[Tensor], list[Tensor | None]]:
        return recording.forward(args, kwargs), recording.backward(arriving)

    first = _run(recording, own)
    again = first if exact else _run(recording, own)
    return _compare(first, again, _run(recording, replayed), exact)


def _run(
    recording: Recording, run: Callable[[], tuple[list[Tensor], list[Tensor | None]]]
) -> Found:
    with put_back(recording.state):
        outs, grads = run()
        state = device_state(recording.arriving[0].device)
        left = [t.detach().clone() for t in recording.state]
    return {"outputs": [*outs], "gradients": grads, "buffers": [*left], "random state": [state]}


def _compare(own: Found, again: Found, got: Found, exact: bool) -> str | None:
    for name, expected in own.items():
        if len(expected) != len(got[name]):
            return f"the number of {name}"
        known = [t for t in expected if t is not None and t.is_floating_point()]
        scale = sum((_norm(t) ** 2 for t in known), 0.0) ** 0.5
        least = 0.0 if name != "gradients" or exact else _SHARE * scale
        for a, b, c in zip(expected, again[name], got[name], strict=True):
            if not _same(a, b, c, exact, least):
                return name
    return None


def _same(a: Tensor | None, b: Tensor | None, c: Tensor | None, exact: bool, least: float) -> bool:
    if a is None or b is None or c is None:
        return a is None and c is None
    if a.shape != c.shape or a.dtype != c.dtype:
        return False
    if exact or not a.is_floating_point():
        return torch.equal(a, c)
    if not bool(a.isfinite().all() & c.isfinite().all()):
        return torch.equal(a.isfinite(), c.isfinite())
    low = a.dtype.itemsize < 4 or current(a.device.type)[1]
    allowed = _TIMES * _norm(a - b) + (_LOW if low else _FLOAT32) * (_norm(a) + least)
    return _norm(a - c) <= allowed


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))

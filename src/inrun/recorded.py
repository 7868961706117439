"""The validation pass as a CUDA graph: recorded once, then replayed in every step.

At one sequence the pass is bound by the host, which launches hundreds of small kernels. A replay
costs one launch. It repeats the kernels, not the Python that chose them, so it is used only where
that Python sees nothing that can change unnoticed: the shapes of the batch, the addresses of the
weights, plain attributes of the modules and plain numbers that the loss function refers to are
compared before each replay; a loss that refers to anything else is never recorded. What cannot be
recorded (the pass waits for the device, say) runs as usual.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

Pass = Callable[[Any], tuple[Tensor, list[Tensor]]]
_BEFORE = 2  # usual passes before one is recorded: everything is compiled and warm by then
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
_FIXED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, nn.Module)


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: tuple[Tensor, list[Tensor]]


class Recorder:
    """Replays passes that came before."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.state_of_loss = referred(loss)
        self._seen: dict[Any, int] = {}
        self._recordings: dict[Any, _Recording] = {}
        self._pool: Any = None

    def run(
        self, compute: Pass, batch: Any, weights: Sequence[Tensor], modules: Sequence[nn.Module],
        context: Any,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """``compute(batch)``: a loss and gradients, valid until the next call."""
        leaves, spec = tree_flatten(batch)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not weights[0].is_cuda or self.state_of_loss is None:
            return compute(batch)
        if not all(x.is_cuda for x in tensors):
            return compute(batch)
        others = [x for x in leaves if not isinstance(x, Tensor)]
        key = (
            str(spec), repr(others), tuple((x.shape, x.dtype) for x in tensors), context,
            tuple(w.data_ptr() for w in weights), self.state_of_loss(), attributes(modules),
        )  # fmt: skip
        recording = self._recordings.get(key)
        if recording is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= _BEFORE or len(self._recordings) >= 4:
                return compute(batch)
            recording = self._record(compute, leaves, spec)
            if recording is None:
                return compute(batch)
            self._recordings[key] = recording
        for mine, given in zip(recording.inputs, tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        recording.graph.replay()
        return recording.result

    def _record(self, compute: Pass, leaves: Sequence[Any], spec: Any) -> _Recording | None:
        static = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = compute(tree_unflatten(static, spec))
        except Exception:
            self.state_of_loss = None  # not this one
            torch.cuda.synchronize()
            return None
        self._pool = graph.pool()
        return _Recording(graph, [x for x in static if isinstance(x, Tensor)], result)


def attributes(modules: Sequence[nn.Module]) -> int:
    """A fingerprint of the plain attributes of modules."""
    plain = [x for m in modules for x in vars(m).values() if type(x) in _PLAIN]
    return hash(tuple(plain))


def referred(loss: Callable[..., Any]) -> Callable[[], tuple[Any, ...]] | None:
    """What a function refers to outside its arguments, to be read again; None where that is more
    than plain values, modules, classes and functions."""
    if not isinstance(loss, types.FunctionType):
        return None
    code, space = loss.__code__, loss.__globals__
    names = [n for n in code.co_names if n in space]
    cells = loss.__closure__ or ()
    defaults = (*(loss.__defaults__ or ()), *(loss.__kwdefaults__ or {}).values())

    def read() -> tuple[Any, ...]:
        found = [space.get(n) for n in names] + [c.cell_contents for c in cells]
        return tuple(x for x in (*found, *defaults) if not isinstance(x, _FIXED))

    return read if all(type(x) in _PLAIN for x in read()) else None

"""The validation pass as a CUDA graph: recorded once, then replayed in every step.

At one sequence the pass is bound by the host, which launches hundreds of small kernels. A replay
costs one launch. It repeats the kernels, not the Python that chose them, so it is used only where
that Python sees nothing that can change unnoticed: the shapes of the batch, the addresses of the
weights, plain attributes of the modules and plain numbers that the loss function refers to are
compared before each replay; a loss that refers to anything else is never recorded. What cannot be
recorded (the pass waits for the device, say) runs as usual.
"""

from __future__ import annotations

import enum
import math
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inrun.torch_compat import (
    MODULE_ATTRIBUTES,
    MODULE_HOOKS,
    hooks_of_tensor,
    parameters_of,
    pretend_capture,
    tree_flatten,
    tree_unflatten,
)
from inrun.validation.reach import PLAIN, names_of

Result = tuple[Tensor, Sequence[Tensor | None]]  # loss and gradients; None without dependence
Pass = Callable[[Any, Sequence[Tensor]], Result]  # of a batch and the weights to differentiate by
_BEFORE = 2  # usual passes before one is recorded: everything is compiled and warm by then


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Result


class GraphCache:
    """Graphs of passes that came before, replayed where nothing has changed."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.state_of_loss = referred(loss)
        self._seen: dict[Any, int] = {}
        self._graphs: dict[Any, _Graph] = {}
        self._refused = False  # one could not be made: no more are tried
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def run(
        self, compute: Pass, batch: Any, weights: Sequence[Tensor], modules: Sequence[nn.Module],
        context: Any,
    ) -> Result:  # fmt: skip
        """Returns ``compute(batch, weights)``; valid until the next call."""

        def usual() -> Result:
            return compute(batch, weights)

        leaves, spec = tree_flatten(batch)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not weights[0].is_cuda or self.state_of_loss is None:
            return usual()
        state = self.state_of_loss()
        if state is None or not all(x.is_cuda for x in tensors):
            return usual()
        fingerprint = attributes(modules)
        if fingerprint is None:
            return usual()
        others = [x for x in leaves if not isinstance(x, Tensor)]
        key = (
            str(spec), repr(others), tuple((x.shape, x.dtype) for x in tensors), context,
            tuple(w.data_ptr() for w in weights), state, fingerprint,
        )  # fmt: skip
        known = self._graphs.get(key)
        if known is not None:
            for mine, given in zip(known.inputs, tensors, strict=True):
                mine.copy_(given, non_blocking=True)
            known.graph.replay()
            return known.result
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._refused or self._seen[key] <= _BEFORE or len(self._graphs) >= 4:
            return usual()
        with torch.cuda.device(weights[0].device):
            trial = trial_pass(compute, batch, weights, modules)
            found = usual()
            if not bool(found[0].isfinite()):
                return found  # says nothing of the trial: next time
            if trial is not None and _same(trial[0], found[0]):
                known = self._make(compute, leaves, spec, weights, modules)
        if known is None:
            self._refused = True
        else:
            self._graphs[key] = known
        return found

    def close(self) -> None:
        self._graphs, self._pool, self._stream = {}, None, None

    def _make(
        self, compute: Pass, leaves: Sequence[Any], spec: Any, weights: Sequence[Tensor],
        modules: Sequence[nn.Module],
    ) -> _Graph | None:  # fmt: skip
        static = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        where = {"pool": self._pool, "stream": self._stream}
        result, cause = None, None
        try:
            with (
                twins(modules, weights) as own,
                torch.cuda.graph(graph, capture_error_mode="thread_local", **where),
            ):
                try:
                    result = compute(tree_unflatten(static, spec), own)
                except BaseException as error:
                    cause = error
                    raise
        except Exception:
            if cause is not None and not isinstance(cause, Exception):
                raise cause from None  # Ctrl-C, which the end of the recording has replaced
        finally:
            torch.cuda.set_stream(before)  # where it fails, torch leaves the recording's in force
        if result is None:
            _settle(weights[0].device)
            return None
        self._pool = graph.pool()
        return _Graph(graph, [x for x in static if isinstance(x, Tensor)], result)


def _same(trial: Tensor, usual: Tensor) -> bool:
    """Is it the same loss but for rounding? Other kernels may have been chosen."""
    return math.isclose(float(trial), float(usual), rel_tol=5e-3, abs_tol=1e-6)


def trial_pass(
    compute: Pass, batch: Any, weights: Sequence[Tensor], modules: Sequence[nn.Module]
) -> Result | None:
    """The pass as it would be recorded; None if that would fail or give something else: it waits
    for the device, or a weight is found elsewhere than in the modules, or has hooks."""
    if any(type(w) is not nn.Parameter or hooks_of_tensor(w) for w in weights):
        return None
    mode = torch.cuda.get_sync_debug_mode()
    own_numbers = torch.random.fork_rng([weights[0].device])
    with warnings.catch_warnings(), own_numbers, pretend_capture():
        warnings.simplefilter("ignore")  # torch says that this debug mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            with twins(modules, weights) as own:
                loss, grads = compute(batch, [*own, *weights])
        except Exception:  # one of the pass's own comes again in the usual pass
            return None
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    if any(g is not None for g in grads[len(weights) :]):
        return None
    return loss, grads[: len(weights)]


@contextmanager
def twins(modules: Sequence[nn.Module], weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The modules with other parameters in the place of these, in the same memory.

    Autograd has a node for each parameter, which lives as long as any graph that it is in (that of
    the training's loss, which a loop usually still holds) and belongs to the stream on which it was
    made. A recording runs on a stream of its own and would fail.
    """
    own = {id(w): nn.Parameter(w.detach()) for w in weights}
    places = [
        (parameters, name, p)
        for parameters in map(parameters_of, modules)
        for name, p in parameters.items()
        if id(p) in own
    ]
    try:
        for parameters, name, p in places:
            parameters[name] = own[id(p)]
        yield [own[id(w)] for w in weights]
    finally:
        for parameters, name, p in places:
            parameters[name] = p


def _settle(device: torch.device) -> None:
    """After a recording that failed: what went wrong in it must not be told of what comes next.
    CUDA may still have it in store, and torch before 2.13 leaves its random numbers in it."""
    generator = torch.cuda.default_generators[device.index or 0]
    with suppress(RuntimeError):
        generator.graphsafe_set_state(generator.clone_state())
    for _ in range(3):
        try:
            torch.cuda.synchronize(device)
            torch.arange(2, device=device).add_(1)
            return
        except RuntimeError:
            continue


def attributes(modules: Sequence[nn.Module]) -> tuple[Any, ...] | None:
    """A fingerprint of the plain attributes of modules, and of containers of such.

    None: a module has hooks, whose Python is not ours to leave out.
    """
    found: list[Any] = []
    for i, module in enumerate(modules):
        own = vars(module)
        if any(own.get(hooks) for hooks in MODULE_HOOKS):
            return None
        found.append(own.get("training"))  # a compiled module has it elsewhere
        for name, x in own.items():
            if name not in MODULE_ATTRIBUTES and (value := _fingerprint(x)) is not None:
                found.append((i, name, value))
    return tuple(found)


def _fingerprint(x: Any, depth: int = 0) -> Any:
    """Something hashable that changes with a plain value, or with a small container of such."""
    kind = type(x)
    if kind in PLAIN:
        return kind, x
    if isinstance(x, (enum.Enum, np.generic)):
        return kind, repr(x)
    if kind not in (tuple, list, set, dict) or len(x) > 64 or depth > 3:
        return None
    if kind is dict:
        return kind, tuple((repr(k), _fingerprint(y, depth + 1)) for k, y in x.items())
    return kind, tuple(_fingerprint(y, depth + 1) for y in x)


def referred(loss: Callable[..., Any]) -> Callable[[], tuple[Any, ...] | None] | None:
    """What a function refers to outside its arguments, to be read again before each replay.

    None, or later a reading of None: that is more than plain values, torch's functions and classes,
    our classes, and functions of which the same is true.
    """

    def read() -> tuple[Any, ...] | None:
        found: list[Any] = []
        return tuple(found) if _read(loss, found, set()) else None

    return read if read() is not None else None


def _read(function: Any, found: list[Any], seen: set[int]) -> bool:
    if not isinstance(function, types.FunctionType):
        return False
    if id(function) in seen:
        return True
    seen.add(id(function))
    try:
        cells = [c.cell_contents for c in function.__closure__ or ()]
    except ValueError:  # not filled yet
        return False
    names = names_of(function.__code__)
    space = function.__globals__
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for x in (*(space[n] for n in names if n in space), *cells, *defaults):
        if type(x) in PLAIN:
            found.append(x)
        elif isinstance(x, nn.Module):
            found.append(attributes(list(x.modules())))
        elif not _fixed(x) and not _read(x, found, seen):
            return False
    return True


def _fixed(x: Any) -> bool:
    """Part of torch, of Python itself or of this library."""
    if isinstance(x, types.ModuleType):
        name = x.__name__
    elif isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
        name = x.__module__ or "builtins"
    else:
        return False
    library = name.split(".")[0]
    if library == "inrun":  # what our functions refer to is read as that of others
        return not isinstance(x, types.FunctionType)
    return library in ("torch", "builtins", "math", "typing", "collections")

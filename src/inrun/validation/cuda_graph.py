"""The validation pass as a CUDA graph: made once, then replayed in every step.

With a small batch the host is the bottleneck: it launches hundreds of small kernels. A replay costs
one launch. It repeats the kernels, not the Python that chose them. So before each replay everything
that this Python depends on is compared: the shapes of the batch, the addresses of parameters and
buffers, the attributes of the modules and the numbers that the loss function refers to. A loss that
refers to anything else gets no graph. Nor does a pass that cannot be one, because it waits for the
device for example; it runs as usual.
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
_KEYS = 256  # different passes after which no graph is made any more
_BEFORE = 2  # usual passes before a graph is made: by then everything is compiled


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Result


class GraphCache:
    """The graphs of earlier passes, each replayed if nothing it depends on has changed."""

    def __init__(
        self,
        loss: Callable[..., Any],
        attributes_of: Callable[[Sequence[nn.Module]], Any] | None = None,
    ) -> None:
        """``attributes_of``: ``Fingerprint.of``, perhaps remembered as long as it holds."""
        self.state_of_loss = referred(loss)
        self._attributes_of = attributes_of or Fingerprint.of
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
        fingerprint = self._attributes_of(modules)
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
        if not self._refused:
            self._seen[key] = self._seen.get(key, 0) + 1
            self._refused = len(self._seen) > _KEYS
        if self._refused or self._seen[key] <= _BEFORE or len(self._graphs) >= 4:
            return usual()
        with torch.cuda.device(weights[0].device):
            trial = trial_pass(compute, batch, weights, modules)
            found = usual()
            if not bool(found[0].isfinite()):
                return found  # cannot be compared with the trial: next time
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
                raise cause from None  # Ctrl-C, which torch.cuda.graph has replaced
        finally:
            torch.cuda.set_stream(before)  # after a failure torch leaves the graph's stream current
        if result is None:
            settle(weights[0].device)
            return None
        self._pool = graph.pool()
        return _Graph(graph, [x for x in static if isinstance(x, Tensor)], result)


def _same(trial: Tensor, usual: Tensor) -> bool:
    """Are the losses the same up to rounding? The passes may have used different kernels."""
    return math.isclose(float(trial), float(usual), rel_tol=5e-3, abs_tol=1e-6)


def trial_pass(
    compute: Pass, batch: Any, weights: Sequence[Tensor], modules: Sequence[nn.Module]
) -> Result | None:
    """Run the pass as it would go into a graph.

    Returns None if a graph would fail or give something else: the pass waits for the device, or a
    weight is used that is not found in the modules, or a weight has hooks.
    """
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
        except Exception:  # an error of the pass itself comes again in the usual pass
            return None
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    if any(g is not None for g in grads[len(weights) :]):
        return None
    return loss, grads[: len(weights)]


@contextmanager
def twins(modules: Sequence[nn.Module], weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Inside, the modules hold new parameters in the place of ``weights``, on the same memory.

    Autograd keeps one node per parameter as long as any autograd graph uses it (the training's
    loss, which a loop usually still holds). The node belongs to the stream on which it was made.
    A CUDA graph is made on another stream and would fail with it.
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


def settle(device: torch.device) -> None:
    """Clean up after a graph could not be made, so that later calls do not report its error.

    CUDA may still hold the error, and torch before 2.13 leaves the random generator in graph mode.
    """
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
    """Returns a fingerprint of the attributes of modules: numbers, text and containers of such.

    Returns None if a module has hooks: a replay would not call them.
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


class Fingerprint:
    """The attributes of modules as a part of a key, hashed once."""

    def __init__(self, found: tuple[Any, ...]) -> None:
        self._found, self._hash = found, hash(found)

    @staticmethod
    def of(modules: Sequence[nn.Module]) -> Fingerprint | None:
        """None if a replay would miss something: see ``attributes``."""
        found = attributes(modules)
        return None if found is None else Fingerprint(found)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return self is other or self._found == other._found


def _fingerprint(x: Any, depth: int = 0) -> Any:
    """Returns something hashable that changes with a value or a small container of values."""
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
    """Returns a function that reads the values ``loss`` refers to beside its arguments.

    It is called before each replay. It returns None, or is None itself, if ``loss`` refers to more
    than plain values, torch's functions and classes, our classes, and functions that refer to no
    more than these.
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
    """Is it part of torch, of Python itself or of this library?"""
    if isinstance(x, types.ModuleType):
        name = x.__name__
    elif isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
        name = x.__module__ or "builtins"
    else:
        return False
    library = name.split(".")[0]
    if library == "inrun":  # the values that our own functions refer to are read as well
        return not isinstance(x, types.FunctionType)
    return library in ("torch", "builtins", "math", "typing", "collections")

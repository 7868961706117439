"""The mode through which every call of a torch function passes while a batch is open.

A ``TorchFunctionMode`` sees torch's functions, and not ``apply`` of a custom
``torch.autograd.Function``. So, while a batch is open, ``apply`` of those that inrun knows (TRL's
and Liger's fused losses, and what is registered) is one that asks the modes first, as torch's own
functions do. It runs the function as it is.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from inrun.capture.signals import LOSSES
from inrun.gradients.fused_libraries import FUNCTIONS
from inrun.gradients.fused_loss import Describe, register_fused
from inrun.torch_compat import (
    DisableTorchFunctionSubclass,
    composite,
    get_eval_frame_callback,
    skip_code,
)

Function = type[torch.autograd.Function]

# Calls whose results are no tensors; they are run and not looked at.
PASSED_ON = {
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.stride, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.storage_offset, Tensor.data_ptr,
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "ndim", "device", "dtype", "layout", "requires_grad", "is_leaf", "is_cpu",
        "is_cuda", "is_mps", "is_nested", "is_sparse", "is_quantized",
    )),
}  # fmt: skip


class Mode(TorchFunctionMode):
    """Hands each call to ``call``, unless it is paused or one of ``passed_on``, and what a loss
    returned to ``on_loss``."""

    def __init__(self, call: Callable[[Any, Any, Any], Any], passed_on: Collection[Any]) -> None:
        super().__init__()
        self.paused, self.call, self.passed_on = False, call, passed_on
        self.on_loss: Callable[[Any, Any, Any, Any], None] | None = None
        # Where torch.compile starts in the middle of eager code, our own is no part of a graph.
        self.hidden = torch.compiler.disable(call)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.compile traces through here; its graph reaches us in compiled/backend.py
        if torch.compiler.is_dynamo_compiling() or self.paused:
            return func(*args, **(kwargs or {}))
        if func in self.passed_on:
            return func(*args, **kwargs) if kwargs else func(*args)
        call = self.call if get_eval_frame_callback() is None else self.hidden
        out = call(func, args, kwargs or {})
        if func in LOSSES and self.on_loss is not None:
            self.on_loss(func, args, kwargs or {}, out)
        return out


skip_code(Mode.__torch_function__.__code__)


class Seen:
    """``function.apply`` as an operation that modes see."""

    def __init__(self, function: Function) -> None:
        self.function, self.original = function, function.apply
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function(args):  # a mode is on, or one of them is a tensor that overrides
            return handle_torch_function(self, args, *args, **kwargs)
        return self.original(*args, **kwargs)


skip_code(Seen.__call__.__code__)  # torch.compile would decide once whether a mode is on


class _Apply:
    """The attribute ``apply`` of a function while a batch is open; subclasses have their own."""

    def __init__(self, seen: Seen, previous: Any) -> None:
        self.seen, self.previous = seen, previous

    def __get__(self, instance: Any, owner: Function) -> Any:
        mine = owner is self.seen.function
        return self.seen if mine else self.previous.__get__(instance, owner)


_SEEN: dict[Function, Seen] = {}
_LOCK = threading.Lock()
_changed: dict[Function, Any] = {}  # what each had as its own ``apply``; _MISSING: nothing
_open = 0  # batches, in all threads
_MISSING = object()


def register_function(function: Function) -> Callable[[Describe], Describe]:
    """Decorator: the function below says what ``function.apply(*args)`` computes.

    It takes the same arguments and returns a :class:`LinearLoss`.
    """

    def decorate(describe: Describe) -> Describe:
        seen = _SEEN[function] = Seen(function)
        register_fused(seen, describe)
        return describe

    return decorate


@contextmanager
def seen_functions() -> Iterator[None]:
    """Context in which modes see the registered functions."""
    global _open
    with _LOCK:
        _open += 1
        _find_libraries()
        for function, seen in _SEEN.items():
            if function not in _changed:
                _changed[function] = vars(function).get("apply", _MISSING)
                previous = inspect.getattr_static(function, "apply")
                setattr(function, "apply", _Apply(seen, previous))  # noqa: B010
    try:
        yield
    finally:
        with _LOCK:
            _open -= 1
            while _changed and not _open:
                function, own = _changed.popitem()
                if own is _MISSING:
                    del function.apply
                else:
                    setattr(function, "apply", own)  # noqa: B010


def _find_libraries() -> None:
    """Register the functions of libraries that have been imported by now."""
    for (module, name), describe in FUNCTIONS.items():
        function = getattr(sys.modules.get(module), name, None)
        if function is not None and function not in _SEEN:
            register_function(function)(describe)


def opened(func: Any) -> Any:
    """A function that does what ``func`` does by operations that modes see; None: there is none."""
    return _expanded if func is torch.functional.broadcast_tensors else composite(func)


def _expanded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``torch.broadcast_tensors``, one tensor at a time: they do not meet. (``Normal(mean, std)``
    calls it.)"""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(t.expand(shape) for t in tensors)


def dressed(call: Callable[[Any, Any, Any], Any]) -> type[nn.Parameter]:
    """A class for parameters: ``call`` gets the calls in which one of them takes part."""

    def hand_over(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            return call(func, args, kwargs or {})

    def copied(self: Any, memo: Any) -> Any:
        with DisableTorchFunctionSubclass():
            copy = nn.Parameter.__deepcopy__(self, memo)
        copy.__class__ = nn.Parameter
        return copy

    own = {"__torch_function__": classmethod(hand_over), "__deepcopy__": copied}
    return type("Parameter", (nn.Parameter,), own)


def keeps_graph(func: Any, args: Any, kwargs: Any) -> bool:
    """Are retain_graph or create_graph given to a function that runs a backward pass?"""
    at = 3 if func is torch.autograd.grad else 2
    return any(args[at : at + 2]) or any(map(kwargs.get, ("retain_graph", "create_graph")))

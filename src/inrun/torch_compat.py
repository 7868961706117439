"""Every use of torch's private API, in one place.

Nothing else in the package touches a name of torch that begins with an underscore
(``tests/test_torch_compat.py`` searches for it). Each entry says why it is needed, what public API
would replace it, and the versions of torch it was tried with. When a new version of torch breaks
inrun, the tests of this file name the entry. Functions on the hot path are bound, not wrapped.

"Tried: 2.11, 2.13" means 2.11 on CUDA by ``make test-gpu`` and 2.13 on a CPU by the tests.
"""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, _ops, nn
from torch._C._dynamo import eval_frame as _c_eval_frame
from torch._dynamo import eval_frame as _eval_frame
from torch._subclasses import fake_tensor as _fake_tensor
from torch.nn.modules import batchnorm as _batchnorm
from torch.utils import _pytree

# Tensors

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor's memory was written to in place.

Autograd's own check that a saved tensor is unchanged; ours, too. Over many tensors use ``map``,
which is faster than a loop. Public replacement: none. Tried: 2.11, 2.13.
"""

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that this one is a view of, or None.

Needed to tap the fresh tensor behind a reshaped output without a copy, and to refuse writes into
views. Public replacement: none. Tried: 2.11, 2.13.
"""

hooks_of_tensor: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
"""Hooks registered by ``Tensor.register_hook``; None or empty if there are none.

A recorded CUDA graph would leave them out. Public replacement: none. Tried: 2.11, 2.13.
"""

unsafe_view = torch.ops.aten._unsafe_view
"""``x.view(shape)`` whose result autograd does not take for a view, so that it may be written to.

Public replacement: none (``reshape`` gives a view). Tried: 2.11, 2.13.
"""

flatten_dense_tensors = torch._utils._flatten_dense_tensors
unflatten_dense_tensors = torch._utils._unflatten_dense_tensors
"""Concatenates tensors of any shapes; cuts a flat tensor into views of such shapes: one C++ call.
Public replacement: ``cat``, ``split`` and ``view`` of each, slower. Tried: 2.11, 2.13."""

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub
foreach_zero_ = torch._foreach_zero_
"""Element-wise work on many tensors in a few kernels; torch.optim's ``foreach=True`` uses it.

Public replacement: a loop, with a kernel for each tensor. Tried: 2.11, 2.13.
"""

TreeSpec = _pytree.TreeSpec
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_unflatten = _pytree.tree_unflatten
"""Nested arguments and batches as flat lists.

Public replacement: the package optree, which does not know the containers that libraries register
with torch (transformers registers its outputs). Tried: 2.11, 2.13.
"""

# Modules

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""A module's own parameters by name; assignments replace them without ``__setattr__``.

Public replacement: ``module.named_parameters(recurse=False)`` to read (several times slower, once a
step for each module) and ``torch.func.functional_call`` to replace (not for a user's own loss
function, which calls the model itself). Tried: 2.11, 2.13.
"""

buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""A module's own buffers by name. As ``parameters_of``. Tried: 2.11, 2.13."""

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""A module's children by name. As ``parameters_of``. Tried: 2.11, 2.13."""

MODULE_STORES = ("_buffers", "_parameters", "_modules")
"""Where ``vars(module)`` holds tensors and children.

The validation pass compares and restores whole namespaces. Public replacement: none.
Tried: 2.11, 2.13.
"""

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where ``vars(module)`` holds hooks.

Hooks are Python that a validation pass may depend on. Public replacement: none: hooks can be added
and removed, not listed. Tried: 2.11, 2.13.
"""

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Names in ``vars(module)`` that belong to ``nn.Module`` and not to the model.

Public replacement: none. Tried: 2.11, 2.13.
"""

NormBase = _batchnorm._NormBase
"""Base class of BatchNorm and InstanceNorm, whose running statistics change in forward passes.

Public replacement: none, short of a list of its subclasses. Tried: 2.11, 2.13.
"""

# Autograd

SAVES_OUTPUT = ("_saved_result", "_saved_output", "_saved_out")
"""Attributes of a ``grad_fn`` that saved its operation's own output for the backward pass.

Such an output must not be written to; autograd would raise an error. Public replacement: none; the
names come from torch's derivatives.yaml. Tried: 2.11, 2.13.
"""

LAYER_NORM_STATISTICS = ("_saved_result1", "_saved_result2")
"""Attributes of ``layer_norm``'s ``grad_fn`` with the mean and 1/σ of each row.

Read instead of computed again. Public replacement: none (``torch.native_layer_norm`` returns them,
but the user calls ``layer_norm``). Where they are missing they are computed. Tried: 2.11, 2.13.
"""

_top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def saved_tensors_hooks() -> bool:
    """Is a ``torch.autograd.graph.saved_tensors_hooks`` context active (non-reentrant
    checkpointing, offloading)? Tensors that autograd saved must not be read then.

    Public replacement: none. Tried: 2.11, 2.13.
    """
    return _top_saved_tensors_hooks(True) is not None


_current_graph_task_id = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Does the autograd engine run this code (activation checkpointing recomputes in it)?

    Public replacement: none. Tried: 2.11, 2.13.
    """
    return bool(_current_graph_task_id() != -1)


# Dispatch of torch's functions

DisableTorchFunction = torch._C.DisableTorchFunction
"""Context in which no ``TorchFunctionMode`` and no tensor subclass sees calls.

Our own mode must not follow us. Public replacement: none. Tried: 2.11, 2.13.
"""
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass  # documented; leaves modes on
top_mode = torch.overrides._get_current_function_mode
"""The mode that sees calls first, or None. Public replacement: none. Tried: 2.11, 2.13."""

functorch_transforms_active = torch._C._are_functorch_transforms_active
"""Is a transformation of ``torch.func`` (``vmap``, ``grad``, ``jvp``) running?

Public replacement: none. Tried: 2.11, 2.13.
"""

_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_get_unwrapped = torch._C._functorch.get_unwrapped


def unwrapped(t: Tensor) -> Tensor:
    """The tensor inside the wrappers of ``torch.func``'s transformations.

    Identifies the user's tensors inside ``vmap`` and ``grad``. Public replacement: none.
    Tried: 2.11, 2.13.
    """
    while _is_functorch_wrapped(t):
        t = _get_unwrapped(t)
    return t


_BODIES: dict[Any, Any] = {}


def composite(func: Any) -> Any:
    """A copy of a Python function of torch that does not dispatch to modes itself; None if
    ``func`` is not such a function.

    Its inner operations then come to the mode one by one (``F.multi_head_attention_forward``). The
    copy sees ``has_torch_function*`` as functions that return False. Public replacement: none: a
    mode can call ``func`` whole, not step into it. Tried: 2.11, 2.13.
    """
    if func not in _BODIES:
        body = None
        if isinstance(func, types.FunctionType) and "has_torch_function" in func.__globals__:
            never = {
                k: (lambda *args: False)
                for k in func.__globals__
                if k.startswith("has_torch_function")
            }
            body = types.FunctionType(
                func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__,
                func.__closure__,
            )  # fmt: skip
            body.__kwdefaults__ = func.__kwdefaults__
        _BODIES[func] = body
    return _BODIES[func]


# torch.compile

FakeTensor = _fake_tensor.FakeTensor
FakeTensorMode = _fake_tensor.FakeTensorMode
"""Tensors with a shape, a type and a device but no data: a compiled graph is planned on them.

Public replacement: none (``device="meta"`` forgets the device). Tried: 2.11, 2.13.
"""

HigherOrderOperator = _ops.HigherOrderOperator
"""Type of the operators that take a graph, such as activation checkpointing in a compiled model.

The planner refuses them and the eager fallback runs what is inside. Public replacement: none.
Tried: 2.11, 2.13.
"""

get_eval_frame_callback = _c_eval_frame.get_eval_frame_callback
"""What torch.compile does with Python frames in this thread; None: no compiled code is running.

``torch.compiler.is_compiling()`` answers while a graph is traced; this one, between the graphs of a
model with graph breaks, too. Public replacement: none. Tried: 2.11, 2.13.
"""

skip_code = _eval_frame.skip_code
"""Keeps torch.compile from compiling one code object, but not what it calls.

Public replacement: ``torch.compiler.disable(recursive=False)``, which wraps the function; a mode's
``__torch_function__`` runs for every call, and the wrapper costs more than it. Tried: 2.11, 2.13.
"""

COMPILED_PREFIX = "_orig_mod."
"""What ``torch.compile(model)`` puts before names of parameters. Public replacement: none.
Tried: 2.11, 2.13."""


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that was given to ``torch.compile``, or the model itself if it is not compiled.

    Public replacement: none. Tried: 2.11, 2.13.
    """
    return getattr(model, "_orig_mod", model)


def is_inductor(backend: Any) -> bool:
    """Is it torch.compile's default backend, whose graphs run no Python of torch?

    Public replacement: none. Tried: 2.11, 2.13.
    """
    return bool(getattr(backend, "compiler_name", "") == "inductor")


@contextmanager
def gradients_in_any_layout() -> Iterator[None]:
    """Graphs compiled inside may return gradients in any memory layout.

    Records leave a compiled graph as gradients. By default inductor writes such a tensor twice: in
    rows of the exact length for us, and in padded ones for its own products. For a vocabulary of
    50,257 that is a second copy of the largest tensor of the step. The second setting has the
    backward graph compiled here as well, where the first applies. Public replacement: none.
    Tried: 2.11, 2.13.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with (
        inductor.patch(bw_outputs_user_visible=False),
        functorch.patch(force_non_lazy_backward_lowering=True),
    ):
        yield


def compile_backend() -> Any:
    """The backend that the user gave to ``torch.compile``, for the graph being compiled.

    Called by our backend, which ``torch.compiler.set_stance(force_backend=...)`` has put in the
    place of the user's. Torch hands over no reference to the one it replaced: it is a variable of
    the function that ``torch.compile`` returned, which is on the call stack. So the stack is
    searched for that function, by its code object and not by a name that other code may use.

    If that fails (a torch that is built differently), torch's list of the backends in use since the
    last ``torch.compiler.reset()`` answers if there is only one. Otherwise it is inductor, with a
    warning.

    Public replacement: none. Tried: 2.13; 2.11 has the same function and variable in its source.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _COMPILED_CALL:
            backend = _innermost(frame.f_locals.get("callback"))
            if callable(backend):
                return backend
        frame = frame.f_back
    known: list[Any] = []
    for backend in getattr(_eval_frame, "cached_backends", {}).values():
        if callable(backend) and backend not in known:
            known.append(backend)
    if len(known) == 1:
        return known[0]
    warnings.warn(
        f"inrun cannot find the backend that torch.compile was given in torch {torch.__version__}; "
        "inside run.batch what is compiled uses inductor. Report this version at inrun's issues.",
        RuntimeWarning,
        stacklevel=2,
    )
    return torch._dynamo.lookup_backend("inductor")


def _innermost(backend: Any) -> Any:
    """The backend inside the wrappers that torch.compile adds."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def _compiled_call() -> types.CodeType | None:
    """The code of what ``torch.compile(function)`` returns; None if it is not built as expected."""
    made = getattr(_eval_frame._TorchDynamoContext.__call__, "__code__", None)
    for code in made.co_consts if made is not None else ():
        if isinstance(code, types.CodeType) and code.co_name == "compile_wrapper":
            return code if "callback" in code.co_freevars else None
    return None


_COMPILED_CALL = _compiled_call()

# CUDA graphs


@contextmanager
def pretend_capture() -> Iterator[None]:
    """Makes ``torch.cuda.is_current_stream_capturing()`` return True in this thread, so that
    libraries skip code that waits for the device (transformers does, where it makes masks).

    A trial of a pass before it is recorded has to take the same branches as the recording. All
    other threads get torch's own answer, also those of the autograd engine: a pass that asks there
    fails its trial and is not recorded. Code that holds the function itself (``from torch.cuda
    import is_current_stream_capturing``) is not reached. Public replacement: none. Tried: 2.13 on a
    CPU.
    """
    me = threading.get_ident()
    with _LOCK:
        if not _PRETENDING:
            _install_answer()
        _PRETENDING[me] = _PRETENDING.get(me, 0) + 1
    try:
        yield
    finally:
        with _LOCK:
            _PRETENDING[me] -= 1
            if not _PRETENDING[me]:
                del _PRETENDING[me]
            if not _PRETENDING:
                _remove_answer()


def _install_answer() -> None:
    own = torch.cuda.is_current_stream_capturing

    def is_current_stream_capturing() -> bool:
        return threading.get_ident() in _PRETENDING or own()

    _ANSWERS.append((is_current_stream_capturing, own))
    torch.cuda.is_current_stream_capturing = is_current_stream_capturing


def _remove_answer() -> None:
    """Put torch's own function back, unless another library has replaced ours since."""
    answer, own = _ANSWERS.pop()
    if torch.cuda.is_current_stream_capturing is answer:
        torch.cuda.is_current_stream_capturing = own


_PRETENDING: dict[int, int] = {}  # threads inside ``pretend_capture``, how often each
_ANSWERS: list[tuple[Callable[[], bool], Callable[[], bool]]] = []  # ours and torch's
_LOCK = threading.Lock()

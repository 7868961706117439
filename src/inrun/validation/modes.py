"""Modes of modules and of the device around a validation pass, and its backward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import itemgetter

import torch
from torch import Tensor, nn


@contextmanager
def without_cudnn() -> Iterator[None]:
    """cuDNN's recurrent layers have no gradient in evaluation mode; torch's own have."""
    before, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def recurrent_on_gpu(modules: Sequence[nn.Module]) -> bool:
    return torch.cuda.is_initialized() and any(isinstance(m, nn.RNNBase) for m in modules)


def training_of(modules: Sequence[nn.Module]) -> list[bool]:
    """``module.training`` of each module."""
    try:
        return list(map(_TRAINING, map(vars, modules)))
    except KeyError:  # a compiled module has it elsewhere
        return [m.training for m in modules]


def set_training(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """``module.training = mode``, without the slow ``Module.__setattr__``."""
    spaces = list(map(vars, modules))
    if all(map(dict.__contains__, spaces, repeat("training"))):
        deque(map(dict.__setitem__, spaces, repeat("training"), modes), maxlen=0)
        return
    for module, space, mode in zip(modules, spaces, modes, strict=True):
        if "training" in space:
            space["training"] = mode
        else:
            module.training = mode


_TRAINING = itemgetter("training")


def making_graph() -> bool:
    """Are kernels being put into a CUDA graph now? (A build without CUDA cannot be asked.)"""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def backward(loss: Tensor, params: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Returns gradients by ``backward()``; the training's own ``.grad`` is set aside meanwhile."""
    own = [p.grad for p in params]
    try:
        for p in params:
            p.grad = None
        loss.backward()
        return tuple(p.grad for p in params)
    finally:
        for p, g in zip(params, own, strict=True):
            p.grad = g

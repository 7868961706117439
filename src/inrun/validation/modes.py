"""Modes of modules and of the device around a validation pass, and its backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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


def set_training(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """``module.training = mode``, without the slow ``Module.__setattr__``."""
    for module, space, mode in zip(modules, map(vars, modules), modes, strict=True):
        if "training" in space:
            space["training"] = mode
        else:  # a compiled module has it elsewhere
            module.training = mode


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

"""What a pass depends on beside its arguments, and what it may write to."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inrun.torch_compat import MODULE_HOOKS
from inrun.validation.reach import Reached

_SMALL = 2**16  # numbers; a larger tensor on the host is not compared


class Around:
    """What the model was like when this was made.

    Args:
        own: the model's forward, where it is not that of its class.

    Attributes:
        why: why no pass of this model can be recorded.
    """

    def __init__(
        self, model: nn.Module, modules: Sequence[nn.Module], own: Any, device: torch.device
    ) -> None:
        self._own, self._code = own, (own, *_code_of(modules))
        self.reached = Reached(modules, self._code)  # type: ignore[arg-type]  # several functions
        found = [*model.parameters(), *model.buffers(), *self.reached.tensors.values()]
        self.tensors = list({id(t): t for t in found}.values())
        self._there = self._places()
        host = [t for t in self.reached.tensors.values() if t.device != device]
        self.why = self._refusal(modules, host)
        self._host = [] if self.why else [(t, t.detach().clone()) for t in host]

    def _refusal(self, modules: Sequence[nn.Module], host: Sequence[Tensor]) -> str | None:
        if any(vars(m).get(hooks) for m in modules for hooks in MODULE_HOOKS):
            return "modules have hooks"
        if self.reached.arrays or any(t.numel() > _SMALL for t in host):
            return "the model holds NumPy arrays or large tensors on the host"
        if self.reached.generators:
            return "the model holds random generators of its own"
        return None

    def same(self, modules: Sequence[nn.Module], own: Any) -> bool:
        """Is all as it was?"""
        return (
            own is self._own
            and self.reached.unchanged(modules)
            and self._places() == self._there
            and all(torch.equal(t, before) for t, before in self._host)
        )

    def _places(self) -> list[Any]:
        """Addresses, and what has a gradient."""
        flags = [t.requires_grad for t in self.tensors]
        return [list(map(Tensor.data_ptr, self.tensors)), flags]


def _code_of(modules: Sequence[nn.Module]) -> list[types.FunctionType]:
    """The functions of the modules' classes, without torch's: they name global variables."""
    kinds = dict.fromkeys(k for m in modules for k in type(m).__mro__)
    return [
        f
        for kind in kinds
        if kind.__module__.partition(".")[0] not in ("torch", "builtins")
        for f in vars(kind).values()
        if isinstance(f, types.FunctionType)
    ]


def settings() -> tuple[Any, ...]:
    """Settings of torch that choose kernels."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32, cudnn.enabled,
        cudnn.benchmark, cudnn.deterministic, torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )  # fmt: skip


@contextmanager
def put_back(tensors: Sequence[Tensor]) -> Iterator[None]:
    """These tensors and the random generators are afterwards as they were."""
    held = [(t, t.detach().clone()) for t in tensors]
    python, own = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(sorted({t.device.index for t in tensors if t.is_cuda})):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(own)
        with torch.no_grad():
            for t, before in held:
                t.data.copy_(before)


@contextmanager
def without(model: nn.Module, names: Sequence[str] = MODULE_HOOKS) -> Iterator[None]:
    """The model without the hooks that it has now: those of a batch under way."""
    space = vars(model)
    held = [(own, own.copy()) for own in map(space.get, names) if own]
    try:
        for own, _ in held:
            own.clear()
        yield
    finally:
        for own, before in held:
            own.update(before)


def host_state(device: torch.device) -> Any:
    """Of the random generators that no recording draws from."""
    name, keys, *rest = np.random.get_state(legacy=True)
    drawn = None if device.type == "cpu" else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), name, np.asarray(keys).tobytes(), rest, drawn


def device_state(device: torch.device) -> Tensor:
    """Of the random generator that a recording draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

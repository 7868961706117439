"""The hooks of a run on ``optimizer.step()``, and which models and optimizers have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from inrun.run.stepping import Stepper

_WATCHED: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()  # and the run that watches it


def open_runs() -> list[tuple[Any, list[Any]]]:
    """The runs that are attached, each with the model and the optimizers that it watches."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    for x, where in list(_WATCHED.items()):
        if (run := where()) is not None:
            found.setdefault(id(run), (run, []))[1].append(x)
    return list(found.values())


class Hooks:
    """Calls ``before`` and ``after`` around each optimizer's ``step()``, with its stepper first.
    Refuses a model or optimizer that another run watches."""

    def __init__(
        self, run: Any, model: nn.Module, steppers: Sequence[Stepper],
        before: Callable[..., Any], after: Callable[..., Any],
    ) -> None:  # fmt: skip
        self._watched = [model, *(o for stepper in steppers for o in stepper.members)]
        if any(x in _WATCHED for x in self._watched):
            self._watched = []
            raise RuntimeError(
                "this model or optimizer is being watched already: close() the other run first; "
                "several targets or estimators fit into one"
            )
        _WATCHED.update(dict.fromkeys(self._watched, ref(run)))
        self._handles: list[Any] = []
        for stepper in steppers:
            first, last = _eager(partial(before, stepper)), _eager(partial(after, stepper))
            for optimizer in stepper.members:
                self._handles.append(optimizer.register_step_pre_hook(first))
                self._handles.append(optimizer.register_step_post_hook(last))

    def __bool__(self) -> bool:
        """Are they attached?"""
        return bool(self._watched)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for x in self._watched:
            _WATCHED.pop(x, None)
        self._handles, self._watched = [], []


def _eager(hook: Any) -> Any:
    """Keep a hook out of the graph where ``optimizer.step`` is compiled."""
    why = "inrun scores the step here: compile optimizer.step without fullgraph=True"
    return torch.compiler.disable(hook, reason=why)

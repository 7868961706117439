"""A copy of a validation batch for each pass, so that no pass sees what another one wrote.

A forward pass may write to its input (``x.mul_``, labels masked in place, a ReLU in place on the
input, through ``.data`` or numpy as well). The user's own tensors stay out of reach of it: a pass
gets copies of all tensors and arrays of the batch. Copying costs next to nothing beside the pass.
"""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# Things without tensors to write to, or which are no part of a batch's data.
_LEFT = (
    str, bytes, int, float, complex, bool, type(None), range, slice, enum.Enum, type, np.generic,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    weakref.ReferenceType, torch.dtype, torch.device, torch.Generator, nn.Module, Dataset,
    DataLoader,
)  # fmt: skip


def fresh(batch: Any, done: dict[int, Any] | None = None) -> Any:
    """The batch with copies of all tensors and arrays in it, also in objects (a tokenizer's
    ``BatchEncoding``, dataclasses); what occurs twice is copied once."""
    done = {} if done is None else done
    if isinstance(batch, Tensor):
        if id(batch) not in done:
            done[id(batch)] = batch.detach().clone().requires_grad_(batch.requires_grad)
        return done[id(batch)]
    if isinstance(batch, _LEFT):
        return batch
    if id(batch) in done:
        return done[id(batch)]
    made: Any
    if isinstance(batch, np.ndarray):
        made = done[id(batch)] = batch.copy()
        return made
    kind = type(batch)
    if kind in (tuple, set, frozenset):
        made = kind(fresh(x, done) for x in batch)
    elif isinstance(batch, tuple) and hasattr(batch, "_make"):
        made = batch._make(fresh(x, done) for x in batch)
    elif kind in (dict, list, OrderedDict, defaultdict):
        made = done[id(batch)] = copy.copy(batch)
        for key in range(len(made)) if kind is list else list(made):
            made[key] = fresh(made[key], done)
    else:
        made = _copied(batch, done)
    done[id(batch)] = made
    return made


def _copied(x: Any, done: dict[int, Any]) -> Any:
    """An object with copies of what its attributes hold; itself where it cannot be copied."""
    slots = slots_of(type(x))
    if not hasattr(x, "__dict__") and not slots:
        return x
    try:
        made = copy.copy(x)
    except Exception:
        return x
    if made is x:
        return x
    done[id(x)] = made
    space = getattr(made, "__dict__", {})
    for name in list(space):
        space[name] = fresh(space[name], done)
    for name in slots:
        if hasattr(made, name) and name not in space:
            object.__setattr__(made, name, fresh(getattr(made, name), done))
    if isinstance(made, dict):  # a class of its own, with entries beside its attributes
        for key in list(made):
            dict.__setitem__(made, key, fresh(dict.__getitem__(made, key), done))
    elif isinstance(made, list):
        made[:] = [fresh(y, done) for y in made]
    return made


def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the slots of a class and its bases."""
    found: list[str] = []
    for c in kind.__mro__:
        slots = getattr(c, "__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return tuple(s for s in dict.fromkeys(found) if s not in ("__dict__", "__weakref__"))

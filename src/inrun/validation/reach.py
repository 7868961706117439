"""Finds what a validation pass may write to: everything it can reach from the model and the loss.

From every module: buffers, plain tensors, numbers and other attributes, containers and objects that
hold such, hooks. From the loss function: the heads, criteria, tensors and generators that its
closure, its defaults, the globals that it names or the object that it is a method of hold. (Its
other belongings, a list of losses for example, are left to it. They may be the work of other
threads, too.)

The walk is made once and holds as long as everything that it went through holds the same objects:
``Reached.unchanged`` compares identities, in a small part of the time.
"""

from __future__ import annotations

import functools
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from inrun.torch_compat import (
    MODULE_ATTRIBUTES,
    MODULE_HOOKS,
    MODULE_STORES,
    NormBase,
    buffers_of,
    parameters_of,
    version_of,
)
from inrun.validation.identity import Trail, same

_DEPTH = 4  # objects and functions inside each other, from a module or a function on
_DEEPEST = 16  # containers
_LARGEST = 4096  # entries of a container whose entries are looked at
# Types of plain values: comparing two of them shows whether anything has changed.
PLAIN = frozenset([int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device])
_NOTHING = PLAIN | {torch.Size, type, types.ModuleType, types.BuiltinFunctionType, slice, range}
_BUILT_IN = frozenset([dict, OrderedDict, defaultdict, list, set, deque])
# Their forward pass writes to nothing, and they hold nothing but parameters and plain values.
_STATELESS = frozenset([
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Dropout,
    nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Sigmoid, nn.Softmax, nn.Identity, nn.Sequential,
    nn.ModuleList, nn.ModuleDict, nn.Flatten, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder,
])  # fmt: skip
# No state of the model, or used by other threads and libraries as well.
_ALIEN = (Optimizer, LRScheduler, Dataset, DataLoader, Sampler)
_LIBRARIES = frozenset(["torch", "numpy", "inrun", "logging", "threading", "_thread", "asyncio",
                        "concurrent", "tqdm", "weakref", "functools", "tokenizers", "datasets",
                        "lightning", "pytorch_lightning", "lightning_fabric", "accelerate",
                        "wandb", "deepspeed"])  # fmt: skip
_SHARED = (random._inst, np.random.mtrand._rand)  # global: state.Generators has them
Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


class Reached:
    """Everything that was found, by kind."""

    def __init__(self, modules: Iterable[nn.Module], loss: Callable[..., Any]) -> None:
        self.spaces: list[tuple[Any, Any]] = []  # containers, and copies of them
        self.slots: list[tuple[Any, dict[str, Any]]] = []  # objects, and what their slots hold
        self.empty: list[dict[str, Any]] = []  # containers without entries
        self.cells: list[tuple[Any, Any]] = []  # closure cells and the tensors in them
        self.names: list[tuple[dict[str, Any], str, Tensor]] = []  # tensors in other namespaces
        self.tensors: dict[int, Tensor] = {}
        self.statistics: set[int] = set()  # those tensors that normalisations average
        self.plain: list[Any] = []  # values that the loss refers to
        self.generators: list[Any] = []
        self.arrays: list[np.ndarray] = []
        self._seen: set[int] = set(map(id, _SHARED))
        self._roots = list(modules)
        self.lasting = True  # holds no tensor whose graph would be kept alive with it
        self._trail, self._stateless = Trail(), Trail()  # all that was gone through
        self._bare: list[dict[str, Any]] = []  # of the stateless modules, without hooks and buffers
        for module in self._roots:
            self._module(module)
        self._value(loss, 0, inside=False)
        self._trail.note()
        self._stateless.note()
        self._params = _params_in(self._bare)

    def unchanged(self, modules: Sequence[nn.Module], thorough: bool = True) -> bool:
        """Would a walk from these modules find the same again? ``thorough``: and are the attributes
        of stateless modules, at which a walk does not look, the same?"""
        return (
            same(self._roots, modules)
            and (self._stateless.unchanged() if thorough else self._still_bare())
            and self.untouched()
        )

    def _still_bare(self) -> bool:
        """Are the stateless modules still without hooks, buffers and a forward pass of their own,
        and have they the same parameters?"""
        try:
            found = any(chain.from_iterable(map(_HOOKS_AND_BUFFERS, self._bare)))
        except KeyError:
            return False
        found = found or any(map(dict.__contains__, self._bare, repeat("forward")))
        return not found and same(_params_in(self._bare), self._params)

    def untouched(self) -> bool:
        """Has a pass replaced nothing of what is put back?"""
        return self._trail.unchanged()

    def fingerprint(self) -> tuple[Any, ...]:
        """Returns a key that changes whenever a plain value changes, or a tensor is written to
        that is neither a parameter nor a running statistic of a normalisation."""
        plain = [
            tuple((k, v) for k, v in copy.items() if type(v) in PLAIN and k != "training")
            for _, copy in (*self.spaces, *self.slots)
            if isinstance(copy, dict)
        ]
        own = [(i, version_of(t)) for i, t in self.tensors.items() if i not in self.statistics]
        return tuple(x for x in plain if x), tuple(self.plain), tuple(own)

    def _module(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        space = vars(module)
        hooked = any(map(space.get, MODULE_HOOKS))
        if hooked:
            for f in (f for name in MODULE_HOOKS for f in space.get(name, {}).values()):
                self._value(f, 0, inside=True)
        bare = not hooked and not buffers_of(module) and "forward" not in space
        if type(module) in _STATELESS and bare:
            self._stateless.module(space)
            self._bare.append(space)
            return
        self._trail.module(space)
        self.spaces.append((space, space.copy()))
        for own in map(space.__getitem__, MODULE_STORES):
            if own:
                self.spaces.append((own, own.copy()))
            else:
                self.empty.append(own)
        for t in buffers_of(module).values():
            if t is not None:
                self._tensor(t)
                if isinstance(module, NormBase):
                    self.statistics.add(id(t))
        for name, x in space.items():
            if name not in MODULE_ATTRIBUTES and type(x) not in _NOTHING:
                self._value(x, 0, inside=True)
        if space.get("max_norm") is not None:  # an embedding whose forward pass shortens its rows
            for p in parameters_of(module).values():
                if p is not None and not p.requires_grad:
                    self.tensors[id(p)] = p

    def _tensor(self, t: Tensor) -> None:
        self._trail.tensors.append((t, t.requires_grad))
        computed = t.requires_grad and not t.is_leaf  # by the pass, of parameters
        self.lasting = self.lasting and not computed
        if isinstance(t, nn.Parameter) or computed or t.layout != torch.strided:
            return
        if not t.is_meta and not t.is_inference():
            self.tensors[id(t)] = t

    def _value(self, x: Any, depth: int, inside: bool) -> None:
        """Note a value and what it holds. ``inside``: it belongs to a module."""
        kind = type(x)
        if kind in _NOTHING or id(x) in self._seen or depth > _DEEPEST:
            return
        if isinstance(x, Tensor):
            self._tensor(x)
            return
        if isinstance(x, nn.Module):
            for module in x.modules():
                self._module(module)
            return
        self._seen.add(id(x))
        if isinstance(x, Generator):
            self.generators.append(x)
        elif isinstance(x, np.ndarray):
            self.arrays.append(x)
        elif isinstance(x, (dict, list, set, deque)) and _library(kind) not in _LIBRARIES:
            self._container(x, depth, inside)
            if kind not in _BUILT_IN:
                self._object(x, depth, inside)
        elif isinstance(x, tuple):
            self._each(x, depth, inside)
        elif depth > _DEPTH:
            return
        elif isinstance(x, types.FunctionType):
            self._function(x, depth, inside)
        elif isinstance(x, types.MethodType):
            self._value(x.__func__, depth, inside)
            self._value(x.__self__, depth, inside)
        elif isinstance(x, functools.partial):
            self._trail.container(x.keywords)
            self._each((x.func, *x.args, *x.keywords.values()), depth, inside)
        else:
            self._object(x, depth, inside)

    def _container(self, x: Any, depth: int, inside: bool) -> None:
        self._trail.container(x)
        entries = {**x} if isinstance(x, dict) else set(x) if isinstance(x, set) else list(x)
        if inside:
            self.spaces.append((x, entries))
        elif isinstance(x, dict):
            self._names(x)
        self._each(entries.values() if isinstance(entries, dict) else entries, depth, inside)

    def _names(self, space: dict[str, Any]) -> None:
        self.names.extend((space, k, x) for k, x in space.items() if isinstance(x, Tensor))
        self.plain.extend((k, x) for k, x in space.items() if type(x) in PLAIN)

    def _each(self, xs: Iterable[Any], depth: int, inside: bool) -> None:
        values = list(xs)
        if len(values) <= _LARGEST:
            for x in values:
                if type(x) not in _NOTHING:
                    self._value(x, depth + 1, inside)

    def _function(self, f: types.FunctionType, depth: int, inside: bool) -> None:
        if _library(f) in _LIBRARIES:
            return
        self._trail.function(f, names_of(f.__code__))
        for cell in f.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if isinstance(held, Tensor):
                self.cells.append((cell, held))
            elif type(held) in PLAIN:
                self.plain.append(held)
            self._value(held, depth + 1, inside)
        space = f.__globals__
        for name in names_of(f.__code__):
            if name in space and type(x := space[name]) not in (types.ModuleType, type):
                if isinstance(x, Tensor):
                    self.names.append((space, name, x))
                elif type(x) in PLAIN:
                    self.plain.append((name, x))
                self._value(x, depth + 1, inside)
        self._each((*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()), depth, inside)

    def _object(self, x: Any, depth: int, inside: bool) -> None:
        if isinstance(x, _ALIEN):
            return
        if _library(type(x)) in _LIBRARIES and not isinstance(x, torch.autocast):
            return
        if slots := {s: getattr(x, s) for s in slots_of(type(x)) if hasattr(x, s)}:
            self._trail.slots.append((x, slots))
            if inside:
                self.slots.append((x, slots))
            self._each(slots.values(), depth, inside)
        if not hasattr(x, "__dict__"):
            return
        space = vars(x)
        if isinstance(space, types.MappingProxyType):  # a class
            return
        self._trail.container(space)
        if inside or isinstance(x, torch.autocast):
            self.spaces.append((space, dict(space)))
        else:
            self._names(space)
        self._each(space.values(), depth, inside)


_HOOKS_AND_BUFFERS = itemgetter(*MODULE_HOOKS, MODULE_STORES[0])
_PARAMETERS = itemgetter(MODULE_STORES[1])


def _params_in(spaces: Iterable[dict[str, Any]]) -> list[Any]:
    """The parameters of modules with these namespaces."""
    return list(chain.from_iterable(map(dict.values, map(_PARAMETERS, spaces))))


def _library(x: Any) -> str:
    """The package that a class or function comes from."""
    return (x.__module__ or "").partition(".")[0]


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code and functions inside it look up."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *(n for c in inner for n in names_of(c)))))


def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the slots of a class and its bases."""
    found: list[str] = []
    for c in kind.__mro__:
        slots = getattr(c, "__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return tuple(s for s in dict.fromkeys(found) if s not in ("__dict__", "__weakref__"))

"""What each tensor of a forward pass is made of, as far as it matters for scoring.

A tensor is one of

* *batched*: made of the batch's data; a ``Layout`` says where its examples are;
* *parametric*: a watched parameter or made of parameters alone (a ``Node``);
* *unknown*: made of the data, but the examples are no longer apart in it (a loss);
* *outside*: brought along by the loop, of another size (a whole dataset): what is cut out of it
  may be the batch;
* *constant*: everything else: the model's own tensors and what is made of nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from inrun.arguments import flatten
from inrun.errors import BatchError, random_parameter
from inrun.follow import follow, written
from inrun.layout import Layout, in_place, name_of, tensors_in
from inrun.nodes import Node
from inrun.recall import Recall
from inrun.tap import Known, MicroBatch, own_tensors, storage_key


class _Kind:
    def __init__(self, name: str) -> None:
        self.name = name


CONSTANT, UNKNOWN, OUTSIDE = _Kind("constant"), _Kind("unknown"), _Kind("outside")
_COLLATED = ("stack", "cat", "concat", "concatenate", "vstack", "pad_sequence")
_RANDOM = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
           "feature_alpha_dropout", "bernoulli", "rrelu", "gumbel_softmax")  # fmt: skip


class Provenance:
    """Remembers it for the tensors of one batch."""

    def __init__(
        self, modules: Sequence[nn.Module], params: Mapping[str, Tensor], batch_dim: int
    ) -> None:
        self.modules, self.batch_dim = modules, batch_dim
        self.live: MicroBatch | None = None
        self.on_empty: Callable[[BatchError], None] = _refuse  # a batch without a gradient
        self.held: Collection[int] = ()  # ids of the parameters that the optimizer trains
        self.outsiders: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._sized: dict[int, tuple[weakref.ref[Tensor], MicroBatch]] = {}
        self._reentered = threading.local()
        self._layouts: dict[Any, Layout] = {}
        self.watch(params)
        self._forget_tensors()

    def _forget_tensors(self) -> None:
        self._info = Known()
        self._by_storage: dict[Any, Layout] | None = None  # where something is recomputed
        self._constants: set[int] | None = None  # the model's own tensors
        self._shapes: list[tuple[int, ...]] = []

    def watch(self, params: Mapping[str, Tensor]) -> None:
        """The parameters to score, from the next batch on."""
        self.nodes = {id(p): Node.parameter(name, p) for name, p in params.items()}
        self.watched = frozenset(params)
        self._recall = Recall(self._find)

    def owns(self, t: Tensor) -> bool:
        """Is it one of the model's own tensors?"""
        if self._constants is None:
            self._constants = own_tensors(self.modules)
        return id(t) in self._constants

    def _find(self, t: Tensor) -> Any:
        info = self._info.get(t)
        if info is None:
            node = self.nodes.get(id(t))
            mine = node is not None and node.param is t
            info = self._info[t] = node if mine else self._one(self._classify(t))
        return info

    def _one(self, info: Any) -> Any:
        """Equal layouts are one object."""
        if type(info) is not Layout:
            return info
        return self._layouts.setdefault((info.dim, info.outer, info.inner, info.guessed), info)

    def _classify(self, t: Tensor) -> Layout | _Kind:
        """A tensor from outside: the batch's data, unless it belongs to the model."""
        assert self.live is not None
        if self.owns(t):
            return CONSTANT
        if t.requires_grad and t.is_leaf and self._outsider(t):
            return CONSTANT
        if getattr(self._reentered, "by", None):
            known = None if self._by_storage is None else self._by_storage.get(storage_key(t))
            if known is not None:
                return known
        if t.ndim > self.batch_dim and t.shape[self.batch_dim] == self.live.B:
            return Layout(self.batch_dim, guessed=True)
        if t.ndim == 0:
            return CONSTANT
        self._shapes.append(tuple(t.shape))
        return UNKNOWN if t.requires_grad and not t.is_leaf else OUTSIDE

    def _outsider(self, t: Tensor) -> bool:
        """Is it a parameter, but of something else than the model (a criterion of its own)? One of
        the batch's size may be an input, unless it comes back in another batch."""
        assert self.live is not None
        known = id(t) in self.held or id(t) in self.outsiders
        if not known and isinstance(t, nn.Parameter):
            known = t.ndim <= self.batch_dim or t.shape[self.batch_dim] != self.live.B
            if not known:
                seen, batch = self._sized.get(id(t), (None, None))
                known = seen is not None and seen() is t and batch is not self.live
                if len(self._sized) > 100:
                    self._sized = {}
                self._sized[id(t)] = weakref.ref(t), self.live
        if known:
            self.outsiders[id(t)] = t
        return known

    def _layout(self, t: Any) -> Layout | None:
        info = self._find(t) if isinstance(t, Tensor) else None
        return info if type(info) is Layout else None

    def _note_batched(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        assert self.live is not None
        name = name_of(func)
        if name == "setitem":
            self._note_written(*args)
        for t in tensors_in(out):
            if name.startswith("new_") or self._only_converted(name, args):
                self._info[t] = CONSTANT
            elif name in _COLLATED and self._collated(t, args, kwargs):
                self._remember(t, Layout(self.batch_dim, guessed=True))
            else:
                self._remember(t, self._follow(func, args, kwargs, t))

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Layout | None:
        """Where the examples are in the output."""
        assert self.live is not None
        return follow(func, args, kwargs, out, self._layout, self.live.B)

    def _only_converted(self, name: str, args: Any) -> bool:
        """``positions.type_as(x)``: a constant stays one."""
        return name in ("to", "type_as") and bool(args) and self._find(args[0]) is CONSTANT

    def _collated(self, t: Tensor, args: Any, kwargs: Any) -> bool:
        """Rows put together inside the block: where one row came from says nothing of the whole."""
        assert self.live is not None
        layouts = [self._layout(x) for x in tensors_in(args, kwargs)]
        if not all(x is None or x.guessed for x in layouts):
            return False
        return t.ndim > self.batch_dim and t.shape[self.batch_dim] == self.live.B

    def _note_written(self, target: Tensor, index: Any, value: Any) -> None:
        """``target[index] = value``: a target without examples takes the value's."""
        assert self.live is not None
        found = self._layout(value)
        if self._layout(target) is None:
            self._remember(
                target,
                None if found is None else written(target, index, value, found, self.live.B),
            )

    def _remember(self, t: Tensor, layout: Layout | None) -> None:
        self._info[t] = self._one(layout) or UNKNOWN
        if self._by_storage is not None:
            self._note_storage(t, layout)

    def _note_storage(self, t: Tensor, layout: Any) -> None:
        """What is recomputed begins with other tensors in the same memory."""
        assert self._by_storage is not None
        if type(layout) is Layout and t.is_floating_point():
            self._by_storage[storage_key(t)] = layout

    def _note_storages(self) -> None:
        """Recomputation is expected: from now on, and of all tensors so far that live."""
        self._by_storage = {}
        for t, info in self._info.alive():
            self._note_storage(t, info)

    def _note_parametric(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if name_of(func) in _RANDOM and out is not args[0] and _is_random(args, kwargs):
            raise random_parameter(name_of(func), self._find(args[0]).roots)
        leaves, spec = flatten(args, kwargs)
        infos = [self._find(x) if isinstance(x, Tensor) else None for x in leaves]
        same = [id(x) for x in leaves]
        nodes = [n if type(n) is Node else x for x, n in zip(leaves, infos, strict=True)]
        for i, t in enumerate(tree_flatten(out)[0]):
            if not isinstance(t, Tensor) or (id(t) in same and not in_place(func)):
                continue  # ``W.to(same type)`` is W
            index = None if isinstance(out, Tensor) else i
            self._info[t] = (
                Node.derived(func, nodes, spec, index, name_of(func), t.device.type)
                if t.requires_grad
                else CONSTANT
            )


def _refuse(error: BatchError) -> None:
    raise error


def _is_random(args: Any, kwargs: Any) -> bool:
    """``dropout(x, p, training)`` does nothing when it is not training or p is 0."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and p != 0

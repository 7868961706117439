"""What each tensor of a forward pass is made of, as far as it matters for scoring.

A tensor is one of

* *batched*: made of the batch's data; a ``Layout`` says where its examples are;
* *parametric*: a watched parameter or made of parameters alone (a ``Node``);
* *unknown*: made of the data, but the examples are no longer apart in it (a loss);
* *pairs*: similarities [B, B] of every example with every other (pairs.py);
* *outside*: brought along by the loop, of another size (a whole dataset): what is cut out of it
  may be the batch;
* *constant*: everything else: the model's own tensors and what is made of nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from inrun import pairs
from inrun.arguments import flatten
from inrun.errors import random_parameter, transformed, unseen_function
from inrun.follow import follow, written
from inrun.layout import Layout, in_place, name_of, tensors_in
from inrun.nodes import Node
from inrun.recall import Followed, Recall, tensors_of
from inrun.tap import (
    Known,
    MicroBatch,
    in_backward,
    own_tensors,
    shape_of,
    sources,
    storage_key,
    unwrapped,
)


class _Kind:
    def __init__(self, name: str) -> None:
        self.name = name


CONSTANT, UNKNOWN, OUTSIDE = _Kind("constant"), _Kind("unknown"), _Kind("outside")
PAIRS = _Kind("pairs")
_COLLATED = ("stack", "cat", "concat", "concatenate", "vstack", "pad_sequence")
LIKE = ("to", "type_as", "view_as", "reshape_as", "expand_as")
_RANDOM = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
           "feature_alpha_dropout", "bernoulli", "rrelu", "gumbel_softmax")  # fmt: skip


class Provenance:
    """Remembers it for the tensors of one batch."""

    def __init__(
        self, modules: Sequence[nn.Module], params: Mapping[str, Tensor], batch_dim: int
    ) -> None:
        self.modules, self.batch_dim = modules, batch_dim
        self.live: MicroBatch | None = None
        self._planning = False
        self._layouts: dict[Any, Layout] = {}
        self.watch(params)
        self._forget_tensors()

    def _forget_tensors(self) -> None:
        self._info = Known()
        self._by_storage: dict[Any, Any] | None = None  # where something is recomputed
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

    def _classify(self, t: Tensor) -> Any:
        """A tensor from outside: the batch's data, unless it belongs to the model."""
        assert self.live is not None
        if self.owns(t) or isinstance(t, nn.Parameter):  # another model's (a teacher) are no data
            return CONSTANT
        if t.is_nested:
            return UNKNOWN
        if self._by_storage is not None and in_backward():
            known = self._by_storage.get(storage_key(t))
            if known is not None and (type(known) is not Node or t.requires_grad):
                return known
        if t.ndim > self.batch_dim and t.shape[self.batch_dim] == self.live.B:
            return Layout(self.batch_dim, guessed=True)
        if t.ndim == 0:
            return CONSTANT
        self._shapes.append(tuple(t.shape))
        return UNKNOWN if t.requires_grad and not t.is_leaf else OUTSIDE

    def _refuse_transformed(self, args: Any, kwargs: Any) -> None:
        """A parameter inside torch.func.vmap or grad."""
        inner = [unwrapped(t) for t in tensors_in(args, kwargs)]
        infos = [self._find(t) for t in inner if t.requires_grad]
        roots = [r for n in infos if type(n) is Node for r in n.roots]
        if roots and torch.is_grad_enabled():
            raise transformed(set(roots))

    def _refuse_unseen(self, tensors: Sequence[Tensor], infos: Sequence[Any]) -> None:
        """A tensor that seems constant and has a gradient: a custom autograd function made it."""
        for t, info in zip(tensors, infos, strict=True):
            if info is CONSTANT and t.grad_fn is not None:
                function, leaves = sources(t)
                names = [self.nodes[id(p)].name for p in leaves if id(p) in self.nodes]
                if names:
                    raise unseen_function(function, names)

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
                self._set(t, CONSTANT)
            elif self._of_pairs(func, args, kwargs, t):
                self._set(t, PAIRS)
            elif name in _COLLATED and self._collated(t, args, kwargs):
                self._remember(t, Layout(self.batch_dim, guessed=True))
            else:
                self._remember(t, self._follow(func, args, kwargs, t))

    def _note_again(self, out: Any, known: Followed) -> bool:
        """The outputs are made of the same as before, if they look the same."""
        outs = tensors_of(out)
        if outs is None or [t.shape for t in outs] != known.shapes:
            return False
        for t, info in zip(outs, known.infos, strict=True):
            self._set(t, info)
        return True

    def _of_pairs(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> bool:
        """Is the output made of similarities, or are these its numbers?"""
        assert self.live is not None
        if out.is_nested:
            return False
        infos = [self._find(t) for t in tensors_in(args, kwargs)]
        if PAIRS not in infos:
            return pairs.made(func, args, out, self._layout, self.live.B)
        others = [type(x) is Layout or x is UNKNOWN for x in infos]
        return pairs.kept(func, out, [x is PAIRS for x in infos], others)

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Layout | None:
        """Where the examples are in the output."""
        assert self.live is not None
        if out.is_nested:
            return None
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
        self._set(t, self._one(layout) or UNKNOWN)

    def _set(self, t: Tensor, info: Any) -> None:
        self._info[t] = info
        if self._by_storage is not None:
            self._note_storage(t, info)

    def _note_storage(self, t: Tensor, info: Any) -> None:
        """What is recomputed begins with other tensors in the same memory."""
        assert self._by_storage is not None
        if t.numel():
            self._by_storage[storage_key(t)] = info

    def _revive(self, tensors: Sequence[Tensor]) -> None:
        """A reentrant checkpoint detaches its inputs and has them require gradients again."""
        assert self._by_storage is not None
        for t in tensors:
            if t.requires_grad and t.is_leaf and self._info.get(t) is CONSTANT:
                known = self._by_storage.get(storage_key(t))
                self._info[t] = known if type(known) is Node else CONSTANT

    def _note_storages(self) -> None:
        """Recomputation is expected: from now on, and of all tensors so far that live."""
        self._by_storage = {}
        for t, info in self._info.alive():
            self._note_storage(t, info)
        for node in self.nodes.values():
            if node.param is not None:
                self._note_storage(node.param, node)

    def _kept(self, x: Any) -> Any:
        """An operand of a tensor that is made of parameters: its node, or the tensor as it is now,
        which may be written to before the parameters are scored. (What is compiled makes its
        tensors from the buffers of the moment; see ``MicroBatch.fixed``.)"""
        info = self._find(x) if isinstance(x, Tensor) else None
        if type(info) is Node:
            return info
        if info is None or self._planning:
            return x
        if type(info) is Layout or info in (UNKNOWN, PAIRS):  # asked for its type
            return shape_of(x)
        return x.detach().clone()

    def _before(self, func: Any, args: Any) -> Any:
        """The arguments of an operation on parameters as they are before it writes to the first."""
        if not in_place(func) or not torch.is_grad_enabled() or type(self._find(args[0])) is Node:
            return args
        target = args[0].detach().clone()
        self._info[target] = self._find(args[0])
        return (target, *args[1:])

    def _note_parametric(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if name_of(func) in _RANDOM and out is not args[0] and _is_random(args, kwargs):
            raise random_parameter(name_of(func), self._find(args[0]).roots)
        leaves, spec = flatten(args, kwargs)
        same, recorded = [id(x) for x in leaves], in_place(func) and torch.is_grad_enabled()
        made = None
        for i, t in enumerate(tree_flatten(out)[0]):
            if not isinstance(t, Tensor) or (id(t) in same and not recorded):
                continue  # ``W.to(same type)`` is W, and so is ``W.clamp_(...)`` under no_grad
            if not t.requires_grad:  # what is in this memory is a parameter still
                self._info[t] = CONSTANT
                continue
            made = made or [self._kept(x) for x in leaves]
            name, index = name_of(func), None if isinstance(out, Tensor) else i
            pure = getattr(torch, name, func) if recorded else func
            self._set(t, Node.derived(pure, made, spec, index, name, t.device.type))


def _is_random(args: Any, kwargs: Any) -> bool:
    """``dropout(x, p, training)`` does nothing when it is not training or p is 0."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and p != 0

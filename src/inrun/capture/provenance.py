"""What each tensor of a forward pass is made of, as far as it matters for scoring.

A tensor is one of

* *batched*: made of the batch; a ``Layout`` says where its examples are;
* *data*: the loop's own, not yet received by the model; a ``Layout`` with ``data`` set if it has
  one entry per example, *outside* if not (a whole dataset, of which a part may be the batch);
* *parametric*: a watched parameter or made of parameters alone (a ``Node``);
* *mixed*: made of the batch and the same for all examples (a mean over the batch, a loss);
* *pairs*: similarities [B, B] of every example with every other (pairs.py);
* *lost*: made of the batch, and where the examples are in it is not known;
* *constant*: everything else: the model's own tensors and what is made of nothing. That a constant
  was made of data costs time, never a value: what it makes of parameters is treated as parametric.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from inrun.capture import pairs
from inrun.capture.anchors import Claims, Entries
from inrun.capture.inputs import CONSTANT, OUTSIDE, PAIRS, Inputs
from inrun.capture.recall import Followed, Recall, tensors_of
from inrun.capture.tap import (
    Known,
    MicroBatch,
    own_tensors,
    shape_of,
    sources,
    storage_key,
)
from inrun.errors import BatchError, random_parameter, transformed, unseen_function
from inrun.gradients.nodes import Node
from inrun.tensors.arguments import flatten
from inrun.tensors.follow import follow
from inrun.tensors.indexing import written
from inrun.tensors.layout import MIXED, Kind, Layout, Lost, in_place, lost, name_of, tensors_in
from inrun.torch_compat import FakeTensor, in_backward, tree_flatten, unwrapped

_COLLATED = ("stack", "cat", "concat", "concatenate", "vstack", "pad_sequence")
LIKE = ("to", "type_as", "view_as", "reshape_as", "expand_as")
_RANDOM = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
           "feature_alpha_dropout", "bernoulli", "rrelu", "gumbel_softmax")  # fmt: skip


class Provenance(Inputs):
    """Holds what each tensor of one batch is made of."""

    def __init__(
        self, modules: Sequence[nn.Module], params: Mapping[str, Tensor], batch_dim: int
    ) -> None:
        super().__init__()
        self.modules, self.batch_dim = modules, batch_dim
        self.live: MicroBatch | None = None
        self._planning = False
        self.on_empty: Callable[[BatchError, bool], None] = _refuse  # a batch without a gradient
        self.held: Collection[int] = ()  # ids of the parameters that the optimizer trains
        self.outsiders: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._layouts: dict[Any, Layout] = {}
        self.claims, self.entries = Claims(), Entries(self, modules[0])
        self.watch(params)
        self._forget_tensors()

    def _forget_tensors(self) -> None:
        self._info = Known()
        self._by_storage: dict[Any, Any] | None = None  # where something is recomputed
        self._constants: set[int] | None = None  # the model's own tensors
        self._shapes: list[tuple[int, ...]] = []
        self.forget_inputs()

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
        """Interns layouts, so that equal ones have one id (a key of the cache of calls)."""
        if type(info) is not Layout:
            return info
        key = (info.dim, info.outer, info.inner, info.data, info.claims)
        return self._layouts.setdefault(key, info)

    def _classify(self, t: Tensor) -> Any:
        """The kind of a tensor that no followed call produced."""
        assert self.live is not None
        if self.owns(t):
            return CONSTANT
        if isinstance(t, nn.Parameter) or id(t) in self.held:  # of a teacher, a criterion: no data
            if t.requires_grad:
                self.outsiders[id(t)] = t
            return CONSTANT
        if self._by_storage is not None and in_backward():
            known = self._by_storage.get(storage_key(t))
            if known is not None and (type(known) is not Node or t.requires_grad):
                return known
        if self.anchored and t.requires_grad and not t.is_leaf:
            return lost("a function that torch does not show")
        if t.ndim == 0 or (self.received and self._inside):
            return CONSTANT
        return self._as_data(t)

    def _as_data(self, t: Tensor) -> Layout | Kind:
        """The loop's own tensor: it may be the batch if it has an entry for each example."""
        assert self.live is not None
        if t.is_nested:
            return lost("a nested tensor")
        if t.ndim > self.batch_dim and t.shape[self.batch_dim] == self.live.B:
            return Layout(self.batch_dim, data=True)
        self._shapes.append(tuple(t.shape))
        return OUTSIDE

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
        """The layout of a batched tensor without the claims that are proven; else None."""
        info = self._find(t) if isinstance(t, Tensor) else None
        if type(info) is not Layout or (info.data and self.anchored):
            return None
        return self._settled(info)

    def _any_batched(self, infos: Sequence[Any]) -> bool:
        """Is one of them made of the batch?"""
        return any(
            x is MIXED or x is PAIRS or type(x) is Lost or (type(x) is Layout and not x.data)
            for x in infos
        )

    def _anchor_operands(
        self, func: Any, tensors: Sequence[Tensor], infos: Sequence[Any]
    ) -> list[Any]:
        """Outside any module, data that meets a parameter is what the model receives."""
        if any(type(x) is Layout for x in infos):
            roots = sorted(r for x in infos if type(x) is Node for r in x.roots)
            name = f"the operand of '{name_of(func)}' with {', '.join(roots[:2])}"
            self.anchor([(name, t) for t in tensors])
        return [self._find(t) for t in tensors]

    def _settled(self, layout: Layout) -> Layout:
        open_ = frozenset(c for c in layout.claims if not self.claims.proven(c))
        return layout if open_ == layout.claims else self._one(replace(layout, claims=open_))

    # What an operation makes of the examples

    def _note_batched(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        assert self.live is not None
        name = name_of(func)
        if name == "setitem":
            self._note_written(*args)
            return
        for t in tensors_in(out):
            if name.startswith("new_") or self._only_converted(name, args):
                self._set(t, CONSTANT)
                continue
            found = self._follow(func, args, kwargs, t)
            if (args and t is args[0]) or t is kwargs.get("out"):
                self._note_in_place(t, found)
            self._remember(t, found)

    def _note_again(self, out: Any, known: Followed) -> bool:
        """Note the outputs of a cached call; False if their shapes differ from the cached ones."""
        outs = tensors_of(out)
        if outs is None or [t.shape for t in outs] != known.shapes:
            return False
        for t, info in zip(outs, known.infos, strict=True):
            self._set(t, info)
        return True

    def _note_data(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note outputs made of the loop's data: follow the layout, else judge by the shape."""
        assert self.live is not None
        find = self._data_layout
        for t in tensors_in(out):
            found = None
            if name_of(func) not in _COLLATED or self._as_data(t) is OUTSIDE:
                found = follow(func, args, kwargs, t, find, self.live.B)
            if type(found) is not Layout:
                found = self._as_data(t)
            self._info[t] = self._one(replace(found, data=True) if type(found) is Layout else found)

    def _data_layout(self, t: Any) -> Layout | None:
        info = self._find(t) if isinstance(t, Tensor) else None
        return info if type(info) is Layout else None

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Layout | Kind:
        """Where the examples are in the output."""
        assert self.live is not None
        if out.is_nested:
            return lost("a nested tensor")
        if self.live.B == 1:  # all that is made of the batch belongs to its only example
            return Layout(0, out.shape[0] if out.ndim else 1)
        tensors = tensors_in(args, kwargs)
        infos = [self._find(t) for t in tensors]
        found: Any = next((x for x in infos if type(x) is Lost), None)
        if self._of_pairs(func, args, kwargs, out):
            return PAIRS
        if found is None and PAIRS in infos:
            found = lost(name_of(func))
        if found is not None:
            return found if out.ndim else MIXED
        if not any(self._layout(t) is not None for t in tensors):
            return MIXED
        found = follow(func, args, kwargs, out, self._layout, self.live.B)
        return found if not isinstance(found, Layout) else self._proved(found)

    def _of_pairs(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> bool:
        """Is the output made of similarities, or are these its numbers?"""
        assert self.live is not None
        if out.is_nested:
            return False
        infos = [self._find(t) for t in tensors_in(args, kwargs)]
        if PAIRS not in infos:
            return pairs.made(func, args, out, self._layout, self.live.B)
        others = [type(x) in (Layout, Lost) or x is MIXED for x in infos]
        return pairs.kept(func, out, [x is PAIRS for x in infos], others)

    def _proved(self, found: Layout) -> Layout:
        """The layout, after noting what the operation has shown."""
        if found.proves:
            self.claims.prove(found.proves)
        if len(found.claims) > 1:
            self.claims.link(found.claims)
        return self._one(replace(found, proves=frozenset()))

    def _only_converted(self, name: str, args: Any) -> bool:
        """``positions.type_as(x)``: a constant stays one."""
        return name in ("to", "type_as") and bool(args) and self._find(args[0]) is CONSTANT

    def _note_written(self, target: Tensor, index: Any, value: Any) -> None:
        """``target[index] = value``: a target without examples takes the value's."""
        assert self.live is not None
        own = self._find(target)
        info = self._find(value) if isinstance(value, Tensor) else CONSTANT
        if self.live.B == 1:
            self._remember(target, Layout(0, target.shape[0] if target.ndim else 1))
            return
        indices = [self._find(t) for t in tensors_in(index)]
        by = lost("setitem")
        if type(own) is Lost or type(info) is Lost:
            found: Any = own if type(own) is Lost else info
        elif (layout := self._layout(value)) is not None:
            before = self._layout(target)
            made = None
            if before is not None or own is CONSTANT or type(own) is Layout:
                made = written(target, index, value, layout, before, self.live.B)
            found = by if made is None else self._proved(made)
        elif type(own) is Layout and not own.data:
            return  # the same for all examples, or no example's: they stay where they are
        else:
            marked = any(type(x) in (Lost, Layout) for x in indices)
            found = by if marked else MIXED
        self._note_in_place(target, found)
        self._remember(target, found)

    def _note_in_place(self, t: Tensor, found: Any) -> None:
        """A tensor is written to: others that share its memory now hold something else, too. What
        is the same for all examples moves none."""
        before = self._find(t)
        if found == before or isinstance(t, FakeTensor):
            return
        memory = t.untyped_storage().data_ptr()
        for other, info in list(self._info.alive()):
            if other is t or type(info) is Node or _at(other) != memory:
                continue
            if found is not MIXED:
                self._info[other] = lost("an operation that writes in place")
            elif info is CONSTANT:
                self._info[other] = MIXED

    def _remember(self, t: Tensor, info: Layout | Kind) -> None:
        self._set(t, self._one(info))

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
        if type(info) in (Layout, Lost) or info in (MIXED, PAIRS):  # asked for its type
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


def _refuse(error: BatchError, backward: bool) -> None:
    raise error


def _is_random(args: Any, kwargs: Any) -> bool:
    """``dropout(x, p, training)`` does nothing when it is not training or p is 0."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and p != 0


def _at(t: Tensor) -> int:
    """Where its memory begins; 0 where it has none of its own."""
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # inside vmap, sparse tensors
        return 0

"""Follows the examples through the operations of a forward pass.

``follow`` gives the layout of an operation's output from those of its inputs, or None where the
examples are no longer apart (a mean over the batch, routing of tokens, an unknown operation). It
goes by provenance: with batch size = sequence length a guess by size is wrong and no sum check
notices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from inrun.layout import Layout, name_of, tensors_in
from inrun.named import agree as _agree
from inrun.named import einsum, gather

# A size no real dimension has: an operation run on shapes alone, with this in the place of the
# examples, shows where they went.
_MARK = 100003


Find = Callable[[Any], "Layout | None"]
Rule = Callable[
    [Callable[..., Any], tuple[Any, ...], dict[str, Any], Tensor, Find], "Layout | None"
]


def follow(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Tensor,
    find: Find,
    B: int,
) -> Layout | None:
    """The layout of ``out = func(*args, **kwargs)``, or None where it cannot be told.

    ``find`` gives the layout of a batched tensor and None for any other.
    """
    if B == 1:  # all that is made of the batch belongs to its only example
        return _whole(out) if _batched(args, kwargs, find) else None
    if out.ndim == 0:
        return None
    if "input" in kwargs:  # wherever it is given, it is the first argument
        args = (kwargs["input"], *args)
        kwargs = {k: x for k, x in kwargs.items() if k != "input"}
    rule = _RULES.get(name_of(func))
    try:
        if rule is not None:
            layout = rule(func, args, kwargs, out, find)
        elif len(tensors_in(args, kwargs)) == 1:
            layout = _probe(func, args, kwargs, out, find)
        elif name_of(func) in _ELEMENTWISE:
            layout = _broadcast(func, args, kwargs, out, find)
        else:
            layout = None
    except (ValueError, IndexError, TypeError, RuntimeError, NotImplementedError):
        return None
    if layout is None or not 0 <= layout.dim < out.ndim:
        return None
    return layout if out.shape[layout.dim] == layout.outer * B * layout.inner else None


def _batched(args: Any, kwargs: Any, find: Find) -> list[tuple[Tensor, Layout]]:
    pairs = [(t, find(t)) for t in tensors_in(args, kwargs)]
    return [(t, layout) for t, layout in pairs if layout is not None]


def _whole(x: Tensor) -> Layout:
    """All numbers of the tensor belong to one example."""
    return Layout(0, x.shape[0] if x.ndim else 1)


def _broadcast(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Element-wise operations: dimensions are aligned from the right."""
    if out.shape != torch.broadcast_shapes(*(t.shape for t in tensors_in(args, kwargs))):
        return None
    return _from_right(func, args, kwargs, out, find)


def _from_right(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    pairs = _batched(args, kwargs, find)
    shifted = [(t, replace(x, dim=x.dim + out.ndim - t.ndim)) for t, x in pairs]
    if _agree([x for _, x in shifted]) is None:  # a constant from outside may have B entries too
        shifted = [(t, x) for t, x in shifted if not x.guessed or t.ndim == out.ndim]
    return _agree([x for _, x in shifted])


def _written_dim(target: Tensor, index: Any, value: Tensor, layout: Layout, B: int) -> int | None:
    """``target[index] = value``: the dimension of the target that takes the value's examples."""
    size = layout.outer * B * layout.inner
    places = []
    for dim in (d for d, n in enumerate(target.shape) if n == size):
        shape = (*target.shape[:dim], _MARK, *target.shape[dim + 1 :])
        part = torch.empty(shape, device="meta")[index].shape
        if _MARK in part and len(part) - part.index(_MARK) == value.ndim - layout.dim:
            places.append(dim)
    return places[0] if len(places) == 1 else None


def written(target: Tensor, index: Any, value: Tensor, layout: Layout, B: int) -> Layout | None:
    """The layout of a tensor without examples after ``target[index] = value``."""
    if B == 1:
        return _whole(target)
    if any(
        isinstance(i, (Tensor, list)) for i in (index if isinstance(index, tuple) else (index,))
    ):
        return None
    dim = _written_dim(target, index, value, layout, B)
    return None if dim is None else replace(layout, dim=dim)


_PROBED: dict[Any, int | None] = {}


def _probe(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Run the operation on shapes alone, with a recognisable size for the examples."""
    ((x, layout),) = _batched(args, kwargs, find)
    plain = tree_map(lambda leaf: None if leaf is x else leaf, (list(args), kwargs))
    key = (func, x.shape, x.dtype, layout.dim, repr(plain))
    if key not in _PROBED:
        if len(_PROBED) > 10_000:
            _PROBED.clear()
        _PROBED[key] = _probe_dim(func, args, kwargs, x, layout.dim)
    dim = _PROBED[key]
    return None if dim is None else replace(layout, dim=dim)


def _probe_dim(func: Any, args: Any, kwargs: Any, x: Tensor, dim: int) -> int | None:
    shape = (*x.shape[:dim], _MARK, *x.shape[dim + 1 :])
    marked = torch.empty(shape, dtype=x.dtype, device="meta")
    args, kwargs = tree_map(lambda leaf: marked if leaf is x else leaf, (list(args), kwargs))
    with torch.no_grad():
        result = func(*args, **kwargs)
    shapes = {tuple(t.shape) for t in tensors_in(result)}
    dims = {s.index(_MARK) for s in shapes if s.count(_MARK) == 1}
    return dims.pop() if len(dims) == 1 else None


def _reshape(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Same numbers in the same order: find the batch factor again in the new shape."""
    x = args[0]
    layout = find(x)
    if layout is None:
        return None
    before = math.prod(x.shape[: layout.dim]) * layout.outer
    after = layout.inner * math.prod(x.shape[layout.dim + 1 :])
    left = 1
    for dim, size in enumerate(out.shape):
        right = math.prod(out.shape[dim + 1 :])
        if before % left == 0 and after % right == 0 and left <= before and right <= after:
            outer, inner = before // left, after // right
            if size % (outer * inner) == 0:
                return Layout(dim, outer, inner)
        left *= size
    return None


def _first(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    return find(args[0] if args else next(iter(kwargs.values())))


def _first_rows(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Convolution, pooling and losses per element: examples stay in dimension 0."""
    layout = _first(func, args, kwargs, out, find)
    return layout if layout is not None and layout.dim == 0 else None


def _linear(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    x, weight = args[0], kwargs.get("weight", args[1] if len(args) > 1 else None)
    layout = find(x)
    if layout is None or layout.dim == x.ndim - 1:
        return None
    mixed = isinstance(weight, Tensor) and weight.requires_grad and find(weight) is not None
    return None if mixed else layout  # examples with examples: each number is of two


def _embedding(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``F.embedding(ids, weight)`` and ``torch.embedding(weight, ids)``: ids keep their place."""
    return next((x for t, x in _batched(args, kwargs, find) if not t.is_floating_point()), None)


def _matmul(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    x, y = tensors_in(args, kwargs)[-2:]
    if name_of(func) == "rmatmul":
        x, y = y, x
    found: list[Layout | None] = []
    if (layout := find(x)) is not None:
        r = x.ndim - layout.dim  # from the right: the last dimension, 1, is summed over
        if r == 1:
            return None
        found.append(replace(layout, dim=layout.dim if y.ndim == 1 else out.ndim - r))
    if (layout := find(y)) is not None:
        r = y.ndim - layout.dim
        if r == 2 or y.ndim == 1:
            return None
        found.append(replace(layout, dim=out.ndim - r + (x.ndim == 1 and r > 2)))
    return _agree(found)


def _attention(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Query, key and value: any of them may be made of parameters alone."""
    given = [*args[:3], *(kwargs[k] for k in ("query", "key", "value") if k in kwargs)]
    return _from_right(func, given, {}, out, find)


def _cat(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0)) % out.ndim
    layout = _agree([x for _, x in _batched(args, kwargs, find)])
    return layout if layout is not None and layout.dim != dim else None


def _stack(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % out.ndim
    layout = _agree([x for _, x in _batched(args, kwargs, find)])
    return layout and replace(layout, dim=layout.dim + (dim <= layout.dim))


def _repeat(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``repeat`` puts whole copies one after the other: the examples get an outer factor."""
    x = args[0]
    layout = find(x)
    if layout is None:
        return None
    dim = layout.dim + out.ndim - x.ndim
    return Layout(dim, layout.outer * (out.shape[dim] // x.shape[layout.dim]), layout.inner)


def _interleave(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    x, repeats = args[0], kwargs.get("repeats", args[1] if len(args) > 1 else None)
    layout, dim = find(x), kwargs.get("dim", args[2] if len(args) > 2 else None)
    if layout is None or not isinstance(repeats, int) or dim is None:
        return None
    same = dim % x.ndim != layout.dim
    return layout if same else replace(layout, inner=layout.inner * repeats)


def _index(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``x[...]``: positions by the probe; of index tensors only those that leave the examples."""
    x, index = args[0], args[1]
    layout = find(x)
    index = index if isinstance(index, tuple) else (index,)
    if not x.requires_grad and any(isinstance(i, Tensor) and find(i) for i in index):
        return _picked(index, find)  # data[rows]: the index says which examples these are
    if layout is None:
        return None
    if not any(isinstance(i, (Tensor, list)) for i in index):
        return _probe(func, (x, index), kwargs, out, find)
    if layout.dim == 0 and isinstance(index[0], slice) and index[0] == slice(None):
        return layout
    tensors = list(itertools.takewhile(lambda i: isinstance(i, Tensor), index))
    if (
        layout != Layout(0)
        or not tensors
        or any(isinstance(i, Tensor) for i in index[len(tensors) :])
    ):
        return None
    rows = tensors[0]  # x[arange(B), position]: one entry per example
    if rows.dtype != torch.long or rows.numel() != x.shape[0]:
        return None
    if not bool((rows.flatten() == torch.arange(rows.numel(), device=rows.device)).all()):
        return None
    dim = max(range(rows.ndim), key=lambda d: rows.shape[d])
    return Layout(max(t.ndim for t in tensors) - rows.ndim + dim)


def _recurrent(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Outputs [B, T, …] or [T, B, …] as the input has it; states are [layers, B, …]."""
    x = args[0]
    layout = find(x)
    if layout is None or x.ndim != 3:
        return None
    return layout if out.shape[:2] == x.shape[:2] else replace(layout, dim=1)


def _picked(index: tuple[Any, ...], find: Find) -> Layout | None:
    places = [k for k, i in enumerate(index) if isinstance(i, Tensor)]
    first = places[0]
    if places != list(range(first, first + len(places))) or Ellipsis in index[:first]:
        return None
    tensors = [index[k] for k in places]
    if any(t.dtype == torch.bool for t in tensors):
        return None  # a mask: how many it takes of each example is anybody's guess
    width = max(t.ndim for t in tensors)
    before = sum(not isinstance(i, int) for i in index[:first])
    found = [(t, x) for t in tensors if (x := find(t)) is not None]
    return _agree([replace(x, dim=before + width - t.ndim + x.dim) for t, x in found])


def _along(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``index_select``, ``scatter`` and friends along a dimension that is not the batch's."""
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    layout = find(x)
    if not isinstance(dim, int):
        return None
    if layout is None and name_of(func) == "index_select":
        return _picked((slice(None),) * (dim % x.ndim) + (kwargs.get("index", args[-1]),), find)
    if layout is None:
        return None
    return layout if dim % x.ndim != layout.dim else None


# Operations on several tensors that are known to be element-wise. Others with an output of the
# broadcast shape exist (``inner`` with square matrices): an unknown one loses the examples, loudly.
_ELEMENTWISE = frozenset((
    "add", "sub", "rsub", "subtract", "mul", "multiply", "div", "rdiv", "divide", "true_divide",
    "floor_divide", "floordiv", "rfloordiv", "remainder", "mod", "rmod", "fmod", "pow", "rpow",
    "float_power", "maximum", "minimum", "fmax", "fmin", "max", "min", "where", "lerp",
    "addcmul", "addcdiv", "atan2", "arctan2", "hypot", "copysign", "xlogy", "logaddexp",
    "logaddexp2", "heaviside", "ldexp", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
    "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "and", "or", "xor",
    "rand", "ror", "rxor", "iand", "ior", "isclose", "clamp", "clip", "masked_fill",
    "masked_scatter", "copy", "complex", "polar", "threshold", "hardtanh", "mse_loss",
    "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss", "poisson_nll_loss",
    "soft_margin_loss",
))  # fmt: skip

_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as",
         "reshape_as", "ravel", "unsafe_view"), _reshape),
    **dict.fromkeys(
        ("to", "type_as", "type", "clone", "detach", "contiguous", "float", "double", "half",
         "bfloat16", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
         "feature_dropout", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm",
         "bucketize", "zeros_like", "ones_like", "empty_like", "full_like",
         "rand_like", "randn_like", "softmax", "log_softmax", "cumsum", "requires_grad",
         "native_layer_norm", "normalize", "one_hot", "prelu"), _first),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
         "conv_transpose3d", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d",
         "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
         "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
         "adaptive_max_pool3d", "interpolate", "unfold", "fold", "pixel_shuffle",
         "cross_entropy", "nll_loss", "bilinear", "grid_sample"), _first_rows),
    **dict.fromkeys(("linear",), _linear),
    **dict.fromkeys(("embedding",), _embedding),
    **dict.fromkeys(
        ("matmul", "rmatmul", "bmm", "mm", "mv", "addmm", "baddbmm", "addbmm"), _matmul),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _from_right),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(
        ("index_select", "scatter", "scatter_add", "index_add",
         "index_copy", "index_fill"), _along),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(("gather", "take_along_dim"), gather),
    "scaled_dot_product_attention": _attention,
    "einsum": einsum,
    "stack": _stack,
    "repeat_interleave": _interleave,
    "getitem": _index,
}  # fmt: skip


def register_layout(func: Callable[..., Any], rule: Rule) -> None:
    """Say where an operation of your own leaves the examples.

    ``rule(func, args, kwargs, out, find)`` returns a :class:`Layout` or None; ``find(tensor)``
    gives the layout of an input.
    """
    _RULES[name_of(func)] = rule

"""Follows the examples through the operations of a forward pass.

``follow`` gives the layout of an operation's output from those of its inputs, ``MIXED`` where the
output is the same for all examples (a mean over the batch), and ``lost(by)`` where it cannot tell:
rows that move (``flip``, ``roll``, ``sort`` along the batch), routing of tokens, any operation
that is not in the table. It goes by what an operation is known to do: with batch size = sequence
length a guess by size is wrong and no sum check notices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.tensors.indexing import MARK, along, gather, index
from inrun.tensors.layout import (
    MIXED,
    Find,
    Kind,
    Layout,
    agree,
    batched,
    lost,
    name_of,
    tensors_in,
)
from inrun.tensors.operations import (
    ALONG,
    ELEMENTWISE,
    PICKS,
    REARRANGED,
    REDUCTIONS,
    is_pointwise,
)
from inrun.tensors.products import einsum, linear, matmul
from inrun.tensors.recurrent import CELLS, SEQUENCES, cell_layout, sequence_layout
from inrun.torch_compat import tree_map

LayoutRule = Callable[
    [Callable[..., Any], tuple[Any, ...], dict[str, Any], Tensor, Find], "Layout | Kind | None"
]


def follow(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Tensor,
    find: Find,
    B: int,
) -> Layout | Kind:
    """The layout of ``out = func(*args, **kwargs)``, or what became of the examples.

    ``find`` gives the layout of a batched tensor and None for any other.
    """
    if out.ndim == 0:
        return lost(name_of(func)) if name_of(func) in PICKS else MIXED
    if "input" in kwargs:  # wherever it is given, it is the first argument
        args = (kwargs["input"], *args)
        kwargs = {k: x for k, x in kwargs.items() if k != "input"}
    name = name_of(func)
    rule = _LAYOUT_RULES.get(name) or (_broadcast if is_pointwise(name) else None)
    try:
        found = None if rule is None else rule(func, args, kwargs, out, find)
    except (ValueError, IndexError, TypeError, RuntimeError, NotImplementedError):
        return lost(name)
    if not isinstance(found, Layout):
        return found or lost(name)
    fits = 0 <= found.dim < out.ndim and out.shape[found.dim] == found.outer * B * found.inner
    return found if fits else lost(name)


def _broadcast(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Element-wise operations: dimensions are aligned from the right."""
    if out.shape != torch.broadcast_shapes(*(t.shape for t in tensors_in(args, kwargs))):
        return None
    return _from_right(func, args, kwargs, out, find)


def _from_right(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    pairs = batched(args, kwargs, find)
    return agree([replace(x, dim=x.dim + out.ndim - t.ndim) for t, x in pairs])


def _filled_from(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``x.masked_scatter(mask, source)`` takes the source's numbers in their order."""
    given = [*args, *kwargs.values()]
    moved = any(find(t) is not None for t in given[2:])
    return None if moved else _broadcast(func, given[:2], {}, out, find)


def _where(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """With one argument it lists positions."""
    several = len(args) + len(kwargs) > 1
    return _broadcast(func, args, kwargs, out, find) if several else None


_PROBED: dict[Any, int | None] = {}


def _rearranged(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Operations that move or cut whole dimensions, and take no part of one in another order: run
    on shapes alone, with a recognisable size for the examples."""
    ((x, layout),) = batched(args, kwargs, find)
    plain = tree_map(lambda leaf: None if leaf is x else leaf, (list(args), kwargs))
    key = (func, x.shape, x.dtype, layout.dim, repr(plain))
    if key not in _PROBED:
        if len(_PROBED) > 10_000:
            _PROBED.clear()
        _PROBED[key] = _probe_dim(func, args, kwargs, x, layout.dim)
    dim = _PROBED[key]
    return None if dim is None else replace(layout, dim=dim)


def _probe_dim(func: Any, args: Any, kwargs: Any, x: Tensor, dim: int) -> int | None:
    shape = (*x.shape[:dim], MARK, *x.shape[dim + 1 :])
    marked = torch.empty(shape, dtype=x.dtype, device="meta")
    args, kwargs = tree_map(lambda leaf: marked if leaf is x else leaf, (list(args), kwargs))
    with torch.no_grad():
        result = func(*args, **kwargs)
    shapes = {tuple(t.shape) for t in tensors_in(result)}
    dims = {s.index(MARK) for s in shapes if s.count(MARK) == 1}
    return dims.pop() if len(dims) == 1 else None


def _reduced(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | Kind | None:
    """``sum``, ``mean``, ``max``: over other dimensions, or over the examples."""
    if len(tensors_in(args, kwargs)) > 1:
        return _broadcast(func, args, kwargs, out, find)
    return _rearranged(func, args, kwargs, out, find) or MIXED


def _counted(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Kind:
    """``bincount``, ``histc``: how often something occurs in the whole batch."""
    return MIXED


def _elsewhere(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``flip``, ``sort``, ``fft``: along dimensions that are not the examples'."""
    x = args[0] if args else kwargs["input"]
    layout = find(x)
    if layout is None or x.ndim != out.ndim:
        return None
    return None if layout.dim in named_dimensions(func, args, kwargs, x.ndim) else layout


def named_dimensions(func: Any, args: Any, kwargs: Any, ndim: int) -> list[int]:
    """The dimensions along which ``flip``, ``sort``, ``fft`` and friends work; all of them where
    none is named and none is usual."""
    name = name_of(func)
    place, missing = ALONG[name]
    dims = kwargs.get("dims", kwargs.get("dim"))
    if dims is None and len(args) > place:
        dims = args[place:] if name == "flip" else args[place]
    if dims is None:
        dims = missing
    given = dims if isinstance(dims, (list, tuple)) else [dims]
    flat = [d for e in given for d in (e if isinstance(e, (list, tuple)) else [e])]
    return list(range(ndim)) if None in flat else [d % ndim for d in flat]


def _matrices(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Functions of single matrices: the examples are in front of these."""
    layout = _first(func, args, kwargs, out, find)
    return layout if layout is not None and layout.dim < args[0].ndim - 2 else None


def _padded(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``F.pad`` counts from the last dimension, two numbers for each."""
    x, pad = args[0], kwargs.get("pad", args[1] if len(args) > 1 else ())
    layout = find(x)
    if layout is None:
        return None
    place = 2 * (x.ndim - 1 - layout.dim)
    return layout if not any(pad[place : place + 2]) else None


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
                return replace(layout, dim=dim, outer=outer, inner=inner)
        left *= size
    return None


def _first(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    return find(args[0] if args else next(iter(kwargs.values())))


def _first_rows(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Convolution, pooling and losses per element: examples stay in dimension 0, which channels or
    classes have where there is no dimension for examples."""
    x, name = (args[0] if args else kwargs["input"]), name_of(func)
    layout = find(x)
    if layout is None or layout.dim != 0:
        return None
    if name[-2:] in ("1d", "2d", "3d"):
        ndim = 2 + int(name[-2])
    else:
        ndim = {
            "pixel_shuffle": 4,
            "pixel_unshuffle": 4,
            "unfold": 3,
            "fold": 3,
            "grid_sample": 4,
        }.get(name, 2)
    return agree([y for _, y in batched(args, kwargs, find)]) if x.ndim >= ndim else None


def _embedding(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``F.embedding(ids, weight)`` and ``torch.embedding(weight, ids)``: ids keep their place. A
    table made of examples would move them."""
    found = batched(args, kwargs, find)
    if any(t.is_floating_point() for t, _ in found):
        return None
    return found[0][1] if found else None


def _attention(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Query, key and value: any of them may be made of parameters alone. Keys and values are
    summed over; a query keeps its place."""
    names = ("query", "key", "value")
    given = [*args[:3], *(kwargs[k] for k in names if k in kwargs)]
    given.append(kwargs.get("attn_mask", args[3] if len(args) > 3 else None))
    for t, layout in batched(given, {}, find):
        if t.ndim - layout.dim <= (1 if t is given[0] else 2):
            return None
    return _from_right(func, given, {}, out, find)


def _cat(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """Beside each other in another dimension."""
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0)) % out.ndim
    layout = agree([x for _, x in batched(args, kwargs, find)])
    return layout if layout is not None and layout.dim != dim else None


def _stack(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % out.ndim
    layout = agree([x for _, x in batched(args, kwargs, find)])
    return layout and replace(layout, dim=layout.dim + (dim <= layout.dim))


def _repeat(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``repeat`` puts whole copies one after the other: the examples get an outer factor."""
    x = args[0]
    layout = find(x)
    if layout is None:
        return None
    dim = layout.dim + out.ndim - x.ndim
    copies = out.shape[dim] // x.shape[layout.dim]
    return replace(layout, dim=dim, outer=layout.outer * copies)


def _interleave(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    x, repeats = args[0], kwargs.get("repeats", args[1] if len(args) > 1 else None)
    layout, dim = find(x), kwargs.get("dim", args[2] if len(args) > 2 else None)
    if layout is None or not isinstance(repeats, int) or dim is None:
        return None
    same = dim % x.ndim != layout.dim
    return layout if same else replace(layout, inner=layout.inner * repeats)


def _bags(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """``F.embedding_bag``: the bags are the rows of a 2-D input, or start at ``offsets``."""
    ids, offsets = args[0], kwargs.get("offsets", args[2] if len(args) > 2 else None)
    if func is not F.embedding_bag or ids.is_floating_point():
        return None
    given = args[8] if len(args) > 8 else kwargs.get("per_sample_weights")
    weights = [find(t) for t in (given,) if t is not None]
    found = (
        [x for x in (find(ids), *weights) if x is not None] if ids.ndim == 2 else [find(offsets)]
    )
    layout = agree(found)
    return layout if layout is not None and layout.dim == 0 else None


_LAYOUT_RULES: dict[str, LayoutRule] = {
    **dict.fromkeys(ELEMENTWISE, _broadcast),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(REARRANGED, _rearranged),
    **dict.fromkeys(("bincount", "histc"), _counted),
    **dict.fromkeys(ALONG, _elsewhere),
    **dict.fromkeys(
        ("inverse", "linalg_inv", "linalg_det", "det", "linalg_cholesky", "cholesky",
         "linalg_matrix_exp", "matrix_exp", "linalg_pinv", "pinverse"), _matrices),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as",
         "reshape_as", "ravel", "unsafe_view"), _reshape),
    **dict.fromkeys(
        ("to", "type_as", "type", "clone", "detach", "contiguous", "dropout", "dropout1d",
         "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
         "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm",
         "bucketize", "zeros_like", "ones_like", "empty_like", "full_like",
         "rand_like", "randn_like", "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp",
         "requires_grad", "native_layer_norm", "normalize", "one_hot", "prelu"), _first),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
         "conv_transpose3d", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d",
         "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
         "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
         "adaptive_max_pool3d", "lp_pool1d", "lp_pool2d", "pixel_unshuffle", "channel_shuffle",
         "local_response_norm", "interpolate", "unfold", "fold", "pixel_shuffle",
         "cross_entropy", "nll_loss", "bilinear", "grid_sample"), _first_rows),
    **dict.fromkeys(
        ("matmul", "rmatmul", "bmm", "mm", "mv", "addmm", "baddbmm", "addbmm", "addmv"), matmul),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _from_right),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(
        ("index_select", "scatter", "scatter_add", "index_add",
         "index_copy", "index_fill"), along),
    **dict.fromkeys(SEQUENCES, sequence_layout),
    **dict.fromkeys(CELLS, cell_layout),
    **dict.fromkeys(("gather", "take_along_dim"), gather),
    **dict.fromkeys(("linear", "grouped_mm", "grouped_mm_fallback"), linear),
    "embedding": _embedding,
    "embedding_bag": _bags,
    "scaled_dot_product_attention": _attention,
    "einsum": einsum,
    "stack": _stack,
    "repeat_interleave": _interleave,
    "getitem": index,
    "pad": _padded,
    "where": _where,
    "masked_scatter": _filled_from,
}  # fmt: skip


def register_layout(func: Callable[..., Any] | str, rule: LayoutRule) -> None:
    """Say where an operation of your own leaves the examples.

    ``rule(func, args, kwargs, out, find)`` returns a :class:`Layout` or None; ``find(tensor)``
    gives the layout of an input.
    """
    _LAYOUT_RULES[func if isinstance(func, str) else name_of(func)] = rule

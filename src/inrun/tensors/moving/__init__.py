"""Moves an owner map by the operation that moves the tensor it belongs to.

``moved`` gives the map of an operation's output from those of its inputs, ``MIXED`` where the
output is the same for all examples, and raises ``UnknownOwnerError`` where it cannot tell. Each
rule is the operation itself, applied to the map. Numbers that are computed from several examples
keep the owner of the place they are in (BatchNorm, attention, a softmax over the batch).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from inrun.tensors.layout import MIXED, Kind, name_of
from inrun.tensors.moving import indexing, places, products
from inrun.tensors.moving.indexing import written
from inrun.tensors.moving.move import Move
from inrun.tensors.operations import ALONG, ELEMENTWISE, PICKS, REDUCTIONS, is_pointwise
from inrun.tensors.owners import UnknownOwnerError, together
from inrun.tensors.recurrent import CELLS, SEQUENCES

__all__ = ["SUMS_PRODUCTS", "Move", "moved", "written"]

# Where all operands have layouts and these do not fit, a sum or product mixes examples.
SUMS_PRODUCTS = frozenset((
    *REDUCTIONS, "matmul", "rmatmul", "bmm", "mm", "mv", "linear", "einsum", "addmm", "baddbmm",
    "scaled_dot_product_attention",
))  # fmt: skip


def moved(move: Move) -> Tensor | Kind:
    """The map of the output of an operation."""
    name = name_of(move.func)
    if move.out.ndim == 0 and name not in PICKS:
        maps = [m for _, m in move.maps(move.args, move.kwargs)]
        try:
            alone = all(m.numel() == 1 for m in maps)  # all numbers are one example's
            return together([m.view(()) for m in maps], move.agree) if alone else MIXED
        except UnknownOwnerError:  # numbers of several examples: a sum of their losses
            return MIXED
    rule = _MOVE_RULES.get(name) or (places.aligned if is_pointwise(name) else None)
    if rule is None:
        raise UnknownOwnerError
    if "input" in move.kwargs:
        move.args = (move.kwargs["input"], *move.args)
        move.kwargs = {k: x for k, x in move.kwargs.items() if k != "input"}
    found = rule(move)
    if isinstance(found, Tensor):
        fits = zip(found.shape, move.out.shape, strict=True)
        if not all(n in (1, size) for n, size in fits):
            raise UnknownOwnerError
    return found


MoveRule = Callable[[Move], "Tensor | Kind"]
_MOVE_RULES: dict[str, MoveRule] = {
    **dict.fromkeys(ELEMENTWISE, places.aligned),
    **dict.fromkeys(REDUCTIONS, products.reduced),
    **dict.fromkeys(ALONG, places.along),
    **dict.fromkeys(
        ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT",
         "H", "mH", "adjoint", "unbind", "split", "split_with_sizes", "chunk", "unsafe_chunk",
         "unsafe_split", "tensor_split", "narrow", "select", "diagonal", "unsqueeze"), places.view),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", "ravel",
         "unsafe_view"), places.reshape),
    **dict.fromkeys(
        ("to", "type_as", "type", "clone", "detach", "contiguous", "dropout", "layer_norm",
         "rms_norm", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like",
         "randn_like", "softmax", "log_softmax", "cumsum", "requires_grad", "normalize",
         "one_hot", "bucketize", "alpha_dropout"), places.same),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), places.expand),
    **dict.fromkeys(("repeat", "tile"), places.repeat),
    **dict.fromkeys(("cat", "concat", "concatenate"), places.cat),
    **dict.fromkeys(("hstack", "vstack", "row_stack"), places.named_stack),
    **dict.fromkeys(("index_add", "index_copy"), indexing.index_write),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), indexing.scatter),
    **dict.fromkeys(("gather", "take_along_dim"), indexing.gather),
    **dict.fromkeys(("nonzero", "argwhere"), indexing.positions),
    **dict.fromkeys(
        ("matmul", "rmatmul", "bmm", "mm", "mv", "linear", "einsum", "addmm", "baddbmm"),
        products.contracted),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "batch_norm", "group_norm", "instance_norm", "max_pool1d",
         "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
        places.rows),
    **dict.fromkeys(("cross_entropy", "nll_loss"), products.cross_entropy),
    **dict.fromkeys(("pack_padded_sequence", "pad_packed_sequence"), products.packed),
    **dict.fromkeys(("grouped_mm", "grouped_mm_fallback"), products.grouped),
    **dict.fromkeys(("bincount", "histc"), lambda move: MIXED),
    **dict.fromkeys(SEQUENCES, products.recurrent),
    **dict.fromkeys(CELLS, products.cell),
    "copy": places.copied,
    "diff": places.diff,
    "stack": places.stack,
    "flip": places.flip, "fliplr": places.fixed_flip(1), "flipud": places.fixed_flip(0),
    "roll": places.roll,
    "repeat_interleave": places.interleave,
    "pad": places.pad,
    "getitem": indexing.getitem,
    "index_select": indexing.index_select,
    "index_put": indexing.index_put,
    "masked_select": indexing.masked_select,
    "where": places.where,
    "scaled_dot_product_attention": products.attention,
    "embedding": products.embedding,
}  # fmt: skip

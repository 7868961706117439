"""Owner maps through operations that keep, move, cut or repeat whole slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inrun.tensors.follow import named_dimensions
from inrun.tensors.layout import MIXED, Kind, name_of, tensors_in
from inrun.tensors.moving.indexing import gathered, positions
from inrun.tensors.moving.move import Move, right, slim, varying
from inrun.tensors.owners import NOBODY, UnknownOwnerError, expanded, reshaped, together
from inrun.torch_compat import tree_map

# Same places


def aligned(move: Move) -> Tensor | Kind:
    """Element-wise operations: dimensions are aligned from the right."""
    shapes = [t.shape for t in tensors_in(move.args, move.kwargs)]
    if move.out.shape != torch.broadcast_shapes(*shapes):
        raise UnknownOwnerError
    maps = [right(m, move.out.ndim) for _, m in move.maps(move.args, move.kwargs)]
    if move.out.dtype == torch.bool and len({varying(m) for m in maps}) > 1:
        return MIXED  # a mask of pairs of positions
    found = together(maps, move.agree)
    move.beside = len(maps) > 1 and found.is_cpu
    return found


def copied(move: Move) -> Tensor:
    """``x.copy_(y)``: nothing is left of what was there."""
    source = move.given(1, "src", "other")
    if (m := move.find(source)) is None:
        raise UnknownOwnerError
    return right(m, move.out.ndim)


def where(move: Move) -> Tensor | Kind:
    if len(move.args) + len(move.kwargs) > 1:
        return aligned(move)
    return positions(move)


def same(move: Move) -> Tensor:
    """The output has the places of the first argument, and perhaps more dimensions behind."""
    m = move.find(move.first)
    if m is None:
        raise UnknownOwnerError
    return m.view([*m.shape, *[1] * (move.out.ndim - m.ndim)])


def rows(move: Move) -> Tensor:
    """Convolution, pooling and losses per element: examples in dimension 0, channels in 1."""
    x = move.first
    m = move.find(x)
    if m is None or varying(m) not in ((), (0,)) or x.ndim < 2:
        raise UnknownOwnerError
    maps = [move.find(t) for t in tensors_in(move.args[1:], move.kwargs)]
    flat = [m.flatten(), *(k.flatten() for k in maps if k is not None)]
    return together(flat, move.agree).view([-1] + [1] * (move.out.ndim - 1))


def along(move: Move) -> Tensor | Kind:
    """``sort``, ``fft`` and friends: owners stay where they are, unless rows are sorted."""
    x, name = move.first, name_of(move.func)
    m = move.find(x)
    if m is None or x.ndim != move.out.ndim:
        raise UnknownOwnerError
    dims = named_dimensions(move.func, move.args, move.kwargs, x.ndim)
    if not any(m.shape[d] > 1 for d in dims):
        return m
    if name not in ("sort", "argsort", "topk") or len(dims) != 1:
        raise UnknownOwnerError
    chosen = move.result if isinstance(move.result, Tensor) else move.result[1]
    if move.out is chosen:
        return MIXED  # places in the order of all examples
    return gathered(move, m, x.shape, dims[0], chosen)


def diff(move: Move) -> Tensor | Kind:
    """``torch.diff`` of positions, which begin again with each document: a difference of neighbours
    keeps the owner of the later one, where it lies. (Of numbers with gradients it is nobody's.)"""
    x, n = move.first, move.given(1, "n", default=1)
    dim = move.given(2, "dim", default=-1) % x.ndim
    ends = [move.given(k, name, default=None) for k, name in ((3, "prepend"), (4, "append"))]
    m = move.find(x)
    if m is None or m.shape[dim] == 1 or x.is_floating_point() or x.is_complex():
        return along(move)
    parts = [t for t in (ends[0], x, ends[1]) if t is not None]
    owners = torch.cat([expanded(move.map_of(t), t.shape) for t in parts], dim)
    return owners.narrow(dim, n, owners.shape[dim] - n)


# Dimensions moved, cut, repeated


def view(move: Move) -> Tensor:
    """Operations that return views: applied to the map, expanded without memory to the tensor's
    shape. Dimensions along which the owner does not change keep the stride 0."""
    x = move.first
    m = move.find(x)
    if m is None:
        raise UnknownOwnerError
    whole = expanded(m, x.shape)
    args, kwargs = tree_map(
        lambda leaf: whole if leaf is x else leaf, (list(move.args), move.kwargs)
    )
    found = tensors_in(move.func(*args, **kwargs))
    outs = tensors_in(move.result)
    place = next(i for i, t in enumerate(outs) if t is move.out)
    return slim(found[place])


def reshape(move: Move) -> Tensor:
    x = move.first
    m = move.find(x)
    if m is None:
        raise UnknownOwnerError
    return reshaped(m, tuple(x.shape), tuple(move.out.shape))


def expand(move: Move) -> Tensor:
    m = move.find(move.first)
    if m is None:
        raise UnknownOwnerError
    return right(m, move.out.ndim)


def flip(move: Move) -> Tensor:
    m = move.map_of(move.first)
    dims = named_dimensions(torch.flip, move.args, move.kwargs, m.ndim)
    return m.flip(dims)


def fixed_flip(dim: int) -> Callable[[Move], Tensor]:
    return lambda move: move.map_of(move.first).flip(dim)


def roll(move: Move) -> Tensor:
    x, dims = move.first, move.given(2, "dims", default=())
    m, shifts = move.map_of(x), move.given(1, "shifts")
    if dims in ((), [], None):
        return expanded(m, x.shape).roll(shifts)
    return m.roll(shifts, dims)


def repeat(move: Move) -> Tensor:
    x = move.first
    m = right(move.map_of(x), move.out.ndim)
    before = [1] * (move.out.ndim - x.ndim) + list(x.shape)
    times = [n // old if old else 1 for n, old in zip(move.out.shape, before, strict=True)]
    return m.repeat([r if n > 1 else 1 for r, n in zip(times, m.shape, strict=True)])


def interleave(move: Move) -> Tensor:
    x, repeats, dim = move.first, move.given(1, "repeats"), move.given(2, "dim")
    m = move.find(x)
    if m is None:  # a constant is repeated as often as each example says
        m = move.map_of(repeats)
        if x.ndim != 1:
            raise UnknownOwnerError
    if dim is None:
        m, dim = expanded(m, x.shape).flatten(), 0
    if m.shape[dim] == 1:
        return m
    if isinstance(repeats, Tensor):
        repeats, m = move.index(repeats, m)
        return m.repeat_interleave(repeats, dim, output_size=move.out.shape[dim])
    return m.repeat_interleave(repeats, dim)


def pad(move: Move) -> Tensor:
    """Numbers that are filled in belong to nobody; other modes copy slices of the tensor."""
    x, pad, mode = move.first, move.given(1, "pad"), move.given(2, "mode", default="constant")
    m = move.map_of(x)
    if mode != "constant":
        changed = [x.ndim - 1 - k // 2 for k, p in enumerate(pad) if p]
        if any(m.shape[d] > 1 for d in changed):
            raise UnknownOwnerError
        return m
    kept = [p if m.shape[x.ndim - 1 - k // 2] > 1 else 0 for k, p in enumerate(pad)]
    return torch.nn.functional.pad(m, kept, value=NOBODY)


def cat(move: Move) -> Tensor:
    parts = list(move.given(0, "tensors"))
    dim = move.given(1, "dim", "axis", default=0) % move.out.ndim
    return _joined(move, [(move.map_of(t), t.shape) for t in parts if t.numel()], dim)


def stack(move: Move) -> Tensor:
    parts = list(move.given(0, "tensors"))
    dim = move.given(1, "dim", default=0) % move.out.ndim
    pairs = [(move.map_of(t).unsqueeze(dim), t.unsqueeze(dim).shape) for t in parts]
    return _joined(move, pairs, dim)


def named_stack(move: Move) -> Tensor:
    """``hstack``, ``vstack``."""
    parts, rows = list(move.given(0, "tensors")), name_of(move.func) != "hstack"
    if rows and parts[0].ndim < 2:
        pairs = [(move.map_of(t).view(1, -1), (1, t.numel())) for t in parts]
    else:
        pairs = [(move.map_of(t), t.shape) for t in parts]
    return _joined(move, pairs, 0 if rows or parts[0].ndim == 1 else 1)


def _joined(move: Move, pairs: Sequence[tuple[Tensor, Sequence[int]]], dim: int) -> Tensor:
    maps = [m for m, _ in pairs]
    if all(m.shape[dim] == 1 for m in maps):
        own = [m for m in maps if bool((m != NOBODY).any())] if _host(maps) else []
        if own and len(own) == len(maps):
            try:  # the same owners beside each other in another dimension
                return together(maps, _certain)
            except UnknownOwnerError:
                pass
    device = next((m.device for m in maps if not m.is_cpu), torch.device("cpu"))
    shape = [max(m.shape[d] for m in maps) for d in range(maps[0].ndim)]
    whole = []
    for m, size in pairs:
        wanted = [size[d] if d == dim else n for d, n in enumerate(shape)]
        whole.append(m.to(device, non_blocking=True).expand(wanted))
    return torch.cat(whole, dim)


def _host(maps: Sequence[Tensor]) -> bool:
    return all(m.is_cpu for m in maps)


def _certain(a: Tensor, b: Tensor) -> Tensor:
    if not torch.equal(a, b):
        raise UnknownOwnerError
    return a

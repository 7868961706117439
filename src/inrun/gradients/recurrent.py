"""Rules of recurrent operations: what recurrence.py finds, as records of the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from inrun.gradients.call import Call, Sizes, register_op
from inrun.gradients.records import Aligned, Dense, Pair, Record, wide_type
from inrun.gradients.recurrence import Recurrence, taken_apart, uses
from inrun.tensors.layout import Layout, to_rows
from inrun.tensors.recurrent import CELLS, SEQUENCES, options


def by_owner(rows: Tensor, lengths: Sequence[int], owner: Tensor, B: int) -> Tensor:
    """Rows [R, F] of packed sequences as [B, T, F]: step t of example k, zeros where it has none.

    ``owner`` [R] is the example of each row of the packed data, −1 if it is nobody's. An example
    has one row in each step at most; where it has two, all becomes NaN, so that no value is made of
    it. (To ask would be to wait for the device.)
    """
    T = len(lengths)
    at = [t for t, length in enumerate(lengths) for _ in range(length)]
    time = torch.tensor(at).to(rows.device, non_blocking=True)
    place = torch.where(owner < 0, B * T, owner * T + time)  # the last is thrown away
    counts = rows.new_zeros(B * T + 1).index_add(0, place, rows.new_ones(len(rows)))[:-1]
    out = rows.new_zeros(B * T + 1, rows.shape[-1]).index_copy(0, place, rows)[:-1]
    return torch.where(counts.max() > 1, torch.nan, out).view(B, T, -1)


def sorted_owner(lengths: Sequence[int]) -> Tensor:
    """The owner of each row [R] where example k is the k-th longest sequence: as
    ``pack_padded_sequence`` has them, before it puts them back in order."""
    return torch.tensor([n for length in lengths for n in range(length)])


def _to_examples(call: Call, found: Recurrence, owner: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Rows [R, F] → [B, T, F]."""
    B, lengths = call.B, found.lengths
    if B == 1 and owner is None:
        return lambda rows: rows[None]
    if found.packed:
        if owner is None:
            raise NotImplementedError(
                "which example a row of its packed data belongs to is unknown"
            )
        return lambda rows: by_owner(rows, lengths, owner, B)
    layout = Layout(1, call.layout.outer, call.layout.inner)
    return lambda rows: to_rows(rows.view(len(lengths), found.columns, -1), layout, B).reshape(
        B, -1, rows.shape[-1]
    )


def _sizes(call: Call) -> Sizes | None:
    """Numbers kept per example in either form, of all weights together."""
    try:
        found = taken_apart(call)
    except NotImplementedError:  # refused when δ arrives
        return None
    matrices = [call.leaves[i] for w in found.weights for i in (w.ih, w.hh, w.hr) if i is not None]
    rows = sum(found.lengths) // call.B
    return Sizes(sum(rows * sum(W.shape) for W in matrices), sum(W.numel() for W in matrices))


@register_op(*SEQUENCES, *CELLS, sizes=_sizes, several=True)
def recurrent(call: Call, deltas: Any) -> Iterator[tuple[Any, Record]]:
    """``deltas``: of the output, the last h and the last c; of a cell h and c."""
    yield from owned(call, (deltas,) if isinstance(deltas, Tensor) else deltas)


def owned(
    call: Call, deltas: Sequence[Tensor | None], owner: Tensor | None = None
) -> Iterator[tuple[Any, Record]]:
    """The same for packed sequences: ``owner`` [R] is the example of each row of the packed data,
    −1 if it is nobody's. A sequence belongs to one example."""
    found, listed, free = uses(call, deltas)
    examples = _to_examples(call, found, owner)
    for use in listed:
        node, delta = call.nodes[use.leaf], examples(use.delta)
        if use.a is None:
            yield node, Dense(delta.sum(1, dtype=wide_type(delta.dtype)))
            continue
        pair = Pair(examples(use.a), delta)
        yield node, pair.materialised(call.blocks) if call.form == "materialise" else pair
    for leaf, grad in free.items():
        yield call.nodes[leaf], _of_operand(call, found, leaf, grad, owner)


def _of_operand(
    call: Call, found: Recurrence, leaf: int, grad: Tensor, owner: Tensor | None
) -> Record:
    """A state or input made of parameters: sequence n has its own slice of it."""
    x = call.leaves[leaf]
    dim = _column_dim(call, leaf, found)
    if dim is not None and leaf not in found.states:  # the input, in rows
        grad = grad.view(len(found.lengths), found.columns, -1)
        grad = grad.movedim(1, dim) if x.ndim == 3 else grad[0]
    if call.B == 1 and owner is None:
        return Dense(grad.reshape(1, *x.shape))
    if dim is None:
        raise NotImplementedError("its packed data are made of parameters alone")
    layout = call.layout
    if layout.outer * layout.inner == 1 and owner is None:
        return Aligned(grad.movedim(dim, 0), dim)
    columns = torch.arange(found.columns, device=grad.device) // layout.inner % call.B
    if owner is not None:
        columns = owner[: found.columns]  # the first step has all sequences
    own = columns == torch.arange(call.B, device=grad.device)[:, None]
    shape = [call.B, *(1 for _ in x.shape)]
    shape[1 + dim] = found.columns
    return Dense(grad * own.view(shape))


def _column_dim(call: Call, leaf: int, found: Recurrence) -> int | None:
    """The dimension of a state or input that holds the sequences."""
    if call.name in CELLS:
        return 0
    if leaf in found.states:
        return 1
    asked = options(lambda position, keyword: call.value(position, keyword))
    return None if asked.packed else asked.columns

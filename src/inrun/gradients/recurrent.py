"""Rules of recurrent operations: what recurrence.py finds, as records of the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from inrun.gradients.call import Call, Sizes, register_op
from inrun.gradients.records import Aligned, Dense, Pair, Record, wide_type
from inrun.gradients.recurrence import Recurrence, taken_apart, uses
from inrun.tensors.layout import Layout, Spread, to_rows
from inrun.tensors.recurrent import CELLS, SEQUENCES, options


def _to_examples(call: Call, found: Recurrence) -> Callable[[Tensor], Tensor]:
    """Rows [R, F] → [B, T, F]. Rows of packed sequences are those of the packed data."""
    B, layout = call.B, call.layout
    if B == 1:
        return lambda rows: rows[None]
    if isinstance(layout, Spread):
        raise NotImplementedError("its examples lie in several dimensions")
    if found.packed:
        return lambda rows: to_rows(rows, layout, B).reshape(B, -1, rows.shape[-1])
    columns = Layout(1, layout.outer, layout.inner)
    return lambda rows: to_rows(
        rows.view(len(found.lengths), found.columns, -1), columns, B
    ).reshape(B, -1, rows.shape[-1])


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
    found, listed, free = uses(call, (deltas,) if isinstance(deltas, Tensor) else deltas)
    examples = _to_examples(call, found)
    for use in listed:
        node, delta = call.nodes[use.leaf], examples(use.delta)
        if use.a is None:
            yield node, Dense(delta.sum(1, dtype=wide_type(delta.dtype)))
            continue
        pair = Pair(examples(use.a), delta)
        dense = call.form == "materialise" and call.positions is None
        yield node, pair.materialised(call.blocks) if dense else pair
    for leaf, grad in free.items():
        yield call.nodes[leaf], _of_operand(call, found, leaf, grad)


def _of_operand(call: Call, found: Recurrence, leaf: int, grad: Tensor) -> Record:
    """A state or input made of parameters: sequence n has its own slice of it."""
    x = call.leaves[leaf]
    dim = _column_dim(call, leaf, found)
    if dim is not None and leaf not in found.states:  # the input, in rows
        grad = grad.view(len(found.lengths), found.columns, -1)
        grad = grad.movedim(1, dim) if x.ndim == 3 else grad[0]
    if call.B == 1:
        return Dense(grad.reshape(1, *x.shape))
    layout = call.layout
    if found.packed or dim is None or isinstance(layout, Spread):
        raise NotImplementedError("a state or the data of packed sequences is made of parameters")
    if layout.outer * layout.inner == 1:
        return Aligned(grad.movedim(dim, 0), dim)
    columns = torch.arange(found.columns, device=grad.device) // layout.inner % call.B
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

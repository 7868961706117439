"""Many targets in one pass: their batches side by side, their gradients told apart by the capture.

Q targets cost about as much as Q more examples in the batch. The records of products are kept in
ghost form, and the gradient of a parameter for each target is formed from them when the parameter
is scored, so Q gradients of the whole model never exist at once.

The loss of the joined batch must be the mean over its rows of what the targets' own losses are
means of. Whether that is so is measured at the first step and at every audit; where it is not, each
target has its own pass.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from inrun.capture import Capture
from inrun.errors import BatchError, CaptureError
from inrun.nodes import pull_back
from inrun.ops.records import Lookup, wide
from inrun.tap import Known, MicroBatch


@dataclass(frozen=True)
class Gradients:
    """Of a group of targets: a loss (or their mean), and gradients by parameter and targets."""

    loss: Tensor
    of: Callable[[str, slice], Tensor]  # [targets, *W], perhaps a view of memory used again
    scale: Tensor | None = None  # [targets]: what they are yet to be multiplied by


class Sweep:
    """Joins the targets' batches where that is right, and runs the pass."""

    def __init__(self, model: nn.Module, batch_dim: int) -> None:
        self.model = model
        self.allowed = batch_dim == 0
        self.verified = False
        self._watched: tuple[tuple[str, int], ...] = ()
        self._capture: Capture | None = None
        self._counted = Known()

    def close(self) -> None:
        if self._capture is not None:
            self._capture.close()

    def join(self, drawn: Sequence[Sequence[Any]]) -> list[int] | None:
        """The rows of each target in the joined batch; None where they do not fit together."""
        if not self.allowed or len(drawn) < 2:
            return None
        kinds, sizes, weights = set(), list[int](), set()
        for batches in drawn:
            rows = [_rows(b) for b in batches]
            if None in rows or len(set(rows)) > 1:
                return None
            sizes.append(sum(rows))  # type: ignore[arg-type]
            for batch in batches:
                kinds.add(_kind(batch))
                weights.add(self._weights(batch, rows[0] or 1))
        return sizes if len(kinds) == 1 and len(weights) == 1 else None

    def _weights(self, batch: Any, rows: int) -> Any:
        """How much counts in each row on average: ignored labels, masks of zeros and ones, weights
        of rows; and numbers that stand for the whole batch."""
        found = []
        for x in tree_flatten(batch)[0]:
            if not isinstance(x, Tensor) or not x.numel() or (x.is_floating_point() and x.ndim > 1):
                continue
            known = self._counted.get(x)
            if known is None or known[0] != x._version:  # asking a tensor on a GPU takes a while
                known = x._version, _counts(x, rows)
                self._counted[x] = known
            found.append(known[1])
        return tuple(found)

    def verify(
        self, loss: Callable[[], Tensor], single: Sequence[Tensor], sizes: Sequence[int],
        params: Mapping[str, Tensor],
    ) -> bool:  # fmt: skip
        """Is the joined loss the mean of the single ones, and can the pass be followed?"""
        try:
            found = self.run(loss, sizes, params).loss
        except (CaptureError, BatchError, RuntimeError) as why:
            return self._refuse(f"{type(why).__name__}: {why}")
        parts = torch.stack(list(single)).double().cpu()
        share = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        expected = (parts * share).sum()
        if not bool(expected.isfinite()):
            return False  # this step says nothing; the next one will
        half = found.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(
            found.device.type
        )
        tolerance = 2e-3 if half else 1e-5
        close = abs(float(found) - float(expected)) <= tolerance * float(
            (parts * share).abs().sum()
        )
        if close:
            self.verified = True
            return True
        return self._refuse(
            f"its loss is {float(found):.6g}, the mean of the targets' own {float(expected):.6g}"
        )

    def _refuse(self, why: str) -> bool:
        """From now on each target has its own pass, which takes so much longer that it is said."""
        self.allowed = self.verified = False
        warnings.warn(
            "the targets' validation batches cannot be joined in one pass, so each has its own and "
            f"a step takes longer ({why}). They can where the loss is a mean over rows and memory "
            "suffices for all of them at once",
            stacklevel=8,
        )
        return False

    def run(
        self, loss: Callable[[], Tensor], sizes: Sequence[int], params: Mapping[str, Tensor]
    ) -> Gradients:
        watched = tuple((k, id(p)) for k, p in params.items())
        if self._capture is None:
            self._capture = Capture(
                self.model, params, form="grouped", probe=True, directions=len(sizes)
            )
        elif self._watched != watched:
            self._capture.watch(params)
        self._watched = watched
        capture = self._capture
        with torch.enable_grad(), capture.batch(sum(sizes)) as micro:
            value = loss()
            torch.autograd.grad(value, [capture.trigger], allow_unused=True)
        capture.refuse_unproven([micro])
        scale = torch.tensor([sum(sizes) / n for n in sizes], dtype=torch.float64)
        at = {k: p.detach() for k, p in params.items()}  # the weights of the point
        return Gradients(
            value.detach(),
            lambda k, qs: _gradient(micro, sizes, k, qs, at),
            scale.to(value.device, non_blocking=True),
        )


def _gradient(
    micro: MicroBatch, sizes: Sequence[int], name: str, qs: slice, at: Mapping[str, Tensor]
) -> Tensor:
    """∇ℓ_q of one parameter for a range of targets, up to their scale, at these weights."""
    offsets = [0, *itertools.accumulate(sizes)]
    first, last = offsets[qs.start], offsets[qs.stop]
    chosen = sizes[qs]
    total: Tensor | None = None
    found = [(node, record) for node, records in micro.nodes([name]) for record in records]
    for node, record in sorted(found, key=lambda x: isinstance(x[1], Lookup)):  # these last
        if isinstance(record, Lookup) and node.param is not None and total is not None:
            total = record.map(lambda t: t[first:last]).add_groups(total, chosen)
            continue
        part = pull_back(node, record.some_groups(first, chosen), at)[name]
        total = part if total is None else total + part
    if total is None:
        like = at[name]
        return torch.zeros((len(chosen), *like.shape), dtype=wide(like).dtype, device=like.device)
    return total


def joined(batches: Sequence[Any]) -> Any:
    """Batches of one kind as one."""

    def one(*xs: Any) -> Any:
        return torch.cat(xs) if isinstance(xs[0], Tensor) and xs[0].ndim else xs[0]

    return tree_map(one, *batches)


def _rows(batch: Any) -> int | None:
    sizes = {x.shape[0] for x in tree_flatten(batch)[0] if isinstance(x, Tensor) and x.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def _kind(batch: Any) -> Any:
    """Batches of the same kind can be put side by side."""
    leaves, spec = tree_flatten(batch)
    return str(spec), tuple(
        (tuple(x.shape[1:]), x.ndim, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves
    )


def _counts(x: Tensor, rows: int) -> tuple[float | None, ...]:
    if x.ndim == 0:
        return (float(x),)
    if x.is_floating_point():
        return (float(x.sum()) / rows,)
    ignored = float((x == -100).sum()) / rows
    mask = x.dtype == torch.bool or (x.ndim > 1 and int(x.min()) >= 0 and int(x.max()) <= 1)
    return ignored, float(x.sum()) / rows if mask else None

"""Steady validation: how much of the validation set each step sees, a running mean of its gradient,
and halves of it, which show how much of a ranking is noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from inrun.errors import ValidationError
from inrun.ledger.tables import HALVES
from inrun.torch_compat import tree_leaves, tree_map
from inrun.validation.sweep import Gradients

PerStep: TypeAlias = int | Literal["all"] | None
WHOLE = 4  # batches: a set of so many is used whole at every step, unless per_step says otherwise


def size_of(source: Any) -> int | None:
    """How many batches a target has; None where that is not known."""
    try:
        return len(source)
    except TypeError:
        return None


def batches_per_step(name: str, size: int | None, per_step: PerStep) -> int:
    """How many batches of a target each step draws."""
    if per_step == "all":
        if size is None:
            raise ValidationError(
                f"target '{name}': per_step='all' needs to know how many batches there are, and "
                "len() of this loader does not say: pass a list of batches, or a number"
            )
        return size
    if per_step is None:
        return size if size is not None and size <= WHOLE else 1
    return per_step


def described(targets: Iterable[tuple[str, int | None, int]], smooth: float) -> dict[str, Any]:
    """For run.json and the report: batches of each target, drawn at each step, and how steady that
    is. ``targets``: name, batches, drawn."""
    found = list(targets)
    whole = all(size is not None and size <= drawn for _, size, drawn in found)
    if whole:
        how = "the whole validation set at every step"
    else:
        how = "some batches of the validation set at each step, in turn"
        how += f", running mean {smooth:g}" if smooth else ""
    passes = sum(drawn for *_, drawn in found)
    return {
        "how": how,
        "whole": whole,
        "smooth": smooth,
        "passes": passes,  # of the model per point where a gradient is taken; joined ones count
        "batches": {name: size for name, size, _ in found},
        "drawn": {name: drawn for name, _, drawn in found},
    }


class Smoothing:
    """The running mean of validation gradients: v̄ ← s·v̄ + (1−s)·v, divided by 1 − sᵗ.

    A gradient whose loss is not finite does not enter it. It is kept in memory only: a resumed run
    begins it again.
    """

    def __init__(self, keep: float) -> None:
        self.keep = keep
        self._means: dict[Any, tuple[Tensor, Tensor]] = {}  # mean, and the sum of its weights

    def of(
        self, place: Any, group: Sequence[int], found: Gradients, params: Mapping[str, Tensor]
    ) -> Gradients:
        """The mean of a group of targets at a place of the path, this step's gradient included."""
        v = found.of(list(params), slice(0, len(group)))
        good = found.loss.isfinite()
        means = {k: self._next((place, group[0], k), x, found.scale, good) for k, x in v.items()}
        return Gradients(found.loss, lambda names, qs: {k: means[k][qs] for k in names})

    def _next(self, key: Any, v: Tensor, scale: Tensor | None, good: Tensor) -> Tensor:
        if scale is not None:
            v = v * scale.to(v.dtype).view(-1, *[1] * (v.ndim - 1))
        mean, weight = self._means.get(
            key, (torch.zeros_like(v), good.new_zeros((), dtype=v.dtype))
        )
        if mean.shape != v.shape or mean.device != v.device:
            mean, weight = torch.zeros_like(v), good.new_zeros((), dtype=v.dtype)
        new = torch.where(good, self.keep * mean + (1 - self.keep) * v, mean)
        weight = torch.where(good, self.keep * weight + (1 - self.keep), weight)
        self._means[key] = new, weight
        return torch.where(weight > 0, new / weight, v)


def halves(validation: Any) -> dict[str, Any]:
    """Two targets made of every other row (or batch) of a validation set, for
    ``watch(..., targets=inrun.halves(validation))``.

    Values are the mean over both, as for the whole set. How far the two rankings agree is an
    estimate of the noise in them, which ``inrun info`` and the report then show.

    Args:
        validation: a dataset of rows, a ``DataLoader`` over one, a list of batches, or several of
            these by name (:func:`inrun.by_label`), each of which is halved.
    """
    if isinstance(validation, Mapping):
        found: dict[str, Any] = {}
        for name, data in validation.items():
            parts = _two(data, f"target '{name}'")
            found |= {f"{name}, {h}": part for h, part in zip(HALVES, parts, strict=True)}
        return found
    return dict(zip(HALVES, _two(validation, "validation"), strict=True))


def _two(data: Any, what: str) -> tuple[Any, Any]:
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        if data.batch_size is not None:
            first, second = _two(data.dataset, what)
            size, collate = data.batch_size, data.collate_fn
            return DataLoader(first, size, collate_fn=collate), DataLoader(
                second, size, collate_fn=collate
            )
        data = list(data)
    rows = hasattr(data, "column_names") and hasattr(data, "__getitem__")
    if rows or (isinstance(data, Dataset) and not isinstance(data, IterableDataset)):
        n = len(data)
        _enough(n, what, "rows")
        return Subset(data, range(0, n, 2)), Subset(data, range(1, n, 2))
    if not isinstance(data, (list, tuple)):
        raise ValidationError(
            f"halves: {what} is a {type(data).__name__}; a dataset of rows, a DataLoader over one "
            "or a list of batches is needed"
        )
    if len(data) == 1:
        return [_every_other(data[0], 0, what)], [_every_other(data[0], 1, what)]
    _enough(len(data), what, "batches")
    return list(data[::2]), list(data[1::2])


def _every_other(batch: Any, first: int, what: str) -> Any:
    sizes = {x.shape[0] if x.ndim else 0 for x in tree_leaves(batch) if isinstance(x, Tensor)}
    if len(sizes) != 1:
        raise ValidationError(
            f"halves: the only batch of {what} has tensors of different lengths; pass two batches"
        )
    _enough(sizes.pop(), what, "rows")
    return tree_map(lambda x: x[first::2] if isinstance(x, Tensor) else x, batch)


def _enough(n: int, what: str, unit: str) -> None:
    if n < 2:
        raise ValidationError(f"halves: {what} has {n} {unit}: two are needed")

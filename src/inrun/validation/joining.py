"""Decides whether the targets' batches may be joined in one pass.

The joined pass gives the gradient of each target as a sum over its rows. It is right if these are
the gradients that each target has alone. That is measured, for **every target** and **every set of
batches**: the gradients of the joined pass are compared with those of one pass for each target, at
weights moved by random numbers. Why this cannot come out right by chance:

* Gradients are compared, not losses, and those of each target on its own, parameter by parameter.
* At random weights near the current ones two smooth functions of the weights agree only if they
  are the same function, so what holds there holds at all weights. A target whose gradient vanishes
  there decides nothing.
* Weights of rows, ignored labels and the like are a matter of the data: a set of batches that was
  not measured is never joined. A set is known again by its contents (a digest of all numbers on the
  host; identity and version of tensors on a GPU), together with everything else that the loss can
  depend on: plain attributes of modules, other tensors of the model and of the loss function.

A set costs as many passes as there are targets, once; sets that do not come back are not joined.
It is measured again at every audit, for models whose rows meet at some weights only (experts with a
limited capacity).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from inrun.capture.tensor_map import TensorMap
from inrun.errors import BatchError, CaptureError
from inrun.tensors.autocast import no_autocast
from inrun.torch_compat import tree_flatten, version_of
from inrun.validation.reach import PLAIN
from inrun.validation.sweep import Gradients
from inrun.validation.targets import rows_in

_ONCE = 8  # measured sets that did not come back; then only sets seen before are measured
_SETS = 4096  # of batches that are remembered
_UNDECIDED = 8  # measurements in a row without a result
_SHAKE = 0.1  # size of the random move, relative to the parameter's
_FROM_ZERO = 0.02  # size of the move of a parameter that is zero
Single = Callable[[int], Sequence[Tensor]]  # a target's own gradient


class Joining:
    """Which sets of batches were found to be joinable."""

    def __init__(self, batch_dim: int) -> None:
        self.allowed = batch_dim == 0
        self._used: dict[Any, int] = {}  # how often a measured set came back
        self._seen: dict[Any, None] = {}
        self._counted: TensorMap[Any] = TensorMap()
        self._tokens: TensorMap[int] = TensorMap()
        self._next = self._measured = self._undecided = 0

    @property
    def verified(self) -> bool:
        """Was any set found to be joinable?"""
        return self.allowed and bool(self._used)

    def join(self, drawn: Sequence[Sequence[Any]]) -> tuple[list[int], Any] | None:
        """Returns the rows of each target in the joined batch and a key of this set of batches;
        None if the batches do not fit together."""
        if not self.allowed or len(drawn) < 2:
            return None
        kinds, sizes, weights = set(), list[int](), set()
        for batches in drawn:
            rows = [rows_in(b) for b in batches]
            if None in rows or len(set(rows)) > 1:
                return None
            sizes.append(sum(rows))  # type: ignore[arg-type]
            for batch in batches:
                kinds.add(_kind(batch))
                weights.add(self._weights(batch, rows[0] or 1))
        if None in kinds or len(kinds) > 1 or len(weights) > 1:
            return None
        contents = (self._contents(x) for bs in drawn for b in bs for x in tree_flatten(b)[0])
        return sizes, (tuple(sizes), tuple(contents))

    def known(self, key: Any) -> bool:
        """Was this set measured and found joinable?"""
        if key not in self._used:
            return False
        self._used[key] += 1
        return True

    def withdraw(self, key: Any) -> None:
        """Another rank found that one pass for all targets is not right."""
        self._used.pop(key, None)
        self.allowed = False

    def worth_measuring(self, key: Any) -> bool:
        """Is this set likely to come back? Measuring one that does not is a waste."""
        lonely = sum(1 for n in self._used.values() if n == 0)
        if key in self._seen or key in self._used or lonely < _ONCE:
            return True
        _limited(self._seen)[key] = None
        return False

    def measure(
        self, key: Any, names: Sequence[str], params: Mapping[str, Tensor],
        joined: Callable[[], Gradients], single: Single, half: bool,
    ) -> bool:  # fmt: skip
        """Compare the joined pass with a pass for each target, at weights moved at random."""
        self._used.pop(key, None)
        try:
            self._measured += 1
            with moved(params, self._measured):
                found, errors = joined(), []
                for q in range(len(names)):
                    errors.append(_error(found, q, dict(zip(params, single(q), strict=True))))
        except (CaptureError, BatchError, RuntimeError) as why:
            return self._refuse(f"{type(why).__name__}: {why}")
        table = torch.stack(errors).cpu()  # [Q]
        worst = int(table.nan_to_num(0.0).argmax())
        if float(table[worst]) > _tolerance(params, half):
            return self._refuse(
                f"the gradient of target '{names[worst]}' differs by {float(table[worst]):.2g} of "
                "its size from that of a pass of its own"
            )
        if bool(table.isfinite().all()):
            _limited(self._used)[key], self._undecided = 0, 0
            return True
        self._undecided += 1
        if self._undecided < _UNDECIDED:
            return False  # no result; the next step may give one
        name = names[int(table.isfinite().int().argmin())]
        return self._refuse(f"the gradient of target '{name}' is zero or not finite")

    def _refuse(self, why: str) -> bool:
        """Give each target its own pass from now on; warn, because that takes longer."""
        self.allowed = False
        warnings.warn(
            "the targets' validation batches cannot be joined in one pass, so each has its own and "
            f"a step takes longer ({why}). They can where the loss is a mean over rows and memory "
            "suffices for all of them at once",
            stacklevel=8,
        )
        return False

    def _weights(self, batch: Any, rows: int) -> Any:
        """Returns how much counts in a row on average (ignored labels, masks of zeros and ones,
        weights of rows) and numbers that stand for the whole batch. Sets of batches that differ in
        these cannot be joined with the usual losses. They are not even tried, because one failure
        ends all joining."""
        found = []
        for x in tree_flatten(batch)[0]:
            if not isinstance(x, Tensor) or not x.numel() or (x.is_floating_point() and x.ndim > 1):
                continue
            known = self._counted.get(x)
            if known is None or known[0] != version_of(x):  # asking a tensor on a GPU takes a while
                known = version_of(x), _counts(x, rows)
                self._counted[x] = known
            found.append(known[1])
        return tuple(found)

    def _contents(self, x: Any) -> Any:
        """Returns a key of a leaf of a batch: a digest of its numbers, or identity and version."""
        if not isinstance(x, Tensor):
            return x
        if x.device.type == "cpu":
            numbers = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return hashlib.blake2b(numbers.data, digest_size=16).digest()
        token = self._tokens.get(x)
        if token is None:
            token = self._tokens[x] = self._next
            self._next += 1
        return token, version_of(x)


def _limited(kept: dict[Any, Any]) -> dict[Any, Any]:
    """Drop the oldest entries, so that there is room for one more."""
    while len(kept) >= _SETS:
        kept.pop(next(iter(kept)))
    return kept


@contextmanager
def moved(params: Mapping[str, Tensor], seed: int) -> Iterator[None]:
    """Inside, the parameters are moved at random; afterwards they have their own memory again."""
    own = [p.data for p in params.values()]
    generators: dict[torch.device, torch.Generator] = {}
    try:
        for p, data in zip(params.values(), own, strict=True):
            if data.device not in generators:
                generators[data.device] = torch.Generator(data.device).manual_seed(seed)
            wide = data if data.is_complex() else data.float()
            size = wide.abs().square().mean().sqrt()
            by = torch.where(size > 0, _SHAKE * size, _FROM_ZERO).to(data.dtype)
            noise = torch.randn(
                data.shape, dtype=data.dtype, device=data.device, generator=generators[data.device]
            )
            p.data = data + by * noise
        yield
    finally:
        for p, data in zip(params.values(), own, strict=True):
            p.data = data


def _error(found: Gradients, q: int, own: Mapping[str, Tensor]) -> Tensor:
    """Returns the relative error of a target's gradient in the joined pass.

    It is the larger of the error of the whole gradient and the largest error of one parameter
    (whose size counts as at least a hundredth of the whole). NaN if the target's own gradient
    vanishes or is not finite.
    """
    off, size = [], []
    with no_autocast(found.loss.device.type):
        for k, g in own.items():
            joined = found.of([k], slice(q, q + 1))[k][0]
            if found.scale is not None:
                joined = joined * found.scale[q].to(joined.dtype)
            off.append((joined - g).norm().double())
            size.append(g.norm().double())
    each, sizes = torch.stack(off), torch.stack(size)
    whole = sizes.norm()
    relative = torch.maximum((each / (sizes + 0.01 * whole)).max(), each.norm() / whole)
    return torch.where((whole > 0) & whole.isfinite(), relative, torch.nan)


def _tolerance(params: Mapping[str, Tensor], half: bool) -> float:
    dtypes = {p.dtype for p in params.values()}
    if half or dtypes & {torch.float16, torch.bfloat16}:
        return 0.05
    if not dtypes & {torch.float32, torch.complex64}:
        return 1e-5  # many models have parts that compute in float32
    on_gpu = any(p.is_cuda for p in params.values())
    return 5e-3 if on_gpu else 1e-4  # TF32


def _kind(batch: Any) -> Any:
    """Returns a key that is equal for batches that can be put side by side; None for a batch that
    holds something other than tensors and plain values."""
    leaves, spec = tree_flatten(batch)
    found = list[Any]()
    for x in leaves:
        if isinstance(x, Tensor):
            if x.layout != torch.strided:
                return None
            found.append((tuple(x.shape[1:]), x.ndim, x.dtype))
        elif type(x) in PLAIN:
            found.append((type(x), x))
        else:
            return None
    return str(spec), tuple(found)


def _counts(x: Tensor, rows: int) -> tuple[float | None, ...]:
    if x.ndim == 0:
        return (float(x),)
    if x.is_floating_point():
        return (float(x.sum()) / rows,)
    ignored = float((x == -100).sum()) / rows
    mask = x.dtype == torch.bool or (x.ndim > 1 and int(x.min()) >= 0 and int(x.max()) <= 1)
    return ignored, float(x.sum()) / rows if mask else None

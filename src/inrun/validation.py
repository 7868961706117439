"""The validation side: batches in their own order, losses and gradients at given weights.

Nothing of the training is touched: modes, random states, gradients and weights are as before
when a pass ends, also after an exception.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, Subset

from inrun.errors import ValidationError

Loss = Callable[[nn.Module, Any], Tensor]


class Batches:
    """The batches of one target, cycled in their own order.

    The position is (epoch, index), so a resumed run goes on where it stopped; shuffling loaders
    shuffle by ``seed`` and epoch, not by the training's random state.
    """

    def __init__(self, name: str, source: Iterable[Any], seed: int) -> None:
        if isinstance(source, (str, bytes, Tensor)) or not isinstance(source, Iterable):
            raise ValidationError(
                f"target '{name}': a loader or a list of batches is needed, "
                f"not {type(source).__name__}"
            )
        self.name, self.source, self.seed = name, source, seed
        self.epoch, self.index = 0, 0
        self._iterator: Iterator[Any] | None = None
        self.peek()

    def peek(self) -> None:
        """Fail now rather than at the first step if there is nothing to draw."""
        if isinstance(self.source, Iterator):
            raise ValidationError(
                f"target '{self.name}': an iterator can be read only once; pass the loader itself "
                "or a list of batches"
            )
        if isinstance(self.source, Sequence) and len(self.source) == 0:
            raise ValidationError(f"target '{self.name}': the validation data is empty")
        self.take(1)
        self.epoch, self.index, self._iterator = 0, 0, None

    def take(self, n: int) -> list[Any]:
        """The next n batches."""
        return [self._next() for _ in range(n)]

    def _next(self) -> Any:
        if self._iterator is None:
            with seeded(self.seed, self.epoch):
                self._iterator = iter(self.source)
            for skipped in range(self.index):
                self._draw(skipped)
        batch = self._draw(self.index)
        if batch is _END:
            if self.index == 0:
                raise ValidationError(f"target '{self.name}': the validation data is empty")
            self.epoch, self.index = self.epoch + 1, 0
            self._iterator = None
            return self._next()
        self.index += 1
        return batch

    def _draw(self, index: int) -> Any:
        assert self._iterator is not None
        if isinstance(self.source, (list, tuple)):
            return next(self._iterator, _END)
        with seeded(self.seed, self.epoch, index + 1):
            return next(self._iterator, _END)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.index, self._iterator = state["epoch"], state["index"], None


_END = object()


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Random states of Python, numpy and torch set by ``key`` inside, and as before outside."""
    python, array, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    seed = hash(key) % 2**32
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if cuda is not None:
            torch.cuda.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """The default validation loss: ``model(**batch).loss``."""
    if not isinstance(batch, Mapping):
        raise ValidationError(
            f"the default validation loss is model(**batch).loss, but a batch is a "
            f"{type(batch).__name__}; pass watch(..., loss=lambda model, batch: ...)"
        )
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise ValidationError(
            "the default validation loss is model(**batch).loss, but the model returned no loss; "
            "put labels into the batch or pass watch(..., loss=lambda model, batch: ...)"
        )
    return loss


class Validator:
    """Losses and gradients of the targets' current batches at the model's current weights.

    ``losses`` and ``gradient`` are called inside ``evaluating()``.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, Iterable[Any]],
        loss: Loss | None,
        per_step: int,
        chunk: int | None,
        seed: int,
    ) -> None:
        if not targets:
            raise ValidationError("there is no validation data: pass validation= or targets=")
        self.model, self.loss, self.per_step, self.chunk = (
            model,
            loss or model_loss,
            per_step,
            chunk,
        )
        self.targets = [Batches(n, s, seed + i) for i, (n, s) in enumerate(targets.items())]
        self.autocast: tuple[str, bool, torch.dtype] | None = None
        self._batches: list[list[Any]] = []
        self._reentrant = False
        self._buffers = Buffers(model)

    def draw(self) -> None:
        """Move every target on to its next ``per_step`` batches."""
        device = next(self.model.parameters()).device
        self._batches = [
            [tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, b) for b in bs]
            for bs in (t.take(self.per_step) for t in self.targets)
        ]

    def losses(self) -> list[float]:
        """ℓ of each target."""
        with torch.no_grad():
            return [
                float(sum(w * self._loss(q, b) for w, b in self._parts(q)))
                for q in range(len(self.targets))
            ]

    def gradient(self, q: int, params: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """ℓ of one target and its gradient; zeros for a parameter it does not depend on."""
        while True:
            try:
                return self._gradient(q, params)
            except torch.cuda.OutOfMemoryError:
                rows = max(_rows(b) or 0 for b in self._batches[q])
                if min(rows, self.chunk or rows) <= 1:
                    raise
                self.chunk = (min(rows, self.chunk or rows) + 1) // 2
                torch.cuda.empty_cache()

    def _gradient(self, q: int, params: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        # float16 gradients vanish or overflow without a scale: the largest that stays finite
        half = self.autocast is not None and self.autocast[1] and self.autocast[2] == torch.float16
        for scale in (2.0**16, 2.0**10, 2.0**4, 1.0) if half else (1.0,):
            total = torch.zeros((), dtype=torch.float64)
            grads: list[Tensor] = []
            with torch.enable_grad():
                for weight, batch in self._parts(q):
                    loss, new = self._differentiate(q, batch, weight * scale, params)
                    total = total + loss.double().cpu() * weight
                    grads = [a + b for a, b in zip(grads, new, strict=True)] if grads else new
            if scale == 1.0:
                return total, grads
            if all(bool(torch.isfinite(g).all()) for g in grads):
                break
        return total, [g / scale for g in grads]

    def _differentiate(
        self, q: int, batch: Any, factor: float, params: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """A batch's loss and the gradient of ``factor`` times it."""
        grads: Sequence[Tensor | None]
        loss = self._loss(q, batch)
        if not loss.requires_grad:
            raise ValidationError(
                f"target '{self.targets[q].name}': the validation loss does not depend on the "
                "watched parameters (is it computed under no_grad, or detached?)"
            )
        if not self._reentrant:
            try:
                grads = torch.autograd.grad(loss * factor, params, allow_unused=True)
            except RuntimeError as e:
                if "incompatible with" not in str(e):
                    raise
                self._reentrant = True  # a reentrant checkpoint allows only backward()
                loss = self._loss(q, batch)
        if self._reentrant:
            grads = _backward(loss * factor, params)
        pairs = zip(params, grads, strict=True)
        return loss.detach(), [torch.zeros_like(p) if g is None else g for p, g in pairs]

    def _parts(self, q: int) -> Iterator[tuple[float, Any]]:
        """Batches, cut into chunks of rows where asked, with their weights in the mean."""
        batches = self._batches[q]
        for batch in batches:
            rows = _rows(batch)
            if self.chunk is None or rows is None or rows <= self.chunk:
                yield 1 / len(batches), batch
                continue
            for start in range(0, rows, self.chunk):
                n = min(self.chunk, rows - start)
                yield n / rows / len(batches), _slice(batch, start, n, rows)

    def _loss(self, q: int, batch: Any) -> Tensor:
        loss = self.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else repr(type(loss))
            )
            raise ValidationError(
                f"target '{self.targets[q].name}': the validation loss must be a scalar, but it is "
                f"{what}; reduce it, for example with .mean()"
            )
        return loss.reshape(())

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around all passes of a step: evaluation mode, the training's autocast, a random state
        of their own."""
        modes = [(m, m.training) for m in self.model.modules()]
        device, enabled, dtype = self.autocast or ("cpu", False, torch.bfloat16)
        try:
            for m, _ in modes:
                m.training = False
            with (
                warnings.catch_warnings(),
                self._buffers.kept(),
                seeded(0),
                torch.compiler.set_stance("force_eager"),
                torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False),
            ):
                # a reentrant checkpoint says so when a loss is measured without gradients
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                yield
        finally:
            for m, training in modes:
                m.training = training

    def state_dict(self) -> dict[str, Any]:
        return {t.name: t.state_dict() for t in self.targets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for t in self.targets:
            t.load_state_dict(state[t.name])


class Buffers:
    """Puts back what a forward pass in evaluation mode writes into the model's buffers.

    Few models do that. The first time all buffers are copied; after that only those that were
    written to.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._written: set[tuple[int, str]] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        before = [
            (module, name, t, t._version, self._copy(module, name, t))
            for module in self.model.modules()
            for name, t in module._buffers.items()
            if t is not None
        ]
        written = self._written or set()
        try:
            yield
        finally:
            for module, name, t, version, copy in before:
                module._buffers[name] = t
                if t._version != version:
                    written.add((id(module), name))
                    if copy is not None:
                        t.data.copy_(copy)
            self._written = written

    def _copy(self, module: nn.Module, name: str, t: Tensor) -> Tensor | None:
        wanted = self._written is None or (id(module), name) in self._written
        return t.detach().clone() if wanted else None


def _backward(loss: Tensor, params: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients by ``backward()``, with the training's own put aside."""
    own = [p.grad for p in params]
    try:
        for p in params:
            p.grad = None
        loss.backward()
        return tuple(p.grad for p in params)
    finally:
        for p, g in zip(params, own, strict=True):
            p.grad = g


def _rows(batch: Any) -> int | None:
    sizes = [x.shape[0] for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes and all(n == sizes[0] for n in sizes) else None


def _slice(batch: Any, start: int, n: int, rows: int) -> Any:
    def cut(x: Any) -> Any:
        return x[start : start + n] if isinstance(x, Tensor) and x.ndim else x

    return tree_map(cut, batch)


def by_label(
    dataset: Dataset[Any],
    label: str | int | Callable[[Any], Any] | Sequence[Any] | None = None,
    *,
    batch_size: int = 64,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> dict[str, DataLoader[Any]]:
    """One validation target per label, for ``watch(..., targets=by_label(dataset))``.

    Args:
        dataset: a map-style dataset of rows.
        label: where a row's label is: a key, an index, a function of the row, or the labels
            themselves, one per row. By default the key ``labels`` or ``label`` of a mapping, or
            the last entry of a tuple.
        batch_size: rows per validation batch.
        collate_fn: as in ``torch.utils.data.DataLoader``.

    Returns:
        A loader for each label, in the order of the sorted labels, named by it.
    """
    n = len(dataset)  # type: ignore[arg-type]
    if isinstance(label, Sequence) and not isinstance(label, str):
        labels = list(label)
        if len(labels) != n:
            raise ValidationError(f"by_label: {len(labels)} labels for {n} rows")
    else:
        labels = [_label(dataset[i], label) for i in range(n)]
    labels = [x.item() if isinstance(x, (Tensor, np.generic)) else x for x in labels]
    rows: dict[Any, list[int]] = {}
    for i, x in enumerate(labels):
        rows.setdefault(x, []).append(i)
    if not rows:
        raise ValidationError("by_label: the dataset is empty")
    return {
        str(x): DataLoader(Subset(dataset, rows[x]), batch_size=batch_size, collate_fn=collate_fn)
        for x in sorted(rows)
    }


def _label(row: Any, label: Any) -> Any:
    if callable(label):
        return label(row)
    if label is not None:
        return row[label]
    if isinstance(row, Mapping):
        return row["labels"] if "labels" in row else row["label"]
    return row[-1]

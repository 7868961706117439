"""The validation side: losses and gradients of the targets at given weights.

Nothing of the training is touched: modes, random states, gradients and weights are as before
when a pass ends, also after an exception.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import ValidationError
from inrun.ranks.shards import Shards
from inrun.ranks.world import ALONE, World
from inrun.tensors.autocast import Autocast, as_it_was, uncached
from inrun.torch_compat import tree_map
from inrun.validation.cuda_graph import Fingerprint, GraphCache
from inrun.validation.halving import keeps_order
from inrun.validation.joining import Joining
from inrun.validation.modes import (
    backward,
    making_graph,
    recurrent_on_gpu,
    set_training,
    training_of,
    without_cudnn,
)
from inrun.validation.split import Split, shared_out
from inrun.validation.state import Generators, State
from inrun.validation.steady import PerStep, Smoothing, batches_per_step, described, size_of
from inrun.validation.sweep import Gradients, Sweep, joined
from inrun.validation.targets import Batches, copy_batch, cut_rows, rows_in

Loss = Callable[[nn.Module, Any], Tensor]


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

    Losses and gradients are asked for inside ``evaluating()``.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, Iterable[Any]],
        loss: Loss | None,
        per_step: PerStep,
        chunk: int | None,
        seed: int,
        batch_dim: int = 0,
        world: World = ALONE,
        smooth: float = 0.0,
    ) -> None:
        if not targets:
            raise ValidationError("there is no validation data: pass validation= or targets=")
        self.model, self.loss, self.chunk = model, loss or model_loss, chunk
        self.targets = [Batches(n, s, seed + i) for i, (n, s) in enumerate(targets.items())]
        sizes = [size_of(t.source) for t in self.targets]
        named = zip(self.targets, sizes, strict=True)
        self.per_step = [batches_per_step(t.name, n, per_step) for t, n in named]
        names = [t.name for t in self.targets]
        self.described = described(zip(names, sizes, self.per_step, strict=True), smooth)
        if not self.described["whole"]:
            self.described["how"] += f" ({'; '.join(sorted({t.order for t in self.targets}))})"
        fixed = all(keeps_order(t.source) for t in self.targets)
        self.described["fixed_order"] = fixed
        self._smoothing = Smoothing(smooth) if smooth else None
        self.batch_dim, self.smoothed_by = batch_dim, smooth
        self.autocast: Autocast | None = None
        self.batches: list[list[Any]] = []  # of each target, in this step
        self._reentrant = False
        self.modules = list(model.modules())
        self._state, self._random = State(self.loss), Generators("ran the validation pass")
        self._world, self._shards, self._split = world, world.shards, Split(world)
        self._sweep, self._joining = Sweep(model), Joining(batch_dim)
        self._graphs = GraphCache(self.loss, partial(self._state.once, Fingerprint.of))
        self._joint: tuple[list[int], Any] | None = None  # see Joining.join

    def draw(self) -> None:
        """Move every target on to its next ``per_step`` batches."""
        shards = self._shards
        device = next(self.model.parameters()).device if shards is None else shards.device
        drawn = [t.take(n) for t, n in zip(self.targets, self.per_step, strict=True)]
        alone = len(drawn) == 1 or self.chunk is not None or self._float16() or shards is not None
        self._joint = None if alone else self._joining.join(drawn)

        def move(x: Any) -> Any:
            return x.to(device, non_blocking=True) if isinstance(x, Tensor) else x

        self.batches = [[tree_map(move, b) for b in bs] for bs in drawn]

    def _float16(self) -> bool:
        """Do the passes run under autocast to float16?"""
        return self.autocast is not None and self.autocast[1] and self.autocast[2] == torch.float16

    def look(self) -> None:
        """Run each batch through the model by itself and whole, as the loss function gets it."""
        if self.chunk is None:
            with self.evaluating():
                self.losses()

    def losses(self) -> list[float]:
        """Returns ℓ of each target."""
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = [float(self._loss_of(q)) for q in range(len(self.targets))]
        self._reshard()
        return found

    def _loss_of(self, q: int) -> Tensor:
        return torch.stack([w * self._loss(q, b).double() for w, b in self._parts(q)]).sum()

    def _reshard(self) -> None:
        """Between passes: gathered parameters are those of other weights."""
        if self._shards is not None:
            self._shards.reshard()

    def groups(self, params: Mapping[str, Tensor], verify: bool) -> list[list[int]]:
        """Returns which targets share a pass for their gradients: all, or each has its own.

        ``verify``: measure again whether one pass for all is right.
        """
        together, apart = list(range(len(self.targets))), [[q] for q in range(len(self.targets))]
        if self._joint is None:
            return apart
        key = (self._joint[1], self._state.fingerprint(), self.autocast)
        if self._joining.known(key) and not verify:
            return [together]
        if self._joining.worth_measuring(key):
            names, weights = [t.name for t in self.targets], list(params.values())
            half = self.autocast is not None and self.autocast[1]

            def single(q: int) -> Sequence[Tensor]:
                with torch.compiler.set_stance("force_eager"):  # compiling would take longer
                    return self._gradient(q, weights, graphs=False)[1]

            right = self._joining.measure(
                key, names, params, lambda: self._together(params), single, half
            )
            if all(self._world.gather(right)):
                return [together]
            if right:
                self._joining.withdraw(key)
        self._joint = None
        return apart

    def _together(self, params: Mapping[str, Tensor]) -> Gradients:
        """All targets in one pass."""
        assert self._joint is not None
        batch = joined([b for batches in self.batches for b in batches])
        self._state.rewind()
        return self._sweep.run(lambda: self._run(0, batch), self._joint[0], params)

    def gradients(
        self, group: Sequence[int], params: Mapping[str, Tensor], keep: bool
    ) -> Gradients:
        """Returns ℓ of a group of targets and their gradients; zeros where there is no dependence.

        ``keep``: copy them, because the next pass may be a replay into the same memory.
        """
        if len(group) > 1:
            return self._together(params)
        loss, grads = self._split.measured(
            len(list(self._parts(group[0]))),
            lambda: self._in_chunks(group[0], list(params.values())),
        )
        if keep:
            loss, grads = loss.clone(), [g.clone() for g in grads]
        return _of_one(params, loss, grads)

    @contextmanager
    def seeing(self, batches: list[list[Any]]) -> Iterator[list[list[int]]]:
        """Inside, these stand for the targets' batches; gives the groups of targets that share a
        pass (``eagerly``): those that did in this step."""
        kept, joint = self.batches, self._joint
        self.batches, Q = batches, len(batches)
        if joint is not None:
            self._joint = [sum(rows_in(b) or 0 for b in own) for own in batches], None
        try:
            yield [[q] for q in range(Q)] if joint is None else [list(range(Q))]
        finally:
            self.batches, self._joint = kept, joint

    def eagerly(self, group: Sequence[int], params: Mapping[str, Tensor]) -> Gradients:
        """``gradients`` without compiling, graphs or choices that later steps would notice."""
        with torch.compiler.set_stance("force_eager"):
            if len(group) > 1:
                return self._together(params)
            q, weights = group[0], list(params.values())
            if self._shards is not None:
                loss, grads = self._sharded_gradient(self._shards, q, weights)
            else:
                loss, grads = self._gradient(q, weights, graphs=False)
        return _of_one(params, loss, grads)

    def smoothed(
        self, place: Any, group: Sequence[int], found: Gradients, params: Mapping[str, Tensor]
    ) -> Gradients:
        """Their running mean over the steps, if ``smooth`` asks for one."""
        smoothing = self._smoothing
        return found if smoothing is None else smoothing.of(place, group, found, params)

    def _in_chunks(self, q: int, params: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The gradient of one target, in smaller chunks of rows where memory runs out."""
        while True:
            try:
                if self._shards is not None:
                    return self._sharded_gradient(self._shards, q, params)
                return self._gradient(q, params)
            except torch.cuda.OutOfMemoryError:
                rows = max(rows_in(b) or 0 for b in self.batches[q])
                if min(rows, self.chunk or rows) <= 1 or not self._world.alone:
                    raise  # several ranks: all need the same chunks, so the user says how large
                if self.chunk is None:
                    warnings.warn(
                        f"a validation batch of {rows} rows does not fit into the GPU's memory and "
                        "is processed in chunks of rows. That is right for a loss that is a mean "
                        "over rows, not for one that weighs rows or tokens by the whole batch "
                        "(class weights, ignored labels): use smaller validation batches then",
                        stacklevel=8,
                    )
                self.chunk = (min(rows, self.chunk or rows) + 1) // 2
                torch.cuda.empty_cache()

    def _gradient(
        self, q: int, params: Sequence[Tensor], graphs: bool = True
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns ℓ of a target and its gradient. ``graphs``: a CUDA graph may be used."""
        # float16 gradients may vanish or overflow: use the largest scale that keeps them finite
        for scale in (2.0**16, 2.0**10, 2.0**4, 1.0) if self._float16() else (1.0,):
            total = torch.zeros((), dtype=torch.float64, device=params[0].device)
            grads: list[Tensor] = []
            with torch.enable_grad():
                parts = self._split.own(list(self._parts(q)))
                for weight, batch in parts:

                    def compute(b: Any, w: Sequence[Tensor], by: float = weight * scale) -> Any:
                        return self._differentiate(q, b, by, w)

                    self._state.rewind()
                    if graphs and params[0].is_cuda and len(parts) == 1 and not self._reentrant:
                        how = (weight * scale, self.autocast, self._state.addresses())
                        loss, found = self._graphs.run(compute, batch, params, self.modules, how)
                        self._state.replayed()
                    else:
                        loss, found = compute(batch, params)
                    total = total + loss.double() * weight
                    new = [torch.zeros_like(p) if g is None else g
                           for g, p in zip(found, params, strict=True)]  # fmt: skip
                    grads = [a + b for a, b in zip(grads, new, strict=True)] if grads else new
            total, grads = self._split.summed(total, grads or [torch.zeros_like(p) for p in params])
            if scale == 1.0:
                return total, grads
            if all(bool(torch.isfinite(g).all()) for g in grads):
                break
        return total, [g / scale for g in grads]

    def _sharded_gradient(
        self, shards: Shards, q: int, params: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The same for this rank's shards: FSDP sums over ranks, and each runs some parts."""
        total = torch.zeros((), dtype=torch.float64, device=params[0].device)
        grads: list[Tensor] = []
        with torch.enable_grad():
            for weight, batch in shared_out(self._world, list(self._parts(q))):
                loss = self._loss(q, batch)
                self._refuse_constant(q, loss)
                found = shards.gradient(loss * (weight * self._world.size), params)
                self._reshard()
                total = total + loss.detach().to(total) * weight
                grads = [a + b for a, b in zip(grads, found, strict=True)] if grads else found
        return self._world.total(total), grads

    def _refuse_constant(self, q: int, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise ValidationError(
                f"target '{self.targets[q].name}': the validation loss does not depend on the "
                "watched parameters (is it computed under no_grad, or detached?)"
            )

    def _differentiate(
        self, q: int, batch: Any, factor: float, params: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """A batch's loss and the gradient of ``factor`` times it; None without dependence."""
        grads: Sequence[Tensor | None]
        loss = self._loss(q, batch)
        self._refuse_constant(q, loss)
        if not self._reentrant:
            try:
                grads = torch.autograd.grad(_times(loss, factor), params, allow_unused=True)
            except RuntimeError as e:
                if "incompatible with" not in str(e):
                    raise
                self._reentrant = True  # a reentrant checkpoint allows only backward()
                loss = self._loss(q, batch)
        if self._reentrant:
            grads = backward(_times(loss, factor), params)
        return loss.detach(), grads

    def _parts(self, q: int) -> Iterator[tuple[float, Any]]:
        """Batches, cut into chunks of rows where asked, with their weights in the mean."""
        batches = self.batches[q]
        for batch in batches:
            rows = rows_in(batch)
            if self.chunk is None or rows is None or rows <= self.chunk:
                yield 1 / len(batches), batch
                continue
            for start in range(0, rows, self.chunk):
                n = min(self.chunk, rows - start)
                yield n / rows / len(batches), cut_rows(batch, start, n)

    def _loss(self, q: int, batch: Any) -> Tensor:
        self._reshard()
        if not making_graph():  # a CUDA graph holds the pass alone
            self._state.rewind()
        return self._run(q, copy_batch(batch))

    def _run(self, q: int, batch: Any) -> Tensor:
        """The loss of a batch that the pass may write to."""
        with self._state.one_pass(self.model):
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
        modules, modes = self.modules, training_of(self.modules)
        try:
            set_training(modules, [False] * len(modules))
            with (
                warnings.catch_warnings(),
                self._state.kept(modules),
                nullcontext() if self._shards is None else self._shards.passing(),
                self._random.seeded(0),
                as_it_was(self.autocast),
                uncached(),
                without_cudnn() if recurrent_on_gpu(modules) else nullcontext(),
            ):
                # a reentrant checkpoint warns so when a loss is measured without gradients
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                yield
        finally:
            set_training(modules, modes)

    def close(self) -> None:
        """Free device memory and drop references to the model."""
        self._graphs.close()
        self._sweep.close()
        self._state.close()

    def state_dict(self) -> dict[str, Any]:
        return {t.name: t.state_dict() for t in self.targets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for t in self.targets:
            t.load_state_dict(state[t.name])


def _of_one(params: Iterable[str], loss: Tensor, grads: Sequence[Tensor]) -> Gradients:
    """Of one target."""
    found = dict(zip(params, grads, strict=True))
    return Gradients(loss, lambda names, qs: {k: found[k][None] for k in names}, single=found)


def _times(loss: Tensor, factor: float) -> Tensor:
    return loss if factor == 1.0 else loss * factor

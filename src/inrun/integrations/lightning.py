"""Lightning: ``Trainer(callbacks=[inrun.integrations.lightning.Watch(validation=loader)])``.

on_train_start         inrun.watch, when the optimizers are there
training_step          opens run.batch before the module's own training_step
on_after_backward      closes it; in automatic optimization both are in optimizer.step(closure)
on_train_batch_end     the run's numbers go to the module's log
state_dict             the run's state, in Lightning's checkpoint
on_train_end           closes the run, writes the report
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

import inrun
from inrun.integrations.outcome import numbers, write_report

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError(
            "inrun.integrations.lightning needs lightning: pip install 'inrun[lightning]'"
        ) from error


class Watch(Callback):  # type: ignore[misc]
    """Watch a training of Lightning.

    Args:
        validation: a loader or list of batches that examples are valued by.
        targets: several of them by name, instead.
        loss: ``loss(module, batch)``; by default what the module's ``validation_step`` returns, its
            logging muted (as the step of the first batch and loader, where it takes their numbers).
        out: a folder for the ledger and the report; None keeps the values in memory.
        report: write ``report.html`` into this folder when the training ends.
        options: everything else that :func:`inrun.watch` takes.

    The training data carry ids: ``DataLoader(inrun.with_ids(dataset), ...)``, with
    ``collate_fn=inrun.carry_ids(collate)`` where there is a collator. ``training_step`` gets its
    batches without them. ``watch.run`` is the :class:`inrun.Run`.
    """

    def __init__(
        self,
        validation: Iterable[Any] | None = None,
        *,
        targets: Mapping[str, Iterable[Any]] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        out: str | os.PathLike[str] | None = None,
        report: bool = True,
        **options: Any,
    ) -> None:
        if (validation is None) == (targets is None):
            raise inrun.ValidationError(
                "Watch takes validation= (a loader or list of batches) or targets= (several by "
                "name): what are the examples valued by?"
            )
        self.run: inrun.Run | None = None
        self._data: dict[str, Any] = {"validation": validation, "targets": targets}
        self._loss, self._out, self._report = loss or _validation_step, out, report
        self._options = options
        self._state: dict[str, Any] | None = None  # of a checkpoint, until the run begins
        self._batch: AbstractContextManager[None] | None = None  # between forward and backward
        self._backwards = 0  # backward passes in this training_step
        self._logged = -1  # the optimizer step whose numbers were logged last

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers = trainer.optimizers
        if self._loss is _validation_step:
            _check_numbers(pl_module, self._data["targets"])
        options = dict(self._options)
        options.setdefault("scaler", getattr(trainer.precision_plugin, "scaler", None))
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm in (None, "norm"):
            options.setdefault("max_norm", float(trainer.gradient_clip_val))
        self.run = inrun.watch(
            pl_module, optimizers[0] if len(optimizers) == 1 else optimizers, loss=self._loss,
            out=self._out, **self._data, **options,
        )  # fmt: skip
        if self._state is not None:
            self.run.load_state_dict(self._state)
            self._state = None
        own = pl_module.training_step
        pl_module.training_step = functools.partial(self._training_step, own)

    def _training_step(self, own: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of the module's own: opens the batch that ``on_after_backward`` closes."""
        assert self.run is not None
        self._close()  # a step before this one that ran no backward
        names, batch = inrun.take_ids(batch)
        self._backwards, self._batch = 0, self.run.batch(**names)
        self._batch.__enter__()
        try:
            found = own(batch, *args, **kwargs)
        except BaseException as error:
            self._close(error)
            raise
        if found is None:  # manual optimization, or a step that the module skips
            self._close()
        return found

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._backwards += 1
        if self._batch is None and self.run is not None and self._backwards > 1:
            raise inrun.BatchError(
                "training_step ran backward twice: which example is behind which row of the second "
                "pass is not known. With several losses, add them up and run backward once; loops "
                "with several passes per batch are watched by inrun.watch and run.batch"
            )

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if self.run is not None and self.run.step != self._logged:
            self._logged = self.run.step
            self.log_dict(numbers(self.run), prog_bar=True, on_step=True, batch_size=1)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)
        self._end(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(pl_module)
        if self._report and self._out is not None:
            trainer.strategy.barrier("every rank has written")
            if trainer.is_global_zero:
                write_report(self._out)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.run is None else {"run": self.run.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict.get("run")

    def _close(self, error: BaseException | None = None) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if error is None:
            batch.__exit__(None, None, None)
            return
        try:
            batch.__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            if raised is not error:
                raise

    def _end(self, pl_module: Any) -> None:
        vars(pl_module).pop("training_step", None)
        if self.run is not None:
            self.run.close()


def _check_numbers(module: Any, targets: Mapping[str, Any] | None) -> None:
    """Refuse several targets where a loss may depend on the number of their loader."""
    if targets and len(targets) > 1 and "dataloader_idx" in _taken(module.validation_step):
        raise inrun.ValidationError(
            f"{type(module).__name__}.validation_step takes a dataloader_idx, and which one a "
            "target has is not known. If the loss does not depend on it: Watch(..., "
            "loss=lambda module, batch: module.validation_step(batch, 0, 0))"
        )


def _taken(step: Callable[..., Any]) -> list[str]:
    """The names of what a ``validation_step`` takes beside the batch."""
    return list(inspect.signature(step).parameters)[1:]


def _validation_step(module: Any, batch: Any) -> Tensor:
    """The loss that the module's ``validation_step`` returns; what it logs is not heard."""
    if isinstance(batch, inrun.ids.Row) or (isinstance(batch, Mapping) and inrun.ids.ID in batch):
        _, batch = inrun.take_ids(batch)
    muted = dict.fromkeys(("log", "log_dict", "print"), _nothing)
    kept = {name: vars(module)[name] for name in muted if name in vars(module)}
    taken = _taken(module.validation_step)  # as Lightning itself looks
    numbers = {"dataloader_idx": 0} if "dataloader_idx" in taken else {}
    first = (0,) if [k for k in taken if k != "dataloader_idx"] else ()
    try:
        vars(module).update(muted)
        found = module.validation_step(batch, *first, **numbers)
    finally:
        for name in muted:
            del vars(module)[name]
        vars(module).update(kept)
    loss = found.get("loss") if isinstance(found, Mapping) else found
    if not isinstance(loss, Tensor):
        raise inrun.ValidationError(
            f"{type(module).__name__}.validation_step returns no loss (but a "
            f"{type(found).__name__}): return it, or pass Watch(..., loss=lambda module, batch: "
            "...)"
        )
    return loss


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of ``self.log`` and ``self.print``."""

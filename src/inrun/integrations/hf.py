"""transformers' ``Trainer`` and ``Seq2SeqTrainer``, TRL's ``SFTTrainer`` and ``DPOTrainer``.

    inrun.integrations.hf.watch(trainer, out="runs/sft")
    trainer.train()
    trainer.inrun.values()

What is hung on the trainer, and taken off again when ``train()`` ends:

train                  notes the checkpoint that is resumed
get_train_dataloader   ids: the dataset and the collator with them (trainer_data.py)
training_step          with run.batch(ids, owner)
log                    adds the run's numbers to the trainer's
a callback             on_train_begin: inrun.watch, when model and optimizer are prepared;
                       on_save: the run's state into the checkpoint's folder;
                       on_train_end: close the run, write the report
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import inrun
from inrun.integrations.outcome import numbers, write_report
from inrun.integrations.packed import Documents, documents_of
from inrun.integrations.trainer_data import train_loader, validation_data, validation_loss

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        "inrun.integrations.hf needs transformers: pip install 'inrun[hf]'"
    ) from error

STATE = "inrun.pt"  # in a checkpoint's folder: run.state_dict()


def watch(
    trainer: Any,
    *,
    validation: Any = None,
    targets: Mapping[str, Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    out: str | os.PathLike[str] | None = None,
    report: bool = True,
    documents: Any = None,
    **options: Any,
) -> WatchedTrainer:
    """Watch the training of a trainer. Call it once, before ``trainer.train()``.

    Args:
        trainer: a ``Trainer`` of transformers or a class made of it, such as TRL's ``SFTTrainer``
            and ``DPOTrainer``.
        validation: what examples are valued by: a dataset with the columns of the training data, a
            loader or a list of batches. By default the trainer's ``eval_dataset``; where that is a
            dictionary, each entry is a target.
        targets: several of them by name.
        loss: ``loss(model, batch)``; by default the loss that the trainer evaluates by.
        out: a folder for the ledger and the report; None keeps the values in memory.
        report: write ``report.html`` into this folder when the training ends.
        documents: with TRL's ``packing=True``: the dataset that the trainer was given, perhaps
            ``inrun.with_ids`` of it. Packed documents then have the ids of its rows; without it
            they are named by ``inrun.row_id`` of their tokens. ``packing_strategy="wrapped"`` needs
            it.
        options: everything else that :func:`inrun.watch` takes.

    Returns:
        The run, also as ``trainer.inrun``. Its tables are those of :class:`inrun.Run` and can be
        read once the training has begun.
    """
    if not hasattr(trainer, "training_step") or not hasattr(trainer, "callback_handler"):
        raise TypeError(
            f"hf.watch takes a Trainer of transformers (or TRL's), not a {type(trainer).__name__}. "
            "For a loop of your own: inrun.watch(model, optimizer, ...)"
        )
    if isinstance(before := getattr(trainer, "inrun", None), WatchedTrainer):
        before.detach()
    named = documents_of(trainer, documents)
    trainer.inrun = watched = WatchedTrainer(
        trainer, validation, targets, loss, out, report, named, options
    )
    return watched


class WatchedTrainer:
    """The run of a trainer: everything that :class:`inrun.Run` has, once training has begun."""

    def __init__(
        self,
        trainer: Any,
        validation: Iterable[Any] | None,
        targets: Mapping[str, Any] | None,
        loss: Callable[..., torch.Tensor] | None,
        out: str | os.PathLike[str] | None,
        report: bool,
        documents: Documents | None,
        options: dict[str, Any],
    ) -> None:
        self.run: inrun.Run | None = None
        self._live = False  # between on_train_begin and the end
        self._trainer, self._out, self._report = trainer, out, report
        self._data = validation_data(trainer, validation, targets)  # refuse before training
        self._loss = loss or validation_loss(trainer)
        self._options, self._resumed, self._documents = options, None, documents
        self._own: dict[str, Any] = {}  # the trainer's methods, under those that replace them
        self._callback = _Callback(self)
        trainer.add_callback(self._callback)
        for name in ("train", "get_train_dataloader", "training_step", "log"):
            self._own[name] = getattr(trainer, name)
            setattr(trainer, name, functools.partial(getattr(self, f"_{name}"), self._own[name]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self.__dict__.get("run") is None:
            raise AttributeError(
                f"{name!r}: the run begins with trainer.train(), so it has nothing to show yet"
            )
        return getattr(self.run, name)

    def __repr__(self) -> str:
        return "<inrun: waits for trainer.train()>" if self.run is None else repr(self.run)

    def _repr_html_(self) -> str | None:
        return None if self.run is None else self.run._repr_html_()

    def detach(self) -> None:
        """Close the run and leave the trainer as it was; the tables stay readable."""
        self.stop()
        self._trainer.remove_callback(self._callback)
        for name in self._own:
            vars(self._trainer).pop(name, None)
        self._own = {}

    # In the place of the trainer's methods

    def _train(self, own: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any,
               **kwargs: Any) -> Any:  # fmt: skip
        self._resumed = resume_from_checkpoint
        if resume_from_checkpoint is True:
            self._resumed = get_last_checkpoint(self._trainer.args.output_dir)
        try:
            return own(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.stop()

    def _get_train_dataloader(self, own: Callable[[], Any]) -> Any:
        return train_loader(self._trainer, own)

    def _training_step(
        self, own: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        assert self.run is not None
        names, inputs = inrun.take_ids(inputs)
        if self._documents is not None:
            names = self._documents.of(names, inputs)
        with self.run.batch(**names):
            return own(model, inputs, *args, **kwargs)

    def _log(self, own: Callable[..., Any], logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.run is not None and {"loss", "train_loss"} & {*logs}:  # no evaluation's
            logs.update(numbers(self.run))
        return own(logs, *args, **kwargs)

    # What the callback does

    def begin(self) -> None:
        """Model and optimizer are prepared and a checkpoint is loaded: watch them."""
        trainer, options = self._trainer, dict(self._options)
        if self._live:  # it begins again within train(), with smaller batches
            options["overwrite"] = True
        self.stop()
        if trainer.args.max_grad_norm:
            options.setdefault("max_norm", trainer.args.max_grad_norm)
        self.run = inrun.watch(
            trainer.model_wrapped, trainer.optimizer, loss=self._loss, out=self._out,
            **self._data, **options,
        )  # fmt: skip
        self._live = True
        if self._resumed:
            self._resume(Path(self._resumed) / STATE)

    def _resume(self, file: Path) -> None:
        assert self.run is not None
        if file.exists():
            self.run.load_state_dict(torch.load(file, weights_only=True))
            return
        warnings.warn(
            f"{file.parent} was saved without inrun: the steps before it have no values, and the "
            "run counts its steps from here",
            stacklevel=2,
        )

    def save(self) -> None:
        """A checkpoint was written: put the run's state into its folder."""
        trainer = self._trainer
        if self.run is None or not self._live:
            return
        state = self.run.state_dict()
        folder = Path(trainer._get_output_dir(trial=None))
        folder = folder / f"checkpoint-{trainer.state.global_step}"
        if trainer.args.should_save and folder.is_dir():
            part = folder / f"{STATE}.part"
            torch.save(state, part)
            part.replace(folder / STATE)

    def stop(self) -> None:
        """Close the run, if one is going on."""
        if self.run is not None and self._live:
            self._live = False
            self.run.close()

    def end(self) -> None:
        """The training has ended: close the run and write its report."""
        self.stop()
        if self._report and self._out is not None:
            self._trainer.accelerator.wait_for_everyone()  # every rank has written
            if self._trainer.is_world_process_zero():
                write_report(self._out)


class _Callback(TrainerCallback):
    def __init__(self, watched: WatchedTrainer) -> None:
        self._watched = watched

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._watched.begin()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._watched.save()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._watched.end()

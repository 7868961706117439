"""What a trainer of transformers trains on and is validated by, with ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import inrun
from inrun.ids import ID, MapWithIds


def train_loader(trainer: Any, original: Callable[[], Any]) -> Any:
    """The trainer's own training loader, whose batches carry ids.

    Ids are the column ``inrun_id`` if the dataset has it, else the index of the row in
    ``trainer.train_dataset`` (of a streamed dataset a hash of the row).
    """
    kept = trainer.train_dataset, trainer.data_collator
    trainer._set_signature_columns_if_needed()  # which columns the trainer does not remove
    columns = trainer._signature_columns
    try:
        trainer._signature_columns = [*columns, ID]
        trainer.train_dataset = _identified(trainer, kept[0])
        trainer.data_collator = inrun.carry_ids(kept[1])
        return original()
    finally:
        trainer.train_dataset, trainer.data_collator = kept
        trainer._signature_columns = columns


def _identified(trainer: Any, dataset: Any) -> Any:
    if dataset is None or isinstance(dataset, (MapWithIds, inrun.ids.IterableWithIds)):
        return dataset
    if ID in (getattr(dataset, "column_names", None) or ()):
        return dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return inrun.with_ids(dataset)
    if hasattr(dataset, "remove_columns"):  # do not read columns that the model does not take
        dataset = trainer._remove_unused_columns(dataset, description="training")
    return MapWithIds(dataset)


def validation_data(trainer: Any, validation: Any, targets: Any) -> dict[str, Any]:
    """``validation=`` or ``targets=`` of ``inrun.watch``; by default the ``eval_dataset``.

    Datasets become loaders with the trainer's own collator.
    """
    if targets is not None:
        if validation is not None:
            raise inrun.ValidationError("pass either validation= or targets=, not both")
        return {"targets": {name: _loader(trainer, data) for name, data in targets.items()}}
    own = validation is None
    if own:
        validation = trainer.eval_dataset
    if validation is None:
        raise inrun.ValidationError(
            "there is no validation data: give the trainer an eval_dataset=, or pass validation= "
            "(a dataset with the columns of the training data, a loader, or a list of batches)"
        )
    if isinstance(validation, Mapping):
        return {"targets": {name: _loader(trainer, x, own) for name, x in validation.items()}}
    return {"validation": _loader(trainer, validation, own)}


def _loader(trainer: Any, data: Any, own: bool = False) -> Any:
    """A loader over a dataset, as the trainer evaluates it; loaders and lists as they are.

    Not the trainer's own loader: that one gives each process a share. ``own``: it is the trainer's
    dataset, so its entries are rows.
    """
    streamed = isinstance(data, IterableDataset)
    rows = own or hasattr(data, "column_names") or isinstance(data, Dataset) or _listed(data)
    if isinstance(data, DataLoader) or not rows:
        return data
    if not streamed and not len(data):
        raise inrun.ValidationError("the validation data is empty")
    _check_columns(trainer, data)
    collate = trainer.data_collator
    if hasattr(data, "remove_columns") and not streamed:
        data = trainer._remove_unused_columns(data, description="validation")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="validation")
    return DataLoader(data, batch_size=trainer.args.eval_batch_size, collate_fn=collate)


def _listed(data: Any) -> bool:
    """Is it a list of rows? In batches there are tensors with a dimension for rows."""
    first = data[0] if isinstance(data, (list, tuple)) and data else None
    return isinstance(first, Mapping) and not any(
        isinstance(x, Tensor) and x.ndim for x in first.values()
    )


def _check_columns(trainer: Any, data: Any) -> None:
    """Refuse text where TRL has tokenised the training data."""
    found = getattr(data, "column_names", None) or ()
    for name in ("input_ids", "prompt_ids"):
        if name in (getattr(trainer.train_dataset, "column_names", None) or ()) and (
            found and name not in found
        ):
            raise inrun.ValidationError(
                f"the validation data has the columns {', '.join(found)}, not {name!r}, which the "
                "trainer has made of the training data: give it to the trainer as eval_dataset=, "
                "which is prepared alike, and leave validation out"
            )


def validation_loss(trainer: Any) -> Callable[[nn.Module, Any], Tensor]:
    """The loss that the trainer evaluates by: what it calls ``eval_loss``."""
    if _is(trainer, "SFTTrainer") and trainer.args.label_smoothing_factor == 0:
        return _model_loss  # the same number, without the trainer's metrics

    def loss(model: nn.Module, batch: Any) -> Tensor:
        metrics = getattr(trainer, "_metrics", None)  # TRL's, written at each call
        kept = {mode: {k: [*v] for k, v in m.items()} for mode, m in (metrics or {}).items()}
        try:
            found: Tensor = trainer.compute_loss(model, dict(batch))
            return found
        finally:
            for mode, lists in kept.items():
                assert metrics is not None
                metrics[mode].clear()
                metrics[mode].update(lists)

    return loss


def _model_loss(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(**batch).loss
    return found


def _is(trainer: Any, name: str) -> bool:
    return any(c.__name__ == name for c in type(trainer).__mro__)

"""The ids of documents that TRL has packed.

``packing=True`` keeps tokens only, so ``inrun.carry_ids`` names each document by a hash of its
tokens. Here the dataset that the trainer was made of is prepared once more, without packing, and
says which of its rows a hash stands for.
"""

from __future__ import annotations

from typing import Any

import torch

import inrun
from inrun.ids import ID, plain_id


class DocumentIds:
    """Hash of a packed document (or of a piece of one that was split) → the id of its row. Rows of
    the same tokens cannot be told apart: they share the id of the first."""

    def __init__(self, trainer: Any, dataset: Any) -> None:
        args = trainer.args
        strategy = getattr(args, "packing_strategy", None)
        if not getattr(args, "packing", False) or strategy not in ("bfd", "bfd_split"):
            raise ValueError(
                "documents= is for TRL's SFTTrainer with packing=True and packing_strategy='bfd' "
                "or 'bfd_split'. Leave it out: where nothing is packed the ids of inrun.with_ids "
                "are kept, and rows packed as 'wrapped' have no documents"
            )
        L = args.max_length
        self._ids: dict[int, Any] = {}
        for row in _unpacked(trainer, inrun.with_ids(dataset)):
            tokens = row["input_ids"]
            pieces = [tokens[:L]]
            if strategy == "bfd_split":
                pieces = [tokens[k : k + L] for k in range(0, len(tokens), L)]
            for piece in pieces:
                self._ids.setdefault(inrun.row_id(list(piece)), plain_id(row[ID]))

    def of(self, hashes: Any) -> Any:
        """The ids of the documents of a batch."""
        listed = hashes.tolist() if isinstance(hashes, torch.Tensor) else hashes
        try:
            return [self._ids[h] for h in listed]
        except KeyError as missing:
            raise inrun.BatchError(
                f"a packed document (hash {missing}) is none of documents=: pass the dataset that "
                "the trainer was given as train_dataset=, with the same tokenizer"
            ) from None


def _unpacked(trainer: Any, dataset: Any) -> Any:
    """The rows as the trainer tokenises them, whole and not packed. TRL 1.16 has no public way:
    ``_prepare_dataset`` is what its constructor calls."""
    prepare = getattr(trainer, "_prepare_dataset", None)
    if prepare is None:
        raise TypeError(f"{type(trainer).__name__} has no _prepare_dataset: it is not TRL's")
    length, trainer.args.max_length = trainer.args.max_length, None  # packing cuts, not this
    try:
        formatting = getattr(trainer, "_formatting_func", None)
        return prepare(dataset, trainer.processing_class, trainer.args, False, formatting, "train")
    finally:
        trainer.args.max_length = length

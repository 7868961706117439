"""The ids of documents that TRL has packed.

``packing=True`` keeps tokens only. Here the dataset that the trainer was made of is prepared once
more, which says whose the tokens are:

bfd, bfd_split   ``inrun.carry_ids`` names each document by a hash of its tokens; the rows, prepared
                 without packing, say which of them a hash stands for
wrapped          documents are joined and cut anywhere; the rows are packed again together with a
                 column that holds, for each token, the number of its row
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

import inrun
from inrun.ids import ID, plain_id

_NUMBER = "inrun_row"  # for each token, the place of its row in the dataset


class Documents(Protocol):
    """What ``run.batch`` needs for the documents of a batch: ``names`` with ids of rows."""

    def of(self, names: dict[str, Any], inputs: Any) -> dict[str, Any]: ...


def documents_of(trainer: Any, dataset: Any) -> Documents | None:
    """How the documents of a trainer are named; None: as the batches name them."""
    args = trainer.args
    prepared = not (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset", False)
    packed = prepared and getattr(args, "packing", False)
    strategy = getattr(args, "packing_strategy", None) if packed else None
    if strategy == "wrapped":
        if dataset is None:
            raise ValueError(
                "packing_strategy='wrapped' joins documents and cuts them anywhere, so a row holds "
                "pieces of several: pass hf.watch(trainer, documents=...) the dataset that the "
                "trainer was given as train_dataset=, for values of its rows, or pack by "
                "packing_strategy='bfd', which keeps documents whole"
            )
        return _Wrapped(trainer, dataset)
    if dataset is None:
        return None
    if strategy is None:
        raise ValueError(
            "documents= is for TRL's SFTTrainer with packing=True. Leave it out: where nothing is "
            "packed the ids of inrun.with_ids are kept"
        )
    return _Whole(trainer, dataset)


class _Whole:
    """Hash of a packed document (or of a piece of one that was split) → the id of its row. Rows of
    the same tokens cannot be told apart: they share the id of the first."""

    def __init__(self, trainer: Any, dataset: Any) -> None:
        L = trainer.args.max_length
        self._ids: dict[int, Any] = {}
        for row in _unpacked(trainer, inrun.with_ids(dataset)):
            tokens = row["input_ids"]
            pieces = [tokens[:L]]
            if trainer.args.packing_strategy == "bfd_split":
                pieces = [tokens[k : k + L] for k in range(0, len(tokens), L)]
            for piece in pieces:
                self._ids.setdefault(inrun.row_id(list(piece)), plain_id(row[ID]))

    def of(self, names: dict[str, Any], inputs: Any) -> dict[str, Any]:
        hashes = names["ids"]
        listed = hashes.tolist() if isinstance(hashes, torch.Tensor) else hashes
        try:
            return {**names, "ids": [self._ids[h] for h in listed]}
        except KeyError as missing:
            raise inrun.BatchError(
                f"a packed document (hash {missing}) is none of documents=: pass the dataset that "
                "the trainer was given as train_dataset=, with the same tokenizer"
            ) from None


class _Wrapped:
    """Place of a packed row → the ids of its tokens' documents."""

    def __init__(self, trainer: Any, dataset: Any) -> None:
        from trl import pack_dataset

        args, packed = trainer.args, trainer.train_dataset
        if not hasattr(dataset, "__len__") or not hasattr(packed, "__len__"):
            raise TypeError(
                "a streamed dataset packed as 'wrapped' has no rows to find again: pack by "
                "packing_strategy='bfd'"
            )
        rows = _unpacked(trainer, inrun.with_ids(dataset))
        self._ids = [plain_id(i) for i in rows[ID]]
        numbers = [[k] * len(tokens) for k, tokens in enumerate(rows["input_ids"])]
        rows = rows.select_columns(["input_ids"]).add_column(_NUMBER, numbers)
        again = _shuffled(rows, args)  # before packing and after it, as the trainer does it
        again = pack_dataset(again, args.max_length, "wrapped", {"num_proc": args.dataset_num_proc})
        again = _shuffled(again, args)
        if list(again["input_ids"]) != list(packed["input_ids"]):
            raise inrun.BatchError(
                "documents= packed again is not what the trainer trains on: pass the dataset that "
                "it was given as train_dataset=, in the same order and with the same tokenizer"
            )
        self._rows: list[list[int]] = list(again[_NUMBER])

    def of(self, names: dict[str, Any], inputs: Any) -> dict[str, Any]:
        lying = [self._rows[int(r)] for r in names["ids"]]
        found = list(dict.fromkeys(k for row in lying for k in row))  # in the order of their tokens
        place = {k: i for i, k in enumerate(found)}
        owner = torch.full(inputs["input_ids"].shape, -1, device="cpu")
        if "owner" in names:  # one long row
            lying = [[k for row in lying for k in row]]
        for r, row in enumerate(lying):
            owner[r, : len(row)] = torch.tensor([place[k] for k in row], device="cpu")
        return {"ids": [self._ids[k] for k in found], "owner": owner}


def _shuffled(dataset: Any, args: Any) -> Any:
    return dataset.shuffle(seed=args.seed) if getattr(args, "shuffle_dataset", False) else dataset


def _unpacked(trainer: Any, dataset: Any) -> Any:
    """The rows as the trainer tokenises them: whole, not packed, in their own order. TRL 1.16 has
    no public way: ``_prepare_dataset`` is what its constructor calls."""
    prepare = getattr(trainer, "_prepare_dataset", None)
    if prepare is None:
        raise TypeError(f"{type(trainer).__name__} has no _prepare_dataset: it is not TRL's")
    # packing cuts, not max_length
    changed = {"max_length": None, "shuffle_dataset": False}
    kept = {name: getattr(trainer.args, name) for name in changed if hasattr(trainer.args, name)}
    try:
        vars(trainer.args).update({name: changed[name] for name in kept})
        formatting = getattr(trainer, "_formatting_func", None)
        return prepare(dataset, trainer.processing_class, trainer.args, False, formatting, "train")
    finally:
        vars(trainer.args).update(kept)

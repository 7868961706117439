"""The examples: what is trained on, what values are for, what accuracy is measured on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.common import encoder
from experiments.common.encoder import Batch, Encoder
from experiments.common.parts import Context, Settings

TARGETS = ("held-out", "evaluation")  # other texts, or those accuracy is measured on


@dataclass
class Task:
    """``validation`` by target; ``choice`` is for learning rates; ``flipped`` says which labels of
    ``train`` were turned (tiny size). Held-out and choice share no text with the others. ``model``
    is made from a seed: of its head, or of all weights where none are at hand."""

    train: Batch
    validation: dict[str, Batch]
    choice: Batch
    evaluation: Batch
    flipped: Tensor
    model: Callable[[int], Encoder]


def make(settings: Settings, context: Context) -> Task:
    """The same examples for every seed: ``examples``, ``held_out``, ``choice`` and ``evaluation``
    are how many, ``length`` that of texts in training; ``longest`` that of the others."""
    s = settings
    where = encoder.folder(context.data, s["hub"])
    if s["pretrained"] and context.data is None:
        raise ValueError("SST-2 is missing: pass --data DIR with sst2/train.tsv and dev.tsv")
    if context.data is not None and (s["pretrained"] or where is not None):
        where = encoder.needed(context.data, s["hub"])
        data = from_sst2(s, context.data, where)
    else:
        where, data = None, from_passages(s)
    used, ids = encoder.narrowed(*(x for x, _ in data))
    (x, y), held_out, choice, evaluation = (
        (own.to(context.device), labels.to(context.device))
        for own, (_, labels) in zip(ids, data, strict=True)
    )
    flipped = torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < s["noise"]
    y = torch.where(flipped.to(y.device), 1 - y, y)

    def model(seed: int) -> Encoder:
        if where is None:
            made = encoder.small(len(used), seed)
        else:
            made = encoder.pretrained(where, used, seed)
        return made.to(context.device)

    validation = dict(zip(TARGETS, (held_out, evaluation), strict=True))
    return Task((cut(x, s["length"]), y), validation, choice, evaluation, flipped, model)


def from_sst2(s: Settings, data: Path, where: str) -> list[Batch]:
    """Training, held-out and choice from SST-2's training set, evaluation from its other one."""
    texts, labels = encoder.read(data, "train")
    other, other_labels = encoder.read(data, "dev")
    groups = split(s, texts, shuffled(len(texts)), set(other))
    chosen = [([texts[i] for i in rows], labels[rows]) for rows in groups]
    chosen.append((other[: s["evaluation"]], other_labels[: s["evaluation"]]))
    return [(encoder.tokens(where, x, s["longest"]), y) for x, y in chosen]


def from_passages(s: Settings) -> list[Batch]:
    ids, labels = encoder.passages(s["longest"])
    texts = [row.tobytes() for row in ids.numpy()]
    order = shuffled(len(texts))
    first, order = order[: s["evaluation"]], order[s["evaluation"] :]
    groups = [*split(s, texts, order, {texts[i] for i in first}), first]
    return [(ids[rows], labels[rows]) for rows in groups]


def split(s: Settings, texts: Sequence[Any], order: list[int], seen: set[Any]) -> list[list[int]]:
    """Rows for training, then held-out and choice, whose texts are not among the former, those
    already ``seen``, and not twice: SST-2 repeats itself."""
    train, wanted = order[: s["examples"]], s["held_out"] + s["choice"]
    seen = seen | {texts[i] for i in train}
    found: list[int] = []
    for i in order[s["examples"] :]:
        if texts[i] not in seen:
            seen.add(texts[i])
            found.append(i)
        if len(found) == wanted:
            return [train, found[: s["held_out"]], found[s["held_out"] :]]
    raise ValueError(f"{wanted:,} further texts are wanted and there are {len(found):,}")


def shuffled(n: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()


def cut(ids: Tensor, length: int) -> Tensor:
    """The first tokens; a text that is cut still ends with the token that ends texts."""
    short = ids[:, :length].clone()
    end = ids.gather(1, (ids != encoder.PAD).sum(1, keepdim=True) - 1)[:, 0]
    over = (ids != encoder.PAD).sum(1) > length
    short[over, -1] = end[over]
    return short


def order(examples: int, settings: Settings, seed: int) -> Tensor:
    """Rows of each step, [steps, batch]: epochs one after the other, what is left over dropped."""
    generator = torch.Generator().manual_seed(seed + 1)
    rows = torch.cat(
        [torch.randperm(examples, generator=generator) for _ in range(settings["epochs"])]
    )
    steps = len(rows) // settings["batch"]
    return rows[: steps * settings["batch"]].view(steps, settings["batch"])

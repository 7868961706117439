"""The examples: what is trained on, what values are for, what accuracy is measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.common import encoder
from experiments.common.encoder import Batch, Encoder
from experiments.common.parts import Context, Settings

TARGETS = ("held-out", "paper")  # disjoint from the evaluation, or the evaluation itself


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
        rest, dev = encoder.sst2(context.data, where, s["longest"])
        order = shuffled(len(rest[0]))
    else:
        where, rest = None, encoder.passages(s["longest"])
        order = shuffled(len(rest[0]))
        dev, order = pick(rest, order[: s["evaluation"]]), order[s["evaluation"] :]
    train = pick(rest, order[: s["examples"]])
    more = others(rest[0], order[s["examples"] :], (train[0], dev[0]), s["held_out"] + s["choice"])
    data = (
        train, pick(rest, more[: s["held_out"]]), pick(rest, more[s["held_out"] :]),
        pick(dev, torch.arange(s["evaluation"])),
    )  # fmt: skip
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

    return Task(
        (cut(x, s["length"]), y), {"held-out": held_out, "paper": evaluation}, choice, evaluation,
        flipped, model,
    )  # fmt: skip


def shuffled(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


def others(ids: Tensor, order: Tensor, than: tuple[Tensor, ...], wanted: int) -> Tensor:
    """Rows, in this order, whose texts are not among these and not twice: SST-2 repeats itself."""
    seen = {row.tobytes() for x in than for row in x.numpy()}
    found: list[int] = []
    for i in order.tolist():
        text = ids[i].numpy().tobytes()
        if text not in seen:
            seen.add(text)
            found.append(i)
        if len(found) == wanted:
            return torch.tensor(found)
    raise ValueError(f"{wanted:,} further texts are wanted and there are {len(found):,}")


def pick(data: Batch, rows: Tensor) -> Batch:
    return data[0][rows], data[1][rows]


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

"""Trainings in several processes and the same in one, on the joined batch.

A rank's loss is the mean over its own rows. DistributedDataParallel averages over ranks, so in one
process each row counts 1 / (rows of its rank · ranks).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import inrun
from inrun.gpt import GPT
from inrun.scoring import deals

STEPS, MICROS, WORDS, LENGTH = 4, 2, 11, 6


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, WORDS)

    def forward(self, ids):
        x = F.one_hot(ids, WORDS).to(self.head.weight.dtype)  # [B, 6, 11]
        x = x.view(len(ids), 2, 3, WORDS)
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class LoRA(nn.Module):
    """Frozen layers with trained low-rank ones beside them."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(LENGTH, 12), nn.Linear(12, WORDS)
        for p in self.parameters():
            p.requires_grad = False
        self.A, self.B = nn.Linear(LENGTH, 2, bias=False), nn.Linear(2, 12, bias=False)

    def forward(self, ids):
        x = ids.to(self.base.weight.dtype) / WORDS
        return self.head(torch.tanh(self.base(x) + 3 * self.B(self.A(x))))


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(LENGTH, 8, bias=False), nn.Linear(8, WORDS, bias=False)

    def forward(self, ids):
        return self.b(torch.tanh(self.a(ids.to(self.a.weight.dtype) / WORDS)))


class Unused(Matrices):
    """Rows of which the first number is large go through a layer more."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(8, 8)

    def forward(self, ids):
        x = torch.tanh(self.a(ids.to(self.a.weight.dtype) / WORDS))
        large = (ids[:, :1] > 8).to(x.dtype)
        return self.b(x + large * self.more(x) if bool(large.any()) else x)


def gpt():
    return GPT(WORDS, 8, 2, 2, LENGTH)


def compiled():
    return torch.compile(gpt(), backend="aot_eager")


def row_losses(model, ids):
    """The loss of each row."""
    out = model(ids)
    if out.ndim == 3:
        return F.cross_entropy(out[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
    return F.cross_entropy(out, ids[:, 0], reduction="none")


def mean_loss(model, ids):
    return row_losses(model, ids).mean()


@dataclass
class Case:
    model: Any = gpt
    optimizer: Any = lambda p: torch.optim.AdamW(p, lr=1e-3)
    sizes: Any = (3, 3, 3, 3)  # rows of each rank in a micro-batch
    micros: int = 1
    no_sync: bool = False
    clip: Any = None
    autocast: bool = False
    penalty: float = 0.0
    tokens: bool = False
    ddp: dict = field(default_factory=dict)
    hook: Any = None
    inner: bool = False  # watch the module inside
    by_hand: bool = False  # average without the wrapper
    shard: Any = None  # applies fully_shard to the model
    evaluate: bool = False  # run the model without gradients after each step
    split: bool | None = None  # the parts of the validation pass
    slab: int | None = None  # numbers of gradients that are held while orders are sampled
    targets: int = 1
    watch: dict = field(default_factory=dict)
    close: float = 1e-9
    steps: int = STEPS


def clip_norm(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_value(model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)


def sgd(p):
    return torch.optim.SGD(p, lr=0.1, momentum=0.9)


def muon(p):
    return torch.optim.Muon(p, lr=1e-2)


FAST = {"training": "fast", "form": "materialise"}  # every weight gradient is a sum
CASES = {
    "gpt": Case(targets=2, watch={"estimator": ["secant", "sgd"]}),
    "convnet, SGD": Case(ConvNet, sgd),
    "LoRA, static graph": Case(LoRA, ddp={"static_graph": True}),
    "Muon": Case(Matrices, muon),
    "accumulation": Case(micros=MICROS, ddp={"gradient_as_bucket_view": True}),
    "accumulation, no_sync": Case(micros=MICROS, no_sync=True, inner=True),
    "clipped by norm": Case(clip=clip_norm, watch={"max_norm": 0.5}),
    "clipped by value": Case(optimizer=sgd, clip=clip_value),
    "bf16": Case(autocast=True, close=0.1),
    "cast by a hook": Case(optimizer=sgd, hook=default_hooks.fp16_compress_hook, close=0.1),
    "penalty, tokens": Case(penalty=1e-2, tokens=True),
    "split validation": Case(split=True, watch={"per_step": 3}),
    "whole validation": Case(split=False, watch={"per_step": 2, "point": "gauss2"}),
    "uneven": Case(sizes=(4, 1, 3, 2)),
    "a rank without examples": Case(sizes=(3, 0, 2, 4), autocast=False),
    "large parameters": Case(sizes=(7, 6), slab=13 * 60),
    "unused parameters": Case(Unused, sgd, ddp={"find_unused_parameters": True}),
    "by hand": Case(by_hand=True, clip=clip_norm, watch={"max_norm": 0.5}),
    "every second step": Case(watch={"every": 2, "seed": 3}),
    "compiled": Case(compiled),
    "carry": Case(targets=2, watch={"estimator": ["carry", "secant"], "window": 2}),
    "carry, SGD, uneven, clipped": Case(
        optimizer=sgd,
        sizes=(4, 1, 3, 2),
        clip=clip_norm,
        watch={"estimator": "carry", "max_norm": 0.5},
    ),
    "carry, a rank without examples": Case(sizes=(3, 0, 2, 4), watch={"estimator": "carry"}),
    "carry, penalty": Case(penalty=1e-2, micros=MICROS, watch={"estimator": "carry"}),
    "carry, clipped by value": Case(clip=clip_value, watch={"estimator": "carry"}),
    "fast": Case(
        ddp={"gradient_as_bucket_view": True}, watch={"ignore": ["blocks.0.qkv.bias"], **FAST}
    ),
}
# Eigenbases begin at the eighth observation. All examples are sampled, in ranks and in one process.
CURVED = {"steps": 12, "watch": {"estimator": ["secant", "influence"]}}
INFLUENCE = {
    "gpt": Case(targets=2, **CURVED),
    "convnet": Case(ConvNet, **CURVED),
    "LoRA": Case(LoRA, **CURVED),
    "SGD, clipped by norm": Case(Matrices, sgd, clip=clip_norm, steps=12, watch={
        "estimator": "influence", "max_norm": 0.5}),
    "uneven": Case(sizes=(4, 1), **CURVED),
    "a rank without examples": Case(sizes=(3, 0), **CURVED),
    "unused parameters": Case(
        Unused, sgd, sizes=(1, 2), ddp={"find_unused_parameters": True}, **CURVED
    ),
    "accumulation": Case(micros=MICROS, no_sync=True, **CURVED),
    "by hand": Case(ConvNet, by_hand=True, **CURVED),
}  # fmt: skip


def data():
    return torch.randint(0, WORDS, (160, LENGTH), generator=torch.Generator().manual_seed(1))


def rows_of(case, step, micro, world):
    """The rows of each rank in a micro-batch."""
    sizes = case.sizes[:world]
    first = (step * case.micros + micro) * sum(sizes) % 100
    return torch.arange(first, first + sum(sizes)).split(sizes)


def rows_and_weights(case, step, micro, world, rank):
    """The rows of a rank and what each counts in its loss; rank None: of all of them."""
    parts = rows_of(case, step, micro, world)
    if rank is not None:
        n = max(len(parts[rank]), 1)
        return parts[rank], torch.full((len(parts[rank]),), 1 / n)
    return torch.cat(parts), torch.cat([torch.full((len(p),), 1 / len(p) / world) for p in parts if
                                        len(p)])  # fmt: skip


def average(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def train(case, world, rank, watched=True, out=None, checks=None):
    """Train as a rank of a world, or (None) on the joined batches: the run, and the state. A check
    of the last step is added to ``checks``. Where there is a process group of one process, the
    model is sharded on it, so that its numbers are cast as those of ranks are."""
    torch.manual_seed(0)
    deals.SLAB = {"cpu": case.slab or 2**26}
    model = net = case.model()
    x = data()
    if case.shard is not None and (rank is not None or dist.is_initialized()):
        case.shard(model)
    elif rank is not None and not case.by_hand:
        net = DistributedDataParallel(model, **case.ddp)
        if case.hook is not None:
            net.register_comm_hook(None, case.hook)
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
    options = {"validation": [x[120:130], x[130:140], x[140:150]], "audit_every": 2}
    if case.targets > 1:
        val = options.pop("validation")
        options["targets"] = {"one": val[:2], "two": val[2:]}
    if rank is not None and case.by_hand:
        options["process_group"] = dist.group.WORLD
    options |= case.watch
    run = None
    if watched:
        run = inrun.watch(
            model if case.inner else net, optimizer, loss=mean_loss, out=out, **options
        )  # fmt: skip
        if case.split is not None and rank is not None:
            run._validator._split.chosen = case.split
    for step in range(case.steps):
        if checks is not None and step == case.steps - 1:
            checks.append(run.check())
        for micro in range(case.micros):
            rows, weights = rows_and_weights(case, step, micro, world, rank)
            quiet = case.no_sync and rank is not None and micro < case.micros - 1
            if case.shard is not None and rank is not None:
                model.set_requires_gradient_sync(not quiet)
                quiet = False
            with net.no_sync() if quiet else nullcontext():
                tokens = {"tokens": True} if case.tokens else {}
                with run.batch(rows, **tokens) if watched else nullcontext():
                    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                        if len(rows):
                            loss = (row_losses(net, x[rows]) * weights).sum()
                        else:  # the wrapper wants a backward pass on each rank
                            loss = 0 * mean_loss(net, x[:1])
                    if case.penalty:
                        loss = loss + case.penalty * sum(p.square().sum() for p in
                                                         model.parameters())  # fmt: skip
                    loss.backward()
                    if case.by_hand and rank is not None:
                        average(model)
        if case.clip is not None:
            case.clip(model)
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluate:
            with torch.no_grad():
                mean_loss(net, x[:2])
    if run is not None:
        run.close()
    kept = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values()
                                   if isinstance(t, torch.Tensor))]  # fmt: skip
    return run, [getattr(t, "_local_tensor", t) for t in kept]

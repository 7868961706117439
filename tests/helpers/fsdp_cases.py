"""Trainings with ``fully_shard``, as those of ddp_cases.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from helpers.ddp_cases import (
    FAST,
    LENGTH,
    MICROS,
    WORDS,
    Case,
    ConvNet,
    LoRA,
    clip_norm,
    clip_value,
    gpt,
    sgd,
)


class Odd(nn.Module):
    """Operations of which the weights are needed again: replayed ones, tensors made of parameters;
    a checkpointed block, parameters smaller than the number of ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(LENGTH, 6), nn.Parameter(torch.randn(6))
        self.slope = nn.PReLU()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = weight_norm(nn.Linear(6, WORDS))

    def forward(self, ids):
        x = ids.to(self.scale.dtype) / WORDS
        x = self.slope(F.linear(x, self.first.weight * self.scale[:, None], self.first.bias))
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.last(self.blocks[1](x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.norm = nn.Bilinear(6, 6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return x + self.norm(self.product(x, x))


def sharded(**options):
    """Shards blocks, if there are any, and the rest."""

    def apply(model):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    return apply


def columns(p):
    return Shard(p.ndim - 1)


def hybrid(model):
    """Two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
OFFLOADED = CPUOffloadPolicy(pin_memory=False)
FSDP_CASES = {
    "fsdp, gpt": Case(shard=sharded(), targets=2, watch={"estimator": ["secant", "sgd"]}),
    "fsdp, convnet, SGD": Case(ConvNet, sgd, shard=sharded()),
    "fsdp, LoRA": Case(LoRA, shard=sharded(reshard_after_forward=False)),
    "fsdp, accumulation, offloaded": Case(
        micros=MICROS, shard=sharded(reshard_after_forward=False, offload_policy=OFFLOADED)
    ),
    "fsdp, accumulation, no sync, tokens, several validation batches": Case(
        micros=MICROS, no_sync=True, tokens=True, shard=sharded(), watch={"per_step": 3}
    ),
    "fsdp, clipped by norm": Case(clip=clip_norm, shard=sharded(), watch={"max_norm": 0.5}),
    "fsdp, clipped by value": Case(ConvNet, sgd, clip=clip_value, shard=sharded()),
    "fsdp, bf16": Case(optimizer=sgd, shard=sharded(mp_policy=BF16), close=0.1),
    "fsdp, a rank without examples": Case(LoRA, sizes=(3, 0, 2, 4), shard=sharded()),
    "fsdp, some left out": Case(shard=sharded(), watch={"ignore": ["blocks.0.*", "norm.weight"]}),
    "fsdp, fast, clipped": Case(
        clip=clip_norm, shard=sharded(), watch={"max_norm": 0.5, "ignore": ["norm.bias"], **FAST}
    ),
    "fsdp, odd operations": Case(Odd, shard=sharded(), evaluate=True),
    "fsdp, columns": Case(shard=sharded(shard_placement_fn=columns)),
    "fsdp, large parameters": Case(sizes=(7, 6), shard=sharded(), slab=13 * 60),
}
FSDP_FOUR = {
    "fsdp, hybrid": Case(gpt, clip=clip_norm, watch={"max_norm": 0.5}, shard=hybrid),
    "fsdp, four": Case(sizes=(4, 1, 3, 2), shard=sharded()),
}

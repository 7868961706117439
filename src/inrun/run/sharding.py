"""Which models under ``fully_shard`` can be watched. Each refusal names the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from inrun.optimizers import rule_for
from inrun.ranks.shards import Shards, is_sharded
from inrun.ranks.torch_compat import unsharded_class
from inrun.torch_compat import uncompiled

_DDP = "train with DistributedDataParallel, where each rank has whole parameters"


def check_shards(model: nn.Module) -> None:
    """Refuse, with a TypeError, what is spread over ranks in another way than by ``fully_shard`` on
    the whole model and one mesh."""
    shards = Shards.of(model)
    if shards is not None:
        _check_groups(model, shards)
        shards.reshard()  # a pass may have left whole parameters in the modules
    known = set() if shards is None else {id(p) for g in shards.groups for p in _held(g)}
    for name, p in model.named_parameters():
        if id(p) not in known and is_sharded(p):
            raise TypeError(
                f"parameter {name} is a DTensor that fully_shard did not make (tensor parallelism, "
                "distribute_tensor): operations on it run in parts on several processes, which the "
                "capture does not see. Spread the model with fully_shard or use "
                "DistributedDataParallel (docs/distributed.md)"
            )
        if shards is not None and id(p) not in known and p.requires_grad:
            raise TypeError(
                f"parameter {name} is trained and not under fully_shard, so its gradient is not "
                "averaged over ranks. Call fully_shard(model) on the whole model after its parts"
            )


def _held(group: Any) -> list[Any]:
    return [raw.sharded_param for raw in group.params]


def _check_groups(model: nn.Module, shards: Shards) -> None:
    why = None
    if _compiled(model) or any(_compiled(m) and _sharded_inside(m) > 1 for m in model.modules()):
        why = (
            "torch.compile around the model, or around several modules that were given to "
            "fully_shard: the graph breaks where FSDP gathers, and its pieces would be compiled "
            "again in every step. Compile the blocks one by one: block.compile() for each"
        )
    mesh = shards.mesh
    if any(g.raw.mesh_info.mesh != mesh for g in shards.groups):
        why = "parameters are spread over different meshes. Give fully_shard one mesh"
    elif mesh.ndim > 1 and mesh.size() != dist.get_world_size():
        why = (
            "a mesh of two dimensions that does not hold all processes (tensor or pipeline "
            f"parallelism beside it). Let all processes average gradients, or {_DDP}"
        )
    for group in shards.groups:
        raw = group.raw
        if raw.gradient_divide_factor not in (None, mesh.size()):
            why = (
                f"set_gradient_divide_factor({raw.gradient_divide_factor}): gradients are no mean "
                "over ranks. Scale the loss instead"
            )
        if raw._all_reduce_hook is not None:
            why = "set_all_reduce_hook: what the hook does to gradients is not known. Remove it"
        if any(p.is_dtensor for p in group.params):
            why = f"fully_shard over tensor parallelism: parameters are spread twice. {_DDP}"
        if any(p.sharded_param._post_accumulate_grad_hooks for p in group.params):
            why = (
                "a hook that runs when a gradient is complete would run in validation passes too. "
                "Do its work after backward()"
            )
        if torch.float16 in (raw.mp_policy.param_dtype, raw.mp_policy.reduce_dtype):
            why = "MixedPrecisionPolicy with float16: use bfloat16, which needs no loss scale"
    if why is not None:
        raise TypeError(f"this model cannot be watched: {why}")


def _compiled(module: nn.Module) -> bool:
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or uncompiled(module) is not module


def _sharded_inside(module: nn.Module) -> int:
    """How many modules were given to ``fully_shard``: this one and those inside."""
    return sum(unsharded_class(m) is not None for m in module.modules())


def check_sharded_step(
    model: nn.Module, optimizers: Sequence[Optimizer], together: bool, scaler: Any
) -> None:
    """Refuse, with a TypeError, optimizers whose update of a coordinate depends on others: a rank
    sees its shard only."""
    if Shards.of(model) is None:
        return
    for optimizer in optimizers:
        if not rule_for(optimizer).elementwise:
            raise TypeError(
                f"{type(optimizer).__name__} with fully_shard: its update needs whole parameters "
                "(or its rule does not say elementwise=True), and each rank has a part of them. "
                f"Use an optimizer that treats each number alone, as AdamW, or {_DDP}"
            )
    if len(optimizers) > 1 and not together:
        raise TypeError(
            "step_together=False with fully_shard: records of the other optimizers would have to "
            f"be kept while weights move. Use one optimizer, or {_DDP}"
        )
    if scaler is not None:
        raise TypeError("a GradScaler with fully_shard is not supported: train in bfloat16")

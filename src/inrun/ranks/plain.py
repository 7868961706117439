"""Plain copies of what ``fully_shard`` has spread over ranks: a model with whole parameters, and an
optimizer of this rank's shards.

``run.check()`` repeats a step with them. FSDP's modules cannot be copied by ``copy.deepcopy``, so
each gets an empty module of its own class first, which is then filled. What FSDP does to numbers
on the way, the casts of its ``MixedPrecisionPolicy``, the copy does too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from inrun.ranks.shards import Shards
from inrun.ranks.torch_compat import local_of, policy_of, unsharded_class, without_sharding
from inrun.torch_compat import tree_map


def plain_copy(model: nn.Module, shards: Shards) -> nn.Module:
    """The model with whole parameters, without FSDP: nothing that it does waits for other ranks.
    Every rank calls it, since each gathers."""
    memo = dict[int, Any]()
    for group in shards.groups:
        for raw in shards.named(group).values():
            p = raw.sharded_param
            whole = shards.joined({"": raw}, {"": local_of(p).detach()[None]})[""][0]
            whole = whole.to(group.raw.mp_policy.param_dtype or whole.dtype, copy=True)
            memo[id(p)] = nn.Parameter(whole, requires_grad=p.requires_grad)
    own = [(m, cls) for m in model.modules() if (cls := unsharded_class(m)) is not None]
    for module, cls in own:
        memo[id(module)] = cls.__new__(cls)
    for module, cls in own:
        made = memo[id(module)]
        state = without_sharding(cls.__getstate__(module))  # what torch.compile made is left out
        made.__setstate__(copy.deepcopy(state, memo))
        _cast_as(made, policy_of(module))
    found: nn.Module = memo.get(id(model)) or copy.deepcopy(model, memo)
    return found


def _cast_as(module: nn.Module, policy: Any) -> None:
    """Cast inputs and outputs of a module as FSDP does."""
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        to_inputs = _caster(policy.param_dtype)
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (to_inputs(args), to_inputs(kwargs)), with_kwargs=True
        )
    if policy.output_dtype is not None:
        to_output = _caster(policy.output_dtype)
        module.register_forward_hook(lambda _, args, out: to_output(out))


def _caster(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return lambda tree: tree_map(cast, tree)


def local_parts(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """A memo for ``deepcopy``: of parameters and state the copies of this rank's shards, as plain
    tensors, with their gradients."""
    memo = dict[int, Any]()
    for group in optimizer.param_groups:
        for p in group["params"]:
            memo[id(p)] = own = nn.Parameter(local_of(p).detach().clone(), p.requires_grad)
            own.grad = None if p.grad is None else local_of(p.grad)
    for state in optimizer.state.values():
        for x in state.values():
            if isinstance(x, Tensor) and local_of(x) is not x:
                memo[id(x)] = local_of(x).clone()
    return memo

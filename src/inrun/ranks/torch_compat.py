"""What ``DistributedDataParallel`` and ``fully_shard`` keep under private names.

As in ``inrun/torch_compat.py``: each entry says why it is needed, what public API would replace it,
and the versions of torch it was tried with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

_CASTING = {
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
}


def casts_gradients(ddp: Any) -> bool:
    """Does a communication hook average the gradients in half precision?

    Public replacement: none. Tried: 2.13.
    """
    return any(hook in _CASTING for hook, _ in getattr(ddp, "_comm_hooks", ()))


def has_mixed_precision(ddp: Any) -> bool:
    """Was it made with ``mixed_precision=``, which replaces the parameters by low-precision copies?

    Public replacement: none (the argument itself is private). Tried: 2.13.
    """
    return getattr(ddp, "mixed_precision", None) is not None


def in_join(ddp: Any) -> bool:
    """Is this inside ``with Join([ddp, ...])`` or ``with ddp.join()``?

    Public replacement: none. Tried: 2.13.
    """
    config = getattr(ddp, "_join_config", None)
    return config is not None and bool(config.enable)


# What ``torch.distributed.fsdp.fully_shard`` (FSDP2) keeps under private names.

no_torch_function = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a subclass whose operations give plain tensors. Tried: 2.11, 2.13."""


def sharding_states(model: nn.Module) -> list[Any]:
    """The state that ``fully_shard`` gave to modules of the model, each once.

    Has the hooks around forward and backward passes and what they note on the way, which the
    validation pass must leave as it was. Public replacement: none. Tried: 2.13.
    """
    if not any(c.__name__ == "FSDPModule" for m in model.modules() for c in type(m).__mro__):
        return []
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    found = (_get_module_fsdp_state(m) for m in model.modules())
    return list({id(s): s for s in found if s is not None}.values())


def sharded_groups(state: Any) -> list[Any]:
    """The parameters that a state gathers together (``FSDPParamGroup``).

    Public replacement: none. Tried: 2.13 (several); 2.11 has one, under another name.
    """
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def local_of(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, the very object that it holds; ``x`` itself if it is none.

    ``to_local`` makes a new tensor each time, and we compare identities. Tried: 2.13.
    """
    held: Tensor = getattr(x, "_local_tensor", x)
    return held


def unsharded_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module had before ``fully_shard``; None if it was not given to it.

    ``fully_shard`` makes a class of two bases, ``FSDPModule`` and the module's own, and refuses
    ``deepcopy``. Public replacement: none. Tried: 2.11, 2.13.
    """
    bases = type(module).__bases__
    if len(bases) == 2 and bases[0].__name__ == "FSDPModule":
        own: type[nn.Module] = bases[1]
        return own
    return None


def without_sharding(held: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module that was given to ``fully_shard``, without its notes and hooks.

    Public replacement: none. Tried: 2.13.
    """
    found = {k: x for k, x in held.items() if not k.startswith("__composable_api")}
    for k in ("_forward_pre_hooks", "_forward_hooks"):
        own = ((i, f) for i, f in held[k].items() if not _of_fsdp(f))
        found[k] = type(held[k])(own)
    return found


def _of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def policy_of(module: Any) -> Any:
    """The ``MixedPrecisionPolicy`` of a module that was given to ``fully_shard``.

    Public replacement: none. Tried: 2.11, 2.13.
    """
    return module._get_fsdp_state()._mp_policy

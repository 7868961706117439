"""What ``torch.nn.parallel.DistributedDataParallel`` keeps under private names.

As in ``inrun/torch_compat.py``: each entry says why it is needed, what public API would replace it,
and the versions of torch it was tried with.
"""

from __future__ import annotations

from typing import Any

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

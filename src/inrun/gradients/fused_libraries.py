"""What the fused losses of torch, TRL and Liger compute, as :class:`LinearLoss`.

Each function here takes the arguments of the library's own and says what they mean in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.gradients.fused_loss import Describe, LinearLoss, Values, register_fused


def cross_entropies(
    targets: Tensor, reduction: str, ignore_index: int, class_weight: Tensor | None = None,
    smoothing: float = 0.0,
) -> Values:  # fmt: skip
    """What each token adds to ``F.cross_entropy`` of all of them."""
    if class_weight is not None and smoothing:
        raise NotImplementedError("it smooths labels and weighs classes")

    def values(z: Tensor, t: Tensor) -> Tensor:
        own = None if class_weight is None else class_weight.to(z.dtype)
        found = F.cross_entropy(
            z, t, own, reduction="none", ignore_index=ignore_index, label_smoothing=smoothing
        )
        return found / tokens if reduction == "mean" else found

    counted = targets != ignore_index
    tokens = counted.sum()
    if class_weight is not None:
        tokens = (class_weight[targets * counted] * counted).sum()
    return values


def torch_chunked(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None,
    weight: Tensor | None, reduction: str, ignore_index: int, label_smoothing: float,
    *tiling: Any,
) -> LinearLoss:  # fmt: skip
    """``F.linear_cross_entropy`` with ``options`` and a reduction; also its other outputs are
    gradients that nobody else sees. Tried: torch 2.13."""
    own = cross_entropies(target, reduction, ignore_index, weight, label_smoothing)
    return LinearLoss(input, linear_weight, target, [own], linear_bias)


def torch_chunked_tokens(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None,
    weight: Tensor | None, ignore_index: int, *tiling: Any,
) -> LinearLoss:  # fmt: skip
    """The same with ``reduction="none"``."""
    own = cross_entropies(target, "none", ignore_index, weight)
    return LinearLoss(input, linear_weight, target, [own], linear_bias)


def trl_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
    chunk_size: int, final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
) -> LinearLoss:  # fmt: skip
    """TRL's ``ChunkedLogProbFunction``: log-probabilities and entropies of tokens; what else it
    gives has no gradient. Tried: trl 1.16."""

    def log_softmax(z: Tensor) -> Tensor:
        z = z * logit_scale
        if (cap := final_logit_softcapping) is not None:
            z = cap * torch.tanh(z / cap)
        return (z / temperature).log_softmax(-1)

    def log_prob(z: Tensor, t: Tensor) -> Tensor:
        return log_softmax(z).gather(-1, t[:, None])[:, 0]

    def entropy(z: Tensor, t: Tensor) -> Tensor:
        found = log_softmax(z)
        return -(found.exp() * found).sum(-1)

    return LinearLoss(hidden, weight, targets, [log_prob, entropy], bias)


def liger(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
    return_z_loss: bool = False, accum_dtype: Any = None, use_token_scaling: bool = False,
    *others: Any,
) -> LinearLoss:  # fmt: skip
    """Liger's ``LigerFusedLinearCrossEntropyFunction``. Its other outputs (z-loss, accuracy,
    predictions) have no gradient. Tried: liger-kernel 0.8."""
    if use_token_scaling:
        raise NotImplementedError("it scales tokens by their probability")
    entropies = cross_entropies(target, reduction, ignore_index, ce_weight, label_smoothing)
    counted = target != ignore_index
    tokens = counted.sum() if reduction == "mean" else 1

    def values(z: Tensor, t: Tensor) -> Tensor:
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        found = entropies(z, t)
        if lse_square_scale:
            squares = z.logsumexp(-1).square() * (t != ignore_index)
            found = found + lse_square_scale * squares / tokens
        return found

    return LinearLoss(input, weight, target, [values], bias)


# Functions of libraries that may never be imported: where each is.
FUNCTIONS: dict[tuple[str, str], Describe] = {
    ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"): trl_log_probs,
    ("liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction"): liger,
}

OPERATORS: dict[str, Describe] = {
    "linear_cross_entropy_batch_chunked": torch_chunked,
    "linear_cross_entropy_batch_chunked_no_reduction": torch_chunked_tokens,
}
for _name, _describe in OPERATORS.items():
    register_fused(_name, _describe)
    register_fused(f"{_name}.default", _describe)

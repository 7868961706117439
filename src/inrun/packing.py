"""Which document each token of a packed batch belongs to: ``owner`` for ``run.batch(ids, owner=)``.

A packed batch holds several documents in one row, or all of them in one long row without padding.
Each function below reads one of the usual descriptions of it and returns an integer tensor of the
shape of the token ids: entry k means the k-th document of the batch (``ids[k]``), −1 nobody.
Documents are counted row by row, from left to right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inrun.errors import BatchError

__all__ = ["from_cu_seqlens", "from_lengths", "from_position_ids", "from_seq_idx"]


def from_lengths(lengths: Sequence[int], shape: Sequence[int] | None = None) -> Tensor:
    """From the lengths of documents that lie one after the other, n_1, n_2, …, in one row.

    ``shape`` as in :func:`from_cu_seqlens`; tokens behind the last document belong to nobody.
    """
    ends = torch.tensor([0, *lengths], device="cpu").cumsum(0)
    return from_cu_seqlens(ends, shape)


def from_cu_seqlens(cu_seqlens: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """From cumulated lengths [0, n_1, n_1 + n_2, …], as FlashAttention takes them.

    ``shape`` is that of the token ids, ``[N]`` (the default, N the last entry) or ``[1, N]``.
    Tokens behind the last document belong to nobody.
    """
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise BatchError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be one-dimensional with one "
            "entry more than there are documents, beginning with 0."
        )
    if cu_seqlens.is_cpu and (int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 0).any())):
        raise BatchError(
            f"cu_seqlens must begin with 0 and grow: [0, n_1, n_1 + n_2, …], but it is "
            f"{cu_seqlens[:4].tolist()}…"
        )
    size = (int(cu_seqlens[-1]),) if shape is None else tuple(shape)
    N = torch.Size(size).numel()
    ends = cu_seqlens[1:].contiguous()
    token = torch.arange(N, device=ends.device, dtype=ends.dtype)
    owner = torch.bucketize(token, ends, right=True).long()
    return owner.masked_fill(owner == len(ends), -1).view(size)


def from_position_ids(position_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """From positions [R, T] or [N] that begin again at 0 with each document.

    ``mask`` (an attention mask): tokens where it is 0 are padding and belong to nobody.
    """
    starts = position_ids == 0
    starts[..., 0] = True
    if mask is not None:
        starts &= mask.bool()
    owner = starts.flatten().long().cumsum(0).view(position_ids.shape) - 1
    return owner if mask is None else owner.masked_fill(mask == 0, -1)


def from_seq_idx(seq_idx: Tensor) -> Tensor:
    """From document numbers [R, T] that begin again at 0 in each row (Mamba's ``seq_idx``, a
    block-diagonal mask's document ids). Negative numbers are padding."""
    rows = seq_idx.reshape(-1, seq_idx.shape[-1]).long()
    counts = rows.amax(1).clamp(min=-1) + 1
    first = counts.cumsum(0) - counts
    owner = torch.where(rows < 0, -1, rows + first[:, None])
    return owner.view(seq_idx.shape)

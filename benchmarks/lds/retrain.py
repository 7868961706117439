"""Retrainings on random halves of the data, many side by side, and their cache.

Every retraining has its own first weights and its own order. The outcomes are kept in a file, so
that credits can be scored again without training again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.lds import clock
from benchmarks.lds.problems import Batch, Problem
from experiments.common import stacked


def halves(examples: int, subsets: int, seed: int = 7) -> Tensor:
    """Random halves of the data as a mask [M, N]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(examples, generator=generator) < examples // 2 for _ in range(subsets)]
    return torch.stack(drawn)


def trained(problem: Problem, masks: Tensor, seeds: Sequence[int]) -> stacked.Stack:
    """One model for each mask, trained on its rows only, all in one stack."""
    models = [problem.make(s) for s in seeds]
    stack, optimizer = stacked.stacked(models[0], problem.optimizer(models[0]), len(seeds))
    with torch.no_grad():
        for k, w in stack.items():
            w.copy_(torch.stack([dict(m.named_parameters())[k] for m in models]))
    orders = [
        problem.order(mask.nonzero()[:, 0], s) for mask, s in zip(masks.cpu(), seeds, strict=True)
    ]
    steps = min(map(len, orders))
    order = [torch.stack([o[t] for o in orders]).to(problem.device) for t in range(steps)]
    stacked.train(models[0], problem.loss, stack, optimizer, problem.train, order, range(steps))
    return stack


def query_losses(problem: Problem, stack: stacked.Stack) -> Tensor:
    """[M, Q]."""
    return _of_queries(problem, stack, problem.losses)


def query_logits(problem: Problem, stack: stacked.Stack) -> Tensor:
    """[M, Q, classes], of problems that classify."""
    return _of_queries(problem, stack, lambda model, batch: model(batch[0]))


def _of_queries(
    problem: Problem, stack: stacked.Stack, what: Callable[[nn.Module, Batch], Tensor]
) -> Tensor:
    one = stacked._with_weights(problem.make(0), what)
    with torch.no_grad():
        return torch.func.vmap(one, in_dims=(0, None), chunk_size=20)(
            {k: w.detach() for k, w in stack.items()}, problem.queries
        )


def outcomes(
    problem: Problem,
    masks: Tensor,
    repeats: int,
    cache: Path | None = None,
    together: int = 50,
    first_seed: int = 100,
    until: float | None = None,
) -> tuple[Tensor, float]:
    """Query losses [repeats, M, Q] after retraining on each half with ``repeats`` seeds, and the
    seconds that one retraining took. Beginning at ``until`` (of ``time.monotonic``) no more seeds
    are started."""
    key = hashlib.sha256(masks.cpu().numpy().tobytes()).hexdigest()[:8]
    found, seconds = [], []
    for r in range(repeats):
        file = cache / f"{problem.name}-{key}-{first_seed + r}.npz" if cache else None
        if file is not None and file.exists():
            kept = np.load(file)
            found.append(torch.from_numpy(kept["losses"]))
            seconds.append(float(kept["seconds"]))
            continue
        if until is not None and time.monotonic() > until and found:
            break
        begun = clock.now()
        parts = []
        for start in range(0, len(masks), together):
            part = masks[start : start + together]
            seeds = [(first_seed + r) * 10_000 + start + k for k in range(len(part))]
            parts.append(query_losses(problem, trained(problem, part, seeds)).cpu())
        found.append(torch.cat(parts))
        seconds.append((clock.now() - begun) / len(masks))
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(file, losses=found[-1].numpy(), seconds=seconds[-1])
    return torch.stack(found), float(np.mean(seconds))

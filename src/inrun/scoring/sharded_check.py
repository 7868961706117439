"""``run.check()`` where parameters are spread over ranks.

Exact Shapley values need no whole parameters: the optimizer treats every number alone, so its real
step for a coalition is taken on this rank's shards, with the gradients [B, *shard] of the examples
of all ranks, and the validation loss is that of the sharded model with the shards of the coalition.

That each example's gradient is its own is shown by a plain copy of the model on every rank, through
which the rank's rows go one by one. That takes the memory of whole models, which is counted before;
where there is too little, the check says so and its verdict is "not verified".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inrun.exact.check import Check, compare, gradient_errors, nobodys, per_example, without
from inrun.exact.reference import twin_of
from inrun.exact.repeat import verified_rows
from inrun.optimizers.joint import members_of
from inrun.ranks.memory import gib, short_of
from inrun.ranks.plain import local_parts, plain_copy
from inrun.ranks.shards import Shards, placed, whole
from inrun.ranks.torch_compat import local_of
from inrun.ranks.world import World
from inrun.tensors.autocast import no_autocast

if TYPE_CHECKING:
    from inrun.scoring.clipping import Clipping
    from inrun.scoring.scorer import Scorer, Step

Rows = dict[str, Tensor]


def check_sharded(
    scorer: Scorer, check: Check, step: Step, ids: np.ndarray, values: np.ndarray,
    clipping: Clipping,
) -> None:  # fmt: skip
    """Fill in ``check``. Every rank calls it."""
    world, shards = scorer.world, scorer.world.shards
    assert shards is not None
    found: list[Any] = world.gather((ids, values))
    ids = np.concatenate([x[0] for x in found if len(x[0])])
    values = np.concatenate([x[1] for x in found], axis=-1)
    _refuse_too_large(scorer, len(ids))
    with no_autocast(shards.device.type):
        rows, nobody = _of_shards(scorer, shards, check, step)
    errors = gradient_errors(without(step.G, nobody), rows, world)
    check.gradient_error = max(world.gather(max(errors.values())))
    members = members_of(scorer.optimizer)
    memos = [local_parts(o) for o in members]
    local = {i: own for memo in memos for i, own in memo.items()}
    twins = [twin_of(o, dict(memo)) for o, memo in zip(members, memos, strict=True)]
    params = {k: local[id(whole(p))] for k, p in scorer.params.items()}
    held = [p for o in members for group in o.param_groups for p in group["params"]]
    own = [world.own(p) for p in held]

    def loss() -> float:
        with placed(own, [local[id(p)].data for p in held]):
            return float(np.mean(scorer.validator.losses()))

    compare(
        check, ids, values.mean(0), rows, nobody, params, scorer.model,
        twins[0] if len(twins) == 1 else twins, loss, clipping.function(world),
        say=world.rank == 0,
    )  # fmt: skip


def _refuse_too_large(scorer: Scorer, B: int) -> None:
    """Raise if not even the gradients of all examples on this rank's shards fit: with them, two
    copies of weights, gradient and state."""
    own = [scorer.world.own(p) for group in scorer.optimizer.param_groups for p in group["params"]]
    state = [t for o in members_of(scorer.optimizer) for x in o.state.values() for t in x.values()]
    kept = [local_of(t) for t in state if isinstance(t, Tensor)]
    need = (B + 4) * _bytes(own) + 2 * _bytes(kept)
    short = short_of(scorer.world, own[0].device, need)
    if short is not None:
        raise MemoryError(
            f"run.check() compares {B} examples by their gradients on each rank's shards: {short}. "
            "Check a step of fewer examples, or train on more ranks"
        )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _of_shards(scorer: Scorer, shards: Shards, check: Check, step: Step) -> tuple[Rows, Rows]:
    """The gradients of all ranks' examples on this rank's shards [B, *shard], and nobody's part.

    Notes in the check how far the captured ones are from those of every row alone.
    """
    world, params, micros = scorer.world, scorer.params, step.micros
    b = sum(m.B for m in micros)
    check.unverified = _too_large(scorer, shards, b)
    rows, nobody, kept = Rows(), Rows(), Rows()
    for raws in shards.in_turn(params):
        like = {k: _like(shards, raw, params[k]) for k, raw in raws.items()}
        own, nobodys_own = per_example(like, micros), nobodys(micros, raws)
        for k, raw in raws.items():
            if check.unverified is None:
                kept[k] = own.get(k, like[k].new_zeros(b, *like[k].shape))
            else:
                rows |= _spread(world, shards, k, raw, own)
            nobody |= _summed(world, shards, k, raw, nobodys_own)
    if check.unverified is None:
        kept = _verified(scorer, shards, check, step, kept)
        raws = {k: raw for group in shards.groups for k, raw in shards.named(group).items()}
        for k in list(kept):
            rows |= _spread(world, shards, k, raws[k], kept)
            del kept[k]
    else:
        check.calls, check.rounding = [], step.tolerance
    return {k: r for k, r in rows.items() if k in step.G}, nobody


def _like(shards: Shards, raw: Any, shard: Tensor) -> Tensor:
    """Type, device and shape of a whole parameter, without its memory."""
    one = torch.zeros((), dtype=shard.dtype, device=shards.device)
    return one.expand(raw._orig_size)


def _too_large(scorer: Scorer, shards: Shards, b: int) -> str | None:
    """Why no plain copy of the model is made, if its memory is not there on some rank: the model
    and one copy, for each row a copy with its gradient, three times the gradients of all rows."""
    size = 0
    for group in shards.groups:
        for raw in shards.named(group).values():
            size += raw._orig_size.numel() * raw.sharded_param.element_size()
    need = (2 + 5 * b) * size
    short = short_of(scorer.world, shards.device, need)
    if short is None and scorer.world.rank == 0:
        print(f"inrun check gathers the model on each rank: {gib(need)} for {b} examples")
    return short and f"rows alone need a whole model on each rank: {short}"


def _verified(
    scorer: Scorer, shards: Shards, check: Check, step: Step, captured: Rows
) -> Rows:  # fmt: skip
    """The gradients of this rank's rows: each row's own where these can be had, else captured."""
    plain = plain_copy(scorer.model, shards)
    named = dict(plain.named_parameters())
    params = {k: named[k] for k in captured}
    rows = captured
    if sum(m.B for m in step.micros):
        mine = {k: r.sum(0) for k, r in captured.items()}
        rows = verified_rows(check, plain, params, step.micros, captured, mine, step.tolerance)
    else:
        check.calls, check.credit_error, check.rounding = [], 0.0, step.tolerance
    found = scorer.world.gather((check.credit_error, check.unverified))
    check.credit_error = max(x for x, _ in found)
    check.unverified = next((x for _, x in found if x is not None), None)
    return rows


def _spread(world: World, shards: Shards, k: str, raw: Any, rows: Mapping[str, Tensor]) -> Rows:
    """Gradients [b, *whole] of a parameter for each rank's examples, as they are in the mean, as
    those of all examples on this rank's shard."""
    own = rows.get(k)
    sent = None if own is None else own.cpu() * world.share
    parts = [shards.own_part(raw, x) for x in world.gather(sent) if x is not None]
    if not parts:
        return {}
    local = local_of(raw.sharded_param)
    return {k: torch.cat([x.to(local) for x in parts])}


def _summed(world: World, shards: Shards, k: str, raw: Any, x: Mapping[str, Tensor]) -> Rows:
    """A gradient [*whole] of a parameter, summed over ranks, on this rank's shard."""
    found = _spread(world, shards, k, raw, {k: x[k][None]} if k in x else {})
    return {k: found[k].sum(0)} if found else {}

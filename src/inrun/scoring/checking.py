"""Checks of a step against slow, obvious computations, over the examples of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.errors import CaptureError, ValidationError
from inrun.exact.check import Check, compare, gradient_errors, nobodys, per_example, without
from inrun.exact.repeat import verified_rows
from inrun.ranks.world import World
from inrun.scoring.agreed import OTHER_DIRECTION, SAME_EVERYWHERE, Agreed, agreed
from inrun.scoring.conclude import Columns, Conclusion
from inrun.scoring.sharded_check import check_sharded
from inrun.tensors.autocast import no_autocast
from inrun.validation.split import digest

if TYPE_CHECKING:
    from inrun.scoring.clipping import Clipping
    from inrun.scoring.scorer import Scorer, Step


def refuse_unseen(world: World, names: Sequence[str], micros: Sequence[MicroBatch]) -> None:
    """Raise if a parameter has a gradient but was not captured, on no rank."""
    seen = {r for m in micros for node in m.met_nodes for r in node.roots}
    seen = set().union(*world.gather(seen))
    if unseen := [k for k in names if k not in seen]:
        raise CaptureError(
            f"parameter {', '.join(unseen[:5])} received a gradient, but no operation of it "
            "was seen inside run.batch(ids): it is used in a custom autograd function (for a "
            "loss fused with its head see inrun.register_function), or outside the with "
            f"block. Leave it out with watch(..., ignore={unseen[:5]!r})."
        )


def refuse_sums(
    world: World, conclusion: Conclusion, params: Mapping[str, Tensor], step: Step,
    numbers: Mapping[str, Tensor], columns: Columns,
) -> None:  # fmt: skip
    """Before the first step with values: captured gradients that do not add up are an error."""
    flags = [f.to(numbers["values"]) for f in step.flags.values()]
    found = agreed(world, numbers, columns, torch.stack(flags) if flags else None)
    expected = numbers["expected"].cpu().numpy()
    own = columns.on_host(numbers["values"], nobody=True)
    every = Agreed.alone(own, expected)
    if found:
        every = Agreed.of(found["agreed"].cpu().numpy(), expected)
    if every.void or not np.isfinite(own).all() or not bool(numbers["finite"]):
        return
    if not every.same_direction(step.tolerance):
        raise ValidationError(f"{OTHER_DIRECTION}. {SAME_EVERYWHERE}")
    if conclusion.add_up(step.number, step.tolerance, every):
        return
    off = []
    if world.alone and world.shards is None:
        G = without(step.G, nobodys(step.micros))
        errors = gradient_errors(G, per_example(params, step.micros))
        off = [k for k, e in errors.items() if e > step.tolerance]
    where = f". Parameters concerned: {', '.join(off[:5]) or 'unknown'}."
    raise CaptureError(conclusion.message + where)


def check_step(
    scorer: Scorer, check: Check, step: Step, ids: np.ndarray, values: np.ndarray,
    clipping: Clipping,
) -> None:  # fmt: skip
    """Fill in ``check``: the values of the first estimator beside exact Shapley values."""
    check.step, check.estimator = step.number, scorer.estimators[0].name
    if scorer.world.shards is not None:
        check_sharded(scorer, check, step, ids, values, clipping)
        return
    ids, values, rows, nobody = gathered(
        scorer.world, check, scorer.model, scorer.params, step.micros, step.G, step.tolerance,
        ids, values,
    )  # fmt: skip
    compare(
        check, ids, values.mean(0), rows, nobody,
        scorer.params, scorer.model, scorer.optimizer,
        lambda: float(np.mean(scorer.validator.losses())), clipping.function(),
        say=scorer.world.rank == 0,
    )  # fmt: skip


def gathered(
    world: World, check: Check, model: Any, params: Mapping[str, Tensor],
    micros: Sequence[MicroBatch], G: Mapping[str, Tensor], tolerance: float,
    ids: np.ndarray, values: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Of all ranks: ids, values [Q, B], gradients [B, *W] of their examples, and nobody's part.

    Notes in the check how far the captured gradients are from ``.grad``, and from those of every
    row alone.
    """
    device = next(iter(G.values())).device
    with no_autocast(device.type):
        rows, nobody = per_example(params, micros), nobodys(micros)
    if world.alone:
        own = without(G, nobody)
        check.gradient_error = max(gradient_errors(own, rows).values())
        return (
            ids,
            values,
            verified_rows(check, model, params, micros, rows, own, tolerance),
            nobody,
        )
    mine = {k: r.sum(0) for k, r in rows.items()}  # of this rank; .grad is the mean over ranks
    if len(ids):
        rows = verified_rows(check, model, params, micros, rows, mine, tolerance)
    else:
        check.calls, check.credit_error, check.rounding = [], 0.0, tolerance
    sent = [{k: t.cpu() * world.share for k, t in x.items()} for x in (rows, nobody)]
    found: list[Any] = world.gather((ids, values, *sent, check.credit_error, check.unverified))
    sizes = [len(x[0]) for x in found]

    def joined(k: str) -> Tensor:
        like = G[k]
        parts = [x[2].get(k, like.new_zeros(n, *like.shape, device="cpu"))
                 for x, n in zip(found, sizes, strict=True)]  # fmt: skip
        return torch.cat(parts).to(like)

    rows = {k: joined(k) for k in G if any(k in x[2] for x in found)}
    nobody = {}
    for part in (x[3] for x in found):
        for k, t in part.items():
            nobody[k] = nobody.get(k, 0) + t.to(device)
    check.gradient_error = max(gradient_errors(without(G, nobody), rows).values())
    check.credit_error = max(x[4] for x in found)
    check.unverified = next((x[5] for x in found if x[5] is not None), None)
    ids = np.concatenate([x[0] for x in found if len(x[0])])
    return ids, np.concatenate([x[1] for x in found], axis=-1), rows, nobody


def refuse_other_data(world: World, batches: Any) -> None:
    """Before the first step of a sharded model: every rank must have the same validation data. The
    gradient, a mean over ranks, would not show it."""
    if world.shards is not None and len(set(world.gather(digest(batches)))) > 1:
        raise ValidationError(f"the ranks have different validation batches. {SAME_EVERYWHERE}")

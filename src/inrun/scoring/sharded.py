"""The contraction where parameters are spread over ranks (ranks/shards.py).

Directions are computed on shards; records hold gradients of whole parameters. So one group of
parameters at a time, as FSDP gathers them: its directions are gathered and contracted with the
records of this rank's examples. Meanwhile its weights are gathered too, since some records run the
operation again. Both are freed before the next group: no rank ever holds more of the model than in
a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from inrun.capture.micro_batch import MicroBatch
from inrun.errors import CaptureError
from inrun.gradients.records import wide_type
from inrun.ranks.shards import Shards
from inrun.ranks.world import World
from inrun.scoring.contraction import Products, add_gradient, contract
from inrun.scoring.uses import Direction


def contraction(world: World) -> Callable[..., Products]:
    """``contract``, or the same for shards."""
    shards = world.shards
    if shards is None:
        return contract

    def by_group(
        u: Mapping[str, Direction], G: Mapping[str, Tensor], micros: Sequence[MicroBatch]
    ) -> Products:
        expected = torch.zeros(len(next(iter(u.values())).v), dtype=torch.float64, device="cpu")
        expected = expected.to(next(iter(G.values())).device)
        values = expected.new_zeros(len(expected), sum(m.columns for m in micros))
        for raws in shards.in_turn(u):
            add_gradient(expected, {k: u[k] for k in raws if G[k].numel()}, G)
            whole = shards.joined(raws, {k: u[k].full for k in raws})
            for k in raws:
                u[k].free()
            as_records = {k: wide_type(raw._unsharded_param.dtype) for k, raw in raws.items()}
            along = {k: Direction(x.to(as_records[k])) for k, x in whole.items()}
            found, _ = contract(along, G, micros, sums=False)
            values += found.to(values.device)
        return values, world.of_whole(expected)

    return by_group


def refuse_scattered(world: World, micros: Sequence[MicroBatch], first: bool) -> None:
    """Raise if parameters that are gathered apart are needed together. In the ``first`` steps on
    all ranks; later a pass that is unlike those before raises where it is seen."""
    shards = world.shards
    if shards is None:
        return
    wrong = _scattered(shards, micros)
    if first:
        wrong = set().union(*world.gather(wrong))
    if wrong:
        raise CaptureError(
            f"{min(wrong)} parameters that fully_shard gathers apart, so they are never whole at "
            "the same time. Give their modules to fully_shard as one: "
            "fully_shard([module_a, module_b])"
        )


def _scattered(shards: Shards, micros: Sequence[MicroBatch]) -> set[str]:
    needed = {(f"{n.name} is made of", n.roots) for m in micros for n in m.met_nodes}
    for op, names in (x for m in micros for x in m.together):
        needed.add((f"the operation '{op}' on {', '.join(sorted(names))} uses", names))
    several = [(what, names) for what, names in needed if len(names) > 1]
    if not several:
        return set()
    group_of = {k: i for i, group in enumerate(shards.inner) for k in shards.named(group)}
    return {w for w, names in several if len({group_of[k] for k in names if k in group_of}) > 1}

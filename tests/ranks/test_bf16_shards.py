"""AdamW under a bfloat16 ``MixedPrecisionPolicy``: ranks against one process with the same casts.

Each rank rounds the gradient of its own rows to bfloat16 before they are averaged; one process
rounds that of all rows. So gradients differ by bfloat16's epsilon, and values by a few of these.
In the first step Adam divides each coordinate of G by its own size, so where the rows' gradients
nearly cancel their rounding decides: there only the sum of the values is compared.
"""

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from helpers.ddp_cases import Case, train
from helpers.fsdp_cases import BF16, sharded
from helpers.ranks import in_ranks

WITHIN = 4 * torch.finfo(torch.bfloat16).eps
CASES = {
    2: Case(shard=sharded(mp_policy=BF16)),
    4: Case(shard=sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
}


def trained(rank, world, ranks):
    """As one of the ranks, or in one process on the joined batches."""
    case = CASES[ranks]
    run, state = train(case, ranks, rank if world > 1 else None)
    _, plain = train(case, ranks, rank if world > 1 else None, watched=False)
    assert all(torch.equal(a, b) for a, b in zip(state, plain, strict=True))
    assert dist.get_world_size() == world
    return run.history().set_index(["step", "id"])["value"].to_dict(), run.steps()


@pytest.mark.parametrize("ranks", CASES)
def test_adamw_in_bf16(ranks):
    ((alone, steps),) = in_ranks(1, trained, ranks)
    by_rank = in_ranks(ranks, trained, ranks)
    joined = {k: v for values, _ in by_rank for k, v in values.items()}
    assert joined.keys() == alone.keys()
    largest = max(abs(v) for (step, _), v in alone.items() if step > 0)
    for (step, example), value in alone.items():
        if step > 0:
            assert abs(joined[step, example] - value) < WITHIN * largest, (step, example)
    for _, own in by_rank:
        size = steps["sum"].abs().max()
        np.testing.assert_allclose(own["sum"], steps["sum"], rtol=0, atol=WITHIN * size)

"""``run.check()`` with fully_shard: exact Shapley values of the global batch, rows alone in plain
copies, and what happens where these do not fit."""

import contextlib
import io

import pandas as pd
import pytest
import torch

from helpers.ddp_cases import Case, ConvNet, LoRA, clip_norm, train
from helpers.fsdp_cases import BF16, Odd, hybrid, sharded
from helpers.ranks import in_ranks
from inrun.ranks import memory

CHECKED = {
    "gpt": Case(sizes=(2, 2), shard=sharded()),
    "odd operations, clipped": Case(
        Odd, sizes=(2, 1), clip=clip_norm, watch={"max_norm": 0.5}, shard=sharded()
    ),
    "frozen, a rank without examples": Case(LoRA, sizes=(3, 0), shard=sharded()),
    "penalty, accumulated, one parameter left out": Case(
        ConvNet, sizes=(2, 2), micros=2, penalty=1e-2, no_sync=True, shard=sharded(),
        watch={"ignore": ["conv.bias"]},
    ),
}  # fmt: skip


FOUR = {
    "hybrid": Case(sizes=(1, 1, 1, 1), shard=hybrid, clip=clip_norm, watch={"max_norm": 0.5}),
    "bf16": Case(sizes=(2, 1, 0, 1), shard=sharded(mp_policy=BF16)),
}


def checked(rank, world, names, free=None):
    if free is not None:
        memory.free_bytes = lambda *args: free
    found = {}
    for name in names:
        case = (CHECKED | FOUR)[name]
        said = io.StringIO()
        checks = []
        with contextlib.redirect_stdout(said):
            _, state = train(case, world, rank, checks=checks)
        _, plain = train(case, world, rank, watched=False)
        same = all(torch.equal(a, b) for a, b in zip(state, plain, strict=True))
        found[name] = checks[0], said.getvalue(), same
    return found


@pytest.fixture(scope="module")
def two():
    return in_ranks(2, checked, list(CHECKED))


def compare(case, world, by_rank, within=1e-8):
    checks = []
    train(case, world, None, checks=checks)
    (alone,) = checks
    for rank, (check, said, same) in enumerate(by_rank):
        assert same  # training is as without
        a, b = (c.table.sort_values("id", ignore_index=True) for c in (check, alone))
        pd.testing.assert_frame_equal(a, b, rtol=within, atol=1e-12)
        assert check.verdict == alone.verdict and check.exact == alone.exact
        assert check.unverified is None and check.gradient_error < 1e-12
        assert check.credit_error < 1e-12
        assert said.count("inrun check at step 3") == (rank == 0)
        assert said.count("inrun check gathers the model on each rank") == (rank == 0)


@pytest.mark.parametrize("name", CHECKED)
def test_check_is_that_of_one_process(two, name):
    compare(CHECKED[name], 2, [found[name] for found in two])


@pytest.mark.slow
def test_replicas_of_shards_and_casts():
    by_rank = in_ranks(4, checked, list(FOUR))
    compare(FOUR["hybrid"], 4, [found["hybrid"] for found in by_rank])
    for found in by_rank:
        check, _, same = found["bf16"]
        assert same and check.unverified is None
        assert 0 < check.credit_error < check.rounding  # rounded, in both ways alike
        assert check.gradient_error < check.rounding
        assert check.pearson > 0.8  # losses are rounded, too


def too_small(rank, world):
    """With memory for shards, but not for whole models; with memory for neither."""
    (check, said, same) = checked(rank, world, ["gpt"], free=250_000)["gpt"]
    with pytest.raises(MemoryError) as caught:
        checked(rank, world, ["gpt"], free=2**10)
    return check, same, said, str(caught.value)


def test_where_whole_models_do_not_fit_the_check_says_so():
    checks = []
    train(CHECKED["gpt"], 2, None, checks=checks)
    for check, same, said, refused in in_ranks(2, too_small):
        pd.testing.assert_frame_equal(check.table, checks[0].table, rtol=1e-8, atol=1e-12)
        assert same and "gathers the model" not in said
        assert check.verdict.startswith("not verified")
        assert "a whole model on each rank: 2 ranks need 0.00 GiB on the host" in check.unverified
        assert "where 0.00 GiB are free" in check.unverified
        assert "by their gradients on each rank's shards: 2 ranks need" in refused

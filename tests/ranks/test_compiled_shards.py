"""``torch.compile`` of the modules that are given to ``fully_shard``: values of one process that
trains the plain model, and graphs that are not compiled again in every step."""

import dataclasses
import warnings

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers.ddp_cases import Case, train
from helpers.fsdp_cases import BF16
from helpers.ranks import in_ranks

BACKEND = "aot_eager"


def before(model, i, **options):
    model.blocks[i].compile(backend=BACKEND)
    fully_shard(model.blocks[i], **options)


def after(model, i, **options):
    fully_shard(model.blocks[i], **options)
    model.blocks[i].compile(backend=BACKEND)


def wrapped(model, i, **options):
    model.blocks[i] = fully_shard(torch.compile(model.blocks[i], backend=BACKEND), **options)


def blocks_by(each, **options):
    def apply(model):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for i in range(len(model.blocks)):
            each(model, i, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    return apply


SECANT = {"estimator": "secant"}  # sampled orders of shards: test_trainings.py
CASES = {
    "before": Case(shard=blocks_by(before), micros=2, no_sync=True, watch=SECANT),
    "after": Case(
        shard=blocks_by(after, reshard_after_forward=False),
        watch=SECANT | {"ignore": ["blocks.0.norm1.*"]},
    ),
    "wrapped": Case(shard=blocks_by(wrapped), sizes=(3, 1), watch=SECANT),
}  # fmt: skip


def no_warnings_of_the_compiler():
    """It looks at ``.grad`` of a block's input, which is no leaf."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def trained(rank, world, name):
    no_warnings_of_the_compiler()
    case, checks, made = CASES[name], [], []
    counted = dataclasses.replace(case, clip=lambda model: made.append(graphs()))
    run, state = train(counted, world, rank, checks=checks if name != "after" else None)
    _, plain = train(case, world, rank, watched=False)
    for a, b in zip(state, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    return run.history(), run.steps()["void"].tolist(), made, checks


def by_row(history):
    return history.set_index(["step", "id"])["value"]


LONG = {"before", "wrapped"}  # with a check, whose coalitions are evaluated by compiled blocks


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=[pytest.mark.slow] * (k in LONG)) for k in CASES]
)
def test_values_are_those_of_the_plain_model(name):
    ranks, checks = in_ranks(2, trained, name), []
    alone, _ = train(dataclasses.replace(CASES[name], shard=None), 2, None, checks=checks)
    want = by_row(alone.history())
    got = {k: v for found in ranks for k, v in by_row(found[0]).items()}
    assert got.keys() == set(want.index)
    assert max(abs(want[k] - v) for k, v in got.items()) < 1e-9 * want.abs().max()
    for found in ranks:
        _, void, made, own = found
        assert void == [None] * 4
        assert made[0] > 0 and made[-1] == made[1]  # compiled, and not again
        for check in own:
            assert check.unverified is None and check.verdict == checks[0].verdict
            assert check.credit_error < 1e-12 and check.gradient_error < 1e-12


def bf16(rank, world):
    no_warnings_of_the_compiler()
    found = []
    for how in (lambda model, i, **options: fully_shard(model.blocks[i], **options), before):
        run, _ = train(Case(shard=blocks_by(how, mp_policy=BF16)), world, rank)
        found.append(run.history().query("step > 0")["value"].to_numpy())
    return found


@pytest.mark.slow
def test_with_a_policy_of_bfloat16():
    """Beside the same ranks without a compiler; both round, so not more than a few per cent."""
    for plain, compiled in in_ranks(2, bf16):
        assert len(plain) and abs(plain - compiled).max() < 0.05 * abs(plain).max()

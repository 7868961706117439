"""What ranks agree on: void on all or none, refused on all, the same direction, one check."""

import contextlib
import io
import re
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import inrun
from helpers.ranks import in_ranks
from inrun.scoring.agreed import Agreed
from inrun.scoring.coalitions import Game

STEPS = 6


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def data():
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(3))
    return x, (x[:, 0] > 0).long()


def parts(ddp=True, fsdp=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    if fsdp:
        fully_shard(model[0], mesh=(mesh := init_device_mesh("cpu", (dist.get_world_size(),))))
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return (DistributedDataParallel(model) if ddp else model), optimizer


def average(model, op=dist.ReduceOp.SUM, divide=True):
    for p in model.parameters():
        dist.all_reduce(p.grad, op)
        if divide:
            p.grad /= dist.get_world_size()


def loop(rank, world, model, optimizer, run, steps=STEPS, inside=None, outside=None):
    x, y = data()
    for step in range(steps):
        rows = torch.arange(step * 6, (step + 1) * 6).view(world, -1)[rank]
        with run.batch(rows):
            loss(model, (x[rows], y[rows])).backward()
            if inside is not None:
                inside(model)
        if outside is not None:
            outside(model, step)
        optimizer.step()
        optimizer.zero_grad()


def watch(model, optimizer, first=40, **options):
    x, y = data()
    val = [(x[first : first + 12], y[first : first + 12])]
    return inrun.watch(model, optimizer, validation=val, loss=loss, audit_every=3, **options)


def error(rank, world, kind, **options):
    """What is raised, as text; the run is closed."""
    model, optimizer = parts(ddp=kind == "ddp", fsdp=kind == "fsdp")
    inside = options.pop("inside", None)
    before, outside = options.pop("before", None), options.pop("outside", None)
    if before is not None:
        before(model)
    kinds = (inrun.CaptureError, inrun.ValidationError, inrun.BatchError)
    with pytest.raises(kinds) as caught, watch(model, optimizer, **options) as run:
        loop(rank, world, model, optimizer, run, inside=inside, outside=outside)
    return str(caught.value)


def refused(rank, world):
    group = dist.group.WORLD
    found = {
        "validation": error(rank, world, "ddp", first=40 + rank),
        "unknown average": error(rank, world, "plain", inside=average),
        "sum": error(rank, world, "plain", process_group=group,
                     inside=lambda m: average(m, divide=False)),
        "none": error(rank, world, "plain", process_group=group),
        "fsdp, validation": error(rank, world, "fsdp", first=40 + rank),
        "fsdp, waiting": error(rank, world, "fsdp",
                               before=lambda m: m.set_requires_gradient_sync(False)),
        "fsdp, gathered": error(rank, world, "fsdp", outside=lambda m, _: m[0].unshard()),
    }  # fmt: skip
    model, optimizer = parts()
    run = watch(model, optimizer)
    with pytest.raises(inrun.BatchError) as caught, Join([model]):
        loop(rank, world, model, optimizer, run)
    run.close()
    return found | {"join": str(caught.value)}


def test_what_does_not_fit_is_refused_on_every_rank():
    for found in in_ranks(2, refused):
        assert "with different directions" in found["validation"]
        assert "without a DistributedSampler" in found["validation"]
        assert "the same gradient, averaged over ranks" in found["none"]
        for wrong in ("unknown average", "sum"):
            assert "do not add up to .grad" in found[wrong]
            assert "not the mean over the ranks" in found[wrong]
        assert (
            "the ranks have different validation batches. Every rank needs the same"
            in found["fsdp, validation"]
        )
        assert "gradients wait to be averaged over ranks" in found["fsdp, waiting"]
        assert "Call reshard() of the modules before the step" in found["fsdp, gathered"]
        assert re.search(r"inside torch's Join.*run\.batch\(\[\]\)", found["join"])


def void_steps(rank, world):
    """Steps that are void: one rank changes its gradient in step 4; averaged outside the batch."""
    found = []
    model, optimizer = parts()

    def noise(model, step):
        if step == 4 and rank == 1:
            model.module[0].weight.grad += 1.0

    with watch(model, optimizer) as run:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            loop(rank, world, model, optimizer, run, outside=noise)
        found.append(run.steps()["void"].fillna("").tolist())
        told = run.history()["step"].unique().tolist()
    for group in (None, dist.group.WORLD):
        model, optimizer = parts(ddp=False)
        with watch(model, optimizer, process_group=group) as run:
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                loop(rank, world, model, optimizer, run, outside=lambda m, step: average(m))
            found.append(run.steps()["void"].notna().tolist())
    model, optimizer = parts(fsdp=True)

    def noise_on_shard(model, step):
        if step == 4 and rank == 1:
            model[0].weight.grad.to_local().add_(1.0)

    with watch(model, optimizer) as run, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        loop(rank, world, model, optimizer, run, outside=noise_on_shard)
        found.append(run.steps()["void"].notna().tolist())
    return found, told


def test_a_step_is_void_on_all_ranks_or_on_none():
    first, second = in_ranks(2, void_steps)
    for (noisy, *by_hand), scored in (first, second):
        assert [bool(v) for v in noisy] == [False] * 4 + [True] * 2  # weights differ since
        assert scored == [0, 1, 2, 3]
        assert by_hand[:2] == [[True] * STEPS] * 2
        assert by_hand[2] == [False] * 4 + [True, False]  # shards: each rank has its own weights
    assert first[0][0][4] == "the step is void on another rank"
    assert second[0][0][4].startswith("the gradient was changed")
    assert first[0][0][5] == second[0][0][5] == (
        "the ranks scored their examples with different directions"
    )  # fmt: skip


def directions(rank, world):
    seen, of = [], Agreed.of

    def noted(flat, expected):
        seen.append((of(flat, expected).spread, expected.copy()))
        return of(flat, expected)

    Agreed.of = staticmethod(noted)
    found = []
    for split in (False, True):
        model, optimizer = parts()
        with watch(model, optimizer, chunk=5) as run:
            run._validator._split.chosen = split
            loop(rank, world, model, optimizer, run)
        found.append([e for _, e in seen])
        assert all((s < 1e-15).all() for s, _ in seen)
        seen.clear()
    return found


def test_the_direction_is_the_same_bit_for_bit():
    first, second = in_ranks(2, directions)
    for a, b in zip(first, second, strict=True):
        assert len(a) == STEPS + 1 and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    np.testing.assert_allclose(first[0], first[1], rtol=1e-12)  # split or not


def checked(rank, world):
    model, optimizer = parts(ddp=world > 1)
    said = io.StringIO()
    with watch(model, optimizer) as run, contextlib.redirect_stdout(said):
        loop(rank, world, model, optimizer, run, steps=2)
        check = run.check()
        x, y = data()
        rows = torch.arange(20, 26).view(world, -1)[rank]
        with run.batch(rows):
            loss(model, (x[rows], y[rows])).backward()
        optimizer.step()
    errors = check.gradient_error, check.credit_error
    return check.table, check.verdict, max(errors), check.unverified, said.getvalue()


def test_check_is_over_the_examples_of_all_ranks():
    alone = checked(0, 1)
    for rank, found in enumerate(in_ranks(2, checked)):
        pd.testing.assert_frame_equal(found[0], alone[0], rtol=1e-8, atol=1e-12)
        assert found[1] == alone[1] and found[3] is None
        assert found[2] < 1e-12
        assert found[4].count("inrun check at step 2") == (rank == 0)


def measured(rank, world):
    """The choice is made in the second pass, by rank 0, and stays."""
    model, optimizer = parts()
    with watch(model, optimizer, chunk=3) as run:
        loop(rank, world, model, optimizer, run, steps=1)
        before = run._validator._split.chosen
        loop(rank, world, model, optimizer, run, steps=3)
        return before, run._validator._split.chosen


def test_rank_0_chooses_who_computes_the_validation_pass():
    (a, first), (b, second) = in_ranks(2, measured)
    assert a is b is None and first is second and first in (True, False)


def sent(rank, world):
    """Bytes given to sums over ranks in a step, split or not; and the number of parameters."""
    torch.set_default_dtype(torch.float32)
    found = []
    for split in (False, True):
        model, optimizer = parts()
        with watch(model, optimizer, per_step=2, estimator="secant") as run:
            run._validator._split.chosen = split
            run._next_audit = STEPS
            for _ in range(2):  # the first step verifies more
                before = run.world.bytes
                x, y = data()
                with run.batch(range(3)):
                    loss(model, (x[:3], y[:3])).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(run.world.bytes - before)
    return found, sum(p.numel() for p in model.parameters()), sent_by_shards()


def sent_by_shards():
    """Bytes given to all collectives in a step with fully_shard: plain, watched, and with sampled
    orders; how often these were drawn."""
    from benchmarks.distributed import counting

    found, drawn = [], []
    sample = Game._by
    Game._by = lambda *own: drawn.append(1) or sample(*own)
    for estimator in (None, "secant", "shapley"):
        model, optimizer = parts(fsdp=True)
        watched = estimator is not None
        options = {"per_step": 2, "estimator": estimator}
        with watch(model, optimizer, **options) if watched else contextlib.nullcontext() as run:
            x, y = data()
            for _ in range(2):  # the first step verifies more
                drawn.clear()
                with counting() as counted:
                    with run.batch(range(3)) if watched else contextlib.nullcontext():
                        loss(model, (x[:3], y[:3])).backward()
                    if watched:
                        run._steppers[0].next_audit = STEPS
                    optimizer.step()
                optimizer.zero_grad()
        found.append(counted["bytes"])
    return *found, len(drawn)


def test_bytes_that_are_sent_are_those_of_the_cost_model():
    from benchmarks.distributed import modelled, modelled_sharded, sharded_pass

    for (whole, split), parameters, (plain, watched, sampled, drawn) in in_ranks(2, sent):
        assert whole == modelled(parameters)
        assert split == modelled(parameters, split=True)
        root = 14  # numbers of the last layer
        assert plain == sharded_pass(parameters, root)
        expected = modelled_sharded(parameters, root, rounds=1)
        assert watched - plain == expected
        with_orders = modelled_sharded(parameters, root, rounds=1, rows=3 * drawn, orders=drawn)
        assert drawn and 0 <= sampled - plain - with_orders < 1000  # values of players

"""``estimator="carry"`` in several processes: what does not fit, checkpoints. That its values are
those of one process is in test_trainings.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import inrun
from helpers.ranks import in_ranks
from inrun.ledger import LedgerError

STEPS, ROWS = 6, 3  # rows of a rank in a step
HALF = STEPS // 2


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def data():
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(3))
    return x, (x[:, 0] > 0).long()


def watched(world, shard=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    net = model if shard else DistributedDataParallel(model)
    x, y = data()
    run = inrun.watch(
        net, optimizer, validation=[(x[40:], y[40:])], loss=loss, estimator="carry", **options
    )
    return net, optimizer, run


def loop(rank, world, model, optimizer, run, steps=STEPS):
    x, y = data()
    for step in range(run.step, steps):
        rows = torch.arange(step * ROWS * world, (step + 1) * ROWS * world).view(world, -1)[rank]
        with run.batch(rows):
            loss(model, (x[rows], y[rows])).backward()
        optimizer.step()
        optimizer.zero_grad()


def refused(rank, world):
    """Rank 1 has no room for the window; parameters in shards."""
    limit = {"memory_limit": 20_000} if rank == 1 else {}
    model, optimizer, run = watched(world, **limit)
    with pytest.raises(MemoryError) as memory:
        loop(rank, world, model, optimizer, run)
    with pytest.raises(ValueError) as shards:
        watched(world, shard=True)
    return str(memory.value), str(shards.value)


def test_what_is_refused_is_so_on_every_rank():
    for memory, shards in in_ranks(2, refused):
        assert "keeps what was captured in 55 steps" in memory
        assert "fully_shard has spread over ranks" in shards
    assert memory.startswith("estimator='carry'")


def gone_on(rank, world, folder):
    """Half a run, and the other half by a run that goes on from the checkpoint of each rank."""
    options = {"window": 2, "out": folder}
    *parts, run = watched(world, **options)
    loop(rank, world, *parts, run, HALF)
    states = [None] * world
    dist.all_gather_object(states, run.state_dict())
    run.close()
    *parts, run = watched(world, **options)
    with pytest.raises(LedgerError) as other:
        run.load_state_dict(states[1 - rank])
    run.load_state_dict(states[rank])
    loop(rank, world, *parts, run)
    run.close()
    dist.barrier()
    return str(other.value), run.history(), run.steps(), len(states[rank]["carried"])


def test_a_rank_goes_on_from_its_own_checkpoint(tmp_path):
    for rank, (other, history, steps, waiting) in enumerate(in_ranks(2, gone_on, tmp_path / "run")):
        assert f"of rank {1 - rank} of 2, here is rank {rank} of 2" in other and waiting
        assert len(history) == STEPS * ROWS * 2 and history["value"].notna().all()
        added = history.groupby("step")["value"].sum()
        assert steps["sum"].to_numpy() == pytest.approx(added.to_numpy(), rel=1e-9)

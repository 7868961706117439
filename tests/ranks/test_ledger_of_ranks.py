"""The ledger that several ranks write: one run for its readers, killed ranks, other numbers of
ranks after a checkpoint."""

import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import inrun
from helpers.ranks import SECONDS, in_ranks, result, start
from inrun.cli.app import app
from inrun.ledger import LedgerError

STEPS, ROWS = 8, 8  # rows of all ranks in a step
WHOLE = StateDictOptions(full_state_dict=True)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train(
    rank, world, folder, until=STEPS, flushed=True, kill=None, overwrite=False, save=4, shard=False
):
    """Train from the checkpoint, if there is one; ``kill`` is the rank that is killed at the end of
    step ``until``. ``flushed``: the checkpoint is made of all ranks' state. ``shard``: with
    fully_shard, not DistributedDataParallel."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    if shard and world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    net = DistributedDataParallel(model) if world > 1 and not shard else model
    file, state = folder / "checkpoint.pt", None
    if file.exists():  # before watch: torch takes an empty step to make the optimizer's state
        state = torch.load(file, weights_only=True)
        set_state_dict(model, optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"], options=WHOLE)  # fmt: skip
    run = inrun.watch(
        net, optimizer, validation=[(x[32:36], y[32:36]), (x[36:], y[36:])], loss=loss,
        out=folder / "run", audit_every=3, overwrite=overwrite, estimator="secant",
    )  # fmt: skip
    if state is not None:
        run.load_state_dict(state["run"])
    for step in range(run.step, until):
        rows = torch.arange(step * ROWS, (step + 1) * ROWS) % 32
        rows = rows.view(world, -1)[rank]
        with run.batch(rows.tolist()):
            loss(net, (x[rows], y[rows])).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == save:
            own = run.state_dict() if flushed or rank == 0 else None
            weights, moments = get_state_dict(model, optimizer, options=WHOLE)
            if rank == 0:
                torch.save({"model": weights, "optimizer": moments, "run": own}, file)
    if kill is not None:
        if rank == 0:
            run._ledger.flush()
        dist.barrier()
        if rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):  # the other rank is gone
            dist.barrier()
            dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    run.close()
    if world > 1:
        dist.barrier()
    return run.steps(), run.values()


def alone(folder, **options):
    folder.mkdir()
    return train(0, 1, folder, **options)


def killed(world, folder, **options):
    """Train in ranks that are killed."""
    started = [start(world, rank, folder / "store", killed_rank, folder, options)
               for rank in range(world)]  # fmt: skip
    for process, hear in started:
        process.join(SECONDS)
        assert process.exitcode == -signal.SIGKILL, result(process, hear)


def killed_rank(rank, world, folder, options):
    return train(rank, world, folder, **options)


def same(found, folder, within=1e-9):
    calm = inrun.open(folder / "run")
    for table in ("history", "values", "steps"):
        a, b = (getattr(r, table)() for r in (calm, found))
        if table == "history":
            a, b = (t.sort_values(["step", "id"], ignore_index=True) for t in (a, b))
        pd.testing.assert_frame_equal(a, b, check_exact=False, rtol=1e-7, atol=within)


def test_a_rank_is_killed_and_the_run_goes_on(tmp_path):
    alone(tmp_path / "calm")
    rough = tmp_path / "rough"
    rough.mkdir()
    killed(2, rough, until=6, kill=1)
    found = inrun.open(rough / "run")  # readable; rank 1 had not flushed its last steps
    assert found.steps()["step"].tolist() == list(range(6))
    assert found.history().groupby("step").size().tolist() == [8] * 4 + [4] * 2
    tables = in_ranks(2, train, rough)
    same(inrun.open(rough / "run"), tmp_path / "calm")
    for steps, values in tables:  # each rank's tables are those of all
        pd.testing.assert_frame_equal(steps, inrun.open(rough / "run").steps())
        assert len(values) == 32


def test_a_sharded_model_goes_on_with_another_number_of_ranks(tmp_path):
    alone(tmp_path / "calm")
    rough = tmp_path / "rough"
    rough.mkdir()
    killed(2, rough, until=6, kill=1, shard=True)
    in_ranks(4, train, rough, STEPS, True, None, False, 4, True)
    same(inrun.open(rough / "run"), tmp_path / "calm")


@pytest.mark.parametrize("ranks", [[4, 2], [2, 4], [1, 2], [2, 1]])
def test_the_number_of_ranks_changes(tmp_path, ranks):
    alone(tmp_path / "calm")
    rough = tmp_path / "rough"
    rough.mkdir()
    for world, until in zip(ranks, (6, STEPS), strict=True):
        in_ranks(world, train, rough, until) if world > 1 else train(0, 1, rough, until)
    same(inrun.open(rough / "run"), tmp_path / "calm")


def test_what_a_killed_rank_had_not_flushed_is_lost_and_the_rest_is_there(tmp_path):
    alone(tmp_path / "calm")
    rough = tmp_path / "rough"
    rough.mkdir()
    killed(2, rough, until=6, kill=1, flushed=False)
    in_ranks(2, train, rough)
    found, calm = inrun.open(rough / "run"), inrun.open(tmp_path / "calm" / "run")
    history, whole = found.history(), calm.history()
    assert history.groupby("step").size().tolist() == [4] * 4 + [8] * 4
    both = history.merge(whole, on=["step", "id"])
    assert len(both) == len(history)
    np.testing.assert_allclose(both["value_x"], both["value_y"], atol=1e-9)
    columns = ["step", "sum", "batch_share", "explained"]  # sums are those of all ranks
    pd.testing.assert_frame_equal(found.steps()[columns], calm.steps()[columns], rtol=1e-6)


def refused(rank, world, folder):
    with pytest.raises(LedgerError, match="holds steps up to 7 already"):
        train(rank, world, folder, save=0)


def test_a_ledger_of_ranks_is_refused_or_overwritten_by_all(tmp_path):
    first = in_ranks(2, train, tmp_path, STEPS, True, None, False, 0)
    in_ranks(2, refused, tmp_path)
    again = in_ranks(2, train, tmp_path, STEPS, True, None, True, 0)
    for a, b in zip(first, again, strict=True):
        pd.testing.assert_frame_equal(a[0], b[0])
        pd.testing.assert_frame_equal(a[1], b[1])
    train(0, 1, tmp_path, until=2, overwrite=True, save=0)  # the folder of rank 1 is emptied
    assert len(inrun.open(tmp_path / "run").history()) == 2 * ROWS
    assert inrun.open(tmp_path / "run").values()["steps"].tolist() == [1] * 16


def test_commands_read_and_repair_all_ranks(tmp_path):
    in_ranks(2, train, tmp_path)
    folder = tmp_path / "run"
    call = CliRunner().invoke
    assert call(app, ["info", str(folder)]).exit_code == 0
    top = call(app, ["top", str(folder), "--json"])
    assert top.exit_code == 0 and '"id"' in top.stdout
    part = next(Path(folder / "rank-00001" / "values").iterdir())
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(LedgerError, match=r"rank-00001.*inrun repair"):
        inrun.open(folder).values()
    fixed = call(app, ["repair", str(folder)])
    assert fixed.exit_code == 0 and "rank-00001: moved to" in fixed.stdout
    with pytest.warns(UserWarning, match="rank-00001.*set aside"):
        assert len(inrun.open(folder).history()) == STEPS * ROWS // 2


def test_a_folder_of_another_run_does_not_count(tmp_path):
    in_ranks(2, train, tmp_path)
    other = tmp_path / "other"
    alone(other, save=0)
    (tmp_path / "run" / "rank-00001").rename(other / "run" / "rank-00001")
    with pytest.warns(UserWarning, match="is of another run and does not count"):
        assert len(inrun.open(other / "run").history()) == STEPS * ROWS

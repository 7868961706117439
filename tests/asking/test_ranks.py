"""Several ranks that ask of their share of the data each: what one process says of all of it."""

import warnings

import numpy as np
import pandas as pd
import pytest
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import inrun
from helpers.asking import N, Words, asked_model, batches, next_word
from helpers.ranks import in_ranks


def shares(rank, world):
    """Uneven: rank 0 has most."""
    cut = [0, 7, N] if world == 2 else [0, *range(1, world), N]
    return range(cut[rank], cut[rank + 1])


def asking(rank, world, folder):
    """Everything that is asked in one world of processes: the results by name."""
    _, model, data, queries = asked_model()
    ddp = DistributedDataParallel(model)
    mine = batches(data, 2, list(shares(rank, world)))
    options = {"run": folder / "run", "loss": next_word}
    found = {"ddp": inrun.ask(ddp, mine, queries, **options)}
    found["group"] = inrun.ask(model, mine, queries, process_group=dist.group.WORLD, **options)
    out = folder / "answers"
    found["folder"] = inrun.ask(ddp, mine, queries, out=out, **options)
    found["tokens"] = inrun.ask(ddp, mine, queries, out=out, tokens=True, **options)
    found["again"] = inrun.ask(ddp, mine, queries, out=out, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        twice = inrun.ask(ddp, batches(data, 5), queries, **options)
    found["twice"] = twice, [str(w.message) for w in told]
    if rank == 0:  # the model inside, on one rank alone: nobody else is waited for
        found["alone"] = inrun.ask(model, batches(data), queries, **options)
    dist.barrier()
    other = {"one": queries["one"]} if rank else queries
    broken = [mine[0], "no batch"] if rank == 1 else mine
    found["errors"] = [
        refused(ValueError, ddp, mine, other, **options),
        refused(ValueError, ddp, mine, {"one": queries["one"][:0]}, **options),
        refused(ValueError, ddp, broken, queries, **options),
    ]
    backwards = batches(data, 2, list(shares(rank, world))[::-1])
    found["errors"].append(refused(inrun.LedgerError, ddp, backwards, queries, out=out, **options))
    sharded = Words().double()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    found["errors"].append(refused(ValueError, sharded, mine, queries, **options))
    return found


def refused(kind, *args, **options):
    try:
        inrun.ask(*args, **options)
    except kind as error:
        return str(error)
    return "nothing was refused"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    _, model, data, queries = asked_model(folder / "run")
    alone = inrun.ask(model, batches(data), queries, run=folder / "run", loss=next_word)
    options = {"run": folder / "run", "loss": next_word, "out": folder / "one"}
    inrun.ask(model, batches(data), queries, **options)
    tokens = inrun.ask(model, batches(data), queries, tokens=True, **options)
    return in_ranks(2, asking, folder), alone, tokens, folder, (model, data, queries)


@pytest.mark.parametrize("how", ["ddp", "group", "folder", "again"])
def test_two_ranks_say_what_one_process_says(two, how):
    ranks, alone, *_ = two
    for found in ranks:
        pd.testing.assert_frame_equal(found[how], alone, rtol=1e-9, atol=1e-12)
    pd.testing.assert_frame_equal(ranks[0]["alone"], alone, rtol=1e-9, atol=1e-12)


def test_what_two_ranks_wrote_reads_as_one(two):
    ranks, alone, tokens, folder, _ = two
    read = inrun.open_answers(folder / "answers")
    pd.testing.assert_frame_equal(read.scores, alone, rtol=1e-9, atol=1e-12)
    assert read.examples == N and (folder / "answers" / "rank-00001" / "done.json").is_file()
    for found in (ranks[0]["tokens"], ranks[1]["tokens"], read.tokens):
        pd.testing.assert_frame_equal(found, tokens, check_dtype=False, rtol=1e-9, atol=1e-12)
    (folder / "answers" / "rank-00001" / "done.json").unlink()
    with pytest.raises(inrun.LedgerError, match="a pass that is not complete"):
        inrun.open_answers(folder / "answers")


def test_rows_that_two_ranks_share_are_told(two):
    ranks, alone, *_ = two
    for found in ranks:
        twice, told = found["twice"]
        # each counts twice, of twice as many rows
        np.testing.assert_allclose(twice["one"], alone["one"], rtol=1e-9)
        assert len(told) == 1 and "10 ids were scored by more than one rank" in told[0]


def test_one_process_does_not_go_on_where_two_were(two):
    *_, folder, (model, data, queries) = two
    with pytest.raises(inrun.LedgerError, match="its ranks differ"):
        inrun.ask(
            model, batches(data, 2), queries, run=folder / "run", loss=next_word,
            out=folder / "answers",
        )  # fmt: skip


def test_what_is_wrong_on_one_rank_is_raised_on_all(two):
    for found in two[0]:
        differ, empty, broken, order, sharded = found["errors"]
        assert "asks other questions than" in differ
        assert "not finite" in empty
        assert "pairs (ids, batch)" in broken
        assert "other ids" in order
        assert "under fully_shard" in sharded and "get_model_state_dict" in sharded

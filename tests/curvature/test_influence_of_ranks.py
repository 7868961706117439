"""estimator="influence" in two processes: what one process finds on the joined batch."""

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import inrun
from helpers.ddp_cases import INFLUENCE, WORDS, data, mean_loss, train
from helpers.ranks import in_ranks
from inrun.curvature import saved
from inrun.gpt import GPT
from inrun.ledger.saved import open_run
from ranks.test_trainings import compare

KEPT = ("S", "A", "U_S", "U_A", "spectrum", "left", "right", "tau")


def kept(curvature):
    """All numbers of a curvature by place and name."""
    return {
        (name, k): x.numpy()
        for name, layer in curvature.layers.items()
        for k in KEPT
        if (x := getattr(layer, k)) is not None
    }


def trainings(rank, world, folder):
    found = {}
    for i, (name, case) in enumerate(INFLUENCE.items()):
        run, state = train(case, world, rank, out=folder / str(i))
        _, plain = train(case, world, rank, watched=False)
        same = all(map(torch.equal, state, plain))
        dist.barrier()
        found[name] = (same, run.steps(), run.coverage()), kept(run.curvature)
    return found, asked(rank, world, folder), sharded(world)


def asked(rank, world, folder):
    """Of the GPT, by the curvature that its ranks have saved."""
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(WORDS, 8, 2, 2, 6))
    mine = torch.arange(30)[rank::world]
    return inrun.ask(
        model, [(mine.tolist(), data()[mine])], {"one": data()[150:151]}, run=folder / "0",
        loss=mean_loss,
    )  # fmt: skip


def sharded(world):
    model = GPT(WORDS, 8, 2, 2, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError) as error:
        inrun.watch(
            model, optimizer, validation=[data()[:4]], loss=mean_loss, estimator="influence"
        )
    return str(error.value)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return in_ranks(2, trainings, folder), folder


@pytest.fixture(autouse=True)
def _in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", INFLUENCE)
def test_values_are_those_of_one_process(two, name):
    ranks, folder = two
    case, i = INFLUENCE[name], list(INFLUENCE).index(name)
    compare(case, 2, [found[name][0] for found, *_ in ranks], folder / str(i))
    values = open_run(folder / str(i)).values("influence")["value"]
    assert values.abs().min() > 0


@pytest.mark.parametrize("name", INFLUENCE)
def test_curvature_is_that_of_one_process_and_the_same_on_both_ranks(two, name):
    first, second = (found[name][1] for found, *_ in two[0])
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[k], second[k]) for k in first)  # bit for bit
    alone, _ = train(INFLUENCE[name], 2, None)
    wanted = kept(alone.curvature)
    assert wanted.keys() == first.keys()
    assert any(key == "U_S" for _, key in wanted)
    for (place, key), x in wanted.items():
        if key[0] != "U":  # of a basis, the matrix that it belongs to
            assert abs(first[place, key] - x).max() <= 1e-9 * abs(x).max()


def test_rank_0_saves_it_and_ranks_ask_of_it(two):
    ranks, folder = two
    assert len(list((folder / "0").rglob(saved.FILE))) == 1
    torch.manual_seed(0)
    one = inrun.ask(
        GPT(WORDS, 8, 2, 2, 6), [(list(range(30)), data()[:30])], {"one": data()[150:151]},
        run=folder / "0", loss=mean_loss,
    )  # fmt: skip
    for _, scores, _ in ranks:
        a, b = (x.sort_values("id")["one"].to_numpy() for x in (one, scores))
        assert abs(a - b).max() <= 1e-9 * abs(a).max()


def test_shards_are_refused_by_name(two):
    for *_, said in two[0]:
        assert "fully_shard" in said and "'influence'" in said

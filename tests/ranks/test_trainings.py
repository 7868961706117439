"""Values, history and steps of several ranks are those of one process on the joined batch."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import distributed as dist

from helpers.ddp_cases import CASES, Unused, train
from helpers.fsdp_cases import FSDP_CASES, FSDP_FOUR
from helpers.ranks import in_ranks
from inrun.ledger.saved import open_run

SMALL = {"gpt", "uneven", "accumulation, no_sync", "split validation"}  # also with four ranks
TWO = CASES | FSDP_CASES
FOUR = {k: CASES[k] for k in sorted(SMALL)} | FSDP_FOUR


def all_cases(rank, world, names, folder):
    """Train every case, watched and not; returns the tables and whether training was the same."""
    found = {}
    for i, name in enumerate(names):
        case = (TWO | FOUR)[name]
        run, state = train(case, world, rank, out=folder / str(i))
        _, plain = train(case, world, rank, watched=False)
        equal = close_by if case.watch.get("training") == "fast" else torch.equal
        same = all(equal(a, b) for a, b in zip(state, plain, strict=True))
        dist.barrier()
        found[name] = same, run.steps(), run.coverage()
    return found


def close_by(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return trained(2, list(TWO), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return trained(4, list(FOUR), tmp_path_factory.mktemp("four"))


def trained(world, names, folder):
    by_rank = in_ranks(world, all_cases, names, folder)
    return {name: ([r[name] for r in by_rank], folder / str(i)) for i, name in enumerate(names)}


def compare(case, world, results, folder):
    alone, _ = train(case, world, None)
    together = open_run(folder)
    scored = alone.history()["value"].abs().max()
    for estimator in together.estimators:
        a, b = (r.history(estimator).sort_values(["step", "id"], ignore_index=True)
                for r in (alone, together))  # fmt: skip
        close(a, b, case.close, scored)
        close(alone.values(estimator), together.values(estimator), case.close, scored)
        close(alone.harm(estimator), together.harm(estimator), max(case.close, 1e-6), 1.0)
        close(alone.steps(estimator), together.steps(estimator), case.close, 1.0)
    if case.tokens:
        key = ["step", "id", "position"]
        close(*(r.tokens().sort_values(key, ignore_index=True) for r in (alone, together)),
              1e-6, scored)  # fmt: skip
    for same, steps, coverage in results:
        assert same or case.model.__name__ == "compiled"
        close(steps, together.steps(), 0, 1.0)  # on every rank the same
        if case.model is not Unused:  # later steps of another rank may use more of it
            covered = (c.drop(columns="forms") for c in (coverage, alone.coverage()))
            pd.testing.assert_frame_equal(*covered)


def close(a, b, within, size):
    assert list(a.columns) == list(b.columns) and len(a) == len(b)
    for name in a.columns:
        if a[name].dtype == float and name not in ("residual", "explained"):
            assert np.array_equal(a[name].isna(), b[name].isna()), name
            off = (a[name] - b[name]).abs().max()
            assert not off > within * max(size, a[name].abs().max()), (name, off)
        elif name not in ("residual", "explained"):
            assert a[name].fillna("").tolist() == b[name].fillna("").tolist(), name


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_are_one_process_on_the_joined_batch(two, name):
    compare(TWO[name], 2, *two[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_are_one_process_on_the_joined_batch(four, name):
    compare(FOUR[name], 4, *four[name])

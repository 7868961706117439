"""Values by halves of validation rows in several processes: those of one, on the joined batch."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from helpers.ddp_cases import CASES, train
from helpers.fsdp_cases import FSDP_CASES
from helpers.ranks import in_ranks

OURS = {
    "gpt": CASES["gpt"],
    "accumulation": CASES["accumulation"],
    "split validation": replace(CASES["split validation"], watch={"per_step": 2}),
    "a rank without examples": replace(
        CASES["a rank without examples"], sizes=(3, 0), watch={"estimator": "influence"}
    ),
    "fsdp": FSDP_CASES["fsdp, gpt"],
}


def found_by(name, rank=None, world=2):
    case = OURS[name]
    case = replace(case, watch={"estimator": "secant", **case.watch, "halves_every": 2})
    run, _ = train(case, world, rank)
    return run._ledger.by_halves(0), str(run.steadiness())


@pytest.mark.parametrize("name", OURS)
def test_they_are_those_of_one_process(name):
    by_rank = in_ranks(2, partial(_of_rank, name))
    whole = found_by(name)[0].set_index(["step", "id"])
    ranks = [frame.set_index(["step", "id"]) for frame in by_rank]
    assert sum(map(len, ranks)) == len(whole) > 0
    for own in ranks:
        for k in ("a", "b", "value"):
            expected = whole.loc[own.index, k].to_numpy(float)
            scale = np.abs(whole[k].to_numpy(float)).max()
            np.testing.assert_allclose(own[k].to_numpy(float), expected, atol=1e-8 * scale, rtol=0)


def _of_rank(name, rank, world):
    return found_by(name, rank, world)[0]

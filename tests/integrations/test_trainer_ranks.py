"""transformers' Trainer in two processes (DDP): the values of the same steps in one."""

import numpy as np
import pandas as pd
import pytest

import inrun
from helpers.ranks import in_ranks
from helpers.trainer_ranks import HELD_OUT, ROWS, work
from helpers.trainers import by_hand, llama, padded

pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
pytest.importorskip("accelerate", reason="needs the extra inrun[hf]")


def by_example(history):
    return history.groupby(["step", "id"])["value"].sum()


@pytest.mark.slow  # two imports of transformers
def test_two_processes_have_the_values_of_one(tmp_path):
    ranks = in_ranks(2, work, str(tmp_path))
    for found in ranks:
        assert found["wrapped"] == "DistributedDataParallel"
        assert found["watched"] == found["plain"]  # bit for bit
        assert found["again"] == found["whole"] and not any(found["void"])
    micros = [a + b for a, b in zip(*(found["order"] for found in ranks), strict=True)]
    steps = [micros[k : k + 2] for k in range(0, len(micros), 2)]
    twin = by_hand(llama(), ROWS, padded(HELD_OUT), steps, first=int(ranks[0]["first"]))
    got = by_example(pd.concat([found["history"] for found in ranks]))
    want = by_example(twin.history())
    assert got.index.equals(want.index) and {*got.index.get_level_values("id")} == {*range(14)}
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9 * want.abs().max())
    np.testing.assert_allclose(ranks[0]["sums"], twin.steps()["sum"], rtol=1e-9)
    # resumed in the same folder, both ranks' parts went on: the ledger is that of the whole run
    saved = inrun.open(tmp_path / "ledger")
    pd.testing.assert_series_equal(
        by_example(saved.history()), by_example(ranks[0]["whole history"]), rtol=0, atol=0
    )
    assert (tmp_path / "ledger/report.html").is_file() and len(saved.values()) == 14

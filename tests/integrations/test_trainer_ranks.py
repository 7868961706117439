"""transformers' Trainer in two processes (DDP): the values of the same steps in one."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import inrun
from helpers import trainer_ranks
from helpers.ranks import in_ranks
from helpers.trainers import by_hand, llama, padded

pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
pytest.importorskip("accelerate", reason="needs the extra inrun[hf]")

LAUNCH = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines",
          "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port",
          "0"]  # fmt: skip


def by_example(history):
    return history.groupby(["step", "id"])["value"].sum()


def check(ranks):
    for found in ranks:
        assert found["wrapped"] == "DistributedDataParallel" and not any(found["void"])
        assert found["watched"] == found["plain"]  # bit for bit
    micros = [a + b for a, b in zip(*(found["order"] for found in ranks), strict=True)]
    steps = [micros[k : k + 2] for k in range(0, len(micros), 2)]
    rows, held_out = trainer_ranks.ROWS, padded(trainer_ranks.HELD_OUT)
    twin = by_hand(llama(), rows, held_out, steps, first=int(ranks[0]["first"]))
    got = by_example(pd.concat([found["history"] for found in ranks]))
    want = by_example(twin.history())
    assert got.index.equals(want.index) and {*got.index.get_level_values("id")} == {*range(14)}
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9 * want.abs().max())
    np.testing.assert_allclose(ranks[0]["sums"], twin.steps()["sum"], rtol=1e-9)


def test_two_processes_have_the_values_of_one(tmp_path):
    check(in_ranks(2, trainer_ranks.launched, str(tmp_path)))


@pytest.mark.slow  # a launcher and two imports of transformers
def test_accelerate_launch_and_resuming(tmp_path):
    command = [sys.executable, "-m", *LAUNCH, str(Path(trainer_ranks.__file__)), str(tmp_path)]
    tests = str(Path(__file__).parents[1])
    paths = [tests, *(p for p in [os.environ.get("PYTHONPATH")] if p)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = [pickle.loads((tmp_path / f"rank-{k}.pickle").read_bytes()) for k in range(2)]
    check(ranks)
    assert all(found["again"] == found["whole"] for found in ranks)
    # resumed in the same folder, both ranks' parts went on: the ledger is that of the whole run
    saved = inrun.open(tmp_path / "ledger")
    pd.testing.assert_series_equal(
        by_example(saved.history()), by_example(ranks[0]["whole history"]), rtol=0, atol=0
    )
    assert (tmp_path / "ledger/report.html").is_file() and len(saved.values()) == 14

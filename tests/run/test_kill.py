"""A watched training that is killed again and again ends with the values of an undisturbed one."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F

import inrun

KILLS = int(os.environ.get("INRUN_KILLS", "3"))
SPAWN = multiprocessing.get_context("forkserver")  # real processes that need not import torch again
SPAWN.set_forkserver_preload(["torch._dynamo", "inrun", "duckdb"])
STEPS = 60 + 12 * KILLS
EVERY = 4  # steps between checkpoints


def train(folder: Path, slow: bool, at_work) -> None:
    """The training: everything that matters is in the checkpoint, the order of the data too."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 8, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = inrun.watch(
        model,
        optimizer,
        targets={"a": list(zip(x[:40].split(10), y[:40].split(10), strict=True)),
                 "b": [(x[40:60], y[40:60])]},
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        out=folder / "run",
        overwrite=True,
        estimator=["secant", "sgd"],
        audit_every=5,
    )  # fmt: skip
    file, start = folder / "checkpoint.pt", 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        run.load_state_dict(state["run"])
        torch.set_rng_state(state["random"])
        start = run.step
    at_work.send(start)
    for step in range(start, STEPS):
        rows = torch.randperm(200)[:8]
        with run.batch(rows):
            F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if slow:
            run.state_dict()  # flushes: be killed with more on disk than the checkpoint knows
            at_work.send(step)
        if step % EVERY == EVERY - 1:
            draft = file.with_suffix(".new")
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "run": run.state_dict(),
                "random": torch.get_rng_state(),
            }
            torch.save(state, draft)
            draft.replace(file)
    run.close()
    torch.save(model.state_dict(), file.with_suffix(".model"))


def start(folder: Path, slow: bool):
    """A process that has begun to train, and the pipe by which it tells of its steps."""
    hear, say = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=train, args=(folder, slow, say))
    process.start()
    say.close()
    hear.recv()
    return process, hear


def kill_at_work(folder: Path, steps: int, delay: float) -> None:
    """Train until `steps` steps are done, some seconds more, and kill."""
    process, hear = start(folder, slow=True)
    for _ in range(steps):
        hear.recv()  # EOFError where the training ended first: make it longer
    process.join(delay)
    assert process.exitcode is None, "the training ended before it could be killed: make it longer"
    process.kill()
    process.join()


def test_training_killed_and_resumed_has_the_values_of_an_undisturbed_one(tmp_path):
    rng = np.random.default_rng(KILLS)
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    for folder in (calm, rough):
        folder.mkdir()
    undisturbed, _ = start(calm, slow=False)
    kills, lost, reached = 0, 0, []
    while kills < KILLS or not lost:  # no checkpoint knew of the lost records
        kill_at_work(rough, int(rng.integers(8)), float(rng.uniform(0.0, 0.03)))
        kills += 1
        last = inrun.open(rough / "run").steps()["step"].max()  # readable after every kill
        reached.append(-1 if np.isnan(last) else int(last))
        lost += reached[-1] >= 0 and reached[-1] % EVERY != EVERY - 1
    for process in (start(rough, slow=False)[0], undisturbed):
        process.join(120)
        assert process.exitcode == 0
    a, b = inrun.open(calm / "run"), inrun.open(rough / "run")
    for estimator in a.estimators:
        for table in ("history", "steps", "values", "harm"):
            expected, found = (getattr(r, table)(estimator) for r in (a, b))
            exact = table in ("history", "steps")  # sums are added up by DuckDB in any order
            pd.testing.assert_frame_equal(
                found, expected, check_exact=exact, **({} if exact else {"rtol": 1e-12})
            )
    models = [torch.load(f / "checkpoint.model", weights_only=True) for f in (calm, rough)]
    assert all(torch.equal(models[0][k], models[1][k]) for k in models[0])
    assert len(a.history()) == 8 * STEPS
    if result := os.environ.get("INRUN_CRASH_RESULT"):
        write_result(Path(result), {
            "kills": kills, "steps": STEPS, "rows_per_estimator": len(a.history()),
            "kills_with_records_after_the_checkpoint": lost, "last_step_at_each_kill": reached,
            "history_equal_bit_for_bit": True, "model_equal_bit_for_bit": True,
        })  # fmt: skip


def write_result(file: Path, result: dict[str, object]) -> None:
    from inrun.demo.stage import machine

    file.write_text(json.dumps(result | {"machine": machine()}, indent=1) + "\n")

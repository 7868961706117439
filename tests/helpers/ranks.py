"""Several processes that train together (gloo, on the CPU), and what they return."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

SPAWN = multiprocessing.get_context("forkserver")  # real processes that need not import torch again
SPAWN.set_forkserver_preload(["torch._dynamo", "inrun", "duckdb"])
SECONDS = 400  # after which processes that wait for each other are given up


def in_ranks(world, function, *args):
    """``function(rank, world, *args)`` in ``world`` processes with a process group; returns what it
    returns on each rank. An error on one rank is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        started = [start(world, rank, Path(folder) / "store", function, *args)
                   for rank in range(world)]  # fmt: skip
        try:
            return [result(*each) for each in started]
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def start(world, rank, store, function, *args):
    """One process of the world, and the pipe on which its result comes."""
    hear, say = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_work, args=(say, world, rank, store, function, args))
    process.start()
    say.close()
    return process, hear


def result(process, hear):
    if not hear.poll(SECONDS):
        raise TimeoutError("the processes wait for each other")
    found, error = hear.recv()
    if error is not None:
        raise AssertionError(error)
    return found


def _work(say, world, rank, store, function, args):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
            timeout=timedelta(seconds=SECONDS),
        )  # fmt: skip
        say.send((function(rank, world, *args), None))
        dist.destroy_process_group()
    except BaseException:
        say.send((None, f"rank {rank}: {traceback.format_exc()}"))
        time.sleep(0.1)  # the others may be about to send an error of their own
        raise

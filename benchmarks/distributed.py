"""Several processes: bytes that are communicated per step, and the share of plain throughput.

    python benchmarks/distributed.py        # benchmarks/results/distributed-cpu.json

A small GPT under DistributedDataParallel (gloo, one thread per process), plain and watched, on 2
and 4 processes. Bytes are counted, DDP's by a communication hook and inrun's where it sums over
ranks, and compared with ``modelled``, the model that docs/costs.md uses for 8 to 512 GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import inrun
from inrun.bench.machine import commit, hardware, versions
from inrun.gpt import GPT

RESULTS = ROOT / "benchmarks" / "results"
RANKS = (2, 4)
# how the validation pass is done, and batches of it per step
VARIANTS = {
    "plain": (None, 0),
    "1 batch, each rank": (False, 1),
    "4 batches, each rank": (False, 4),
    "4 batches, split": (True, 4),
}


def modelled(parameters: int, estimators: int = 1, targets: int = 1, split: bool = False) -> int:
    """Bytes that inrun gives to sums over ranks in a step without audit and clipping.

    One vector of five float64 numbers per estimator and target and two flags; where the validation
    pass is split, for each target the gradient of all parameters (float32) and the loss.
    """
    small = 8 * (5 * estimators * targets + 2)
    return small + targets * (4 * parameters + 8) * split


def ring(size: float, ranks: int) -> float:
    """Bytes that each rank sends (and receives) in a ring all-reduce of ``size`` bytes."""
    return 2 * (ranks - 1) / ranks * size


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def measure(rank: int, ranks: int, store: str, say: Any, options: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = [one(rank, name, options) for name in VARIANTS]
    if rank == 0:
        say.put(found)
    dist.barrier()
    dist.destroy_process_group()


def one(rank: int, variant: str, options: Any) -> dict[str, Any]:
    split, per_step = VARIANTS[variant]
    torch.manual_seed(0)
    model = GPT(256, options.width, options.layers, 4, options.length)
    net = DistributedDataParallel(model)
    counted = {"ddp": 0}

    def count(state, bucket):  # DDP refuses annotations that are strings
        counted["ddp"] += bucket.buffer().numel() * bucket.buffer().element_size()
        return allreduce_hook(state, bucket)

    net.register_comm_hook(None, count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(rank)
    shape = (options.batch, options.length)
    x = torch.randint(256, (options.steps, *shape), generator=generator)
    validation = torch.randint(256, (4, 4, options.length),
                               generator=torch.Generator().manual_seed(99))  # fmt: skip
    run = None
    if split is not None:
        run = inrun.watch(net, optimizer, validation=list(validation), loss=loss_of,
                          per_step=per_step, audit_every=0)  # fmt: skip
        run._validator._split.chosen = split
    times = []
    for step in range(options.steps):
        if step == options.warm:
            start_ddp, start_own = counted["ddp"], run.world.bytes if run else 0
        begun = time.perf_counter()
        if run is None:
            loss_of(net, x[step]).backward()
        else:
            with run.batch(range(step * options.batch, (step + 1) * options.batch)):
                loss_of(net, x[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        times.append(time.perf_counter() - begun)
    if run is not None:
        run.close()
    steps = options.steps - options.warm
    own = (run.world.bytes - start_own) / steps if run else 0.0
    parameters = sum(p.numel() for p in model.parameters())
    expected = modelled(parameters, split=bool(split)) if run else 0
    assert own == expected, (variant, own, expected)
    return {
        "variant": variant, "parameters": parameters, "ddp_bytes": (counted["ddp"] - start_ddp)
        / steps, "inrun_bytes": own, "modelled_bytes": expected,
        "step_ms": 1e3 * median(times[options.warm :]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("width", 128), ("layers", 4), ("length", 64), ("batch", 4),
                          ("steps", 30), ("warm", 6)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--out", type=Path, default=RESULTS / "distributed-cpu.json")
    options = parser.parse_args()
    runs = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            say = multiprocessing.get_context("spawn").SimpleQueue()
            args = (ranks, f"{folder}/store", say, options)
            multiprocessing.spawn(measure, args, nprocs=ranks, join=True)
            runs.append({"ranks": ranks, "rows": say.get()})
        print(json.dumps(runs[-1], indent=1))
    shown = {k: v for k, v in vars(options).items() if k not in ("out", "ranks")}
    found = {"environment": {**hardware(torch.device("cpu")), **versions(), "commit": commit()},
             "options": shown, "runs": runs}  # fmt: skip
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

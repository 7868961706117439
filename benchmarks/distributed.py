"""Several processes: bytes that are communicated per step, and the share of plain throughput.

    python benchmarks/distributed.py        # benchmarks/results/distributed-cpu.json

A small GPT under DistributedDataParallel and under fully_shard (gloo, one thread per process),
plain and watched, on 2 and 4 processes. Bytes are counted, DDP's by a communication hook and
inrun's where it sums over ranks, those with fully_shard at all collectives. They are compared with
``modelled`` and ``modelled_sharded``, the models that docs/costs.md uses for 8 to 512 GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import inrun
from inrun.bench.machine import commit, hardware, versions
from inrun.gpt import GPT

RESULTS = ROOT / "benchmarks" / "results"
RANKS = (2, 4)
FIRST = "1 batch, first steps"  # with sampled orders: two steps, none to warm up
# how the validation pass is done, and batches of it per step
VARIANTS = {
    "plain": (None, 0),
    "1 batch, each rank": (False, 1),
    "4 batches, each rank": (False, 4),
    "4 batches, split": (True, 4),
    FIRST: (False, 1),
}


# with fully_shard: batches of the validation set per step
SHARDED = {"plain": 0, "1 batch": 1, "4 batches": 4}


def modelled(
    parameters: int, estimators: int = 1, targets: int = 1, split: bool = False, rows: int = 0
) -> int:
    """Bytes that inrun gives to collectives in a step without audit and clipping.

    One vector of five float64 numbers per estimator and target and two flags; where the validation
    pass is split, for each target the gradient of all parameters (float32) and the loss. ``rows``:
    examples of a rank in a step whose orders are sampled; their gradients are exchanged.
    """
    small = 8 * (5 * estimators * targets + 2)
    return small + targets * (4 * parameters + 8) * split + 4 * rows * parameters


def sharded_pass(parameters: int, root: int, width: int = 4) -> int:
    """Bytes that fully_shard gives to collectives in a forward and backward pass: parameters are
    gathered for both, those of the root module (which stay) once; gradients are reduce-scattered.
    ``width``: bytes of a number on the wire."""
    return width * (parameters + (parameters - root) + parameters)


def modelled_sharded(
    parameters: int, root: int, rounds: int, estimators: int = 1, targets: int = 1, width: int = 4,
    rows: int = 0, orders: int = 0,
) -> int:  # fmt: skip
    """Bytes that inrun adds to that in a step without audit and clipping.

    ``rounds`` validation passes for each target (its batches divided by the ranks, rounded up); for
    each estimator and target the directions (float32) and once more the weights, a group of
    parameters at a time; numbers: one float32 (was the gradient changed?), per target its loss, per
    estimator and target ⟨u, G⟩, and what ``modelled`` has. Where orders are sampled, the weights
    are gathered for each of ``orders`` draws, and the gradients of ``rows`` examples sent in all.
    """
    passes = targets * rounds * sharded_pass(parameters, root, width)
    contraction = estimators * targets * (4 + width) * parameters
    numbers = 4 + 8 * targets + 8 * estimators * targets
    sampled = orders * width * parameters
    return (
        passes
        + contraction
        + sampled
        + numbers
        + modelled(parameters, estimators, targets, rows=rows)
    )


def scatter(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-gather or reduce-scatter of ``size`` bytes."""
    return (ranks - 1) / ranks * size


def ring(size: float, ranks: int) -> float:
    """Bytes that each rank sends (and receives) in a ring all-reduce of ``size`` bytes."""
    return 2 * (ranks - 1) / ranks * size


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def measure(rank: int, ranks: int, store: str, say: Any, options: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = [one(rank, name, options) for name in VARIANTS]
    sharded = [one_sharded(rank, name, options) for name in SHARDED]
    if rank == 0:
        say.put((found, sharded))
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
    run, rows = None, options.batch if variant == FIRST else 0
    if split is not None:
        run = watched(net, optimizer, per_step, options, "shapley" if rows else "secant")
        run._validator._split.chosen = split
    if rows:
        options = argparse.Namespace(**{**vars(options), "steps": 2, "warm": 0})
    found, step_ms = trained(
        rank, net, optimizer, run, options, lambda: (counted["ddp"], run.world.bytes if run else 0)
    )
    parameters = sum(p.numel() for p in model.parameters())
    expected = modelled(parameters, split=bool(split), rows=rows) if run else 0
    again = 0
    if rows:  # more orders: the gradients once more; the orders' values are some hundred bytes
        again = round((found[1] - expected) / (4 * rows * parameters) * options.steps)
        expected += 4 * rows * parameters * again / options.steps
    assert abs(found[1] - expected) <= 1000 * bool(rows), (variant, found[1], expected, again)
    return {
        "variant": variant, "parameters": parameters, "ddp_bytes": found[0],
        "inrun_bytes": found[1], "modelled_bytes": expected, "step_ms": step_ms,
    }  # fmt: skip


def one_sharded(rank: int, variant: str, options: Any) -> dict[str, Any]:
    per_step = SHARDED[variant]
    torch.manual_seed(0)
    model = GPT(256, options.width, options.layers, 4, options.length)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    parameters = sum(p.numel() for p in model.parameters())
    root = parameters - sum(p.numel() for p in model.blocks.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = watched(model, optimizer, per_step, options) if per_step else None
    with counting() as counted:
        found, step_ms = trained(rank, model, optimizer, run, options, lambda: (counted["bytes"],))
    own = sharded_pass(parameters, root)
    rounds = -(-per_step // dist.get_world_size())
    expected = modelled_sharded(parameters, root, rounds) if run else 0
    assert found[0] == own + expected, (variant, found[0], own + expected)
    return {
        "variant": variant, "parameters": parameters, "root": root, "fsdp_bytes": own,
        "inrun_bytes": found[0] - own, "modelled_bytes": expected, "step_ms": step_ms,
    }  # fmt: skip


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Counts the bytes of the larger side of all collectives, of an exchange what is sent."""
    counted = {"bytes": 0}
    names = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single")
    own = {name: getattr(dist, name) for name in names}

    def patched(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            tensors = tensors[1:] if name == "all_to_all_single" else tensors  # what is sent
            counted["bytes"] += max(x.numel() * x.element_size() for x in tensors)
            return own[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, patched(name))
        yield counted
    finally:
        for name, f in own.items():
            setattr(dist, name, f)


def watched(
    net: Any, optimizer: Any, per_step: int, options: Any, estimator: str = "secant"
) -> Any:
    validation = torch.randint(256, (4, 4, options.length),
                               generator=torch.Generator().manual_seed(99))  # fmt: skip
    return inrun.watch(net, optimizer, validation=list(validation), loss=loss_of,
                       per_step=per_step, audit_every=0, estimator=estimator)  # fmt: skip


def trained(
    rank: int, net: Any, optimizer: Any, run: Any, options: Any,
    count: Callable[[], tuple[int, ...]],
) -> tuple[list[float], float]:  # fmt: skip
    """Trains; what was counted per step after warming up, and milliseconds of a step."""
    generator = torch.Generator().manual_seed(rank)
    shape = (options.batch, options.length)
    x = torch.randint(256, (options.steps, *shape), generator=generator)
    times = []
    for step in range(options.steps):
        if step == options.warm:
            start = count()
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
    found = [(b - a) / (options.steps - options.warm) for a, b in zip(start, count(), strict=True)]
    if run is not None:
        run.close()
    return found, 1e3 * median(times[options.warm :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("width", 128), ("layers", 4), ("length", 64), ("batch", 4),
                          ("steps", 20), ("warm", 6)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--out", type=Path, default=RESULTS / "distributed-cpu.json")
    options = parser.parse_args()
    load = os.getloadavg()[0]  # of other programs: what it took is told beside the throughput
    runs = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            say = multiprocessing.get_context("spawn").SimpleQueue()
            args = (ranks, f"{folder}/store", say, options)
            multiprocessing.spawn(measure, args, nprocs=ranks, join=True)
            rows, sharded = say.get()
            runs.append({"ranks": ranks, "rows": rows, "sharded": sharded})
        print(json.dumps(runs[-1], indent=1))
    shown = {k: v for k, v in vars(options).items() if k not in ("out", "ranks")}
    found = {"environment": {**hardware(torch.device("cpu")), **versions(), "commit": commit(),
                             "load": load},
             "options": shown, "runs": runs}  # fmt: skip
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

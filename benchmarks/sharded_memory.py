"""Memory of a rank under fully_shard, plain and watched.

    python benchmarks/sharded_memory.py         # benchmarks/results/sharded_memory-cpu.json

Two numbers for a GPT on 2 and 4 processes (gloo, CPU), each beside that of the plain training:

tensors    the most bytes that tensors held at a time, after any operation, in steps without an
           audit and in audited ones. Nothing is sampled: every storage is followed
resident   the most memory that the system gave to the process, in a training of its own: tensors,
           what the allocator does not give back, and buffers of gloo
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import inrun
from inrun.bench.machine import commit, hardware, versions
from inrun.gpt import GPT

RESULTS = ROOT / "benchmarks" / "results"
WARM = 6  # steps in which inrun looks more closely
STEPS = WARM + 3
AUDITED = WARM + 2  # the last step


class Live(TorchDispatchMode):
    """Follows the storages of all tensors that operations take or make; ``peak`` is the most bytes
    that they held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._known = 0, dict[int, StorageWeakRef]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        new = False
        for t in tree_leaves((args, kwargs, out)):
            t = getattr(t, "_local_tensor", t)
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is None or known.expired():
                    self._known[storage._cdata] = StorageWeakRef(storage)
                    new = True
        if new:
            self.peak = max(self.peak, self._bytes())
        return out

    def _bytes(self) -> int:
        total = 0
        for key, known in list(self._known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
            if storage is None:
                del self._known[key]
            else:
                total += storage.nbytes()  # FSDP frees by making it smaller
        return total


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(rank: int, watch: bool, live: Live | None, options: Any) -> tuple[int, list[int]]:
    """Trains; the number of parameters, and the peak of each step."""
    torch.manual_seed(0)
    model = GPT(256, options.width, options.layers, 4, options.length)
    parameters = sum(p.numel() for p in model.parameters())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (options.batch, options.length)
    x = torch.randint(256, (STEPS, *shape), generator=torch.Generator().manual_seed(rank))
    held_out = torch.randint(256, shape, generator=torch.Generator().manual_seed(99))
    run = None
    if watch:
        run = inrun.watch(
            model, optimizer, validation=[held_out], loss=loss_of, audit_every=AUDITED
        )
    peaks = []
    with live or nullcontext():
        for step in range(STEPS):
            if live is not None:
                live.peak = 0
            with nullcontext() if run is None else run.batch(range(options.batch)):
                loss_of(model, x[step]).backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(0 if live is None else live.peak)
    if run is not None:
        run.close()
        assert run.steps()["explained"].notna().tolist()[WARM:] == [False, False, True]
    return parameters, peaks


def measure(rank: int, ranks: int, store: str, say: Any, watch: bool, options: Any) -> None:
    """Bytes of tensors; or, with ``options.resident``, of the process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    live = None if options.resident else Live()
    parameters, peaks = train(rank, watch, live, options)
    found = {"tensors": max(peaks[WARM:AUDITED]), "audited": peaks[AUDITED]}
    if options.resident:
        found = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, found)
    if rank == 0:
        say.put((parameters, {k: max(x[k] for x in every) for k in found}))
    dist.barrier()
    dist.destroy_process_group()


def measured(ranks: int, watch: bool, options: Any) -> tuple[int, dict[str, int]]:
    """The largest of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        say = multiprocessing.get_context("spawn").SimpleQueue()
        args = (ranks, f"{folder}/store", say, watch, options)
        multiprocessing.spawn(measure, args, nprocs=ranks, join=True)
        return say.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("width", 256), ("layers", 8), ("length", 32), ("batch", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4))
    parser.add_argument("--out", type=Path, default=RESULTS / "sharded_memory-cpu.json")
    options = parser.parse_args()
    runs = []
    for ranks in options.ranks:
        found: dict[str, dict[str, int]] = {"plain": {}, "watched": {}}
        for name, bytes_of in found.items():
            for options.resident in (False, True):
                parameters, more = measured(ranks, name == "watched", options)
                bytes_of.update(more)
        runs.append({"ranks": ranks, "parameters": parameters, **found})
        print(json.dumps(runs[-1]), flush=True)
    shown = {k: v for k, v in vars(options).items() if k not in ("out", "ranks", "resident")}
    found = {"environment": {**hardware(torch.device("cpu")), **versions(), "commit": commit()},
             "options": shown, "runs": runs}  # fmt: skip
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

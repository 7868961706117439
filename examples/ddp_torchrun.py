"""Watch a training in several processes:

    torchrun --nproc-per-node 2 examples/ddp_torchrun.py
    torchrun --nproc-per-node 2 examples/ddp_torchrun.py --shard    # FSDP2 instead of DDP

Each rank trains on its own rows; ``runs/ddp`` is one run. A small network on random data, on the
CPU; on GPUs use the backend "nccl" and put model and batches on ``cuda:LOCAL_RANK``.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import inrun


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[1]), batch[2])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/ddp")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--shard", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    x = torch.randn(600, 20, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    data = TensorDataset(torch.arange(512), x[:512], y[:512])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    if options.shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # the whole validation set on every rank: no DistributedSampler here
    validation = [[torch.arange(512, 600), x[512:], y[512:]]]
    with inrun.watch(
        model, optimizer, validation=validation, loss=loss_of, out=options.out, overwrite=True
    ) as run:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                with run.batch(batch[0]):  # ids of this rank's rows
                    loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()  # every rank has written
    if dist.get_rank() == 0:
        saved = inrun.open(options.out)
        print(saved.values().nsmallest(5, "value").to_string(index=False))
        print(f"{len(saved.values())} examples, explained {saved.summary()['explained']:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Watch a training in several processes:

    torchrun --nproc-per-node 2 examples/ddp_torchrun.py
    torchrun --nproc-per-node 2 examples/ddp_torchrun.py --shard    # FSDP2 instead of DDP

Each rank trains on its own rows; ``runs/ddp`` is one run. A small network on random points, on the
CPU; on GPUs use the backend "nccl" and put model and batches on ``cuda:LOCAL_RANK``.
"""

from __future__ import annotations

import argparse

import torch
from small_data import point_loss, point_network, points, show
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import inrun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/ddp")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--shard", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    data, held_out = points()  # rows: id, point, class
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = point_network()
    if options.shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # the whole validation set on every rank: no DistributedSampler here
    with inrun.watch(
        model, optimizer, validation=[held_out], loss=point_loss, out=options.out, overwrite=True
    ) as run:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                with run.batch(batch[0]):  # ids of this rank's rows
                    point_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()  # every rank has written
    if dist.get_rank() == 0:
        show(inrun.open(options.out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

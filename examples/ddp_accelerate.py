"""Watch a training with Hugging Face accelerate:

    accelerate launch --multi_gpu --num_processes 2 examples/ddp_accelerate.py

(Without a GPU the same command starts two processes on the CPU; ``--cpu`` would start one.)
``accelerator.prepare`` wraps the model in DistributedDataParallel and the optimizer in a class of
its own; ``inrun.watch`` takes both.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from small_data import point_loss, point_network, points, show
from torch.utils.data import DataLoader

import inrun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/accelerate")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    data, held_out = points()  # rows: id, point, class
    net = point_network()
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-2),
        DataLoader(data, batch_size=16, shuffle=True),
    )
    validation = [[t.to(accelerator.device) for t in held_out]]  # the whole of it on every rank
    with inrun.watch(
        model, optimizer, validation=validation, loss=point_loss, out=options.out, overwrite=True
    ) as run:
        for _ in range(options.epochs):
            for batch in loader:
                with run.batch(batch[0]):  # ids of this rank's rows
                    accelerator.backward(point_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        show(inrun.open(options.out))
    accelerator.end_training()


if __name__ == "__main__":
    main()

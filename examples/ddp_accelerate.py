"""Watch a training with Hugging Face accelerate:

    accelerate launch --multi_gpu --num_processes 2 examples/ddp_accelerate.py

(Without a GPU the same command starts two processes on the CPU; ``--cpu`` would start one.)
``accelerator.prepare`` wraps the model in DistributedDataParallel and the optimizer in a class of
its own: watch the model as it is after ``prepare``, and the optimizer inside.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import inrun


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[1]), batch[2])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/accelerate")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    x = torch.randn(600, 20, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    data = TensorDataset(torch.arange(512), x[:512], y[:512])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, adamw, loader)

    device = accelerator.device
    validation = [[t.to(device) for t in (torch.arange(512, 600), x[512:], y[512:])]]
    with inrun.watch(
        model, adamw, validation=validation, loss=loss_of, out=options.out, overwrite=True
    ) as run:
        for _ in range(options.epochs):
            for batch in loader:
                with run.batch(batch[0]):  # ids of this rank's rows
                    accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        saved = inrun.open(options.out)
        print(saved.values().nsmallest(5, "value").to_string(index=False))
        print(f"{len(saved.values())} examples, explained {saved.summary()['explained']:.1%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

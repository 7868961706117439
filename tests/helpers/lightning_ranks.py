"""A training of Lightning in one process or in one of several."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import inrun


def data(n=24):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, torch.arange(n) % 3)


def module():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        validation_step = training_step

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(1)
    return Module()


def fit(folder=None, watch=True, rank=0, world=1):
    """Trains two epochs: the weights and the run."""
    import lightning.pytorch as pl

    held_out, watched = DataLoader(data(8), 8), []
    if watch:
        watched = [inrun.integrations.lightning.Watch(held_out, out=folder, audit_every=2)]
    model = module()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False, callbacks=watched,
        strategy="ddp" if world > 1 else "auto", devices=world, use_distributed_sampler=False,
    )  # fmt: skip
    rows = inrun.with_ids(data()) if watch else data()
    own = [i for i in range(24) if i % 8 * world // 8 == rank]  # of each eight rows
    loader = DataLoader(rows, batch_size=8 // world, sampler=own)
    trainer.fit(model, loader, held_out)
    weights = [p.detach().numpy() for p in model.parameters()]
    return weights, watched[0].run if watch else None


def launched(rank, world, folder):
    """In a process that no launcher has told about the others."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "0"}  # fmt: skip
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    plain, _ = fit(watch=False, rank=rank, world=world)
    watched, run = fit(Path(folder), rank=rank, world=world)
    reported = rank > 0 or (Path(folder) / "report.html").is_file()
    return plain, watched, run.steps(), len(inrun.open(folder).values()) if reported else None

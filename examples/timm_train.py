"""A training in the style of timm's ``train.py``, watched: a vision transformer with stochastic
depth, no decay for vectors, AdamW, warm-up and cosine decay, label smoothing, clipping, an
average of the weights (EMA) that is evaluated, and ``summary.csv``.

    python examples/timm_train.py                                    a small ViT on digits
    python examples/timm_train.py --model resnet18 --data FOLDER     a model of timm's on the
                                                                     ImageFolders train and val

Mixup and CutMix make one row of two examples: whose it is cannot be said, so leave them off.

Recorded (torch 2.13, one core, 41 s of CPU time; one label in ten flipped): 83.7 % of the test
digits, 83.7 % by the average of the weights; explained 100.0 % in the median audited step; harm
finds the 96 flipped labels among 1,000 with AUROC 0.820.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
from pathlib import Path

import torch
from small_data import digits, show
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import inrun


class DropPath(nn.Module):
    """Leaves out this branch for some of the rows."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or not self.rate:
            return x
        keep = torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device) >= self.rate
        return x * keep / (1 - self.rate)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads, self.path = heads, DropPath(drop_path)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        x = x + self.path(self.proj(mixed))
        return x + self.path(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, width: int, depth: int, drop_path: float, classes: int = 10) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 2, 2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        rates = torch.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.Sequential(*(Block(width, 4, rate) for rate in rates))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ModelEma:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        ours, theirs = self.module.state_dict(), model.state_dict()
        for name, x in ours.items():
            new = theirs[name]
            x.lerp_(new, 1 - self.decay) if x.is_floating_point() else x.copy_(new)


def param_groups(model: nn.Module, weight_decay: float):
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    return [
        {"params": vectors, "weight_decay": 0.0},
        {"params": others, "weight_decay": weight_decay},
    ]


def load(args):
    """Model, training, validation and test data, and which training labels were flipped."""
    if args.data is None:
        return ViT(args.width, args.depth, args.drop_path), *digits(args.train, seed=args.seed)
    import timm
    from torchvision.datasets import ImageFolder

    folder, kept = Path(args.data), {"pretrained": args.pretrained}
    data = ImageFolder(folder / "train")
    model = timm.create_model(args.model, num_classes=len(data.classes), **kept)
    config = timm.data.resolve_model_data_config(model)
    data.transform = timm.data.create_transform(**config, is_training=True)
    held = ImageFolder(folder / "val", timm.data.create_transform(**config))
    generator = torch.Generator().manual_seed(args.seed)
    return model, data, *torch.utils.data.random_split(held, [0.5, 0.5], generator), None


def train_one_epoch(args, model, ema, loader, optimizer, schedule, device, run):
    model.train()
    losses = []
    for batch in loader:
        names, (x, y) = inrun.take_ids(batch)
        with run.batch(**names):
            output = model(x.to(device))
            loss = F.cross_entropy(output, y.to(device), label_smoothing=args.smoothing)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ema.update(model)
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    hits = [(model(x.to(device)).argmax(1).cpu() == y).float() for x, y in loader]
    return torch.cat(hits).mean().item() * 100


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="ImageFolders train and val; without it: digits")
    parser.add_argument("--model", default="resnet18", help="of timm, for --data")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--train", type=int, default=1000, help="digits to train on")
    parser.add_argument("--width", type=int, default=32, help="of the small ViT")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--warmup-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--drop-path", type=float, default=0.1)
    parser.add_argument("--model-ema-decay", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", default="runs/timm")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, data, validation, test, flipped = load(args)
    model = model.to(device)
    ema = ModelEma(model, args.model_ema_decay)
    loader = DataLoader(inrun.with_ids(data), args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(param_groups(model, args.weight_decay), lr=args.lr)
    warm, total = args.warmup_epochs * len(loader), args.epochs * len(loader)

    def factor(step):
        cosine = 0.5 * (1 + math.cos(math.pi * step / total))
        return (step + 1) / (warm + 1) if step < warm else cosine

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    with inrun.watch(
        model, optimizer, targets=inrun.by_label(validation), out=args.output, overwrite=True,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        max_norm=args.clip_grad, audit_every=10,
    ) as run, (Path(args.output) / "summary.csv").open("w", newline="") as file:  # fmt: skip
        rows = csv.writer(file)
        rows.writerow(["epoch", "train_loss", "eval_top1", "eval_top1_ema"])
        for epoch in range(args.epochs):
            loss = train_one_epoch(args, model, ema, loader, optimizer, schedule, device, run)
            tests = DataLoader(test, 500)
            found = [validate(m, tests, device) for m in (model, ema.module)]
            rows.writerow([epoch, loss, *found])
            print(f"epoch {epoch}: loss {loss:.3f}, test {found[0]:.1f} %, EMA {found[1]:.1f} %")
    show(run, flipped)
    return run


if __name__ == "__main__":
    main()

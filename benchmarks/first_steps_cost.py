"""What do the first steps cost, in which orders of the examples are sampled?

    python benchmarks/first_steps_cost.py [--models mlp gpt encoder] [--steps 60] [--estimators ...]
        [--out FILE.json --label after]

AdamW on random data, step by step: processor time (on a GPU: wall time) of plain training, with the
secant, and with the default estimator, the samples that its steps took and how far the secant was
off. ``gpt2`` is for a GPU. Entries of ``--out`` that are there already stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import inrun
from inrun.bench.machine import commit, hardware, versions
from inrun.gpt import GPT
from inrun.scoring import coalitions

Batch = tuple[Tensor, Tensor]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPTS = {"gpt": (2048, 256, 6, 8), "gpt2": (50257, 768, 12, 12)}  # vocabulary, width, layers, heads
SIZES = {"mlp": (32, 64), "gpt": (16, 64), "encoder": (32, 64), "gpt2": (16, 1024)}  # batch, tokens
LABELS = 10


class Encoder(nn.Module):
    """A text encoder of MiniLM's size (6 layers of 384) with a head for two classes."""

    def __init__(self) -> None:
        import transformers  # not needed by the others

        super().__init__()
        config = transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        self.bert = transformers.BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=ids).logits
        return logits


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.ReLU(),
                             nn.Linear(32, LABELS))  # fmt: skip
    return Encoder() if name == "encoder" else GPT(*GPTS[name], SIZES[name][1]).to(DEVICE)


def drawn(name: str, n: int, seed: int) -> Batch:
    """Random data with something to learn; words of a text are as frequent as 1/rank."""
    rng = torch.Generator().manual_seed(seed)
    T = SIZES[name][1]
    if name == "mlp":
        x = torch.randn(n, T, generator=rng)
        return x, x[:, :LABELS].argmax(1)
    V = GPTS[name][0] if name in GPTS else 30522
    ids = torch.multinomial(
        (1 / torch.arange(1.0, V + 1)).expand(n, -1), T + 1, True, generator=rng
    )
    y = ids[:, 1:] if name in GPTS else (ids < 100).sum(1) % 2
    return ids[:, :-1].to(DEVICE), y.to(DEVICE)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        logits = model(x)
    return F.cross_entropy(logits.float().flatten(0, -2), y.flatten())


def clock() -> float:
    if DEVICE.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(name: str, estimator: str, steps: int) -> dict[str, Any]:
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4 if name in GPTS else 1e-4)
    run, B, times = None, SIZES[name][0], []
    if estimator != "plain":
        run = inrun.watch(model, optimizer, validation=[drawn(name, max(1, B // 4), 1)], loss=loss,
                          estimator=estimator, audit_every=0, training="fast")  # fmt: skip
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        batch = drawn(name, B, 2 + step)
        start = clock()
        if run is None:
            loss(model, batch).backward()
        else:
            with run.batch(range(B)):
                loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(clock() - start)
        print(name, estimator, step, f"{1e3 * times[-1]:.0f} ms", flush=True)
    found: dict[str, Any] = {"seconds": times, "median": statistics.median(times[2:])}
    found["parameters"] = sum(p.numel() for p in model.parameters())
    if DEVICE.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated()
    if run is not None:
        found["bend"] = [None if x != x else x for x in run.steps()["bend"].tolist()]
        run.close()
    return found


def counting(samples: list[int]) -> Callable[..., Any]:
    """``Game.values`` that notes how many samples it took."""
    values = coalitions.Game.values

    def counted(self: coalitions.Game, *args: Any, **options: Any) -> coalitions.Sampled:
        found = values(self, *args, **options)
        samples.append(len(found.pairs))
        return found

    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["mlp", "gpt", "encoder"])
    names = ["plain", "secant", "shapley"]
    parser.add_argument("--estimators", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--label", default="after")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    samples: list[int] = []
    coalitions.Game.values = counting(samples)  # type: ignore[method-assign]
    before = args.out is not None and args.out.exists()
    data: dict[str, Any] = json.loads(args.out.read_text()) if before else {}
    for name in args.models:
        for estimator in args.estimators:
            samples.clear()
            found = measure(name, estimator, args.steps)
            found |= {"samples": [*samples], "batch": SIZES[name][0], "commit": commit()}
            data.setdefault(args.label, {}).setdefault(name, {})[estimator] = found
            data["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
            data |= {"hardware": hardware(DEVICE), "versions": versions()}
            if args.out:
                args.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

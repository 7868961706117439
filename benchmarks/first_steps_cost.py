"""What do the first steps cost, in which orders of the examples are sampled?

    python benchmarks/first_steps_cost.py [--size gpt2] [--batch 16] [--tokens 1024] [--steps 6]
        [--out FILE.json]

A GPT trained with AdamW on random tokens: the median time of a step, plain, with the secant, and of
steps in which orders are sampled, with the number of orders and the peak memory on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
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

# vocabulary, width, layers, heads
SIZES = {"small": (256, 128, 4, 4), "gpt2": (50257, 768, 12, 12)}


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def measure(args: argparse.Namespace, estimator: str | None) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    V, *shape = SIZES[args.size]
    torch.manual_seed(0)
    model = GPT(V, *shape, args.tokens).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
    ids = torch.randint(0, V, (args.batch + 1, args.tokens + 1), device=device)
    run = None
    if estimator is not None:
        run = inrun.watch(model, optimizer, validation=[ids[:1]], loss=loss, estimator=estimator,
                          audit_every=0, training="fast")  # fmt: skip
    times = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(args.steps):
        start = time.perf_counter()
        if run is None:
            loss(model, ids[1:]).backward()
        else:
            with run.batch(range(args.batch)):
                loss(model, ids[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    found: dict[str, Any] = {"ms": times, "median": statistics.median(times[2:])}
    if device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated()
    if run is not None:
        found["bend"] = run.steps()["bend"].tolist()
        run.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pairs: list[int] = []
    values = coalitions.Game.values

    def counted(self: coalitions.Game, *own: Any) -> coalitions.Sampled:
        found = values(self, *own)
        pairs.append(len(found.pairs))
        return found

    coalitions.Game.values = counted  # type: ignore[method-assign]
    data: dict[str, Any] = {k: v for k, v in vars(args).items() if k != "out"}
    for name in (None, "secant", "shapley"):
        data[name or "plain"] = found = measure(args, name)
        print(name or "plain", *(f"{ms:.0f}" for ms in found["ms"]), "ms", flush=True)
    data["pairs"] = pairs
    print("pairs of an order and its reverse, by step:", pairs)
    data |= {"hardware": hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))}
    data |= {"versions": versions(), "commit": commit()}
    if args.out:
        args.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Would the mean slope over random coalitions do in the first steps, instead of sampled orders?

    python benchmarks/mean_slope.py [--out FILE.json]

Per coordinate K = ∫ E[Ψ'(αG + √(α(1−α) Σg_i²) ξ)] dα by Gauss nodes, what is left of the step
shared by |g_i|; and *differences*, where (Ψ(X + r/2) − Ψ(X − r/2)) / r with the size r of the
players' own gradients stands for Ψ'. Beside them the secant and orders of all coordinates, two and
32 pairs. Models of first_steps.py in float64, AdamW's update written out here; compared with exact
Shapley values of all coalitions (batches 4 and 8) or with 64 pairs of orders (32). Not in the
library: orders of a part of the coordinates cost less and their error is measured.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import first_steps
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inrun.bench.machine import commit, hardware, versions

STEPS = (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 60)
MODELS = ("convnet", "gpt2", "llama")
BATCHES = (4, 8, 32)
LR, BETA1, BETA2, EPS, DECAY = first_steps.LR, 0.9, 0.999, 1e-8, 0.01
TINY = 1e-300
Update = Callable[[Tensor], Tensor]


def flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    pairs = zip(tensors, like, strict=True)
    return torch.cat([torch.zeros(p.numel()) if x is None else x.flatten() for x, p in pairs])


def adam(m: Tensor, v: Tensor, t: int) -> tuple[Update, Update]:
    """AdamW's update at step t, counted from 1, and its derivative."""
    c1, c2 = 1 - BETA1**t, 1 - BETA2**t

    def update(g: Tensor) -> Tensor:
        r = ((BETA2 * v + (1 - BETA2) * g * g) / c2).sqrt()
        return LR / c1 * (BETA1 * m + (1 - BETA1) * g) / (r + EPS)

    def slope(g: Tensor) -> Tensor:
        r = ((BETA2 * v + (1 - BETA2) * g * g) / c2).sqrt()
        bent = (BETA1 * m + (1 - BETA1) * g) * (1 - BETA2) * g / c2 / r.clamp_min(TINY)
        return LR / c1 * ((1 - BETA1) / (r + EPS) - bent / (r + EPS) ** 2)

    return update, slope


def by_orders(update: Update, rows: Tensor, v: Tensor, pairs: int) -> Tensor:
    """Values by orders and their reverses; eight coordinates at a time have their own."""
    B, N = rows.shape
    n, rng = -(-N // 8), torch.Generator().manual_seed(0)
    padded, total = F.pad(rows, (0, 8 * n - N)).view(B, n, 8), torch.zeros(B)
    for _ in range(pairs):
        order = torch.rand(n, B, generator=rng).argsort(1)
        for own in (order, order.flip(1)):
            x, before = torch.zeros(n, 8), update(torch.zeros(N))
            for place in range(B):
                x = x + padded[own[:, place], torch.arange(n)]
                after = update(x.flatten()[:N])
                gain = F.pad((after - before) * v, (0, 8 * n - N)).view(n, 8).sum(1)
                total.index_add_(0, own[:, place], gain)
                before = after
    return total / (2 * pairs)


def mean_slope(slope: Update, G: Tensor, energy: Tensor, xi: int, alpha: int) -> Tensor:
    """∫ E[Ψ'(αG + √(α(1−α)·energy) ξ)] dα with so many nodes of ξ and α."""
    at, weights = np.polynomial.hermite_e.hermegauss(xi)
    x, w = np.polynomial.legendre.leggauss(alpha)
    K = torch.zeros_like(G)
    for a, wa in zip((x + 1) / 2, w / 2, strict=True):
        for z, wz in zip(at, weights / weights.sum(), strict=True):
            K += wa * wz * slope(a * G + (a * (1 - a) * energy).sqrt() * z)
    return K


def estimates(update: Update, slope: Update, rows: Tensor, v: Tensor) -> dict[str, Tensor]:
    G, energy, size = rows.sum(0), rows.square().sum(0), rows.abs()
    change = update(G) - update(torch.zeros_like(G))
    share = size / size.sum(0).clamp_min(TINY)

    def with_rest(K: Tensor) -> Tensor:
        return rows @ (K * v) + (share * (change - K * G)) @ v

    r = (size**3).sum(0) / energy.clamp_min(TINY)  # of those who count
    others = (1 - (size**4).sum(0) / energy.square().clamp_min(TINY)).clamp_min(0) * energy

    def difference(x: Tensor) -> Tensor:
        return (update(x + r / 2) - update(x - r / 2)) / r.clamp_min(TINY)

    K = mean_slope(slope, G, energy, 7, 6)
    secant = torch.where(G == 0, 0.0, change / torch.where(G == 0, 1.0, G))
    return {
        "secant": rows @ (secant * v),
        "mean slope, rest not shared": rows @ (K * v),
        "mean slope": with_rest(K),
        "mean slope, 3 × 2 nodes": with_rest(mean_slope(slope, G, energy, 3, 2)),
        "differences": with_rest(mean_slope(difference, G, others, 7, 6)),
        "orders, 2 pairs": by_orders(update, rows, v, 2),
        "orders, 32 pairs": by_orders(update, rows, v, 32),
    }


class Training:
    def __init__(self, name: str, seed: int) -> None:
        make, self.draw = first_steps.MODELS[name]
        torch.manual_seed(seed)
        self.rng = torch.Generator().manual_seed(seed + 5)
        self.model = make().train()
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=LR, weight_decay=DECAY)
        self.validation = self.draw(6, self.rng)

    def at(self, w: Tensor, gradient: bool = False) -> Tensor:
        """The validation loss with these weights, or its gradient."""
        own = flat([p.detach() for p in self.params], self.params)
        nn.utils.vector_to_parameters(w, self.params)
        loss = first_steps.loss_of(self.model, self.validation)
        if gradient:
            loss = flat(torch.autograd.grad(loss, self.params, allow_unused=True), self.params)
        nn.utils.vector_to_parameters(own, self.params)
        return loss.detach()

    def measure(self, batch: first_steps.Batch, t: int) -> dict[str, float]:
        B, rows = len(next(iter(batch.values()))), []
        for i in range(B):
            own = {k: x[i : i + 1] for k, x in batch.items()}
            loss = first_steps.loss_of(self.model, own) / B
            grads = torch.autograd.grad(loss, self.params, allow_unused=True)
            rows.append(flat(grads, self.params))
        g, states = torch.stack(rows), [self.optimizer.state[p] for p in self.params]
        m, v = (flat([s.get(k) for s in states], self.params) for k in ("exp_avg", "exp_avg_sq"))
        update, slope = adam(m, v, t)
        whole, zero = g.sum(0), torch.zeros_like(m)
        decayed = (1 - LR * DECAY) * flat([p.detach() for p in self.params], self.params)
        middle = decayed - (update(zero) + update(whole)) / 2
        direction = self.at(middle, gradient=True)
        found = estimates(update, slope, g, direction)
        if B > 10:
            exact = by_orders(update, g, direction, 64)
        else:
            with torch.no_grad():
                exact = shapley(lambda mask: self.at(decayed - update(mask @ g)), B)
        return {k: float((x - exact).norm() / exact.norm()) for k, x in found.items()}

    def step(self, batch: first_steps.Batch) -> None:
        self.optimizer.zero_grad()
        first_steps.loss_of(self.model, batch).backward()
        self.optimizer.step()


def shapley(utility: Callable[[Tensor], Tensor], B: int) -> Tensor:
    """The drop of a loss as Shapley values, by all coalitions."""
    masks = torch.arange(2**B)[:, None] >> torch.arange(B) & 1
    losses = torch.stack([utility(mask.double()) for mask in masks])
    found = torch.zeros(B)
    for S, mask in enumerate(masks):
        weight = 1 / (B * math.comb(B - 1, int(mask.sum()))) if int(mask.sum()) < B else 0.0
        for i in range(B):
            if not mask[i]:
                found[i] += weight * (losses[S] - losses[S | 1 << i])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = Path(__file__).parent / "results/mean_slope.json"
    parser.add_argument("--out", type=Path, default=out)
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    runs: list[dict[str, Any]] = []
    for name in MODELS:
        for B in BATCHES:
            training, steps = Training(name, 0), {}
            for step in range(max(STEPS) + 1):
                batch = training.draw(B, training.rng)
                if step in STEPS:
                    steps[step] = training.measure(batch, step + 1)
                    print(name, B, step, *(f"{k}: {e:.4f}" for k, e in steps[step].items()),
                          flush=True)  # fmt: skip
                training.step(batch)
            runs.append({"model": name, "batch": B, "steps": steps})
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    data = {"runs": runs, "lr": LR, "date": now, "hardware": hardware(torch.device("cpu")),
            "versions": versions(), "commit": commit()}  # fmt: skip
    args.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

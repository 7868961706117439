"""Other methods, written out the obvious way with exact per-example gradients: what they can do at
their best, where a library of theirs does not run. Named "our …" in the tables."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.lds import clock
from benchmarks.lds.credit import Credit
from benchmarks.lds.curvature import ekfac
from benchmarks.lds.gradients import Training, Weights, all_rows, chunks, dots, per_example, wait
from benchmarks.lds.problems import Batch, Problem

CHECKPOINTS = 10
FEATURES = 40e9  # bytes of exact features; above them they are hashed to BUCKETS numbers
BUCKETS = 1 << 16


def end(training: Training) -> Weights:
    return training.weights[max(training.weights)]


def scored(problem: Problem, training: Training, weights: Weights, directions: Weights) -> Tensor:
    """One pass over the training rows at these weights: [N, Q]."""
    found = [
        dots(per_example(problem, training.model, weights, rows), directions)
        for _, rows in chunks(problem, problem.train)
    ]
    return torch.cat(found)


def graddot(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    """⟨g_i, g_q⟩ at the end of training."""
    begun = clock.now()
    asked = all_rows(problem, training.model, end(training), problem.queries)
    values = scored(problem, training, end(training), asked)
    wait(problem)
    return {"our GradDot": Credit(values, clock.now() - begun)}


def tracin(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    """Sum of ⟨g_i, g_q⟩ over checkpoints, all with the same learning rate (TracInCP)."""
    begun = clock.now()
    values: Tensor | int = 0
    last = max(training.weights)
    for t in [(k + 1) * last // CHECKPOINTS for k in range(CHECKPOINTS)]:
        weights = training.weights[min(training.weights, key=lambda s: abs(s - t))]
        asked = all_rows(problem, training.model, weights, problem.queries)
        values = values + scored(problem, training, weights, asked)
    wait(problem)
    assert isinstance(values, Tensor)
    return {f"our TracInCP, {CHECKPOINTS} checkpoints": Credit(values, clock.now() - begun)}


def ekfac_at_end(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    """EK-FAC of the trained model, damped by a tenth of each layer's mean eigenvalue. Biases have a
    diagonal of their own, as in inrun; kronfluence has them inside the factors."""
    begun = clock.now()
    weights, model = end(training), training.model
    parts = [rows for _, rows in chunks(problem, problem.train)]
    curvature = ekfac(problem, model, weights, parts)
    asked = all_rows(problem, model, weights, problem.queries)
    mean = {k: float(x.mean()) / curvature.examples for k, x in curvature.eigenvalues.items()}
    found = curvature.solve(asked, {k: 0.1 * x for k, x in mean.items()})
    values = scored(problem, training, weights, found)
    wait(problem)
    return {"our EK-FAC, biases apart": Credit(values, clock.now() - begun)}


def trak(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    """TRAK with one model: features ∇ log(p / (1 − p)) with p = exp(−loss), a Gram matrix damped
    by its mean diagonal, scores weighted by 1 − p."""
    begun = clock.now()
    whole = sum(w.numel() for w in end(training).values())
    hashed = 4.0 * whole * problem.examples > FEATURES
    features, wrong = _features(problem, training, problem.train, hashed)
    asked, _ = _features(problem, training, problem.queries, hashed)
    gram = features @ features.T
    gram += gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    values = torch.linalg.solve(gram, features @ asked.T) * wrong[:, None]
    wait(problem)
    name = f"our TRAK, {BUCKETS} hashed features" if hashed else "our TRAK, exact features"
    return {name: Credit(values, clock.now() - begun)}


def _features(
    problem: Problem, training: Training, batch: Batch, hashed: bool
) -> tuple[Tensor, Tensor]:
    """[B, P] or [B, BUCKETS], and 1 − p [B]. ∇ log(p / (1 − p)) = −∇loss / (1 − p)."""
    weights, wrong, found = end(training), [], torch.empty(0)
    for ids, rows in chunks(problem, batch):
        with torch.no_grad():
            losses = problem.losses(training.model, rows)
        wrong.append(-torch.expm1(-losses).clamp(max=-1e-6))
        own = _flat(per_example(problem, training.model, weights, rows), hashed)
        if not len(found):  # all at once: there is no memory for two of them
            found = own.new_empty(len(batch[0]), own.shape[1])
        found[ids] = own / wrong[-1][:, None]
    return found, torch.cat(wrong)


def _flat(grads: Weights, hashed: bool) -> Tensor:
    if not hashed:
        return torch.cat([g.flatten(1) for g in grads.values()], dim=1)
    first = next(iter(grads.values()))
    found = torch.zeros(len(first), BUCKETS, device=first.device)
    for seed, g in enumerate(grads.values()):
        generator = torch.Generator(g.device).manual_seed(seed)
        flat, place = g.flatten(1), {"generator": generator, "device": g.device}
        bucket = torch.randint(BUCKETS, flat.shape[1:], **place)
        sign = torch.randint(2, flat.shape[1:], **place) * 2 - 1
        found.index_add_(1, bucket, flat * sign)
    return found

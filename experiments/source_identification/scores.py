"""Scores of every candidate for every query, [candidates, queries]: higher is more of a source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import inrun
from experiments.common.parts import Context, Settings
from experiments.source_identification.models import loss, losses
from experiments.source_identification.texts import Problem

ESTIMATORS = ("sgd", "tangent", "secant")
POINTS = ("tangent", "tangent+midpoint", "secant+current", "secant")  # either map at either point
INFLUENCE = ("sgd", "tangent", "secant", "influence")  # and `inrun.ask` after the run
Rows = tuple[Tensor, ...]  # tokens and how many count: models.LanguageModel.rows
WATCHED: dict[str, Any] = {"loss": loss, "audit_every": 0, "training": "fast"}


def along_the_run(
    model: nn.Module, candidates: Rows, queries: Rows, settings: Settings, context: Context
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Train on the candidates; in-run values of all estimators, and how many steps, void ones.

    "later" is without the first step, when Adam's state is empty: every coordinate moves by the
    learning rate then, however small its gradient, and one step can outweigh all others.
    """
    cuda = context.device.type == "cuda"
    optimizer = torch.optim.AdamW(trained(model), lr=settings["lr"], fused=cuda)
    generator = torch.Generator().manual_seed(settings["seed"] + 1)
    N, batch = len(candidates[0]), settings["batch"]
    epochs = [torch.randperm(N, generator=generator) for _ in range(settings["epochs"])]
    order = [ids for epoch in epochs for ids in epoch.split(batch)]
    estimators = settings.get("estimators", list(ESTIMATORS))
    with inrun.watch(
        model, optimizer, targets=targets(queries), estimator=estimators, **WATCHED
    ) as run:
        for step in context.track(len(order)):
            for group in optimizer.param_groups:
                group["lr"] = settings["lr"] * min(1.0, (step + 1) / settings["warmup"])
            backward(run, model, candidates, order[step])
            optimizer.step()
            optimizer.zero_grad()
        found = {}
        for e in estimators:
            history = run.history(e)
            found[e] = summed(run, history, N)
            found[f"{e}, later"] = summed(run, history[history["step"] > 0], N)
        counts = {"steps": len(order), "void": voided(run)}
    if "influence" in estimators:
        found["ask"] = asked(run, model, candidates, queries)
    return found, counts


def asked(
    run: inrun.Run, model: nn.Module, candidates: Rows, queries: Rows, batch: int = 64
) -> np.ndarray:
    """``inrun.ask``: one pass over the candidates for all queries."""

    def halved(model: nn.Module, rows: Rows) -> Tensor:
        with half(rows[0].device):
            return loss(model, rows)

    parts = torch.arange(len(candidates[0])).split(batch)
    data = ((i.tolist(), tuple(x[i.to(x.device)] for x in candidates)) for i in parts)
    names = targets(queries)
    found = inrun.ask(
        model, data, {k: v[0] for k, v in names.items()}, run=run, loss=halved, memory_limit=10**11
    )
    return found.sort_values("id")[list(names)].to_numpy(np.float64)


def after_the_run(
    model: nn.Module, candidates: Rows, queries: Rows, context: Context, batch: int = 64
) -> tuple[np.ndarray, int]:
    """IF-proxy: ⟨gradient of the query, gradient of the candidate⟩ at the final weights, and how
    many steps are void.

    That is the in-run value of a step of SGD with learning rate 1; the step is undone.
    """
    params = trained(model)
    final = [p.detach().clone() for p in params]
    optimizer = torch.optim.SGD(params, lr=1.0)
    N = len(candidates[0])
    rows = torch.arange(N).split(batch)
    sizes = np.repeat([len(ids) for ids in rows], [len(ids) for ids in rows])
    with inrun.watch(model, optimizer, targets=targets(queries), estimator="sgd", **WATCHED) as run:
        for step in context.track(len(rows)):
            backward(run, model, candidates, rows[step])
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(params, final)
        found = summed(run, run.history("sgd"), N)
        void = voided(run)
    return found * sizes[:, None], void  # a text has a part of the mean over its batch


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def targets(queries: Rows) -> dict[str, list[Rows]]:
    """Each query is a target of its own."""
    return {f"q{q}": [tuple(x[q : q + 1] for x in queries)] for q in range(len(queries[0]))}


def backward(run: inrun.Run, model: nn.Module, candidates: Rows, ids: Tensor) -> None:
    chosen = ids.to(candidates[0].device)
    with run.batch(ids):
        with half(chosen.device):
            value = loss(model, tuple(x[chosen] for x in candidates))
        value.backward()


def half(device: torch.device) -> Any:
    """bfloat16 on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def summed(run: inrun.Run, history: pd.DataFrame, N: int) -> np.ndarray:
    """[candidates, queries]; a candidate without a step (or with void ones only) has no credit."""
    names = run.targets if len(run.targets) > 1 else ["value"]
    found = np.zeros((N, len(names)))
    np.add.at(found, history["id"].to_numpy(np.int64), history[names].to_numpy(np.float64))
    return found


def voided(run: inrun.Run) -> int:
    """Steps without values."""
    return int(run.steps()["void"].notna().sum())


@torch.no_grad()
def mean_loss(model: nn.Module, rows: Rows, batch: int = 64) -> float:
    parts = []
    with half(rows[0].device):
        for chosen in zip(*(x.split(batch) for x in rows), strict=True):
            parts.append(losses(model, chosen))
    return float(torch.cat(parts).double().mean())


def bm25(problem: Problem) -> np.ndarray:
    """The lexical baseline: lower case, English stop words left out, no stemming."""
    try:
        import bm25s
    except ImportError:
        raise ValueError("BM25 needs bm25s: pip install bm25s") from None
    options = {"stopwords": "en", "return_ids": False, "show_progress": False}
    index = bm25s.BM25()
    index.index(bm25s.tokenize(problem.candidates, **options), show_progress=False)
    asked = bm25s.tokenize([q.text for q in problem.queries], **options)
    nothing = np.zeros(len(problem.candidates))
    return np.stack([index.get_scores(words) if words else nothing for words in asked], axis=1)

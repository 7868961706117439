"""``inrun.ask``: the influence of every training example on questions that come after the run.

1. directions: the gradient of each question's loss at the model's weights, through the inverse
   curvature that the run has saved (curvature/);
2. one pass over the training data: per-example gradients are captured as in training and
   contracted with the directions of all questions at once; nothing is projected;
3. score_i = ⟨u, ∇ℓ_i⟩ / N with N examples: by how much the question's loss would rise, in its own
   unit, had example i not been among them. Positive: it taught the model this.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from inrun.asking.parts import Parts, Scored, positions
from inrun.capture.capture import Capture
from inrun.capture.micro_batch import MicroBatch
from inrun.curvature import saved
from inrun.curvature.curvature import Curvature
from inrun.errors import CaptureError
from inrun.gradients.records import wide, wide_type
from inrun.ledger.saved import SavedRun, open_run
from inrun.run.bookkeeping import as_ids, as_owner
from inrun.scoring.contraction import contract
from inrun.scoring.estimators import DAMPING
from inrun.scoring.received import doubts, tolerance_of
from inrun.scoring.uses import Direction
from inrun.tensors.autocast import no_autocast
from inrun.torch_compat import tree_map, uncompiled
from inrun.validation.targets import copy_batch
from inrun.validation.validator import Loss, Validator

VERIFIED_EVERY = 50  # batches: so often the scores are compared with the batch's own gradient
MEMORY = 2**33  # bytes of all directions, unless ``memory_limit`` says otherwise


def ask(
    model: nn.Module,
    data: Iterable[Any],
    queries: Mapping[str, Any],
    *,
    run: Any,
    loss: Loss | None = None,
    damping: float = DAMPING,
    out: str | os.PathLike[str] | None = None,
    tokens: bool = False,
    examples: int | None = None,
    batch_dim: int = 0,
    memory_limit: int = MEMORY,
) -> pd.DataFrame:
    """Which training examples taught the model the answers to these questions?

    Args:
        model: the trained model. It is evaluated (no dropout) and left as it was.
        data: the training data, pairs ``(ids, batch)`` with one id per example, or triples
            ``(ids, batch, owner)`` for packed rows, as in ``run.batch(ids, owner)``. One pass.
        queries: a batch for each question, by name; its loss is what examples are scored by. A
            batch of one row is one question.
        run: the run with ``estimator="influence"`` that trained the model: the live one, or the
            folder of its ledger.
        loss: ``loss(model, batch) -> scalar``, for questions and training data alike: the mean
            over the examples of the batch. By default ``model(**batch).loss``. Put autocast into
            it, if the model was trained in half precision.
        damping: a of λ = a/τ.
        out: a folder for the scores, written as the pass goes on. Called again after an
            interruption, with the same arguments and data in the same order, it goes on there.
        tokens: score single positions instead, as ``run.batch(ids, tokens=True)`` does, for a few
            examples: those that were found. Returns id, position, what the model received there
            if that was an integer, and a column for each question. Needs ``examples``.
        examples: how many the model was trained on, if ``data`` is a part of them.
        batch_dim: the dimension of the examples in the model's inputs.
        memory_limit: bytes that the directions may take; more is refused.

    Returns:
        A row for each id, in the order of the data: id, and a column for each question: by how much
        its loss would rise without the example, in the first order.
    """
    model = uncompiled(model)
    curvature, name = _curvature(run)
    params = _parameters(model, curvature)
    _refuse(queries, params, tokens, examples, out, memory_limit)
    asked = Validator(model, {k: [b] for k, b in queries.items()}, loss, 1, None, 0, batch_dim)
    asked.draw()
    try:
        with torch.no_grad(), asked.evaluating():
            u, losses = _directions(asked, params, curvature, damping)
            parts = Parts(
                None if out is None else Path(out), list(queries), losses,
                {"run": name, "step": curvature.step, "damping": damping},
            )  # fmt: skip
            found = _scored(model, data, params, u, asked, batch_dim, parts, tokens)
            if tokens:
                return positions(found, list(queries), examples or 0)
            for batch in found:
                parts.add(batch.ids, batch.scores)
            return parts.table(examples)
    finally:
        asked.close()


def _refuse(
    queries: Mapping[str, Any], params: Mapping[str, Tensor], tokens: bool, examples: int | None,
    out: Any, memory_limit: int,
) -> None:  # fmt: skip
    """Refuse questions that cannot be answered, before the pass begins."""
    if tokens and (examples is None or out is not None):
        raise ValueError("tokens=True is for a few examples: pass examples=N, and no out")
    if not queries:
        raise ValueError("ask needs at least one question: queries={'a name': batch}")
    size = len(queries) * sum(p.numel() for p in params.values()) * 4
    if size > memory_limit:
        raise ValueError(
            f"the directions of {len(queries)} questions take {size / 1e9:.1f} GB, more than "
            f"memory_limit={memory_limit / 1e9:.1f} GB: ask fewer at a time, or raise it"
        )


def _curvature(run: Any) -> tuple[Curvature, str]:
    """The curvature of a run, and the run's name."""
    if isinstance(run, (str, os.PathLike)):
        run = open_run(run)
    if isinstance(run, SavedRun):
        return saved.read(Path(run.path), run.info.get("run")), str(run.info.get("run"))
    found = getattr(run, "curvature", None)
    if not isinstance(found, Curvature) or not found.layers:
        raise ValueError(
            "ask needs a run whose curvature is known: watch(..., estimator='influence') or "
            "estimator=['secant', 'influence'], after some steps"
        )
    return found, "live"


def _parameters(model: nn.Module, curvature: Curvature) -> dict[str, Tensor]:
    """The parameters of the model whose curvature is known."""
    own = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    known = [x for k, x in curvature.layers.items() if curvature.known(k) is not None]
    for name, shape in (item for layer in known for item in layer.shapes.items()):
        p = own.get(name)
        if p is None or p.shape != shape:
            has = "not there" if p is None else f"of shape {tuple(p.shape)}"
            raise ValueError(
                f"this is not the model of that run: its parameter {name} was of shape "
                f"{tuple(shape)} and is {has} here"
            )
        if not p.requires_grad:
            raise ValueError(f"parameter {name} was trained and is frozen here: unfreeze it to ask")
        found[name] = p
    return found


def _directions(
    asked: Validator, params: Mapping[str, Tensor], curvature: Curvature, damping: float
) -> tuple[dict[str, Direction], list[float]]:
    """u of all questions by parameter, and the questions' losses."""
    rows: dict[str, list[Tensor]] = {k: [] for k in params}
    layers = [
        x.to(params[k].device, wide_type(params[k].dtype))
        for k, x in curvature.layers.items()
        if k in params
    ]
    losses = []
    for q in range(len(asked.targets)):
        found = asked.gradients([q], params, keep=True)
        losses.append(float(found.loss))
        if not np.isfinite(losses[-1]):
            raise ValueError(f"the loss of the question {asked.targets[q].name!r} is not finite")
        v = found.of(list(params), slice(0, 1))
        for layer in layers:
            names = layer.place.names
            u = layer.directions([wide(v[k]) for k in names], damping)
            for k, x in zip(names, u, strict=True):
                rows[k].append(x[0])
    # one parameter at a time: both forms of all of them would be twice the memory
    return {k: Direction(torch.stack(rows.pop(k))) for k in params}, losses


def _scored(
    model: nn.Module, data: Iterable[Any], params: Mapping[str, Tensor], u: dict[str, Direction],
    asked: Validator, batch_dim: int, parts: Parts, tokens: bool,
) -> Iterator[Scored]:  # fmt: skip
    """⟨u_q, B g_i⟩ of every batch that has no scores yet, by example or position."""
    capture = Capture(model, params, batch_dim=batch_dim, probe=True, directions=len(asked.targets))
    device, kind = next(iter(params.values())).device, None
    nothing = {k: torch.zeros_like(p) for k, p in params.items()}
    try:
        for number, (given, batch, owner) in enumerate(map(_triple, data)):
            ids, kind = as_ids(given, kind)
            if parts.has(ids):
                continue
            batch = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
            owner = as_owner(owner, len(ids))
            micro = _captured(capture, asked, batch, len(ids), owner, tokens)
            for reason, flag in doubts([micro]).items():
                if bool(flag):
                    raise CaptureError(f"batch {number}: {reason}")
            capture.inputs.settle_claims([micro], asked.look)
            verify = number % VERIFIED_EVERY == 0
            G = _gradient(asked, batch, params) if verify else nothing
            with no_autocast(device.type):
                values, expected = contract(u, G, [micro])
            if verify:
                _check_sums(number, values, expected, tolerance_of(G.values(), [micro]))
            micro.forget()
            capture.blocks.over()
            own = (len(ids) * values[:, : micro.rows]).T.cpu().numpy()
            if not np.isfinite(own).all():
                raise ValueError(f"the scores of batch {number} are not finite")
            yield Scored(ids, own, micro.slots, micro.inputs)
    finally:
        capture.close()


def _triple(item: Any) -> tuple[Any, Any, Any]:
    if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
        raise ValueError(
            "ask needs the training data as pairs (ids, batch) or triples (ids, batch, owner), but "
            f"an item of it is a {type(item).__name__}"
        )
    return item[0], item[1], item[2] if len(item) == 3 else None


def _captured(
    capture: Capture, asked: Validator, batch: Any, B: int, owner: Tensor | None, tokens: bool
) -> MicroBatch:
    """The records of a batch. A pass that did not follow the plan of those before is repeated call
    by call."""
    for _ in range(2):
        with torch.enable_grad(), capture.batch(B, owner, tokens) as micro:
            value = asked.loss(asked.model, copy_batch(batch))
            torch.autograd.grad(value.reshape(()), [capture.trigger], allow_unused=True)
        if micro.void is None:
            return micro
        micro.forget()
    raise CaptureError(f"the batch cannot be scored: {micro.void}")


def _gradient(asked: Validator, batch: Any, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch's own gradient, by autograd alone."""
    with torch.enable_grad():
        value = asked.loss(asked.model, copy_batch(batch)).reshape(())
        grads = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    pairs = zip(params.items(), grads, strict=True)
    return {k: torch.zeros_like(p) if g is None else g for (k, p), g in pairs}


def _check_sums(number: int, values: Tensor, expected: Tensor, tolerance: float) -> None:
    off = (values.sum(1) - expected).abs()
    size = values.abs().sum(1) + expected.abs()
    if bool((off > tolerance * size).any()):
        q = int((off / (size + 1e-300)).argmax())
        raise CaptureError(
            f"batch {number}: the captured per-example gradients do not add up to the gradient of "
            f"the loss (⟨u, Σg_i⟩ = {float(values[q].sum()):.6g}, ⟨u, G⟩ = {float(expected[q]):.6g}"
            "). Possible causes: a loss that is not the same in each pass, a custom autograd "
            "function, parameters that take part outside the model's forward pass"
        )

"""``inrun.ask``: the influence of every training example on questions that come after the run.

1. directions: the gradient of each question's loss at the model's weights, through the inverse
   curvature that the run has saved (curvature/);
2. one pass over the training data: per-example gradients are captured as in training and
   contracted with the directions of all questions at once; nothing is projected;
3. score_i = ⟨u, ∇ℓ_i⟩ / N with N examples: by how much the question's loss would rise, to first
   order, had example i not been among them. Positive: it taught the model this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from inrun.asking.parts import CLOSE, Parts, Scored, answers_to
from inrun.asking.positions import first_of, positions, save, those_with
from inrun.capture.capture import Capture
from inrun.capture.micro_batch import MicroBatch
from inrun.curvature import saved
from inrun.curvature.curvature import Curvature
from inrun.errors import CaptureError
from inrun.gradients.records import wide, wide_type
from inrun.ledger.saved import SavedRun, open_run
from inrun.ranks.shards import is_sharded
from inrun.ranks.world import ALONE, World, unwrapped
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
    process_group: Any = None,
) -> pd.DataFrame:
    """Which training examples taught the model the answers to these questions?

    Args:
        model: the trained model. It is evaluated (no dropout) and left as it was. In
            DistributedDataParallel, every rank asks the same questions of its share of the data.
        data: the training data, pairs ``(ids, batch)`` with one id per example, or triples
            ``(ids, batch, owner)`` for packed rows, as in ``run.batch(ids, owner)``. One pass.
        queries: a batch for each question, by name (its own words, say); its loss is what examples
            are scored by. A batch of one row is one question.
        run: the run with ``estimator="influence"`` that trained the model: the live one, or the
            folder of its ledger.
        loss: ``loss(model, batch) -> scalar``, for questions and training data alike: the mean
            over the examples of the batch. By default ``model(**batch).loss``. Put autocast into
            it, if the model was trained in half precision.
        damping: a of λ = a/τ.
        out: a folder for the answers, written as the pass goes on. Called again after an
            interruption, with the same arguments and data in the same order, it goes on there.
            ``inrun.open_answers``, ``inrun ask`` and ``inrun report`` read it.
        tokens: score single positions instead, as ``run.batch(ids, tokens=True)`` does, for the
            examples that were found. Returns id, position, what the model received there if that
            was an integer, and a column for each question. With ``out``, which must hold the
            answers: of the ten examples that each question names first, kept there; batches
            without them are passed over. Without ``out``: of all data that are passed, and
            ``examples`` is needed.
        examples: how many the model was trained on, if ``data`` is a part of them.
        batch_dim: the dimension of the examples in the model's inputs.
        memory_limit: bytes that the directions may take; more is refused.
        process_group: of ranks that train together without DistributedDataParallel.

    Returns:
        A row for each id, in the order of the data: id, and a column for each question: by how much
        its loss would rise without the example, to first order. Retraining moves the loss less
        (docs/lds.md): trust the order more than the size. On every rank the same, of the data of
        all ranks.
    """
    world = _world(model, process_group)
    model = unwrapped(model)
    curvature, name = world.together(lambda: _curvature(run))
    params = world.together(lambda: _parameters(model, curvature))
    world.together(lambda: _refuse(queries, params, tokens, examples, out, memory_limit))
    folder = None if out is None else Path(out)
    asked = world.together(lambda: _asked(model, queries, loss, batch_dim))
    try:
        with torch.no_grad(), asked.evaluating():
            u, losses = world.together(lambda: _directions(asked, params, curvature, damping))
            _agree(world, list(queries), losses)
            about = {"run": name, "step": curvature.step, "damping": damping}
            if tokens:
                return _tokens(
                    model, data, params, u, asked, batch_dim, folder, about, examples, world
                )
            kind = np.float64 if any(x.v.dtype == torch.float64 for x in u.values()) else np.float32
            parts = world.together(lambda: Parts(folder, list(queries), losses, about, kind, world))
            try:
                world.together(lambda: _pass(model, data, params, u, asked, batch_dim, parts))
                return parts.table(examples)
            finally:
                parts.close()
    finally:
        asked.close()


def _asked(
    model: nn.Module, queries: Mapping[str, Any], loss: Loss | None, batch_dim: int
) -> Validator:
    """The questions as targets of a validation pass."""
    asked = Validator(model, {k: [b] for k, b in queries.items()}, loss, 1, None, 0, batch_dim)
    asked.draw()
    return asked


def _world(model: nn.Module, process_group: Any) -> World:
    """The ranks that ask together. A plain model in one of several processes asks alone: its
    wrapper, if there is one, is not looked for."""
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "ask with a model under fully_shard: its parameters are spread over ranks. Gather them "
            "into a plain copy of the model (get_model_state_dict with full_state_dict=True, in "
            "torch.distributed.checkpoint.state_dict) and ask that: on one rank, or, wrapped in "
            "DistributedDataParallel, on all of them with a share of the data each"
        )
    wrapped = unwrapped(model) is not uncompiled(model)
    return World.of(model, process_group) if wrapped or process_group is not None else ALONE


def _agree(world: World, names: list[str], losses: list[float]) -> None:
    """Refuse ranks that ask different questions, or different models."""
    for rank, (other, found) in enumerate(world.gather((names, losses))):
        if other != names or not np.allclose(found, losses, rtol=CLOSE, atol=0):
            raise ValueError(
                f"rank {rank} asks other questions than rank {world.rank}, or another model: every "
                "rank must ask the same, of its own share of the data"
            )


def _pass(
    model: nn.Module, data: Iterable[Any], params: Mapping[str, Tensor], u: dict[str, Direction],
    asked: Validator, batch_dim: int, parts: Parts,
) -> None:  # fmt: skip
    for batch in _scored(model, data, params, u, asked, batch_dim, parts.has, False):
        parts.add(batch.ids, batch.scores)
    parts.end()


def _tokens(
    model: nn.Module, data: Iterable[Any], params: Mapping[str, Tensor], u: dict[str, Direction],
    asked: Validator, batch_dim: int, folder: Path | None, about: Mapping[str, Any],
    examples: int | None, world: World,
) -> pd.DataFrame:  # fmt: skip
    """Scores of positions: of all data, or of the examples that the folder's answers name first."""
    names, wanted = [t.name for t in asked.targets], None
    if folder is not None:
        answers = world.together(lambda: answers_to(folder, names, about))
        examples, wanted = answers.examples, first_of(answers)
        data = those_with(data, wanted)
    found = _scored(model, data, params, u, asked, batch_dim, lambda ids: False, True)
    table = positions(found, names, examples or 0, world, wanted)
    if folder is not None:
        world.together(
            lambda: save(table, names, examples or 0, folder) if world.rank == 0 else None
        )
    return table


def _refuse(
    queries: Mapping[str, Any], params: Mapping[str, Tensor], tokens: bool, examples: int | None,
    out: Any, memory_limit: int,
) -> None:  # fmt: skip
    """Refuse questions that cannot be answered, before the pass begins."""
    if tokens and examples is None and out is None:
        raise ValueError(
            "tokens=True is for a few examples: pass out=, a folder that holds the answers to "
            "these questions, or only the examples you mean, and examples=N: of how many"
        )
    if examples is not None and examples < 1:
        raise ValueError(f"examples={examples}: how many the model was trained on, at least 1")
    if not queries:
        raise ValueError("ask needs at least one question: queries={'a name': batch}")
    for name in queries:
        if not isinstance(name, str) or name in ("id", "position", "input"):
            raise ValueError(f"{name!r} cannot name a question: use other words")
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
    info = getattr(getattr(run, "_ledger", None), "info", None) or {}
    return found, str(info.get("run", "live"))


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
    asked: Validator, batch_dim: int, has: Callable[[np.ndarray], bool], tokens: bool,
) -> Iterator[Scored]:  # fmt: skip
    """⟨u_q, B g_i⟩ of every batch that has no scores yet, by example or position."""
    capture = Capture(model, params, batch_dim=batch_dim, probe=True, directions=len(asked.targets))
    device, kind = next(iter(params.values())).device, None
    nothing = {k: torch.zeros_like(p) for k, p in params.items()}
    try:
        for number, (given, batch, owner) in enumerate(map(_triple, data)):
            ids, kind = as_ids(given, kind)
            if has(ids):
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

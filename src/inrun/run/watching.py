"""``watch``: checks its arguments and makes a ``Run``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from inrun.gradients import Form
from inrun.ledger.entries import Ledger
from inrun.optimizers.joint import Optimizers, members_of
from inrun.ranks.world import World
from inrun.ranks.world import unwrapped as inner_model
from inrun.run.bookkeeping import Config
from inrun.run.carrying import check_carry
from inrun.run.coverage import scored_parameters
from inrun.run.curving import check_curvature
from inrun.run.recording import make_ledger
from inrun.run.refusals import (
    check_choices,
    check_estimators,
    check_model,
    check_optimizers,
    named_targets,
)
from inrun.run.replacing import replace_earlier
from inrun.run.run import Run
from inrun.run.sharding import check_sharded_step
from inrun.run.wrapped import unwrapped
from inrun.validation.validator import Loss, Validator


def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    validation: Iterable[Any] | None = None,
    targets: Mapping[str, Iterable[Any]] | None = None,
    loss: Loss | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    estimator: str | Sequence[str] = "shapley",
    point: str | None = None,
    training: Literal["bitwise", "fast"] = "bitwise",
    audit_every: int = 50,
    per_step: int | Literal["all"] | None = None,
    every: int = 1,
    ignore: str | Sequence[str] = (),
    batch_dim: int = 0,
    form: Form = "auto",
    chunk: int | None = None,
    offload: bool = False,
    memory_limit: int | None = None,
    max_norm: float | None = None,
    scaler: Any = None,
    seed: int = 0,
    step_together: bool = True,
    process_group: Any = None,
    window: int | None = None,
    smooth: float = 0.0,
    cuda_graphs: bool = False,
    halves_every: int = 50,
) -> Run:
    """Watch a training loop: what does each example do to the validation loss?

    Args:
        model: the model that is trained, or the ``DistributedDataParallel`` around it; it may be
            under ``fully_shard``.
        optimizer: the optimizer whose ``step()`` trains it; its class needs a rule
            (docs/optimizers.md). What ``accelerator.prepare`` returns is taken, too. Several in a
            list, ``[muon, adamw]``: see ``step_together``.
        validation: a loader or list of batches; the loss on them is what examples are valued by.
            A small set is used whole at every step, a large one in turn: see ``per_step``. A
            dataset of rows (torch's, Hugging Face's) is taken in batches of 32, if its rows need no
            padding.
        targets: several of them by name, instead of ``validation``. See :func:`inrun.by_label`.
        loss: ``loss(model, batch) -> scalar``; by default ``model(**batch).loss``.
        out: a folder for the ledger; None keeps it in memory. A folder that holds an earlier run
            is continued by ``load_state_dict`` and otherwise refused.
        overwrite: start again in such a folder; what it holds is forgotten at the first step.
        estimator: "shapley" (values add up, and are right in the first steps, too, in which orders
            of the examples are sampled while the update bends, at most in 100: docs/accuracy.md;
            "shapley:1000" sets another number), "secant" (the same without sampling: cheaper first
            steps, in which it is far off), "tangent" (Theorem 4.2 of the paper), "sgd" (ignores the
            optimizer), "carry" (also what momentum carries into later steps; see ``window``),
            "influence" (what would be lost without the example, by the inverse curvature:
            docs/which-number.md; "influence:1" sets its damping), or several; a point of its own
            after a plus: "secant+gauss2".
        point: where the validation gradient is taken: "midpoint", "current" or "gauss2" (two
            points, twice the cost); None is midpoint for shapley and secant and current for the
            others.
        training: "bitwise" leaves the training as it is without inrun, bit for bit; "fast" forms
            weight gradients as sums of per-example gradients, the same up to rounding. What is
            compiled by ``torch.compile`` is the same up to rounding in any case.
        audit_every: every ``audit_every`` steps, measure the validation losses before the step,
            after it without the batch and after it with the batch; 0 never.
        per_step: validation batches per step and target; their losses are averaged. "all" uses the
            whole set, which makes values far less noisy and costs a pass for each batch. None: the
            whole set if it has at most 4 batches, otherwise one batch, in turn: of a loader or list
            in its own order, of a dataset in a fixed order with labels in balance, where they can
            be seen. ``run.json`` and the report say which.
        every: score each step with probability 1/every and weight its values by ``every``.
        ignore: parameters to leave out: names as ``run.coverage()`` shows them, or patterns such as
            ``"encoder.*"``. One that matches nothing is refused.
        batch_dim: the dimension of the examples in the model's inputs (1 for sequence-first).
        form: force "ghost" or "materialise" where an operation has both; "auto" takes the cheaper
            (docs/costs.md).
        chunk: rows of a validation batch to process at a time (right for losses that are means
            over rows); chosen by itself when a GPU runs out of memory.
        offload: keep what is captured in host memory until the step.
        memory_limit: bytes the captures of one step may take (of all that "carry" keeps); by
            default what is free.
        max_norm: the norm gradients are clipped to, if they are; otherwise it is recognised, at
            the latest from the second clipped step on (docs/method.md).
        scaler: the ``GradScaler``, needed only if gradients are also clipped by norm; that of a
            prepared optimizer of Accelerate is found.
        seed: of the validation order of shuffling loaders, of ``every`` and ``halves_every``.
        step_together: with several optimizers. True: their steps after the same batches make one
            step, w_∅ and w_B move the parameters of all of them, and the values add up to
            U(∅) − U(B) of the whole. An optimizer that takes no part in a step (GANs) is refused.
            False: each optimizer's step is a step of its own, a row of its own in ``run.steps()``:
            from w_∅ to w_B only its parameters move, those of the others stay where they are at
            that moment, and its values add up to that U(∅) − U(B). An example's value then depends
            on the order in which the optimizers step.
        process_group: the processes over which the loop averages the gradients by itself, inside
            ``run.batch``; with ``DistributedDataParallel`` or ``fully_shard`` it is found
            (docs/distributed.md).
        window: for "carry": how many steps a batch is followed. Captures are kept so long, and a
            step enters the tables when its window is over or the run is closed. By default until
            less than 1 % of a gradient is left in the momentum (44 steps for 0.9).
        smooth: where each step sees a part of the validation set, value examples by a running mean
            of the validation gradient: ``smooth=0.9`` keeps 90 % of it at each step. Rankings are
            less noisy; the values of a step no longer add up to its batch share.
        cuda_graphs: experimental, tested with a stand-in for CUDA graphs on a CPU, its speed not
            measured yet: record the model's forward and backward pass as CUDA graphs once it has
            been the same in several batches, and replay them, for small batches, where the host is
            the limit. What the model's Python does beside calling torch does not happen in a replay
            (docs/costs.md). A replay is compared with the model's own pass before it is used.
            Passes that cannot be recorded run as usual; ``run.replays`` counts and says why.
            Nothing on a CPU, on several ranks, with ``torch.compile``, "carry", ``offload`` or
            gradient accumulation.
        halves_every: in one step of so many, left to chance, also take values by two halves of its
            validation rows: how steady are the rankings (``run.steadiness()``)? Values stay as they
            are; such a step takes longer. 0 never.

    Returns:
        A :class:`Run`, also a context manager that closes itself. In a notebook it replaces a run
        that is still open on this model, this optimizer or this folder, and says so.
    """
    optimizer, scaler = unwrapped(optimizer, scaler)
    data = named_targets(validation, targets)
    check_choices(training, form, per_step, every, smooth, halves_every)
    config = Config(
        check_estimators(estimator, point), point, training, audit_every, per_step, every,
        batch_dim, _names(ignore), form, seed, step_together, window, smooth, halves_every,
        cuda_graphs,
    )  # fmt: skip
    watched = _check_parts(model, optimizer, step_together, every, scaler)
    world, model = World.of(model, process_group), inner_model(model)
    _check_fit(config, model, watched, world)
    replace_earlier([model, *members_of(watched)], out, overwrite)
    validator = Validator(model, data, loss, per_step, chunk, seed, batch_dim, world, smooth)
    ledger = make_ledger(world, out, config, list(data), overwrite)
    others = offload, memory_limit, max_norm, scaler, overwrite, world
    with _closed_after_an_error(ledger):
        return Run(model, watched, config, validator, ledger, *others)


@contextmanager
def _closed_after_an_error(ledger: Ledger) -> Iterator[None]:
    try:
        yield
    except BaseException:
        ledger.close()
        raise


def _names(ignore: str | Sequence[str]) -> tuple[str, ...]:
    return (ignore,) if isinstance(ignore, str) else tuple(ignore)


def _check_parts(
    model: nn.Module, optimizer: Any, step_together: bool, every: int, scaler: Any
) -> Optimizers:
    """Refuse a model or optimizers that cannot be watched, before anything is made on disk; returns
    the optimizers."""
    check_model(model)
    watched = check_optimizers(optimizer, model, step_together, every)
    check_sharded_step(model, members_of(watched), step_together, scaler)
    return watched


def _check_fit(config: Config, model: nn.Module, optimizer: Optimizers, world: World) -> None:
    """Refuse estimators that do not fit this run, and a model without parameters to score."""
    check_carry(config, optimizer, world)
    check_curvature(config, model, optimizer, world)
    scored_parameters(model, optimizer, config.ignore)

"""``Run``: the order of the stages of one training step, and nothing else.

with run.batch(ids)         capture: records of each example's gradient
before optimizer.step()     scorer: optimizer, validation and records give the values
after optimizer.step()      scorer: was it the step that was predicted? then ledger
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inrun.capture.micro_batch import MicroBatch
from inrun.errors import BatchError
from inrun.exact.check import PERMUTATIONS, Check
from inrun.exact.repeat import ModelCalls
from inrun.ledger.entries import Ledger, StepEntry
from inrun.ledger.run_tables import RunTables
from inrun.optimizers.joint import Optimizers, members_of
from inrun.ranks.world import ALONE, World
from inrun.run.attaching import Hooks
from inrun.run.begin_end import BeginEnd
from inrun.run.bookkeeping import (
    Config,
    EmptyBatches,
    EntryQueue,
    MemoryLimit,
    Tally,
    as_ids,
    as_owner,
)
from inrun.run.capturing import make_capture, replays_of
from inrun.run.carrying import make_window
from inrun.run.checkpoints import Checkpoints
from inrun.run.coverage import (
    ModuleTree,
    UnscoredParameters,
    coverage_table,
    describe,
    held_by,
    scored_parameters,
    trainable,
)
from inrun.run.curving import save_curvature, with_curvature
from inrun.run.logging import Summary
from inrun.run.recording import claim, share_coverage
from inrun.run.stepping import IN_BATCH, Stepper
from inrun.scoring.conclude import Begun, Pending, StepResult
from inrun.scoring.estimators import CARRY, Estimator
from inrun.scoring.scorer import Scorer
from inrun.validation.validator import Validator


class Run(BeginEnd, Checkpoints, Summary, RunTables):
    """A watched training run. Made by :func:`inrun.watch`."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, config: Config, validator: Validator,
        ledger: Ledger, offload: bool, memory_limit: int | None, max_norm: float | None,
        scaler: Any, overwrite: bool = False, world: World = ALONE,
    ) -> None:  # fmt: skip
        self.world, self.model, self.optimizer, self.config = world, model, optimizer, config
        self.estimators = [Estimator.parse(e, config.point) for e in config.estimator]
        self._names = config.estimator
        self.targets = [t.name for t in validator.targets]
        self.params, self._left_out = scored_parameters(model, optimizer, config.ignore)
        self._tree = ModuleTree(model)
        self._trainable = trainable(self._tree.modules(), optimizer)
        self.step = 0  # optimizer steps so far
        self.unwatched = 0  # of these, steps without a batch
        self._validator, self._ledger = validator, ledger
        self._overwrite, self._loaded, self._described = overwrite, False, False
        together = (optimizer,) if config.step_together else members_of(optimizer)
        carry = make_window(
            config, self.estimators, optimizer, offload, memory_limit, self._device, world
        )
        how = carry, config.halves_every, config.seed
        scoring = (self.params, self.estimators, validator, max_norm, scaler, world, *how)
        self._steppers = [Stepper(o, Scorer(model, o, *scoring)) for o in together]
        for stepper in self._steppers:
            stepper.score(self.params)
        self._memory = MemoryLimit(memory_limit, offload, self._device)
        self._capture = make_capture(
            model, self.params, config, len(self.targets), self._memory, self._first_gradient, world
        )
        self.replays = replays_of(self._capture, config, self._memory, world, self._steppers, carry)
        self._empty, self._unscored = EmptyBatches(), UnscoredParameters()
        self._capture.on_empty = self._empty.ended
        self._capture.provenance.held = held_by(optimizer)
        self.tally = Tally(adds_up=not self.estimators[0].curvature)
        self._entries = EntryQueue(ledger, self.tally, self._on_result, carry)
        self._id_type: type | None = None
        self._check: Check | None = None
        self._hooks = Hooks(self, model, self._steppers, self._on_step, self._after_step)

    # The training loop's side

    @contextmanager
    def batch(
        self,
        ids: Sequence[int] | Sequence[str] | np.ndarray | Tensor,
        owner: Tensor | None = None,
        tokens: bool = False,
    ) -> Iterator[None]:
        """Around the forward and backward pass of one batch: ``ids`` names its examples, in order.

        Row k of the model's input belongs to ``ids[k]``, unless ``owner`` says otherwise: integers
        of the leading dimensions of the inputs, [R, T] for packed rows, [N] for flattened tokens
        or the nodes of graphs. ``owner[r, t] = k``: this position belongs to ``ids[k]``; −1: to
        nobody. ``inrun.packing`` makes it from the usual descriptions of packed batches.

        ``tokens=True`` also records a value for each position of the model's first input, [B, T]
        or [B, T, …] (those of ``owner``, if given), for :meth:`tokens`: what the position's own use
        of the parameters did. Where positions were pooled, what comes after is one position's.

        Several batches before one ``optimizer.step()`` are gradient accumulation. An id may occur
        more than once; its values add up. A rank that has no examples in a step passes ``[]``.
        """
        if not self._hooks:
            raise BatchError("this run is closed: watch the model again")
        if self._capture.live is not None:
            raise BatchError("run.batch inside run.batch: one batch at a time")
        self.world.enter_batch()
        array, self._id_type = as_ids(ids, self._id_type, empty=not self.world.alone)
        owner = as_owner(owner, len(array))
        for stepper in self._steppers:
            self._give_up_step(stepper)
            stepper.forget_calls()
        self._rescan()
        scored = self.config.scores(self.step)
        if not scored or not len(array):
            self._drop_skipped()
            yield
            for stepper in self._steppers:
                stepper.micros.append((array, stepper.scorer.no_examples() if scored else None))
                stepper.scorer.accumulated.note(stepper.params, scored)
            return
        if self.replays is not None:
            self.replays.paused = self._check is not None  # which notes the model's own calls
        held, self._memory.batches = self._memory.held, max(len(s.micros) for s in self._steppers)
        try:
            with self._noting_calls(), self._capture.batch(len(array), owner, tokens) as micro:
                yield
        except BaseException:
            self._memory.held = held
            raise
        if self._hooks:  # not closed inside the block
            self._keep(array, micro)

    def _keep(self, array: np.ndarray, micro: MicroBatch) -> None:
        """Keep what a batch has left until the optimizer steps."""
        if not micro.fired:
            if self._check is not None:
                self._check.calls.pop()
            return
        for stepper in self._steppers:
            stepper.keep(array, micro, self._audited(stepper), len(self._steppers) == 1)
        if len(self._steppers) > 1:
            micro.records.clear()  # each has its own part
        outsiders = list(self._capture.provenance.outsiders.values())
        if self._unscored.look(self._left_out, outsiders, self.optimizer) and self._described:
            self._ledger.update_info(**describe(self.model, self.optimizer, self.coverage()))

    def _noting_calls(self) -> AbstractContextManager[None]:
        """Keep the calls of the model if ``check()`` was called, else do nothing."""
        if self._check is None:
            return nullcontext()
        calls = ModelCalls(self.model, self.config.batch_dim)
        self._check.calls.append(calls)
        return calls.noting()

    def check(self, permutations: int = PERMUTATIONS) -> Check:
        """Compare the next scored step with exact Shapley values of this very model.

        The real optimizer takes the step for every coalition of the batch (random permutations
        above 12 examples), clipping included, and the validation loss is measured. Per-example
        gradients come from copies of the model that see one row each. The verdict is printed;
        the returned object holds the numbers.
        """
        if self.estimators[0].kind == CARRY or self.estimators[0].curvature:
            name = self.estimators[0].name
            raise ValueError(
                f"check() compares one step, and {name!r} credits an example for more: name an "
                f"estimator of one step first, as estimator=['secant', {name!r}]"
            )
        if self.config.smooth:
            raise ValueError("check() compares one step, and smooth= mixes many: leave that out")
        self._check = Check(permutations=permutations)
        return self._check

    def close(self) -> None:
        """Detach. The model and the optimizer are as they were; the tables stay readable.

        Raises LedgerError if records could not be written; call it again once they can.
        """
        if self._hooks:
            self._hooks.remove()
            self._drop_open_batch()
            for stepper in self._steppers:
                self._give_up_step(stepper, refuse=False)
            self._entries.finish()
            self._forget(*self._steppers)
            self._capture.close()
            if self.replays is not None:
                self.replays.close()
            self._validator.close()
            for stepper in self._steppers:
                stepper.scorer.close()
            scorers = [stepper.scorer for stepper in self._steppers]
            save_curvature(scorers, self._ledger, self.world)
            if self._described and self._said != self._validator.described:
                self._ledger.update_info(validation=self._validator.described)
        try:
            self._settled().close()
        finally:
            self.tally.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def coverage(self) -> pd.DataFrame:
        """One row per parameter: is it scored, through which operations, in which form; with
        ``estimator="influence"`` also how its curvature is kept, and the bytes of it."""
        others = self._left_out | self._unscored.outside
        table = coverage_table(self.params, others, self._capture.keeper.coverage)
        return table if self.curvature is None else with_curvature(table, self.model, self.params)

    # One step

    def _on_step(self, stepper: Stepper, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Before ``optimizer.step()``: gradients and state are final."""
        if not stepper.enter(optimizer):
            return None
        if self._capture.live is not None:
            raise BatchError(IN_BATCH)
        if stepper.waits_for(optimizer):
            return None
        self._give_up_step(stepper, optimizer)
        changed: tuple[Any, Any] | None = None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            changed = ((args[0], lambda: result), {})
            stepper.entered(optimizer)
            if self._capture.live is not None:
                raise BatchError(IN_BATCH)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):  # the fused optimizer will skip this step
            self._forget(stepper)
            return changed
        try:
            with torch.no_grad():
                self._begin_step(stepper)
        finally:
            self.step += 1
            self._forget(stepper)
            for other in self._steppers:
                other.freeze()
        return changed

    def _after_step(self, stepper: Stepper, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """After ``optimizer.step()``: the weights are what the step made of them."""
        taken = stepper.leave(optimizer)
        if taken is None:
            return
        entry, begun = taken
        done: StepResult | Pending
        with torch.no_grad():
            done = stepper.scorer.finish(begun) if isinstance(begun, Begun) else begun
        self._entries.add(entry, done)
        if isinstance(done, StepResult) and done.audit is not None:
            every = self.config.audit_every
            stepper.next_audit = (entry.step // every + 1) * every

    def _begin_step(self, stepper: Stepper) -> None:
        if not stepper.micros:
            self.unwatched += 1
            if self.unwatched == 1:
                warnings.warn(
                    f"optimizer.step() at step {self.step} without run.batch(ids): what it did is "
                    "credited to nobody. (Said once; run.unwatched counts them.)",
                    stacklevel=6,
                )
            return
        ids = np.concatenate([i for i, _ in stepper.micros])
        micros = [m for _, m in stepper.micros if m is not None]
        begun: StepResult | Begun = StepResult()
        stepper.refuse_turns()
        if len(micros) == len(stepper.micros):
            check, self._check = self._check, None
            begun = stepper.scorer.begin(self.step, micros, ids, self._audited(stepper), check)
            self._capture.inputs.settle_claims(micros, self._validator.look)
        self._claim_ledger()
        entry = StepEntry(self.step, ids, None, stepper.lr, float(self.config.every))
        stepper.begin(entry, begun)

    def _give_up_step(self, stepper: Stepper, entering: Any = None, refuse: bool = True) -> None:
        """Record the step under way as void: it never finished. ``refuse``: raise if optimizers
        that should step together do not."""
        given_up = stepper.give_up(entering)
        if given_up is not None:
            entry, result, error = given_up
            self._entries.add(entry, result)
            if refuse and error is not None:
                raise error

    def _audited(self, stepper: Stepper) -> bool:
        return self.config.audit_every > 0 and self.step >= stepper.next_audit

    def _on_result(self, result: StepResult) -> None:
        for stepper in self._steppers:
            stepper.scorer.settled(result)

    def _settled(self) -> Ledger:
        """Returns the ledger, after the steps whose values were still on the device are in it."""
        self._entries.settle()
        return self._ledger

    def _how_validated(self) -> Any:
        return self._validator.described

    def _claim_ledger(self) -> None:
        """Before the first entry: continue the ledger, overwrite it or raise LedgerError."""
        if self._described:
            return
        claim(self.world, self._ledger, self._loaded, self._overwrite)
        share_coverage(self.world, self._capture.keeper.coverage)
        found = describe(self.model, self.optimizer, self.coverage())
        self._said = dict(self._validator.described)
        self._ledger.update_info(**found, validation=self._said)
        self._described = True

    # Bookkeeping

    def _rescan(self) -> None:
        """Find the scored parameters again if layers were frozen, unfrozen or added."""
        modules = self._tree.modules()
        self._capture.provenance.modules = self._validator.modules = modules
        before, self._trainable = self._trainable, trainable(modules, self.optimizer)
        if before != self._trainable:
            found = scored_parameters(self.model, self.optimizer, self.config.ignore)
            self.params, self._left_out = found
            for stepper in self._steppers:
                stepper.score(self.params)
            self._capture.watch(self.params)
            self._capture.provenance.held = held_by(self.optimizer)

    def _drop_skipped(self) -> None:
        """Drop the records of a step that GradScaler skipped: its gradients were cleared."""
        for stepper in self._steppers:
            if stepper.micros and stepper.scorer.accumulated.thrown_away(stepper.params):
                self._forget(stepper)

    def _first_gradient(self) -> None:
        """Called in each batch before its backward pass adds anything to .grad."""
        self._drop_skipped()
        for stepper in self._steppers:
            stepper.scorer.accumulated.begin(stepper.params, first=not stepper.micros)

    def _forget(self, *steppers: Stepper) -> None:
        for stepper in steppers:
            stepper.forget()
        if not any(stepper.micros for stepper in self._steppers):
            if self._check is not None:
                self._check.calls.clear()
            self._memory.held = 0
            self._capture.blocks.over()

    def _device(self) -> torch.device:
        return next(iter(self.params.values())).device

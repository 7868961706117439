"""``Run``: the order of the stages of one training step, and nothing else.

with run.batch(ids)         capture: records of each example's gradient
before optimizer.step()     scorer: optimizer, validation and records give the values
after optimizer.step()      scorer: was it the step that was predicted? then ledger
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inrun.capture.capture import Capture
from inrun.capture.micro_batch import MicroBatch
from inrun.errors import BatchError
from inrun.exact.check import PERMUTATIONS, Check
from inrun.exact.repeat import ModelCalls
from inrun.ledger import LedgerError
from inrun.ledger.entries import Ledger, RunTables, StepEntry
from inrun.ranks.world import ALONE, World
from inrun.run.bookkeeping import (
    Config,
    EmptyBatches,
    EntryQueue,
    MemoryLimit,
    Tally,
    as_ids,
    as_owner,
)
from inrun.run.coverage import (
    UnscoredParameters,
    coverage_table,
    describe,
    held_by,
    modules_of,
    scored_parameters,
    trainable,
)
from inrun.run.logging import Summary
from inrun.run.recording import claim, of_this_rank, share_coverage
from inrun.scoring.conclude import Begun, Pending, StepResult
from inrun.scoring.estimators import Estimator
from inrun.scoring.scorer import Scorer
from inrun.validation.validator import Validator

_WATCHED: WeakKeyDictionary[Any, None] = WeakKeyDictionary()


class Run(Summary, RunTables):
    """A watched training run. Made by :func:`inrun.watch`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: Config,
        validator: Validator,
        ledger: Ledger,
        offload: bool,
        memory_limit: int | None,
        max_norm: float | None,
        scaler: Any,
        overwrite: bool = False,
        world: World = ALONE,
    ) -> None:
        self.world = world
        self.model, self.optimizer, self.config = model, optimizer, config
        self.estimators = [Estimator.parse(e, config.point) for e in config.estimator]
        self._names = config.estimator
        self.targets = [t.name for t in validator.targets]
        self.params, self._left_out = scored_parameters(model, optimizer, config.ignore)
        self._trainable = trainable(modules_of(model), optimizer)
        self.step = 0  # optimizer steps so far
        self.unwatched = 0  # of these, steps without a batch
        self._next_audit = 0  # the first scored step from here on is audited
        self._validator, self._ledger = validator, ledger
        self._overwrite, self._loaded, self._described = overwrite, False, False
        self._scorer = Scorer(
            model, optimizer, self.params, self.estimators, validator, max_norm, scaler, world
        )
        self._memory = MemoryLimit(memory_limit, offload, self._device)
        self._capture = Capture(
            model, self.params, batch_dim=config.batch_dim, form=config.form,
            fast=config.training == "fast", directions=len(self.targets) * len(self.estimators),
            offload=offload, check_memory=self._memory.add, on_first_gradient=self._first_gradient,
        )  # fmt: skip
        self._micros: list[tuple[np.ndarray, MicroBatch | None]] = []  # of this step
        self._taking: tuple[StepEntry, StepResult | Begun] | None = None  # inside optimizer.step()
        self._empty, self._unscored = EmptyBatches(), UnscoredParameters()
        self._capture.on_empty = self._empty.ended
        self._capture.provenance.held = held_by(optimizer)
        self.tally = Tally()
        self._entries = EntryQueue(ledger, self.tally, self._scorer.settled)
        self._id_type: type | None = None
        self._check: Check | None = None
        self._depth = 0  # an optimizer whose step() calls its base class's runs the hooks twice
        self._hooks: list[Any] = []
        self._attach()

    def _attach(self) -> None:
        """Hook ``optimizer.step()``; refuse a model or optimizer that another run watches."""
        if self.model in _WATCHED or self.optimizer in _WATCHED:
            raise RuntimeError(
                "this model or optimizer is being watched already: close() the other run first; "
                "several targets or estimators fit into one"
            )
        _WATCHED[self.model] = _WATCHED[self.optimizer] = None
        before, after = _eager(self._on_step), _eager(self._after_step)
        self._hooks.append(self.optimizer.register_step_pre_hook(before))
        self._hooks.append(self.optimizer.register_step_post_hook(after))

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
        self.world.refuse_join()
        array, self._id_type = as_ids(ids, self._id_type, empty=not self.world.alone)
        owner = as_owner(owner, len(array))
        self._depth = 0  # a step that raised did not count down
        self._give_up_step()
        self._rescan()
        scored = self.config.scores(self.step)
        if not scored or not len(array):
            self._drop_skipped()
            yield
            self._micros.append((array, self._scorer.no_examples() if scored else None))
            self._scorer.accumulated.note(self.params, scored)
            return
        held, self._memory.batches = self._memory.held, len(self._micros)
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
        self._micros.append((array, micro))
        self._scorer.accumulated.note(self.params, audit=self._audited())
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
        self._check = Check(permutations=permutations)
        return self._check

    def close(self) -> None:
        """Detach. The model and the optimizer are as they were; the tables stay readable.

        Raises LedgerError if records could not be written; call it again once they can.
        """
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            _WATCHED.pop(self.model, None)
            _WATCHED.pop(self.optimizer, None)
            self._give_up_step()
            self._entries.settle()
            self._forget()
            self._capture.close()
            self._validator.close()
            self._scorer.close()
        try:
            self._settled().close()
        finally:
            self.tally.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def coverage(self) -> pd.DataFrame:
        """One row per parameter: is it scored, through which operations, in which form."""
        others = self._left_out | self._unscored.outside
        return coverage_table(self.params, others, self._capture.keeper.coverage)

    def state_dict(self) -> dict[str, Any]:
        """For the user's checkpoint: where the run stands. Everything recorded is safe first.

        Raises LedgerError if records could not be written; training itself goes on without.
        """
        ledger = self._settled()
        ledger.flush()
        return {
            "step": self.step,
            "unwatched": self.unwatched,
            "next_audit": self._next_audit,
            "validation": self._validator.state_dict(),
            "ledger": ledger.state_dict(),
            "rank": self.world.rank,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; what was recorded after it is forgotten."""
        wanted = ("step", "unwatched", "next_audit", "validation", "ledger")
        if missing := [key for key in wanted if key not in state]:
            raise LedgerError(
                f"this is not what run.state_dict() returned: it has no {missing[0]!r}. Keep that "
                "under a key of its own in the checkpoint and pass it here as it was"
            )
        self._settled().load_state_dict(of_this_rank(self.world, state))  # not another run's
        self._ledger.truncate(state["step"])
        self._forget()
        self._taking = None
        self.step, self.unwatched = state["step"], state["unwatched"]
        self._next_audit = state["next_audit"]
        self._validator.load_state_dict(state["validation"])
        self._loaded = True

    # One step

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Before ``optimizer.step()``: gradients and state are final."""
        self._depth += 1
        if self._depth > 1:
            return None
        self._give_up_step()
        changed: tuple[Any, Any] | None = None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            changed = ((args[0], lambda: result), {})
            self._depth = 1  # a run.batch inside the closure set it to 0
        if self._capture.live is not None:
            raise BatchError("optimizer.step() inside run.batch: step after the with block")
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):  # the fused optimizer will skip this step
            self._forget()
            return changed
        try:
            with torch.no_grad():
                self._begin_step()
        finally:
            self.step += 1
            self._forget()
        return changed

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """After ``optimizer.step()``: the weights are what the step made of them."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or self._taking is None:
            return
        entry, begun = self._taking
        self._taking = None
        done: StepResult | Pending
        with torch.no_grad():
            done = self._scorer.finish(begun) if isinstance(begun, Begun) else begun
        self._entries.add(entry, done)
        if isinstance(done, StepResult) and done.audit is not None:
            every = self.config.audit_every
            self._next_audit = (entry.step // every + 1) * every

    def _begin_step(self) -> None:
        if not self._micros:
            self.unwatched += 1
            if self.unwatched == 1:
                warnings.warn(
                    f"optimizer.step() at step {self.step} without run.batch(ids): what it did is "
                    "credited to nobody. (Said once; run.unwatched counts them.)",
                    stacklevel=6,
                )
            return
        ids = np.concatenate([i for i, _ in self._micros])
        micros = [m for _, m in self._micros if m is not None]
        lr = float(self.optimizer.param_groups[0]["lr"])
        begun: StepResult | Begun = StepResult()
        if len(micros) == len(self._micros):
            check, self._check = self._check, None
            begun = self._scorer.begin(self.step, micros, ids, self._audited(), check)
            self._capture.inputs.settle_claims(micros, self._validator.look)
        self._claim_ledger()
        entry = StepEntry(self.step, ids, None, lr, float(self.config.every))
        self._taking = entry, begun

    def _give_up_step(self) -> None:
        """Record the step under way as void: ``optimizer.step()`` raised and never finished."""
        if self._taking is not None:
            entry, _ = self._taking
            self._taking = None
            self._entries.add(entry, StepResult(void="optimizer.step() did not finish"))

    def _audited(self) -> bool:
        return self.config.audit_every > 0 and self.step >= self._next_audit

    def _settled(self) -> Ledger:
        """Returns the ledger, after the steps whose values were still on the device are in it."""
        self._entries.settle()
        return self._ledger

    def _claim_ledger(self) -> None:
        """Before the first entry: continue the ledger, overwrite it or raise LedgerError."""
        if self._described:
            return
        claim(self.world, self._ledger, self._loaded, self._overwrite)
        share_coverage(self.world, self._capture.keeper.coverage)
        self._ledger.update_info(**describe(self.model, self.optimizer, self.coverage()))
        self._described = True

    # Bookkeeping

    def _rescan(self) -> None:
        """Find the scored parameters again if layers were frozen, unfrozen or added."""
        modules = modules_of(self.model)
        self._capture.provenance.modules = self._validator.modules = modules
        before, self._trainable = self._trainable, trainable(modules, self.optimizer)
        if before != self._trainable:
            found = scored_parameters(self.model, self.optimizer, self.config.ignore)
            self.params, self._left_out = found
            self._scorer.params = self.params
            self._capture.watch(self.params)
            self._capture.provenance.held = held_by(self.optimizer)

    def _drop_skipped(self) -> None:
        """Drop the records of a step that GradScaler skipped: its gradients were cleared."""
        if self._micros and self._scorer.accumulated.thrown_away(self.params):
            self._forget()

    def _first_gradient(self) -> None:
        """Called in each batch before its backward pass adds anything to .grad."""
        self._drop_skipped()
        self._scorer.accumulated.begin(self.params, first=not self._micros)

    def _forget(self) -> None:
        for _, micro in self._micros:
            if micro is not None:
                micro.records.clear()  # a loss that the loop keeps would keep the MicroBatch alive
        if self._check is not None:
            self._check.calls.clear()
        self._micros, self._memory.held = [], 0
        self._capture.blocks.over()
        self._scorer.accumulated.forget()

    def _device(self) -> torch.device:
        return next(iter(self.params.values())).device


def _eager(hook: Any) -> Any:
    """Keep a hook out of the graph where ``optimizer.step`` is compiled."""
    why = "inrun scores the step here: compile optimizer.step without fullgraph=True"
    return torch.compiler.disable(hook, reason=why)

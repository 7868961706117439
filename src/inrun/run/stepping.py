"""Optimizers that step together: the batches since their last step, and the step under way.

One optimizer is the usual case. With several, a step begins before the first of them moves
anything, when all gradients are final, and is complete when each that has a gradient has stepped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from inrun.capture.apart import frozen, part
from inrun.capture.micro_batch import MicroBatch
from inrun.errors import BatchError
from inrun.ledger.entries import StepEntry
from inrun.optimizers.joint import Optimizers, has_gradient, members_of
from inrun.ranks.shards import whole
from inrun.run.coverage import held_by
from inrun.scoring.conclude import NOT_FINITE, Begun, StepResult
from inrun.scoring.scorer import Scorer

UNFINISHED = "optimizer.step() did not finish"
INCOMPLETE = "one of the optimizers did not step"
IN_BATCH = (
    "optimizer.step() inside run.batch: step after the with block (after run.end()). An optimizer "
    "that steps during backward(), in a hook of its parameters, cannot be watched: it moves "
    "weights before all gradients of the batch are known"
)
_APART = (
    "Optimizers that take turns, as in a GAN, or that step at different times do not step "
    "together: pass watch(..., step_together=False), and each optimizer's step is scored by itself"
)


class Stepper:
    """The optimizers of one step, their scorer, and where the step stands.

    A step of several is refused, with a BatchError, if one of them has no part in it, as long as
    no step of all of them was seen; after that such a step is void.
    """

    def __init__(self, optimizer: Optimizers, scorer: Scorer) -> None:
        self.optimizer, self.scorer = optimizer, scorer
        self.members = members_of(optimizer)
        self.micros: list[tuple[np.ndarray, MicroBatch | None]] = []  # of the step to come
        self.taking: tuple[StepEntry, StepResult | Begun] | None = None  # the step under way
        self.next_audit = 0  # the first scored step from here on is audited
        self._left: list[Optimizer] = []  # members that the step under way waits for
        # An optimizer whose step() calls its base class's runs the hooks twice.
        self._depth = dict.fromkeys(map(id, self.members), 0)
        self._together = len(self.members) == 1  # has a step of all members been complete?

    @property
    def params(self) -> Mapping[str, Tensor]:
        """The scored parameters, by name."""
        return self.scorer.params

    @property
    def lr(self) -> float:
        """The learning rate of the first optimizer's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def score(self, params: Mapping[str, Tensor]) -> None:
        """Of these parameters, score those of its optimizers."""
        held, own = held_by(self.optimizer), self.scorer.world.own
        self.scorer.params = {k: own(p) for k, p in params.items() if id(p) in held}

    # The step hooks

    def enter(self, optimizer: Optimizer) -> bool:
        """A ``step()`` of a member begins; is it a call from outside, and does it move anything?"""
        self._depth[id(optimizer)] += 1
        outermost = self._depth[id(optimizer)] == 1
        return outermost and (len(self.members) == 1 or has_gradient(optimizer))

    def entered(self, optimizer: Optimizer) -> None:
        """A ``run.batch`` inside the closure of this step has forgotten that it is under way."""
        self._depth[id(optimizer)] = 1

    def waits_for(self, optimizer: Optimizer) -> bool:
        """Has another member begun the step that this one takes part in now?"""
        return self.taking is not None and any(o is optimizer for o in self._left)

    def begin(self, entry: StepEntry, begun: StepResult | Begun) -> None:
        self.taking = entry, begun
        self._left = [o for o in self.members if len(self.members) == 1 or has_gradient(o)]

    def leave(self, optimizer: Optimizer) -> tuple[StepEntry, StepResult | Begun] | None:
        """A ``step()`` of a member ended; returns the step if it was the last one to come."""
        depth = self._depth[id(optimizer)] = max(self._depth[id(optimizer)] - 1, 0)
        if depth or self.taking is None:
            return None
        self._left = [o for o in self._left if o is not optimizer]
        if self._left:
            return None
        taken, self.taking, self._together = self.taking, None, True
        return taken

    def forget_calls(self) -> None:
        """A step that raised did not count down."""
        self._depth = dict.fromkeys(self._depth, 0)

    # What goes wrong

    def give_up(
        self, entering: Optimizer | None
    ) -> tuple[StepEntry, StepResult, BatchError | None] | None:
        """The step under way will not be complete, because a batch begins or (``entering``) another
        step: its void result and, with several optimizers whose steps were never seen together, the
        error to raise. None: no step is under way."""
        if self.taking is None:
            return None
        (entry, begun), self.taking = self.taking, None
        if isinstance(begun, StepResult) and begun.void is not None:
            return entry, begun, None
        raised = any(depth for k, depth in self._depth.items() if k != id(entering))
        if len(self.members) == 1 or raised:
            return entry, StepResult(void=UNFINISHED), None
        if isinstance(begun, Begun) and not bool(begun.numbers["finite"]):  # a GradScaler skipped
            return entry, StepResult(void=NOT_FINITE), None
        if self._together:
            return entry, StepResult(void=INCOMPLETE), None
        left = self._names(self._left)
        error = BatchError(
            f"step {entry.step}: {left} has gradients and did not step before the next batch or "
            f"the next step of the other optimizers. {_APART}"
        )
        return entry, StepResult(void=INCOMPLETE), error

    def refuse_turns(self) -> None:
        """Before the first step of several optimizers: the batches must reach all of them."""
        if self._together:
            return
        nodes = (node for _, m in self.micros if m is not None for node in m.records)
        reached = {id(whole(self.params[k])) for node in nodes for k in node.roots}
        own = {id(whole(p)) for p in self.params.values()}
        missing = [
            o for o in self.members if (held := held_by(o) & own) and held.isdisjoint(reached)
        ]
        if missing and reached:
            raise BatchError(
                f"the batches of this step reach no parameter of {self._names(missing)}. {_APART}"
            )

    def _names(self, some: Sequence[Optimizer]) -> str:
        numbered = [(i, o) for i, o in enumerate(self.members) if any(o is s for s in some)]
        n = len(self.members)
        return ", ".join(f"{type(o).__name__} (optimizer {i + 1} of {n})" for i, o in numbered)

    # The batches

    def keep(self, ids: np.ndarray, micro: MicroBatch, audit: bool, alone: bool) -> None:
        """Keep what a batch has left until the step; not ``alone``: its part for these optimizers,
        if it reached them."""
        accumulated = self.scorer.accumulated
        if not alone:
            micro = part(micro, self.params.keys())
            if not micro.records:
                if not self.micros:
                    accumulated.forget()
                return
        self.micros.append((ids, micro))
        accumulated.note(self.params, audit=audit)

    def forget(self) -> None:
        """Drop the batches: the step is over, or was skipped."""
        for _, micro in self.micros:
            if micro is not None:
                micro.forget()  # a loss that the loop keeps would keep the MicroBatch alive
        self.micros = []
        self.scorer.accumulated.forget()

    def freeze(self) -> None:
        """Another optimizer is about to move its weights: keep what the batches left as it is."""
        kept, self.micros = self.micros, []
        for ids, micro in kept:
            self.micros.append((ids, None if micro is None else frozen(micro, self.params)))

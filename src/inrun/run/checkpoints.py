"""``run.state_dict()`` and ``run.load_state_dict(state)``: where a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inrun.curvature.saved import state_of
from inrun.ledger import LedgerError
from inrun.ledger.entries import Ledger, as_state
from inrun.run.curving import load_curvature, save_curvature
from inrun.run.recording import carried, of_this_rank

if TYPE_CHECKING:
    from inrun.curvature.curvature import Curvature
    from inrun.ranks.world import World
    from inrun.run.bookkeeping import EntryQueue
    from inrun.run.stepping import Stepper
    from inrun.validation.validator import Validator


class Checkpoints:
    """The state of a run for the user's checkpoint."""

    world: World
    step: int
    unwatched: int
    _steppers: list[Stepper]
    _validator: Validator
    _ledger: Ledger
    _entries: EntryQueue
    _loaded: bool

    if TYPE_CHECKING:

        def _settled(self) -> Ledger: ...
        def _forget(self, *steppers: Stepper) -> None: ...

    @property
    def curvature(self) -> Curvature | None:
        """With ``estimator="influence"``: what :func:`inrun.ask` needs of the run."""
        return self._steppers[0].scorer.maps.curvature

    def state_dict(self) -> dict[str, Any]:
        """For the user's checkpoint: where the run stands. Everything recorded is safe first.

        Raises LedgerError if records could not be written; training itself goes on without.
        """
        ledger = self._settled()
        ledger.flush()
        scorers = [stepper.scorer for stepper in self._steppers]
        save_curvature(scorers, ledger, self.world)
        for scorer in scorers:  # as in a run that goes on from here
            scorer.maps.forget()
        return {
            "step": self.step,
            "unwatched": self.unwatched,
            "next_audit": [stepper.next_audit for stepper in self._steppers],
            "validation": self._validator.state_dict(),
            "ledger": ledger.state_dict(),
            "rank": self.world.rank,
            "ranks": self.world.size,
            "sampling": [s.sampling.state_dict() for s in scorers],
            "carried": [as_state(e) for e in self._entries.incomplete()],
            "curvature": [state_of(c) for s in scorers if (c := s.maps.curvature) is not None],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; what was recorded after it is forgotten.

        With ``estimator="carry"`` the captures before the checkpoint are gone: their examples keep
        what they were credited until then, and what their momentum does later is nobody's. Of
        several ranks each then needs its own state.
        """
        wanted = ("step", "unwatched", "next_audit", "validation", "ledger")
        if missing := [key for key in wanted if key not in state]:
            raise LedgerError(
                f"this is not what run.state_dict() returned: it has no {missing[0]!r}. Keep that "
                "under a key of its own in the checkpoint and pass it here as it was"
            )
        waiting = carried(self.world, state)
        self._settled().load_state_dict(of_this_rank(self.world, state))  # not another run's
        self._ledger.truncate(waiting[0].step if waiting else state["step"])
        self._forget(*self._steppers)
        self._entries.replace(waiting)
        self.step, self.unwatched = state["step"], state["unwatched"]
        audits = state["next_audit"]
        for i, stepper in enumerate(self._steppers):
            stepper.taking = None
            known = audits if isinstance(audits, list) else [audits]  # saved before several could
            stepper.next_audit = known[min(i, len(known) - 1)]
        for stepper, own in zip(self._steppers, state.get("sampling", ()), strict=False):
            stepper.scorer.sampling.load_state_dict(own)
        load_curvature([stepper.scorer for stepper in self._steppers], state)
        self._validator.load_state_dict(state["validation"])
        self._loaded = True

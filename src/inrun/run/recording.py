"""The ledger of a run: made, claimed and continued alike on all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from inrun.ledger import LedgerError
from inrun.ledger.entries import Ledger, MemoryLedger, StepEntry, from_state
from inrun.ranks.world import World
from inrun.run.bookkeeping import Config


def make_ledger(
    world: World, out: str | os.PathLike[str] | None, config: Config, targets: Sequence[str],
    overwrite: bool,
) -> Ledger:  # fmt: skip
    """The ledger in memory, or the one in a folder: rank 0 makes that, the others add theirs."""
    if out is None:
        return MemoryLedger(targets)
    from inrun.ledger.saved import RankedStore

    made: Any = None
    names = list(config.estimator)

    def make(run: str | None) -> RankedStore:
        return RankedStore.of_rank(
            out, world.rank, world.size, config.saved(), targets, names, overwrite, run
        )

    def first() -> None:
        nonlocal made
        made = make(None) if world.rank == 0 else None

    def others() -> None:
        nonlocal made
        made = made or make(run)

    world.together(first)
    run = world.agree(made.info["run"] if made else None)
    try:
        world.together(others)
    except BaseException:
        if made is not None:
            made.close()
        raise
    return made


def claim(world: World, ledger: Ledger, loaded: bool, overwrite: bool) -> None:
    """Before the first entry: continue the ledger, start it again or raise LedgerError."""
    last = max(world.gather(ledger.last_step))
    if loaded:
        return
    if overwrite:
        ledger.restart(world.agree(uuid4().hex))
    elif last >= 0:
        raise LedgerError(
            f"{ledger.name()} holds steps up to {last} already. To go on, "
            "call run.load_state_dict(...) with the checkpoint's state; to start again, pass "
            "watch(..., overwrite=True) or another folder"
        )


def share_coverage(world: World, own: dict[str, set[tuple[str, str]]]) -> None:
    """Add the operations that other ranks have seen so far, and their forms, by parameter."""
    for found in world.gather(own) if not world.alone else ():
        for name, uses in found.items():
            own.setdefault(name, set()).update(uses)


def of_this_rank(world: World, state: Mapping[str, Any]) -> Any:
    """The ledger's part of a checkpoint. What was recorded in memory is its own rank's only."""
    ledger = state["ledger"]
    if "records" in ledger and state.get("rank", 0) != world.rank:
        return {"records": []}
    return ledger


def carried(world: World, state: Mapping[str, Any]) -> list[StepEntry]:
    """The steps of a checkpoint that wait for what momentum makes of them ("carry"): those of the
    rank that saved it."""
    found = [from_state(x) for x in state.get("carried", [])]
    saved, own = (state.get("rank", 0), state.get("ranks", 1)), (world.rank, world.size)
    if found and saved != own:
        raise LedgerError(
            "estimator='carry' in several processes: a rank goes on from its own run.state_dict(), "
            f"and with as many ranks. This one is of rank {saved[0]} of {saved[1]}, here is rank "
            f"{own[0]} of {own[1]}: save one for each rank"
        )
    return found

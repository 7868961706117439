"""The curvature of a run with ``estimator="influence"``: refused where it would be wrong, saved
with the ledger, continued from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import Tensor, nn

from inrun.curvature import saved
from inrun.curvature.layer import Layer
from inrun.curvature.places import places
from inrun.gradients.records import wide_type
from inrun.ledger import LedgerError
from inrun.ledger.entries import Ledger
from inrun.optimizers.joint import Optimizers, members_of
from inrun.ranks.world import World
from inrun.scoring.estimators import Estimator

if TYPE_CHECKING:
    from inrun.run.bookkeeping import Config
    from inrun.scoring.scorer import Scorer


def check_curvature(config: Config, model: nn.Module, optimizer: Optimizers, world: World) -> None:
    """Refuse runs whose curvature would be wrong."""
    name = next((e for e in config.estimator if Estimator.parse(e, config.point).curvature), None)
    if name is None:
        return
    if world.shards is not None and not world.alone:
        raise ValueError(
            f"estimator {name!r} with fully_shard: its curvature needs whole parameters, of which "
            "each rank has a part. Use DistributedDataParallel, or leave it out of the list of "
            "estimators"
        )
    if not config.step_together and len(members_of(optimizer)) > 1:
        raise ValueError(
            f"estimator {name!r} with step_together=False: influence is what training on the "
            "whole loss does, and each of these optimizers takes a part of it alone. Let them "
            "step together, or leave it out of the list of estimators"
        )
    for k, p in model.named_parameters():
        if p.requires_grad and p.is_complex():
            raise ValueError(
                f"estimator {name!r} with the complex parameter {k}: its curvature is not known. "
                f"Leave it out with ignore=[{k!r}] and requires_grad=False, or use 'secant'"
            )


def with_curvature(
    coverage: pd.DataFrame, model: nn.Module, params: Mapping[str, Tensor]
) -> pd.DataFrame:
    """The table with two more columns: how the curvature of each parameter is kept, and its
    bytes; a bias is kept with its weight."""
    kinds, sizes = {}, {}
    for name, place in places(model.modules(), params).items():
        layer = Layer(place, params[name].shape)
        kinds[name] = layer.kind
        sizes[name] = layer.numbers * wide_type(params[name].dtype).itemsize
        if place.bias is not None:
            kinds[place.bias] = f"with {name}"
    names = coverage["parameter"]
    return coverage.assign(
        curvature=[kinds.get(k, "") for k in names],
        curvature_bytes=[sizes.get(k, 0) for k in names],
    )


def save_curvature(scorers: Sequence[Scorer], ledger: Ledger, world: World) -> None:
    """Write it beside the ledger, if that is in a folder and holds a step. All ranks have the same:
    rank 0 does."""
    if world.rank:
        return
    folder, info = getattr(ledger, "path", None), getattr(ledger, "info", None)
    for scorer in scorers:
        curvature = scorer.maps.curvature
        if curvature is not None and curvature.layers and folder is not None and info is not None:
            saved.save(curvature, folder, info["run"])


def load_curvature(scorers: Sequence[Scorer], state: Mapping[str, Any]) -> None:
    """Continue from the state of a checkpoint."""
    own = [s for s in scorers if s.maps.curvature is not None]
    found = state.get("curvature", [])
    if len(found) != len(own):
        raise LedgerError(
            "this checkpoint has no curvature, which estimator='influence' goes on from: it was "
            "saved by a run without it. Start the run again, or leave the estimator out"
        )
    for scorer, known in zip(own, found, strict=True):
        assert scorer.maps.curvature is not None
        saved.load_state(scorer.maps.curvature, known, scorer.params)
        scorer.maps.forget()

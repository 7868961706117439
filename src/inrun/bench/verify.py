"""Are the values of a variant right? The same step in float64, from the same weights and state."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

from inrun.bench.trainers import Trainer, Watched
from inrun.report.metrics import pearson


def verify(trainer: Trainer) -> dict[str, float | None]:
    """Take one more step and compare its values with those of its float64 twin.

    The twin is watched by inrun (``training="bitwise"``, eager) and starts from the trainer's
    weights and optimizer state. Direct variants are compared with the tangent estimator.

    Returns:
        R: Pearson correlation, None for a single value. relative_error: ‖values − twin's‖ /
        ‖twin's‖.
    """
    assert trainer.estimator is not None
    model = copy.deepcopy(trainer.model).double()
    kind: Any = type(trainer.optimizer)
    optimizer = kind(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))  # steps are shared
    twin = Watched(trainer.problem.double(), model, optimizer, estimator=trainer.estimator)
    try:
        twin.step()
        truth = twin.values()
    finally:
        twin.close()
    trainer.step()
    values = trainer.values()
    error = float(np.linalg.norm(values - truth) / np.linalg.norm(truth))
    R = pearson(values.ravel(), truth.ravel())
    return {"R": R if math.isfinite(R) else None, "relative_error": error}

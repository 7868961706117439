"""Taken: did the optimizer take the step that its rule describes?

Values credit the step that the rule describes (optimizers/). A hook that changes gradients after
they were scored, or a subclass with another update, takes a step that it does not. So before the
step the weights after it are predicted, on all coordinates or on a sample of each parameter; after
it the real ones are compared. The verdict stays on the device until the step's values are fetched.

A parameter is as predicted if ‖real − predicted‖ ≤ tolerance · (‖w_B − w_t‖ + ‖w_∅ − w_t‖)
+ 2ε‖w_t‖: the second sum is what the terms of an update may cancel to, the last one the rounding of
the weights. Tolerances: float64 1e-6, float32 1e-3; half precision 0.1, because the optimizer
rounds each of its operations and the rule does not; 0.1 also for updates that round to half
precision inside (torch's Muon), whose matrix products differ from machine to machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from inrun.scoring.path import ParamStep, Path
from inrun.scoring.received import SAMPLED, SampleViews
from inrun.torch_compat import version_of

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_TOLERANCE = 0.1


@dataclass
class Piece:
    """Parameters of one type and device: their numbers, or a sample of them, in one tensor."""

    params: list[Tensor]
    expected: Tensor  # the predicted weights [numbers]
    param_of: Tensor | None  # the parameter of each number [numbers]; None where there is only one
    allowed: Tensor  # the distance that counts as rounding [parameters]

    def off(self, views: SampleViews | None) -> Tensor:
        """Whether any parameter is further from its prediction than rounding explains."""
        now = self.params[0].detach().flatten() if views is None else views.joined(self.params)
        away = _norms(now.to(self.expected.dtype) - self.expected, self.param_of, len(self.params))
        return (~(away <= self.allowed)).any()  # NaN is off


@dataclass
class Prediction:
    """The weights that the optimizer's rule predicts after a step."""

    pieces: list[Piece]
    views: SampleViews | None  # of a sample; None: all coordinates are compared
    gradients: list[tuple[Tensor, Tensor, int]]  # parameter, its gradient and version

    @torch.no_grad()
    def off(self) -> Tensor:
        """After the step: 1.0 if the weights are not as predicted. Stays on the device."""
        flags = [piece.off(self.views) for piece in self.pieces]
        return torch.stack([f.to(flags[0].device) for f in flags]).any().double()

    def likely_cause(self, borrowed_by: type[Optimizer] | None) -> str:
        """Why the step may not have been the rule's, and what to do. ``borrowed_by``: the class of
        the optimizer, if it uses the rule of its base class."""
        others = [g for p, g, v in self.gradients if p.grad is not g or version_of(g) != v]
        if others:
            return (
                "Gradients were changed after they were scored, inside optimizer.step(): by a step "
                "pre-hook that was registered after inrun.watch, or by the step itself. Register "
                "the hook before inrun.watch"
            )
        if borrowed_by is not None:
            name = f"{borrowed_by.__module__}.{borrowed_by.__qualname__}"
            return (
                f"{name} uses the rule of its base class, but its update is another: give it one "
                "with @inrun.register_optimizer (docs/optimizers.md)"
            )
        return (
            "Likely causes: a hook or a wrapper of the optimizer that changes weights, options or "
            "the update during step()"
        )


@torch.no_grad()
def predict(moved: Sequence[ParamStep], path: Path, views: SampleViews | None) -> Prediction:
    """Before the step: the weights after it, on a sample of each parameter or (``views`` is None)
    on all coordinates."""
    if views is None:
        ends = zip(moved, path.point(0.0), path.point(1.0), strict=True)
        pieces = [
            _piece([m], m.p.detach().flatten(), a.flatten(), b.flatten(), None)
            for m, a, b in ends
            if m.p.numel()
        ]
    else:
        views.shrink(64 + 8 * len(moved))
        groups: dict[Any, list[ParamStep]] = {}  # whose samples are computed together
        for m in moved:
            if m.p.numel():
                kind = m.kind or (id(m.rule), m.p.dtype, m.g.dtype, m.p.device)
                groups.setdefault(kind, []).append(m)
        pieces = [_sampled(members, views) for members in groups.values()]
    grads = [(m.p, g, version_of(g)) for m in moved if (g := m.p.grad) is not None]
    return Prediction(pieces, views, grads)


def _piece(
    members: list[ParamStep], w: Tensor, without: Tensor, expected: Tensor, param_of: Tensor | None
) -> Piece:
    """The prediction for some parameters from their weights before the step, and after it without
    and with the batch."""
    own, n = members[0], len(members)
    half = own.p.dtype not in TOLERANCE or own.rule.twin is not None
    tolerance = HALF_TOLERANCE if half else TOLERANCE[own.p.dtype]
    w, without = w.to(expected.dtype), without.to(expected.dtype)
    moves = _norms(expected - w, param_of, n) + _norms(without - w, param_of, n)
    rounding = 2 * torch.finfo(own.p.dtype).eps * _norms(w, param_of, n)
    return Piece([m.p for m in members], expected, param_of, tolerance * moves + rounding)


def _norms(x: Tensor, param_of: Tensor | None, n: int) -> Tensor:
    """The norm of each parameter's numbers [n]."""
    if x.is_complex():
        x = x.abs()
    if param_of is None:
        return torch.linalg.vector_norm(x, dtype=torch.float64)[None]
    squares = torch.zeros(n, dtype=torch.float64, device=x.device)
    return squares.index_add_(0, param_of, x.double().square()).sqrt()


def _sampled(members: list[ParamStep], views: SampleViews) -> Piece:
    """The prediction for a sample of the weights of parameters of one kind."""
    first, once = members[0], SampleViews()
    w = views.joined([m.p for m in members])
    param_of = _param_of(tuple([min(SAMPLED, m.p.numel()) for m in members]), w.device)
    if first.kind is not None:
        state = {
            k: _sampled_state(x, [m.state[k] for m in members], first.p, param_of, views)
            for k, x in first.state.items()
        }
        g = once.joined([m.g for m in members])
        joined = ParamStep(w, g, first.rule, state, first.options)
        without, expected = joined.weights_at(0.0), joined.weights_at(1.0)
    else:  # the update needs whole parameters
        without, expected = (once.joined([m.weights_at(x) for m in members]) for x in (0.0, 1.0))
    return _piece(members, w, without, expected, param_of)


def _sampled_state(
    first: Any, values: list[Any], p: Tensor, param_of: Tensor, views: SampleViews
) -> Any:
    """One state entry of all parameters, sampled. A number on a device may differ between
    parameters, so it is repeated for each coordinate."""
    if not isinstance(first, Tensor):
        return first
    if first.shape == p.shape:  # a number for each coordinate
        return views.joined(values)
    if first.device.type == "cpu":
        return first
    return torch.stack([x.reshape(()) for x in values])[param_of]


@lru_cache(maxsize=64)
def _param_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The parameter of each number, if parameter i has counts[i] of them."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)

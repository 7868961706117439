"""What the optimizer did: the weights after a step against those that its rule predicts.

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

from inrun.scoring import sample
from inrun.scoring.direction import Moved, Path
from inrun.torch_compat import version_of

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF = 0.1


@dataclass
class Piece:
    """Parameters of one type and device: their numbers, or a sample of them, in one tensor."""

    params: list[Tensor]
    expected: Tensor  # the predicted weights [numbers]
    owner: Tensor | None  # the parameter of each number; None where there is only one
    allowed: Tensor  # the distance that counts as rounding [parameters]

    def off(self, views: sample.Views | None) -> Tensor:
        """Whether any parameter is further from its prediction than rounding explains."""
        flat = self.params[0].detach().flatten() if views is None else views.joined(self.params)
        away = _norms(flat.to(self.expected.dtype) - self.expected, self.owner, len(self.params))
        return (~(away <= self.allowed)).any()  # NaN is off


@dataclass
class Prediction:
    """The weights that the optimizer's rule predicts after a step."""

    pieces: list[Piece]
    views: sample.Views | None  # of a sample; None: of all coordinates
    gradients: list[tuple[Tensor, Tensor, int]]  # parameter, its gradient and version

    @torch.no_grad()
    def off(self) -> Tensor:
        """After the step: 1.0 if the weights are not as predicted. Stays on the device."""
        flags = [piece.off(self.views) for piece in self.pieces]
        return torch.stack([f.to(flags[0].device) for f in flags]).any().double()

    def other_gradients(self) -> bool:
        """Did the optimizer receive other gradients than those that were scored?"""
        return any(p.grad is not g or version_of(g) != v for p, g, v in self.gradients)


@torch.no_grad()
def predict(moved: Sequence[Moved], path: Path, views: sample.Views | None) -> Prediction:
    """Before the step, on all coordinates or on a sample of each parameter."""
    if views is None:
        ends = zip(moved, path.point(0.0), path.point(1.0), strict=True)
        pieces = [
            _piece([m], m.p.detach().flatten(), a.flatten(), b.flatten(), None)
            for m, a, b in ends
            if m.p.numel()
        ]
    else:
        views.shrink(64 + 8 * len(moved))
        pieces = [_sampled(group, views) for group in _groups(moved)]
    grads = [(m.p, g, version_of(g)) for m in moved if (g := m.p.grad) is not None]
    return Prediction(pieces, views, grads)


def _piece(
    members: list[Moved], w: Tensor, without: Tensor, expected: Tensor, owner: Tensor | None
) -> Piece:
    own, n = members[0], len(members)
    half = own.p.dtype not in TOLERANCE or own.rule.twin is not None
    tolerance = HALF if half else TOLERANCE[own.p.dtype]
    w, without = w.to(expected.dtype), without.to(expected.dtype)
    moves = _norms(expected - w, owner, n) + _norms(without - w, owner, n)
    rounding = 2 * torch.finfo(own.p.dtype).eps * _norms(w, owner, n)
    return Piece([m.p for m in members], expected, owner, tolerance * moves + rounding)


def _norms(x: Tensor, owner: Tensor | None, n: int) -> Tensor:
    """The norm of each parameter's numbers [n]."""
    if x.is_complex():
        x = x.abs()
    if owner is None:
        return torch.linalg.vector_norm(x, dtype=torch.float64)[None]
    squares = torch.zeros(n, dtype=torch.float64, device=x.device)
    return squares.index_add_(0, owner, x.double().square()).sqrt()


def _sampled(members: list[Moved], views: sample.Views) -> Piece:
    """A sample of the weights of parameters of one kind."""
    first, counts, once = members[0], sample.counts(m.p for m in members), sample.Views()
    w = views.joined(m.p for m in members)
    if first.rule.elementwise:
        state = {k: _state([m.state[k] for m in members], counts, views) for k in first.state}
        g = once.joined(m.g for m in members)
        whole = Moved(w, g, first.rule, state, first.options)
        without, expected = whole.at(0.0), whole.at(1.0)
    else:  # the update needs whole parameters
        without, expected = (once.joined([m.at(x) for m in members]) for x in (0.0, 1.0))
    return _piece(members, w, without, expected, _owner(counts, w.device))


def _state(values: list[Any], counts: tuple[int, ...], views: sample.Views) -> Any:
    """One state entry of all parameters, sampled. A scalar on a GPU may differ between parameters,
    so it is repeated for each coordinate."""
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    if first.dim():  # of each coordinate
        return views.joined(values)
    if first.device.type == "cpu":
        return first
    return torch.stack([x.reshape(()) for x in values])[_owner(counts, first.device)]


@lru_cache(maxsize=64)
def _owner(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)


def _groups(moved: Sequence[Moved]) -> list[list[Moved]]:
    """Parameters grouped so that the samples of a group can be computed together."""
    found: dict[Any, list[Moved]] = {}
    for m in moved:
        if m.p.numel():
            found.setdefault(_kind(m), []).append(m)
    return list(found.values())


def _kind(m: Moved) -> tuple[Any, ...]:
    kind: list[Any] = [m.p.dtype, m.g.dtype, m.p.device, id(m.rule)]
    if not m.rule.elementwise:
        return tuple(kind)
    kind.append(id(m.options))
    for k, x in m.state.items():
        if not isinstance(x, Tensor):
            kind.append((k, x if isinstance(x, (bool, int, float)) else None))
        elif x.dim():  # of each coordinate
            kind.append((k, x.dtype))
        else:
            kind.append((k, x.dtype, x.item() if x.is_cpu else x.device))
    return tuple(kind)

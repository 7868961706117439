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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from inrun.scoring.moved import Moved, ParamStep
from inrun.scoring.packs import in_packs
from inrun.scoring.path import Path
from inrun.scoring.samples import Sample, sampled
from inrun.torch_compat import version_of

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_TOLERANCE = 0.1
# the columns of weights and gradient, beside those of the state
_WEIGHTS, _GRADIENT = "(weights)", "(gradient)"


@dataclass
class Piece:
    """Parameters of one type and device: all numbers of one, or a sample of each."""

    now: Callable[[], Tensor]  # reads the weights [parameters, numbers]
    expected: Tensor  # the predicted ones
    allowed: Tensor  # the distance that counts as rounding [parameters]

    def off(self) -> Tensor:
        """Whether any parameter is further from its prediction than rounding explains."""
        away = _norms(self.now().to(self.expected.dtype) - self.expected)
        return (~(away <= self.allowed)).any()  # NaN is off


@dataclass
class Prediction:
    """The weights that the optimizer's rule predicts after a step."""

    pieces: list[Piece]
    of_sample: bool  # otherwise all coordinates are compared
    gradients: list[tuple[Tensor, Tensor | None]]  # parameters and their gradients,
    versions: list[int]  # and how often each of these had been written to

    @torch.no_grad()
    def off(self) -> Tensor:
        """After the step: 1.0 if the weights are not as predicted. Stays on the device."""
        flags = [piece.off() for piece in self.pieces]
        if not flags:  # all shards of this rank are empty
            return torch.zeros((), dtype=torch.float64, device="cpu")
        return torch.stack([f.to(flags[0].device) for f in flags]).any().double()

    def likely_cause(self, borrowed_by: type[Optimizer] | None) -> str:
        """Why the step may not have been the rule's, and what to do. ``borrowed_by``: the class of
        the optimizer, if it uses the rule of its base class."""
        now = [version_of(g) for _, g in self.gradients if g is not None]
        if now != self.versions or any(p.grad is not g for p, g in self.gradients):
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
def predict(moved: Moved, path: Path, of_sample: bool) -> Prediction:
    """Before the step: the weights after it, on a sample of each parameter or on all
    coordinates."""
    if of_sample:
        if (found := path.sampled()) is not None:
            weights = moved.once("weights", lambda: Sample([m.p for m in moved.steps]))
            pieces = [_piece(moved.steps[0], weights.read, *found)]
        elif path.on_host:
            packed = moved.once("packed kinds", lambda: _packed(moved))
            pieces = [kind.predicted(kind.read(path)) for kind in packed]
        else:
            kinds = moved.once("kinds", lambda: list(map(_Scattered, moved.kinds())))
            pieces = [kind.predicted(kind.read()) for kind in kinds]
    else:
        ends = zip(moved.steps, path.point(0.0), path.point(1.0), strict=True)
        pieces = [
            _piece(m, partial(_row, m.p), _row(m.p), _row(a), _row(b))
            for m, a, b in ends
            if m.p.numel()
        ]
    grads = [(m.p, m.p.grad) for m in moved.steps]
    return Prediction(pieces, of_sample, grads, [version_of(g) for _, g in grads if g is not None])


def _row(p: Tensor) -> Tensor:
    return p.detach().reshape(1, -1)


def _piece(
    own: ParamStep, now: Callable[[], Tensor], w: Tensor, without: Tensor, expected: Tensor
) -> Piece:
    """The prediction for some parameters like ``own``, from their weights before the step, and
    after it without and with the batch [parameters, numbers]."""
    half = own.p.dtype not in TOLERANCE or own.rule.twin is not None
    tolerance = HALF_TOLERANCE if half else TOLERANCE[own.p.dtype]
    w, without = w.to(expected.dtype), without.to(expected.dtype)
    moves = _norms(torch.stack([expected - w, without - w])).sum(0)
    rounding = 2 * torch.finfo(own.p.dtype).eps * _norms(w)
    return Piece(now, expected, torch.add(rounding, moves, alpha=tolerance))


def _norms(x: Tensor) -> Tensor:
    """Of the last dimension."""
    x = x.abs() if x.is_complex() else x
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)


class _Kind:
    """Parameters of one kind, of which a sample is computed together. Kept from step to step."""

    def __init__(self, members: list[ParamStep]) -> None:
        self.members, first = members, members[0]
        self.weights = Sample([m.p for m in members], often=True)
        self.columns = [_WEIGHTS]  # and entries of the state with a number for each coordinate,
        for k, x in first.state.items() if first.kind is not None else ():
            # or with one for each parameter: they may differ; numbers on the host may not
            if isinstance(x, Tensor) and (x.shape == first.p.shape or x.device.type != "cpu"):
                self.columns.append(k)

    def predicted(self, read: dict[str, Tensor]) -> Piece:
        """The prediction for a sample of the weights, from what was read there."""
        members, first = self.members, self.members[0]
        w = read.pop(_WEIGHTS)
        if first.kind is not None:
            g = read.pop(_GRADIENT)
            joined = ParamStep(w, g, first.rule, {**first.state, **read}, first.options)
            without, expected = joined.weights_at(0.0), joined.weights_at(1.0)
        else:  # the update needs whole parameters
            without, expected = (sampled([m.weights_at(x) for m in members]) for x in (0.0, 1.0))
        return _piece(first, self.weights.read, w, without, expected)


class _Scattered(_Kind):
    """On a device: one launch reads the entries of many tensors."""

    def __init__(self, members: list[ParamStep]) -> None:
        super().__init__(members)
        together: dict[Any, list[tuple[str, list[Tensor]]]] = {}  # columns that one launch reads
        for k in self.columns:
            own = [m.p if k == _WEIGHTS else m.state[k] for m in members]
            together.setdefault((own[0].dtype, own[0].device), []).append((k, own))
        self.samples = [
            ([k for k, _ in columns], Sample([t for _, own in columns for t in own]))
            for columns in together.values()
        ]

    def read(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for names, sample in self.samples:
            found.update(zip(names, sample.read().chunk(len(names)), strict=True))
        if self.members[0].kind is not None:
            found[_GRADIENT] = sampled([m.g for m in self.members])
        return found


class _Packed(_Kind):
    """On a host: the entries are read from the packs, which the maps need as well."""

    def __init__(self, members: list[ParamStep], moved: Moved) -> None:
        super().__init__(members)
        self.pieces = in_packs(moved, members)

    def read(self, path: Path) -> dict[str, Tensor]:
        packs = list(path.joined())
        places, of_state = self.pieces.flats, self.columns[1:]
        read = self.pieces.read
        found = {k: read({i: packs[i].state[k] for i in places}) for k in of_state}
        found[_WEIGHTS] = read({i: packs[i].p for i in places})
        if self.members[0].kind is not None:
            found[_GRADIENT] = read({i: packs[i].g for i in places})
        return found


def _packed(moved: Moved) -> list[_Packed]:
    """The kinds of a step on the host."""
    return [_Packed(members, moved) for members in moved.kinds()]

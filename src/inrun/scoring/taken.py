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

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from inrun.scoring.moved import Moved, ParamStep
from inrun.scoring.path import Path
from inrun.scoring.samples import SAMPLED, Sample, sampled
from inrun.torch_compat import version_of

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_TOLERANCE = 0.1
_WEIGHTS = ""  # the column of the weights, beside those of the state


@dataclass
class Piece:
    """Parameters of one type and device: their numbers, or a sample of them, in one tensor."""

    params: list[Tensor]
    expected: Tensor  # the predicted weights [numbers]
    param_of: Tensor | None  # the parameter of each number [numbers]; None where there is only one
    allowed: Tensor  # the distance that counts as rounding [parameters]
    sample: Sample | None = None  # of the weights; None: all of one parameter are compared

    def off(self) -> Tensor:
        """Whether any parameter is further from its prediction than rounding explains."""
        now = self.params[0].detach().flatten() if self.sample is None else self.sample.read()
        away = _norms(now.to(self.expected.dtype) - self.expected, self.param_of, len(self.params))
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
        kinds = moved.once("kinds", lambda: [_Kind(members) for members in moved.kinds()])
        pieces = [kind.predicted() for kind in kinds]
    else:
        ends = zip(moved.steps, path.point(0.0), path.point(1.0), strict=True)
        pieces = [
            _piece([m], m.p.detach().flatten(), a.flatten(), b.flatten(), None)
            for m, a, b in ends
            if m.p.numel()
        ]
    grads = [(m.p, m.p.grad) for m in moved.steps]
    return Prediction(pieces, of_sample, grads, [version_of(g) for _, g in grads if g is not None])


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


class _Kind:
    """Parameters of one kind, of which a sample is computed together. Kept from step to step."""

    def __init__(self, members: list[ParamStep]) -> None:
        self.members, first = members, members[0]
        self.counts = tuple([min(SAMPLED, m.p.numel()) for m in members])
        self.weights = Sample([m.p for m in members])
        self.numbers: list[str] = []  # entries of the state with one number for each parameter
        columns = {_WEIGHTS: [m.p for m in members]}
        for k, x in first.state.items() if first.kind is not None else ():
            if isinstance(x, Tensor) and x.shape == first.p.shape:
                columns[k] = [m.state[k] for m in members]
            elif isinstance(x, Tensor) and x.device.type != "cpu":
                # It may differ between parameters, which one on the host may not.
                columns[k] = [m.state[k] for m in members]
                self.numbers.append(k)
        together: dict[Any, list[str]] = {}  # columns that one launch reads
        for k, column in columns.items():
            together.setdefault((column[0].dtype, column[0].device), []).append(k)
        self.samples = [
            (names, Sample([t for k in names for t in columns[k]]), [
                len(members) if k in self.numbers else sum(self.counts) for k in names
            ])
            for names in together.values()
        ]  # fmt: skip

    def predicted(self) -> Piece:
        """The prediction for a sample of the weights."""
        members, first = self.members, self.members[0]
        read: dict[str, Tensor] = {}
        for names, sample, lengths in self.samples:
            read.update(zip(names, sample.read().split(lengths), strict=True))
        w = read.pop(_WEIGHTS)
        param_of = _param_of(self.counts, w.device)
        if first.kind is not None:
            read |= {k: read[k][param_of] for k in self.numbers}
            g = sampled([m.g for m in members])
            joined = ParamStep(w, g, first.rule, {**first.state, **read}, first.options)
            without, expected = joined.weights_at(0.0), joined.weights_at(1.0)
        else:  # the update needs whole parameters
            without, expected = (sampled([m.weights_at(x) for m in members]) for x in (0.0, 1.0))
        piece = _piece(members, w, without, expected, param_of)
        piece.sample = self.weights
        return piece


@lru_cache(maxsize=64)
def _param_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The parameter of each number, if parameter i has counts[i] of them."""
    owner = torch.arange(len(counts), device="cpu")
    return owner.repeat_interleave(torch.tensor(counts, device="cpu")).to(device)

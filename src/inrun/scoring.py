"""The stages of one optimizer step: direction, contraction, checks.

Given what the capture recorded and the optimizer about to step, gives every example of the step
its value: ⟨u, g_i⟩, u the validation gradient carried back through the optimizer's update and
through clipping.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inrun.autocast import no_autocast
from inrun.check import Check, compare, gradient_errors, per_example
from inrun.clipping import Accumulated, Clipping, ClippingWatch
from inrun.contraction import Direction, cancelling, components, contract
from inrun.direction import POINTS, Estimator, Moved, Path, Static
from inrun.errors import CaptureError
from inrun.groups import group_values
from inrun.ledger import Audit
from inrun.repeat import verified_rows
from inrun.rules import rule_for
from inrun.rules.base import LinearMap, Scale
from inrun.score import Pending, Score
from inrun.stages import stage
from inrun.sweep import Gradients
from inrun.tap import MicroBatch
from inrun.validation import Validator

_NOT_FINITE = "the training gradient is not finite"
_NOT_ADDING_UP = "captured gradients do not add up to .grad"
_CHANGED = "the gradient was changed between backward() and step() for the first time"


class Scorer:
    """Turns captures into values; keeps only what must be remembered between steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        params: Mapping[str, Tensor],
        estimators: Sequence[Estimator],
        validator: Validator,
        max_norm: float | None,
        scaler: Any,
    ) -> None:
        self.model, self.optimizer, self.params = model, optimizer, params
        self.rule = rule_for(optimizer)
        self.estimators, self.validator, self.scaler = estimators, validator, scaler
        self.targets = [t.name for t in validator.targets]
        self.accumulated = Accumulated()
        self._clipping = ClippingWatch(max_norm)
        self._static = Static()
        self._verified = False
        self._candidates: set[str] = set()  # vectors that may cancel
        self._looked_at: Any = None

    def close(self) -> None:
        self._static = Static()

    def score(
        self, step: int, micros: list[MicroBatch], ids: np.ndarray, audit: bool,
        check: Check | None,
    ) -> Score | Pending:  # fmt: skip
        """Values of all examples of the step that the optimizer is about to take."""
        names = [k for k, p in self.params.items() if p.grad is not None]
        if not self._verified:
            self._refuse_unseen(names, micros)
        mine = {k: self.params[k] for k in names}
        moved = self._moved()
        own = {id(m.p): i for i, m in enumerate(moved)}
        places = [own[id(p)] for p in mine.values()]
        received = [moved[i].g for i in places]
        finite = _finite(received)
        if not finite.is_cuda and not bool(finite):
            return Score(void=_NOT_FINITE)
        G, changed = self.accumulated.compare(
            {k: g for k, p in mine.items() if (g := p.grad) is not None}
        )
        fixed = self._recognise(G, received, changed)
        clipping, aligned = self._spread(fixed, G, micros)

        path = Path(moved, self._static)
        self.validator.autocast = micros[-1].autocast
        self.validator.draw()
        values = received[0].new_zeros(
            (len(self.estimators), len(self.targets), len(ids)), dtype=torch.float64
        )
        expected, losses = values.new_zeros(values.shape[:2]), values.new_zeros(values.shape[1])
        maps = self._maps(path, places, G, self._cancelling(G, micros, audit))
        measured, parts = None, components(names, micros) if len(self.targets) > 1 else []
        with self.validator.evaluating():
            for group in self.validator.groups(mine, audit):
                at = self._gradients(group, path, mine)
                qs = slice(group[0], group[-1] + 1)
                losses[qs] = sum(g.loss for g in at.values())
                if not losses.is_cuda and not bool(losses.isfinite().all()):
                    return Score(void=self._loss_not_finite(losses.numpy()))
                with stage("contraction"), no_autocast(losses.device.type):
                    for point, which in self._by_point().items():
                        kinds = [self.estimators[e].kind for e in which]
                        carries = [clipping if k == "secant" else fixed for k in kinds]
                        through = [(maps[e], c) for e, c in zip(which, carries, strict=True)]
                        points = [at[x] for x in POINTS[point]]
                        found = group_values(points, through, G, micros, parts, len(group))
                        for e, carry, (inner, sums) in zip(which, carries, found, strict=True):
                            values[e, qs] = carry.apply(inner, sums, aligned)
                            expected[e, qs] = sums * carry.common
            if check is not None:
                self._compare(check, step, ids, values[0], micros, G, clipping)
            if audit:
                measured = self._audit(path)
        numbers = {"values": values, "expected": expected, "losses": losses, "finite": finite,
                   "missed": _missed([moved[i] for i in places], values)}  # fmt: skip
        numbers["changed"] = values.new_zeros(()) if changed is None else changed
        half = any(m.autocast is not None and m.autocast[1] for m in micros)
        conclude = partial(self._conclude, step, measured, _tolerance(G.values(), half))
        pending = Pending(numbers, conclude)
        if values.is_cuda and self._verified and check is None and not audit:
            return pending
        score = pending.settle()
        if score.void == _NOT_ADDING_UP and not self._verified:
            self._refuse(G, micros, _tolerance(G.values(), half))
        return score

    def _conclude(
        self, step: int, audit: Audit | None, tolerance: float, *, values: np.ndarray,
        expected: np.ndarray, losses: np.ndarray, finite: np.ndarray, missed: np.ndarray,
        changed: np.ndarray,
    ) -> Score:  # fmt: skip
        """The numbers of a step are here: are they good?"""
        if not finite:
            return Score(void=_NOT_FINITE)
        if not np.isfinite(losses).all():
            return Score(void=self._loss_not_finite(losses))
        if changed:
            self.accumulated.whole = True
            warnings.warn(f"step {step}: {_CHANGED}; the step is recorded as void.", stacklevel=8)
            return Score(void=_CHANGED)
        for q, target in enumerate(self.targets):
            if not np.isfinite(values[:, q]).all():
                return Score(void=f"the values for '{target}' are not finite")
        sums, size = values.sum(2), np.abs(values).sum(2) + np.abs(expected)
        off = np.abs(sums - expected) > tolerance * size
        if not off.any():
            self._verified = True
            return Score(values, None, audit, float(missed))
        worst = np.unravel_index(np.argmax(np.abs(sums - expected) / (size + 1e-300)), off.shape)
        self._message = (
            f"step {step}: the captured per-example gradients do not add up to .grad "
            f"(⟨u, Σg_i⟩ = {sums[worst]:.6g}, ⟨u, G⟩ = {expected[worst]:.6g}). Possible causes: "
            "gradients from outside run.batch(ids); clipping, unscaling or torch.autograd.grad "
            "inside it; a hook that changes a parameter's gradient; a custom autograd function"
        )
        if self._verified:
            warnings.warn(self._message + "; the step is recorded as void.", stacklevel=8)
        return Score(void=_NOT_ADDING_UP)

    def _refuse(self, G: Mapping[str, Tensor], micros: list[MicroBatch], tolerance: float) -> None:
        errors = gradient_errors(G, per_example(self.params, micros))
        off = [k for k, e in errors.items() if e > tolerance]
        where = f". Parameters concerned: {', '.join(off[:5]) or 'unknown'}."
        raise CaptureError(self._message + where)

    def _loss_not_finite(self, losses: np.ndarray) -> str:
        target = self.targets[int(np.argmin(np.isfinite(losses)))]
        return f"the validation loss of '{target}' is not finite"

    def _cancelling(
        self, G: Mapping[str, Tensor], micros: list[MicroBatch], audit: bool
    ) -> dict[str, Tensor]:
        """Which vectors cancel in this step. It is a matter of the model which of them can, so all
        are looked at only now and then."""
        if not self.rule.adaptive:
            return {}
        state = tuple(G), tuple(m.training for m in self.validator.modules)
        if audit or not self._verified or state != self._looked_at:
            flags = cancelling(G, micros)
            self._candidates = {k for k, x in flags.items() if bool(x)}
            self._looked_at = state
        return cancelling(G, micros, self._candidates) if self._candidates else {}

    def _maps(
        self, path: Path, places: list[int], G: Mapping[str, Tensor], still: Mapping[str, Tensor]
    ) -> list[dict[str, LinearMap]]:
        """For each estimator, the linear map of each parameter; to zero for those that are
        ``still``."""
        made: dict[str, list[LinearMap]] = {}
        with stage("update map"):
            for e in self.estimators:
                if e.kind not in made:
                    maps = path.maps(e.kind, POINTS[e.point][0])
                    made[e.kind] = [
                        _unless(still[k], maps[i]) if k in still else maps[i]
                        for k, i in zip(G, places, strict=True)
                    ]
        return [dict(zip(G, made[e.kind], strict=True)) for e in self.estimators]

    def _by_point(self) -> dict[str, list[int]]:
        """The estimators that share the targets' gradients."""
        found: dict[str, list[int]] = {}
        for e, estimator in enumerate(self.estimators):
            found.setdefault(estimator.point, []).append(e)
        return found

    def _gradients(
        self, group: Sequence[int], path: Path, params: Mapping[str, Tensor]
    ) -> dict[float | None, Gradients]:
        """The targets' gradients at every point that an estimator asks for."""
        gradients: dict[float | None, Gradients] = {}
        points = list(dict.fromkeys(x for e in self.estimators for x in POINTS[e.point]))
        for x in points:
            with path.weights(x), stage("validation"):
                gradients[x] = self.validator.gradients(group, params, len(points) > 1)
        return gradients

    def _moved(self) -> list[Moved]:
        """All parameters that this step will move."""
        scale = getattr(self.optimizer, "grad_scale", None)
        return [
            Moved.of(
                p, p.grad if scale is None else p.grad / scale, self.rule,
                self.optimizer.state.get(p, {}), group,
            )
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]  # fmt: skip

    def _recognise(
        self, G: Mapping[str, Tensor], received: list[Tensor], changed: Tensor | None
    ) -> Clipping:
        fused = getattr(self.optimizer, "grad_scale", None)
        same = all(g is self.params[k].grad for k, g in G.items())
        if fused is None and (changed is not None or same):
            return Clipping(1.0)
        scale = None
        if fused is not None:
            scale = 1.0 / float(fused)
        elif self.scaler is not None:
            scale = 1.0 / self.scaler.get_scale()
        return self._clipping.recognise(list(G.values()), received, scale)

    def _spread(
        self, fixed: Clipping, G: Mapping[str, Tensor], micros: list[MicroBatch]
    ) -> tuple[Clipping, Tensor | None]:
        """Clipping by norm for single examples, and ⟨G, g_i⟩/‖G‖²."""
        if fixed.norm is None:
            return fixed, None
        clipping = fixed.spread(list(G.values()), sum(m.energy() for m in micros))
        along, size = contract({k: Direction(g[None]) for k, g in G.items()}, G, micros)
        return clipping, along / size

    def _compare(
        self, check: Check, step: int, ids: np.ndarray, values: Tensor, micros: list[MicroBatch],
        G: Mapping[str, Tensor], clipping: Clipping,
    ) -> None:  # fmt: skip
        check.step, check.estimator = step, self.estimators[0].name
        with no_autocast(values.device.type):
            rows = per_example(self.params, micros)
        check.gradient_error = max(gradient_errors(G, rows).values())
        half = any(m.autocast is not None and m.autocast[1] for m in micros)
        rows = verified_rows(
            check, self.model, self.params, micros, rows, G, _tolerance(G.values(), half)
        )
        compare(
            check, ids, values.mean(0).cpu().numpy(), rows,
            self.params, self.model, self.optimizer,
            lambda: float(np.mean(self.validator.losses())), clipping.function(),
        )  # fmt: skip

    def _audit(self, path: Path) -> Audit | None:
        """The losses before, without and with the batch; None where one is not finite."""
        measured = []
        for x in (None, 0.0, 1.0):
            with path.weights(x):
                measured.append(np.array(self.validator.losses()))
        return Audit(*measured) if np.isfinite(measured).all() else None

    # Do the captured gradients add up to .grad?

    def _refuse_unseen(self, names: list[str], micros: list[MicroBatch]) -> None:
        seen = {r for m in micros for node in m.records for r in node.roots}
        unseen = [k for k in names if k not in seen]
        if unseen:
            raise CaptureError(
                f"parameter {', '.join(unseen[:5])} received a gradient, but no operation of it "
                "was seen inside run.batch(ids): it is used in a custom autograd function, or "
                f"outside the with block. Leave it out with watch(..., ignore={unseen[:5]!r})."
            )


def _finite(tensors: list[Tensor]) -> Tensor:
    """Is every number finite? One launch on a GPU. On a CPU sums are quickest, and only where one
    is not finite it may have overflowed."""
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(tensors, math.inf)).isfinite().all()
    found = all(math.isfinite(t.sum()) or bool(t.isfinite().all()) for t in tensors)
    return torch.tensor(found, device=tensors[0].device)


def _unless(still: Tensor, f: LinearMap) -> LinearMap:
    """The map, or one to zero of the same kind."""
    if isinstance(f, Scale):
        return Scale(f.K.masked_fill(still, 0.0))
    return lambda v: f(v).masked_fill(still, 0.0)


def _tolerance(G: Iterable[Tensor], half: bool) -> float:
    dtypes = {g.dtype for g in G}
    if half or dtypes & {torch.float16, torch.bfloat16}:
        return 0.05
    return 1e-3 if torch.float32 in dtypes else 1e-7


def _missed(mine: list[Moved], like: Tensor) -> Tensor:
    """The largest part of a parameter's update that its secant does not carry."""
    rules = [m for m in mine if not m.rule.coordinatewise]
    if not rules:
        return like.new_zeros(())
    found = [m.rule.completeness(m.g, m.p.detach(), m.state, m.options) for m in rules]
    return torch.stack([x.to(like) for x in found]).max()

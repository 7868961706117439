"""The stages of one optimizer step: direction, contraction, checks.

Given what the capture recorded and the optimizer about to step, gives every example of the step
its value: ⟨u, g_i⟩, u the validation gradient carried back through the optimizer's update and
through clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inrun.capture.micro_batch import MicroBatch
from inrun.errors import CaptureError
from inrun.exact.check import Check, compare, gradient_errors, per_example
from inrun.exact.repeat import verified_rows
from inrun.ledger.records import Audit
from inrun.optimizers import rule_for
from inrun.optimizers.base import LinearMap, Scale, has_own_rule
from inrun.scoring.clipping import Clipping, ClippingWatch, Unrecognised
from inrun.scoring.conclude import NOT_FINITE, OTHER_STEP, Conclusion
from inrun.scoring.contraction import Direction, cancelling, components, contract
from inrun.scoring.direction import POINTS, Estimator, Moved, Path, Static
from inrun.scoring.groups import group_values
from inrun.scoring.received import BEFORE, CHANGED, FIRST, Accumulated, Received
from inrun.scoring.sample import Views
from inrun.scoring.score import Begun, Pending, Score
from inrun.scoring.stages import stage
from inrun.scoring.taken import predict
from inrun.tensors.autocast import no_autocast
from inrun.torch_compat import foreach_norm
from inrun.validation.sweep import Gradients
from inrun.validation.validator import Validator

_ADVICE = {
    CHANGED: "Clipping and unscaling are recognised from the next step on",
    BEFORE: "Call optimizer.zero_grad() before the first batch of a step, and every backward() "
    "inside run.batch(ids)",
}


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
        self.conclusion = Conclusion(self.targets)
        self._clipping = ClippingWatch(max_norm)
        self._static = Static()
        self._candidates: set[str] = set()  # vectors that may cancel
        self._looked_at: Any = None
        self._views = Views()  # of weights and optimizer state
        self._compared = 0  # steps whose weights were compared on all coordinates

    def close(self) -> None:
        self._static = Static()
        self._views.forget()
        self.accumulated.close()

    def begin(
        self, step: int, micros: list[MicroBatch], ids: np.ndarray, audit: bool,
        check: Check | None,
    ) -> Score | Begun:  # fmt: skip
        """Values of all examples of the step that the optimizer is about to take."""
        names = [k for k, p in self.params.items() if p.grad is not None]
        if not self.conclusion.verified:
            self._refuse_unseen(names, micros)
        mine = {k: self.params[k] for k in names}
        moved = self._moved()
        own = {id(m.p): i for i, m in enumerate(moved)}
        places = [own[id(p)] for p in mine.values()]
        g = [moved[i].g for i in places]
        finite = _finite(g)
        if not finite.is_cuda and not bool(finite):
            return Score(void=NOT_FINITE)
        found = self.accumulated.compare(
            {k: x for k, p in mine.items() if (x := p.grad) is not None}
        )
        fixed = self._arrived(step, found, g, micros)
        if isinstance(fixed, Score):
            return fixed
        path, G = Path(moved, self._static), found.G
        numbers = self._numbers(len(ids), g[0])
        numbers["finite"] = finite
        numbers["missed"] = _missed([moved[i] for i in places], numbers["values"])
        whole = audit or self._compared < FIRST
        tolerance = _tolerance(G.values(), any(_is_half(m) for m in micros))
        prediction, measured = (
            predict(moved, path, None if whole else self._views),
            list[np.ndarray](),
        )
        maps = self._maps(path, places, G, self._cancelling(G, micros, audit))
        with self._validating(micros):
            clipping = self._values(numbers, path, mine, maps, fixed, G, micros, audit)
            losses = numbers["losses"]
            if not losses.is_cuda and not bool(losses.isfinite().all()):
                return self.conclusion.loss_not_finite(losses.numpy())
            if not self.conclusion.verified:
                self._refuse(step, tolerance, numbers, G, micros)
            if check is not None:
                self._compare(check, step, ids, numbers["values"][0], micros, G, clipping)
            if audit:
                for point in (None, 0.0):
                    with path.weights(point):
                        measured.append(np.array(self.validator.losses()))
        wait = not losses.is_cuda or whole or check is not None
        return Begun(step, numbers, tolerance, prediction, found.flags, measured, wait)

    def finish(self, begun: Begun) -> Score | Pending:
        """After ``optimizer.step()``: the score, or one whose values are still on the device."""
        audit = None
        if begun.losses:  # U(B) at the weights that are really there
            with self.validator.evaluating():
                losses = [*begun.losses, np.array(self.validator.losses())]
            audit = Audit(*losses) if np.isfinite(losses).all() else None
        like = begun.numbers["values"]
        flags = [*begun.flags.values(), begun.prediction.off()]
        begun.numbers["flags"] = torch.stack([f.to(like) for f in flags])
        advice = {k: _ADVICE[k] for k in begun.flags}
        advice[OTHER_STEP] = self._why_other(begun)
        conclude = partial(self.conclusion.of, begun.step, audit, begun.tolerance, advice)
        pending = Pending(begun.numbers, conclude)
        if not begun.wait:
            return pending
        score = pending.settle()
        if begun.prediction.views is None and score.void is None:
            self._compared += 1
        return score

    def settled(self, score: Score) -> None:
        """Called with each step's score: after a mismatch, go back to the thorough checks."""
        if score.void == CHANGED:
            self.accumulated.suspect()
        if score.void == OTHER_STEP:
            self._compared = 0

    def _numbers(self, B: int, like: Tensor) -> dict[str, Tensor]:
        """Zeros for the values [E, Q, B], their expected sums [E, Q] and the losses [Q]."""
        values = like.new_zeros((len(self.estimators), len(self.targets), B), dtype=torch.float64)
        expected, losses = values.new_zeros(values.shape[:2]), values.new_zeros(values.shape[1])
        return {"values": values, "expected": expected, "losses": losses}

    @contextmanager
    def _validating(self, micros: list[MicroBatch]) -> Iterator[None]:
        """Context of the validation passes of a step; draws each target's next batches."""
        self.validator.autocast = micros[-1].autocast
        self.validator.draw()
        with self.validator.evaluating():
            yield

    def _values(
        self, numbers: dict[str, Tensor], path: Path, mine: Mapping[str, Tensor],
        maps: list[dict[str, LinearMap]], fixed: Clipping, G: Mapping[str, Tensor],
        micros: list[MicroBatch], audit: bool,
    ) -> Clipping:  # fmt: skip
        """Fill in the values, one group of targets at a time; returns the per-example clipping."""
        values, losses = numbers["values"], numbers["losses"]
        clipping, aligned = self._spread(fixed, G, micros)
        parts = components(list(G), micros) if len(self.targets) > 1 else []
        for group in self.validator.groups(mine, audit):
            at = self._gradients(group, path, mine)
            qs = slice(group[0], group[-1] + 1)
            losses[qs] = sum(g.loss for g in at.values())
            if not losses.is_cuda and not bool(losses[qs].isfinite().all()):
                break
            with stage("contraction"), no_autocast(losses.device.type):
                for point, which in self._by_point().items():
                    kinds = [self.estimators[e].kind for e in which]
                    carries = [clipping if k == "secant" else fixed for k in kinds]
                    through = [(maps[e], c) for e, c in zip(which, carries, strict=True)]
                    points = [at[x] for x in POINTS[point]]
                    found = group_values(points, through, G, micros, parts, len(group))
                    for e, carry, (inner, sums) in zip(which, carries, found, strict=True):
                        values[e, qs] = carry.apply(inner, sums, aligned)
                        numbers["expected"][e, qs] = sums * carry.common
        return clipping

    def _refuse(
        self, step: int, tolerance: float, numbers: Mapping[str, Tensor], G: Mapping[str, Tensor],
        micros: list[MicroBatch],
    ) -> None:  # fmt: skip
        """Before the first step with values: captured gradients that do not add up are an error."""
        values, expected = (numbers[k].cpu().numpy() for k in ("values", "expected"))
        if not np.isfinite(values).all() or not bool(numbers["finite"]):
            return
        if self.conclusion.add_up(step, tolerance, values, expected):
            return
        errors = gradient_errors(G, per_example(self.params, micros))
        off = [k for k, e in errors.items() if e > tolerance]
        where = f". Parameters concerned: {', '.join(off[:5]) or 'unknown'}."
        raise CaptureError(self.conclusion.message + where)

    def _why_other(self, begun: Begun) -> str:
        """The likely cause of a step that was not the rule's."""
        cls = type(self.optimizer)
        if begun.prediction.other_gradients():
            return (
                "Gradients were changed after they were scored, inside optimizer.step(): by a step "
                "pre-hook that was registered after inrun.watch, or by the step itself. Register "
                "the hook before inrun.watch"
            )
        if not has_own_rule(cls):
            return (
                f"{cls.__module__}.{cls.__qualname__} uses the rule of its base class, but its "
                "update is another: give it one with @inrun.register_optimizer (docs/optimizers.md)"
            )
        return (
            "Likely causes: a hook or a wrapper of the optimizer that changes weights, options or "
            "the update during step()"
        )

    def _cancelling(
        self, G: Mapping[str, Tensor], micros: list[MicroBatch], audit: bool
    ) -> dict[str, Tensor]:
        """By parameter (1-D ones): a flag, True if its per-example gradients cancel in this step.
        Which can cancel depends on the model, so the full scan runs only at audits and when the
        model changes."""
        if not self.rule.adaptive:
            return {}
        state = tuple(G), tuple(m.training for m in self.validator.modules)
        if audit or not self.conclusion.verified or state != self._looked_at:
            flags = cancelling(G, micros)
            self._candidates = {k for k, x in flags.items() if bool(x)}
            self._looked_at = state
        return cancelling(G, micros, self._candidates) if self._candidates else {}

    def _maps(
        self, path: Path, places: list[int], G: Mapping[str, Tensor], still: Mapping[str, Tensor]
    ) -> list[dict[str, LinearMap]]:
        """For each estimator, the linear map of each parameter; zero if its flag in ``still`` is
        True."""
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
        """Indices of the estimators, grouped by the point of their validation gradient."""
        found: dict[str, list[int]] = {}
        for e, estimator in enumerate(self.estimators):
            found.setdefault(estimator.point, []).append(e)
        return found

    def _gradients(
        self, group: Sequence[int], path: Path, params: Mapping[str, Tensor]
    ) -> dict[float | None, Gradients]:
        """The gradients of a group of targets at each point that some estimator needs."""
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

    def _arrived(
        self, step: int, found: Received, g: list[Tensor], micros: list[MicroBatch]
    ) -> Clipping | Score:
        """The clipping C with ḡ = C(G), or a void score if ḡ is no known function of G."""
        for reason, flag in found.flags.items():
            if flag.device.type == "cpu" and bool(flag):
                return self.conclusion.void(step, reason, _ADVICE[reason])
        fused = getattr(self.optimizer, "grad_scale", None)
        if fused is None and not found.changed:
            return Clipping(1.0)
        scale = None
        if fused is not None:
            scale = 1.0 / float(fused)
        elif self.scaler is not None:
            scale = 1.0 / self.scaler.get_scale()
        half = any(
            m.autocast is not None and m.autocast[1:3] == (True, torch.float16) for m in micros
        )
        C = self._clipping.recognise(list(found.G.values()), g, scale, self._others(), half)
        if isinstance(C, Unrecognised):
            return self.conclusion.void(step, C.void, C.advice)
        return C

    def _others(self) -> list[Tensor]:
        """Gradients that are not scored but may have been clipped together with the others."""
        own = {id(p) for p in self.params.values()}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        every = {id(p): p for p in (*self.model.parameters(), *held)}
        return [p.grad for i, p in every.items() if i not in own and p.grad is not None]

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

    def _refuse_unseen(self, names: list[str], micros: list[MicroBatch]) -> None:
        seen = {r for m in micros for node in m.records for r in node.roots}
        unseen = [k for k in names if k not in seen]
        if unseen:
            raise CaptureError(
                f"parameter {', '.join(unseen[:5])} received a gradient, but no operation of it "
                "was seen inside run.batch(ids): it is used in a custom autograd function (for a "
                "loss fused with its head see inrun.register_function), or outside the with "
                f"block. Leave it out with watch(..., ignore={unseen[:5]!r})."
            )


def _finite(tensors: list[Tensor]) -> Tensor:
    """Whether all entries are finite, as a tensor. One kernel on a GPU. On a CPU a finite sum is
    the fastest proof; a sum that is not finite may have overflowed, so then look at entries."""
    if tensors[0].is_cuda:
        return torch.stack(foreach_norm(tensors, math.inf)).isfinite().all()
    found = all(math.isfinite(t.sum()) or bool(t.isfinite().all()) for t in tensors)
    return torch.tensor(found, device=tensors[0].device)


def _unless(still: Tensor, f: LinearMap) -> LinearMap:
    """The map ``f``, or the zero map of the same kind if the flag ``still`` is True."""
    if isinstance(f, Scale):
        return Scale(f.K.masked_fill(still, 0.0))
    return lambda v: f(v).masked_fill(still, 0.0)


def _is_half(micro: MicroBatch) -> bool:
    return micro.autocast is not None and micro.autocast[1]


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

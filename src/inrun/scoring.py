"""The stages of one optimizer step: direction, contraction, checks.

Given what the capture recorded and the optimizer about to step, gives every example of the step
its value: ⟨u, g_i⟩, u the validation gradient carried back through the optimizer's update and
through clipping.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inrun import reference
from inrun.check import EXACT_UP_TO, Check
from inrun.clipping import Clipping, ClippingWatch
from inrun.direction import POINTS, Estimator, Moved, Path
from inrun.errors import CaptureError
from inrun.ledger import Audit
from inrun.nodes import directions, pull_back
from inrun.rules import rule_for
from inrun.tap import MicroBatch
from inrun.validation import Validator


@dataclass(frozen=True)
class Score:
    """What became of a step: values [E, Q, B], or the reason why there are none."""

    values: np.ndarray | None = None
    void: str | None = None
    audit: Audit | None = None
    missed: float = 0.0  # part of the update that the secant could not carry (Muon's first steps)


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
        self._clipping = ClippingWatch(max_norm)
        self._verified = False

    def score(
        self,
        step: int,
        micros: list[MicroBatch],
        accumulated: Mapping[str, Tensor],
        ids: np.ndarray,
        audit: bool,
        check: Check | None,
    ) -> Score:
        """Values of all examples of the step that the optimizer is about to take.

        ``accumulated`` is G, the gradient as the batch left it, before unscaling and clipping.
        """
        names = [k for k, p in self.params.items() if p.grad is not None]
        self._refuse_unseen(names, micros)
        moved = self._moved()
        by_param = {id(m.p): m for m in moved}
        mine = [by_param[id(self.params[k])] for k in names]
        G = [accumulated.get(k, m.g) for k, m in zip(names, mine, strict=True)]
        if not all(bool(torch.isfinite(m.g).all()) for m in mine):
            return Score(void="the training gradient is not finite")
        clipping = fixed = self._recognise(names, G, mine)
        if clipping.norm is not None:
            clipping = clipping.spread(G, sum(m.energy() for m in micros))
        zero = [_cancelling(k, g, micros) for k, g in zip(names, G, strict=True)]

        path = Path(moved)
        self.validator.autocast = micros[-1].autocast
        self.validator.draw()
        values = np.zeros((len(self.estimators), len(self.targets), len(ids)))
        maps = [[m.map(e.kind) for m in mine] for e in self.estimators]
        measured = None
        with self.validator.evaluating():
            for q, target in enumerate(self.targets):
                gradients = self._gradients(q, path, mine)
                if gradients is None:
                    return Score(void=f"the validation loss of '{target}' is not finite")
                for e, estimator in enumerate(self.estimators):
                    v = _mean([gradients[x] for x in POINTS[estimator.point]])
                    u = [f(x.to(m.g.dtype)) for f, x, m in zip(maps[e], v, mine, strict=True)]
                    u = [
                        x if z is None else x.masked_fill(z, 0.0)
                        for x, z in zip(u, zero, strict=True)
                    ]
                    u = (clipping if estimator.kind == "secant" else fixed).carry(u, G)
                    values[e, q] = _contract(dict(zip(names, u, strict=True)), micros)
                    if not np.isfinite(values[e, q]).all():
                        return Score(void=f"the values for '{target}' are not finite")
                    if not self._verify(step, names, u, G, values[e, q], micros):
                        return Score(void="captured gradients do not add up to .grad")
            if check is not None:
                self._compare(check, step, ids, names, micros, G, values[0].mean(axis=0), clipping)
            if audit:
                measured = self._audit(path)
        return Score(values, None, measured, _missed(mine))

    def _gradients(
        self, q: int, path: Path, mine: list[Moved]
    ) -> dict[float | None, list[Tensor]] | None:
        """The target's gradient at every point that an estimator asks for; None if not finite."""
        gradients: dict[float | None, list[Tensor]] = {}
        for x in dict.fromkeys(x for e in self.estimators for x in POINTS[e.point]):
            with path.weights(x):
                loss, gradients[x] = self.validator.gradient(q, [m.p for m in mine])
            if not bool(torch.isfinite(loss)):
                return None
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

    def _recognise(self, names: list[str], G: list[Tensor], mine: list[Moved]) -> Clipping:
        fused = getattr(self.optimizer, "grad_scale", None)
        # Version counters do not tell: GradScaler unscales without touching them.
        if fused is None and not _differ(G, [self.params[k].grad for k in names]):
            return Clipping(1.0)
        scale = None
        if fused is not None:
            scale = 1.0 / float(fused)
        elif self.scaler is not None:
            scale = 1.0 / self.scaler.get_scale()
        return self._clipping.recognise(G, [m.g for m in mine], scale)

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
        if unseen and not self._verified:
            raise CaptureError(
                f"parameter {', '.join(unseen[:5])} received a gradient, but no operation of it "
                "was seen inside run.batch(ids): it is used in a custom autograd function, or "
                f"outside the with block. Leave it out with watch(..., ignore={unseen[:5]!r})."
            )

    def _verify(
        self, step: int, names: list[str], u: list[Tensor], G: list[Tensor], values: np.ndarray,
        micros: list[MicroBatch],
    ) -> bool:  # fmt: skip
        """Σ_i ⟨u, g_i⟩ = ⟨u, G⟩. An error at first, later a warning and a void step."""
        expected = sum(float((a.double() * b.double()).sum()) for a, b in zip(u, G, strict=True))
        size = float(np.abs(values).sum()) + abs(expected)
        half = any(m.autocast is not None and m.autocast[1] for m in micros)
        dtypes = {g.dtype for g in G}
        half |= bool(dtypes & {torch.float16, torch.bfloat16})
        tolerance = 0.05 if half else 1e-3 if torch.float32 in dtypes else 1e-7
        if abs(float(values.sum()) - expected) <= tolerance * size:
            self._verified = True
            return True
        message = (
            f"step {step}: the captured per-example gradients do not add up to .grad "
            f"(⟨u, Σg_i⟩ = {values.sum():.6g}, ⟨u, G⟩ = {expected:.6g}). Possible causes: "
            "gradients from outside run.batch(ids); clipping, unscaling or torch.autograd.grad "
            "inside it; a hook that changes a parameter's gradient; a custom autograd function"
        )
        if self._verified:
            warnings.warn(message + "; the step is recorded as void.", stacklevel=8)
            return False
        errors = _gradient_errors(dict(zip(names, G, strict=True)), self._rows(micros))
        off = [k for k, e in errors.items() if e > tolerance]
        raise CaptureError(message + f". Parameters concerned: {', '.join(off[:5]) or 'unknown'}.")

    def _rows(self, micros: list[MicroBatch]) -> dict[str, Tensor]:
        """Per-example gradients of the whole step by parameter: [B, *W]."""
        total = sum(m.B for m in micros)
        rows: dict[str, Tensor] = {}
        start = 0
        for micro in micros:
            for node, records in micro.records.items():
                for record in records:
                    for k, g in pull_back(node, record.rows()).items():
                        p = self.params[k]
                        rows.setdefault(k, p.new_zeros((total, *p.shape)))
                        rows[k][start : start + micro.B] += g.to(p.device, p.dtype)
            start += micro.B
        return rows

    def _compare(
        self, check: Check, step: int, ids: np.ndarray, names: list[str],
        micros: list[MicroBatch], G: list[Tensor], estimate: np.ndarray, clipping: Clipping,
    ) -> None:  # fmt: skip
        """Exact Shapley values by the real optimizer on copies."""
        rows, n = self._rows(micros), len(ids)
        check.step, check.estimator = step, self.estimators[0].name
        errors = _gradient_errors(dict(zip(names, G, strict=True)), rows)
        check.gradient_error = max(errors.values())
        name_of = {id(p): k for k, p in self.params.items()}
        gradients: list[Tensor | None] = []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                own = rows.get(name_of.get(id(p), ""))
                if own is None and p.grad is not None:  # not scored: every example has a share
                    own = (p.grad / n).expand(n, *p.shape)
                gradients.append(own)
        utility = reference.coalition_utility(
            self.model, self.optimizer, gradients,
            lambda: float(np.mean(self.validator.losses())), clipping.function(),
        )  # fmt: skip
        share = utility(frozenset()) - utility(frozenset(range(n)))
        if n <= EXACT_UP_TO:
            check.coalitions = 2**n
            check.fill(ids, estimate, -reference.exact_shapley(n, utility), None, share)
        else:
            phi, error = reference.permutation_shapley(n, utility, check.permutations)
            check.coalitions = check.permutations * n
            check.fill(ids, estimate, -phi, error, share)
        print(check)


def _differ(a: Sequence[Tensor], b: Sequence[Any]) -> bool:
    return bool(torch.stack([(x != y).any() for x, y in zip(a, b, strict=True)]).any())


def _mean(gradients: list[list[Tensor]]) -> list[Tensor]:
    if len(gradients) == 1:
        return gradients[0]
    return [torch.stack(parts).mean(0) for parts in zip(*gradients, strict=True)]


def _contract(u: Mapping[str, Tensor], micros: list[MicroBatch]) -> np.ndarray:
    """⟨u, g_i⟩ for every example of the step."""
    parts = []
    for micro in micros:
        total: Tensor | None = None
        for node, records in micro.records.items():
            direction = directions(node, u)
            if direction is None:
                continue
            for record in records:
                part = record.to(direction.device).dot(direction).double()
                total = part if total is None else total + part
        parts.append(np.zeros(micro.B) if total is None else total.cpu().numpy())
    return np.concatenate(parts)


def _cancelling(name: str, G: Tensor, micros: list[MicroBatch]) -> Tensor | None:
    """Coordinates of a vector whose gradient is zero but for rounding, though single examples' are
    not: a bias before BatchNorm. The batch does not move them, yet an adaptive optimizer's slope
    at zero is of the order lr/eps there and would credit examples with nonsense."""
    if G.ndim > 1:
        return None
    size: Tensor | None = None
    for micro in micros:
        for node, records in micro.records.items():
            if node.name == name:
                for record in records:
                    part = record.rows().abs().sum(0).to(G.device)
                    size = part if size is None else size + part
    if size is None:
        return None
    return G.abs() <= 0.3 * math.sqrt(torch.finfo(size.dtype).eps) * size


def _missed(mine: list[Moved]) -> float:
    """The largest part of a parameter's update that its secant does not carry."""
    rules = [m for m in mine if not m.rule.coordinatewise]
    return max(
        (float(m.rule.completeness(m.g, m.p.detach(), m.state, m.options)) for m in rules),
        default=0.0,
    )


def _gradient_errors(G: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> dict[str, float]:
    """How far the captured gradients' sum is from .grad, relative to their size, by parameter."""
    errors = {}
    for k, g in G.items():
        captured = rows.get(k)
        if captured is None:
            errors[k] = 1.0 if bool(g.any()) else 0.0
            continue
        size = float(captured.abs().sum(0).norm())
        errors[k] = float((captured.sum(0) - g).norm()) / (size + 1e-30)
    return errors

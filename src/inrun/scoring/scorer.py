"""One optimizer step, from gradients to values: the order of the stages, and what they remember.

Before ``optimizer.step()``, ``Scorer.begin``:

1. received: .grad must be what the batches left there, or a known function C of it (received.py,
   clipping.py);
2. update map: the optimizer's rule gives a linear map for each parameter and estimator, and the
   weights on the path from "without the batch" to "with it" (path.py, maps.py);
3. validation: losses and gradients of the targets at these weights (validation/);
4. contraction: ⟨u, g_i⟩ of every example, u the validation gradient carried back through the update
   map and through C (contraction.py);
5. audit, now and then: the validation losses before the step and without the batch.

After it, ``Scorer.finish``:

6. taken: are the weights those that the rule predicted (taken.py)?
7. conclude: values, or void and why (conclude.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inrun.capture.aside import CHANGED as ASIDE
from inrun.capture.micro_batch import MicroBatch
from inrun.exact.check import Check
from inrun.ledger.entries import Audit
from inrun.optimizers import rule_for
from inrun.optimizers.base import LinearMap, has_own_rule
from inrun.optimizers.joint import Optimizers, members_of
from inrun.ranks.shards import whole
from inrun.ranks.world import ALONE, World
from inrun.scoring.agreed import agreed, best, by_example
from inrun.scoring.carry import Window
from inrun.scoring.checking import check_step, refuse_other_data, refuse_sums, refuse_unseen
from inrun.scoring.clipping import Clipping, ClippingWatch, Unrecognised
from inrun.scoring.conclude import (
    NOT_FINITE,
    OTHER_STEP,
    Begun,
    Columns,
    Conclusion,
    Pending,
    StepResult,
)
from inrun.scoring.credit import Credit
from inrun.scoring.estimators import POINTS, Estimator, Place
from inrun.scoring.halving import Halving
from inrun.scoring.kept import fill
from inrun.scoring.maps import Maps
from inrun.scoring.moved import Moved
from inrun.scoring.packs import flat_gradients, sampled_gradients
from inrun.scoring.path import Path, PathBuffers, missed
from inrun.scoring.received import (
    BEFORE,
    CHANGED,
    FIRST,
    Accumulated,
    Received,
    all_finite,
    doubts,
    tolerance_of,
)
from inrun.scoring.sampling import Sampling
from inrun.scoring.sharded import contraction, refuse_scattered
from inrun.scoring.taken import predict
from inrun.scoring.uses import Direction
from inrun.tensors.autocast import no_autocast
from inrun.validation.sweep import Gradients
from inrun.validation.validator import Validator

# Context of the stage of this name. A benchmark puts its stopwatch here (bench/stopwatch.py).
stage: Callable[[str], AbstractContextManager[Any]] = nullcontext

MIXED_UP = "Say whose each row is with run.batch(ids, owner=...), or keep these rows apart"
_ADVICE = {
    ASIDE: "Passes like it are looked at call by call from now on",
    CHANGED: "Clipping and unscaling are recognised from the next step on",
    BEFORE: "Call optimizer.zero_grad() before the first batch of a step, and every backward() "
    "inside run.batch(ids)",
}


@dataclass(eq=False)
class Step:
    """What the stages of one step share."""

    number: int
    micros: list[MicroBatch]
    audit: bool
    params: dict[str, Tensor]  # the scored parameters that have a gradient
    moved: Moved  # all parameters that the optimizer will move
    places: list[int]  # of the scored ones among these
    finite: Tensor | None  # flag: the received gradient is finite; None: the update map will tell
    G: dict[str, Tensor]  # the gradient as the batches left it
    flags: dict[str, Tensor]  # by reason: if one is up, the step is void
    clipping: Clipping  # C, its factor the same for every example
    tolerance: float  # relative, of sums of values


class Scorer:
    """Turns captures into values; keeps only what must be remembered between steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        params: Mapping[str, Tensor],
        estimators: Sequence[Estimator],
        validator: Validator,
        max_norm: float | None,
        scaler: Any,
        world: World = ALONE,
        carry: Window | None = None,
        halves_every: int = 0,
        seed: int = 0,
    ) -> None:
        self.world, self.carry = world, carry
        self.model, self.optimizer, self.params = model, optimizer, params
        self.rules = [(o, rule_for(o)) for o in members_of(optimizer)]
        kinds = [type(o) for o, _ in self.rules]  # one may have the rule of its base class
        self._borrowed_by = next((cls for cls in kinds if not has_own_rule(cls)), None)
        self.estimators, self.validator, self.scaler = estimators, validator, scaler
        self.targets = [t.name for t in validator.targets]
        self.accumulated, self._contract = Accumulated(world), contraction(world)
        self.conclusion = Conclusion(self.targets)
        self._clipping = ClippingWatch(max_norm, world)
        self.sampling = Sampling(estimators, world)
        self.halving = Halving(estimators, validator, halves_every, seed, world)
        self._weights_memory = PathBuffers()
        self.maps = Maps(estimators, validator, world)
        self._moved = Moved([])  # of the last step
        self._advice = dict(_ADVICE)
        self._compared = 0  # steps whose weights were compared on all coordinates

    def no_examples(self) -> MicroBatch:
        """The batch of a rank without examples in a step: there are no records, and its gradient
        counts as zero."""
        return MicroBatch(0, autocast=self.validator.autocast)

    def close(self) -> None:
        self.maps.forget()
        self._weights_memory = PathBuffers()
        self._moved = Moved([])
        self.accumulated.close()

    def begin(
        self, number: int, micros: list[MicroBatch], ids: np.ndarray, audit: bool,
        check: Check | None,
    ) -> StepResult | Begun:  # fmt: skip
        """Stages 1 to 5: values of all examples of the step that the optimizer is about to take."""
        step = self._received(number, micros, audit)
        if isinstance(step, StepResult):
            return step
        all_coordinates = audit or self._compared < FIRST
        sharded = self.world.shards is not None  # no CUDA graph reads its weights
        path = Path(step.moved, None if sharded else self._weights_memory)
        prediction = predict(step.moved, path, of_sample=not all_coordinates)
        with stage("update map"):
            if self.halving.measures(number):
                self.maps.forget()
            maps = self.maps.of(step, path, thorough=audit or not self.conclusion.verified)
        numbers = self._numbers(step, path, sum(m.columns for m in micros))
        losses, measured = numbers["losses"], list[np.ndarray]()
        columns = Columns.of(micros)
        self.validator.autocast = micros[-1].autocast
        self.validator.draw()
        with self.validator.evaluating():
            self.sampling.begin(step, path, self._others, numbers, columns)
            credit = self._credit(step, maps)
            self._values(credit, path, numbers)
            self.sampling.end(numbers)
            bad = self.world.alone and not losses.is_cuda and not bool(losses.isfinite().all())
            if bad:
                return self.conclusion.loss_not_finite(losses.numpy())
            if not self.conclusion.verified:
                refuse_sums(self.world, self.conclusion, self.params, step, numbers, columns)
                refuse_other_data(self.world, self.validator.batches)
            if check is not None:
                own = best(by_example(columns, numbers["values"]), numbers.get("sampled"))[0]
                check_step(self, check, step, ids, own[..., :-1].cpu().numpy(), credit.clipping)
            with stage("halves"), no_autocast(losses.device.type):
                self.halving.measure(credit, path, self.sampling, numbers, columns)
            if audit:
                for point in (None, 0.0):
                    with path.weights(point):
                        measured.append(np.array(self.validator.losses()))
        if self.carry is not None:
            self.carry.keep(step, columns, self.rules)
        wait = not losses.is_cuda or all_coordinates or check is not None
        return Begun(
            number, numbers, step.tolerance, prediction, step.flags, measured, columns, wait
        )

    def finish(self, begun: Begun) -> StepResult | Pending:
        """Stages 6 and 7: the result, or one whose values are still on the device."""
        audit = None
        if self.carry is not None:
            self.carry.taken(self.rules, self.params)
        if begun.losses:  # U(B) at the weights that are really there
            with self.validator.evaluating():
                losses = [*begun.losses, np.array(self.validator.losses())]
            audit = Audit(*losses) if np.isfinite(losses).all() else None
        like = begun.numbers["values"]
        off = begun.prediction.off()
        flags = [*begun.flags.values(), off]
        begun.numbers["flags"] = torch.stack([f.to(like) for f in flags])
        begun.numbers |= agreed(self.world, begun.numbers, begun.columns, begun.numbers["flags"])
        begun.numbers |= {k: t.to(like.device) for k, t in begun.columns.moving().items()}
        advice = {k: self._advice.get(k, MIXED_UP) for k in begun.flags}
        fine = off.is_cpu and not bool(off)  # of one on a device that is known later
        advice[OTHER_STEP] = "" if fine else begun.prediction.likely_cause(self._borrowed_by)
        conclude = partial(
            self.conclusion.of, begun.step, audit, begun.tolerance, advice, begun.columns
        )
        pending = Pending(begun.numbers, conclude)
        if not begun.wait:
            return pending
        result = pending.settle()
        if not begun.prediction.of_sample and result.void is None:
            self._compared += 1
        return result

    def settled(self, result: StepResult) -> None:
        """Called with each step's result: after a mismatch, go back to the thorough checks."""
        if result.void is not None:
            self.maps.forget()
        if result.void == CHANGED:
            self.accumulated.suspect()
        if result.void == OTHER_STEP:
            self._compared = 0

    # 1. Received

    def _received(self, number: int, micros: list[MicroBatch], audit: bool) -> Step | StepResult:
        """What the optimizer is about to do with which gradient. A void result if that gradient is
        no known function of what the batches left."""
        at_once = self.world.alone  # several ranks decide together, when the step is over
        void = next((m.void for m in micros if m.void), None)
        if void is not None and at_once:
            return self.conclusion.void(number, void, _ADVICE[void])
        if self.world.shards is not None:
            self.world.shards.refuse_unfinished()
            self.params = {k: self.world.own(whole(p)) for k, p in self.params.items()}
        params = {k: p for k, p in self.params.items() if p.grad is not None}
        if not self.conclusion.verified:
            refuse_unseen(self.world, list(params), micros)
        refuse_scattered(self.world, micros, first=not self.conclusion.verified)
        if not self._moved.again():
            self._moved = Moved.of(self.rules, self.world)
        moved = self._moved
        places = moved.places(list(params.values()))
        g = [moved.steps[i].g for i in places]
        every = moved.on_host and len(g) == len(moved.steps)
        finite = None if g[0].is_cuda else all_finite(flat_gradients(moved) if every else g)
        if at_once and finite is not None and not bool(finite):
            return StepResult(void=NOT_FINITE)
        grads = {k: x for k, p in params.items() if (x := p.grad) is not None}
        sampled = partial(sampled_gradients, moved, places) if moved.on_host else None
        found = self.accumulated.compare(grads, sampled)
        for reason, flag in found.flags.items():
            if at_once and flag.device.type == "cpu" and bool(flag):
                return self.conclusion.void(number, reason, _ADVICE[reason])
        found.flags.update(doubts(micros) | ({void: torch.ones(())} if void else {}))
        C = self._recognised(found, g, micros)
        if isinstance(C, Unrecognised) and at_once:
            return self.conclusion.void(number, C.void, C.advice)
        if isinstance(C, Unrecognised):
            found.flags[C.void], self._advice[C.void] = torch.ones(()), C.advice
            C = Clipping(1.0)
        tolerance = tolerance_of(grads.values(), micros, self.world.coarse)
        return Step(
            number, micros, audit, params, moved, places, finite, found.G, found.flags, C, tolerance
        )

    def _recognised(
        self, found: Received, g: list[Tensor], micros: list[MicroBatch]
    ) -> Clipping | Unrecognised:
        """The clipping C with ḡ = C(G), if it is a known one."""
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
        return self._clipping.recognise(list(found.G.values()), g, scale, self._others(), half)

    def _others(self) -> list[Tensor]:
        """Gradients that are not scored but may have been clipped together with the others."""
        scored = {id(p) for p in self.params.values()}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        every = {id(own): own for p in (*self.model.parameters(), *held)
                 if (own := self.world.own(p)).grad is not None}  # fmt: skip
        return [g for i, p in every.items() if i not in scored and (g := p.grad) is not None]

    # 3. and 4. Validation and contraction

    def _numbers(self, step: Step, path: Path, C: int) -> dict[str, Tensor]:
        """What travels to the host at the end: values [E, Q, C] (``conclude.Columns`` says whose),
        their expected sums [E, Q] and the losses [Q], all still 0; whether the gradient is finite;
        the uncredited part."""
        scored = [step.moved.steps[i] for i in step.places]
        like, finite = scored[0].g, step.finite
        if finite is None:
            seen = path.finite(step.places)
            finite = all_finite([m.g for m in scored]) if seen is None else seen
        values = like.new_zeros((len(self.estimators), len(self.targets), C), dtype=torch.float64)
        expected, losses = values.new_zeros(values.shape[:2]), values.new_zeros(values.shape[1])
        left = missed(scored, values)
        found = {"values": values, "expected": expected, "losses": losses}
        return found | {"finite": finite, "missed": left}

    def _credit(self, step: Step, maps: list[dict[str, LinearMap]]) -> Credit:
        clipping, aligned = self._split_clipping(step)
        return Credit(
            step, self.estimators, maps, self.maps.together, {*self.maps.kept},
            len(self.targets) > 1, clipping, aligned, self._contract, self.world,
        )  # fmt: skip

    def _values(self, credit: Credit, path: Path, numbers: dict[str, Tensor]) -> None:
        """Fill in the values, one group of targets at a time."""
        values, losses, step = numbers["values"], numbers["losses"], credit.step
        if self.carry is not None:
            self.carry.begin(numbers)
        fresh, made = credit.by_point, self.maps.keeping(step, len(self.targets))
        groups = self.validator.groups(step.params, step.audit) if fresh else []
        for group in groups:
            at = self._gradients(group, path, step.params, fresh)
            if group is groups[-1]:
                path.forget(at.keys() - {0.0, 1.0})  # the ends are needed again
            qs = slice(group[0], group[-1] + 1)
            losses[qs] = sum(g.loss for g in at.values())
            if not losses.is_cuda and not bool(losses[qs].isfinite().all()):
                break
            keep = {e: partial(own.add, qs) for e, own in made.items()}
            products = partial(credit.products, at, len(group), keep=keep)
            with stage("contraction"), no_autocast(losses.device.type):
                for which in fresh:
                    for e, (found, sums) in products(which, step.G):
                        values[e, qs], numbers["expected"][e, qs] = found, sums
                if self.carry is not None:
                    at_halfway, own = at["halfway"], credit.maps[self.carry.e]
                    self.carry.note(qs, at_halfway, own, step, path, numbers)
            with stage("orders"), no_autocast(losses.device.type):
                self.sampling.fill(numbers, qs, at, step.number, products, credit.linear)
        with stage("contraction"), no_autocast(losses.device.type):
            fill(numbers, self.maps.kept, step.G, step.micros, step.clipping, self._contract)
        self.maps.kept |= made

    def _gradients(
        self, group: Sequence[int], path: Path, params: Mapping[str, Tensor],
        which: Iterable[Sequence[int]],
    ) -> dict[Place, Gradients]:  # fmt: skip
        """The gradients of a group of targets at each point that these estimators need."""
        gradients: dict[Place, Gradients] = {}
        own = [POINTS[self.estimators[some[0]].point] for some in which]  # of one point together
        points = list(dict.fromkeys(x for some in own for x in some))
        for x in points:
            with path.weights(x), stage("validation"):
                found = self.validator.gradients(group, params, len(points) > 1)
                gradients[x] = self.validator.smoothed(x, group, found, params)
        return gradients

    def _split_clipping(self, step: Step) -> tuple[Clipping, Tensor | None]:
        """Clipping by norm for single examples, and ⟨G, g_i⟩/‖G‖²."""
        G, micros = step.G, step.micros
        if step.clipping.norm is None:
            return step.clipping, None
        found = (m.energy(names) for names in self.world.in_turn(G) for m in micros)
        energy = torch.tensor(sum(found), dtype=torch.float64)
        energy = self.world.total(energy) * self.world.share**2
        clipping = step.clipping.spread(list(G.values()), float(energy), self.world)
        along, size = self._contract({k: Direction(g[None]) for k, g in G.items()}, G, micros)
        return clipping, self.world.averaged(along) / size

"""``watch`` and ``Run``: the order of the stages of one training step, and nothing else.

capture (forward, backward) → direction (optimizer, validation) → contraction → ledger.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inrun import reference
from inrun.capture import Capture, MicroBatch
from inrun.check import EXACT_UP_TO, PERMUTATIONS, Check
from inrun.clipping import Clipping, ClippingWatch
from inrun.direction import POINTS, Estimator, Moved, weights_at
from inrun.errors import BatchError, CaptureError, ValidationError
from inrun.ledger import Audit, Ledger, MemoryLedger, StepRecord
from inrun.nodes import directions, pull_back
from inrun.ops import Form
from inrun.rules import rule_for
from inrun.validation import Loss, Validator

_WATCHED: WeakKeyDictionary[Any, None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Config:
    """The choices of a run that its numbers depend on."""

    estimator: tuple[str, ...]
    point: str | None
    training: str
    audit_every: int
    per_step: int
    every: int
    batch_dim: int
    ignore: tuple[str, ...]
    form: Form
    seed: int


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    validation: Iterable[Any] | None = None,
    targets: Mapping[str, Iterable[Any]] | None = None,
    loss: Loss | None = None,
    out: str | os.PathLike[str] | None = None,
    estimator: str | Sequence[str] = "secant",
    point: str | None = None,
    training: Literal["bitwise", "fast"] = "bitwise",
    audit_every: int = 50,
    per_step: int = 1,
    every: int = 1,
    ignore: Sequence[str] = (),
    batch_dim: int = 0,
    form: Form = "auto",
    chunk: int | None = None,
    offload: bool = False,
    memory_limit: int | None = None,
    max_norm: float | None = None,
    scaler: Any = None,
    seed: int = 0,
) -> Run:
    """Watch a training loop: what does each example do to the validation loss?

    Args:
        model: the model that is trained.
        optimizer: the optimizer whose ``step()`` trains it; its class needs a rule (docs/optimizers.md).
        validation: a loader or list of batches; the loss on them is what examples are valued by.
            It is cycled, ``per_step`` batches at each step, in its own order.
        targets: several of them by name, instead of ``validation``. See :func:`inrun.by_label`.
        loss: ``loss(model, batch) -> scalar``; by default ``model(**batch).loss``.
        out: a folder for the ledger; None keeps it in memory.
        estimator: "secant" (values add up), "tangent" (Theorem 4.2 of the paper), "sgd" (ignores
            the optimizer), or a list of them; a point of its own after a plus: "secant+gauss2".
        point: where the validation gradient is taken: "midpoint", "current" or "gauss2" (two
            points, twice the cost); None is midpoint for secant and current for the others.
        training: "bitwise" leaves the training as it is without inrun, bit for bit; "fast" forms
            weight gradients as sums of per-example gradients, the same up to rounding.
        audit_every: measure the validation losses before, without and with the batch every so
            many steps; 0 never.
        per_step: validation batches per step and target; their losses are averaged.
        every: score a random one in so many steps, weighted by it.
        ignore: names of parameters to leave out.
        batch_dim: the dimension of the examples in the model's inputs (1 for sequence-first).
        form: force "ghost" or "materialise" where an operation has both; "auto" keeps the smaller.
        chunk: rows of a validation batch to process at a time (right for losses that are means
            over rows); chosen by itself when a GPU runs out of memory.
        offload: keep what is captured in host memory until the step.
        memory_limit: bytes the captures of one step may take; by default what is free.
        max_norm: the norm gradients are clipped to, if they are; otherwise it is recognised from
            the second clipped step on.
        scaler: the ``GradScaler``, needed only if gradients are also clipped by norm.
        seed: of the validation order of shuffling loaders and of ``every``.

    Returns:
        A :class:`Run`, also a context manager that closes itself.
    """
    if (validation is None) == (targets is None):
        raise ValidationError("pass either validation= (one target) or targets= (several by name)")
    if training not in ("bitwise", "fast"):
        raise ValueError(f"training={training!r} is not known: use 'bitwise' or 'fast'")
    if form not in ("auto", "ghost", "materialise"):
        raise ValueError(f"form={form!r} is not known: use 'auto', 'ghost' or 'materialise'")
    for name, number in (("per_step", per_step), ("every", every)):
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    if out is not None:
        raise NotImplementedError("a ledger on disk is not there yet: leave out=None")
    names = (estimator,) if isinstance(estimator, str) else tuple(estimator)
    config = Config(
        names, point, training, audit_every, per_step, every, batch_dim, tuple(ignore), form, seed
    )
    if targets is None:
        assert validation is not None
        targets = {"validation": validation}
    validator = Validator(model, targets, loss, per_step, chunk, seed)
    ledger = MemoryLedger(list(targets))
    return Run(model, optimizer, config, validator, ledger, offload, memory_limit, max_norm, scaler)


class Run:
    """A watched training run. Made by :func:`watch`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: Config,
        validator: Validator,
        ledger: Ledger,
        offload: bool,
        memory_limit: int | None,
        max_norm: float | None,
        scaler: Any,
    ) -> None:
        self.rule = rule_for(optimizer)
        self.model, self.optimizer, self.config = model, optimizer, config
        self.estimators = [Estimator.parse(e, config.point) for e in config.estimator]
        self.targets = [t.name for t in validator.targets]
        self.params, self._left_out = _scored(model, optimizer, config.ignore)
        self.step = 0  # optimizer steps so far
        self.unwatched = 0  # of these, steps without a batch
        self._validator, self._ledger, self._scaler = validator, ledger, scaler
        self._clipping = ClippingWatch(max_norm)
        self._limit, self._held = memory_limit, 0
        self._capture = Capture(
            model, self.params, batch_dim=config.batch_dim, form=config.form,
            fast=config.training == "fast", offload=offload, check_memory=self._account,
        )  # fmt: skip
        self._pending: list[tuple[np.ndarray, MicroBatch | None]] = []
        self._gradients: dict[str, tuple[Tensor, int, Tensor]] = {}  # .grad, its version, a copy
        self._id_type: type | None = None
        self._verified = False
        self._check: Check | None = None
        if model in _WATCHED or optimizer in _WATCHED:
            raise RuntimeError(
                "this model or optimizer is being watched already: close() the other run first; "
                "several targets or estimators fit into one"
            )
        _WATCHED[model] = _WATCHED[optimizer] = None
        self._hook: Any = optimizer.register_step_pre_hook(self._on_step)

    # The training loop's side

    @contextmanager
    def batch(self, ids: Sequence[int] | Sequence[str] | np.ndarray | Tensor) -> Iterator[None]:
        """Around the forward and backward pass of one batch: ``ids`` names its examples, in order.

        Several batches before one ``optimizer.step()`` are gradient accumulation. An id may occur
        more than once; its values add up.
        """
        if self._hook is None:
            raise BatchError("this run is closed: watch the model again")
        if self._capture.live is not None:
            raise BatchError("run.batch inside run.batch: one batch at a time")
        array = self._ids(ids)
        self._drop_skipped()
        if not self._chosen():
            yield
            self._pending.append((array, None))
            return
        held = self._held
        try:
            with self._capture.batch(len(array)) as micro:
                yield
        except BaseException:
            self._held = held
            raise
        self._pending.append((array, micro))
        self._gradients = {
            k: (p.grad, p.grad._version, p.grad.detach().clone())
            for k, p in self.params.items()
            if p.grad is not None
        }

    def check(self, permutations: int = PERMUTATIONS) -> Check:
        """Compare the next scored step with exact Shapley values of this very model.

        The real optimizer takes the step for every coalition of the batch (random permutations
        above 12 examples), clipping included, and the validation loss is measured. The verdict is
        printed; the returned object holds the numbers.
        """
        self._check = Check(permutations=permutations)
        return self._check

    def close(self) -> None:
        """Detach. The model and the optimizer are as they were; the tables stay readable."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            _WATCHED.pop(self.model, None)
            _WATCHED.pop(self.optimizer, None)
            self._forget()
            self._ledger.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Tables

    def values(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per example: id, value (the mean over targets), one column per named target,
        steps in which it was seen and scored. An example that was never scored has NaN."""
        return self._ledger.values(self._index(estimator))

    def history(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per step and example: step, id, value and one column per named target."""
        return self._ledger.history(self._index(estimator))

    def harm(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per example: id, harm: how often and how far it was among the harmful of its
        batch, summed over steps and targets. Ranks suspects; see docs/method.md."""
        return self._ledger.harm(self._index(estimator))

    def steps(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per optimizer step: lr, sum of values, and where it was audited the loss, batch
        share, momentum share, residual and explained ratio (means over targets)."""
        return self._ledger.steps(self._index(estimator))

    def coverage(self) -> pd.DataFrame:
        """One row per parameter: is it scored, through which operations, in which form."""
        rows = []
        for name, p in self.params.items():
            seen = sorted(self._capture.coverage.get(name, ()))
            rows.append((name, tuple(p.shape), p.numel(), "scored" if seen else "no gradient yet",
                         ", ".join(sorted({o for o, _ in seen})),
                         ", ".join(sorted({f for _, f in seen}))))  # fmt: skip
        for name, (p, why) in self._left_out.items():
            rows.append((name, tuple(p.shape), p.numel(), why, "", ""))
        columns = ["parameter", "shape", "size", "status", "operations", "forms"]
        return pd.DataFrame(rows, columns=columns)

    def state_dict(self) -> dict[str, Any]:
        """For the user's checkpoint: where the run stands. Everything recorded is safe first."""
        self._ledger.flush()
        return {
            "step": self.step,
            "unwatched": self.unwatched,
            "validation": self._validator.state_dict(),
            "ledger": self._ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; what was recorded after it is forgotten."""
        self._forget()
        self.step, self.unwatched = state["step"], state["unwatched"]
        self._validator.load_state_dict(state["validation"])
        self._ledger.load_state_dict(state["ledger"])
        self._ledger.truncate(self.step)

    # One step

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Before ``optimizer.step()``: gradients and state are final."""
        changed = None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            changed = ((args[0], lambda: result), {})
        if self._capture.live is not None:
            raise BatchError("optimizer.step() inside run.batch: step after the with block")
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):  # the fused optimizer will skip this step
            self._forget()
            return changed
        try:
            with torch.no_grad():
                self._record()
        finally:
            self._forget()
            self.step += 1
        return changed

    def _record(self) -> None:
        if not self._pending:
            self.unwatched += 1
            if self.unwatched == 1:
                warnings.warn(
                    f"optimizer.step() at step {self.step} without run.batch(ids): what it did is "
                    "credited to nobody. (Said once; run.unwatched counts them.)",
                    stacklevel=6,
                )
            return
        ids = np.concatenate([i for i, _ in self._pending])
        micros = [m for _, m in self._pending if m is not None]
        lr = float(self.optimizer.param_groups[0]["lr"])
        weight = float(self.config.every)
        if len(micros) < len(self._pending):
            self._ledger.append(StepRecord(self.step, ids, None, lr, weight))
            return
        values, audit, void = self._score(micros, ids)
        self._ledger.append(StepRecord(self.step, ids, values, lr, weight, void, audit))

    def _score(
        self, micros: list[MicroBatch], ids: np.ndarray
    ) -> tuple[np.ndarray | None, Audit | None, str | None]:
        names = [k for k, p in self.params.items() if p.grad is not None]
        self._refuse_unseen(names, micros)
        moved = self._moved()
        scored = {id(m.p): m for m in moved}
        mine = [scored[id(self.params[k])] for k in names]
        params = [m.p for m in mine]
        G = [self._accumulated(k) for k in names]
        if not all(bool(torch.isfinite(m.g).all()) for m in mine):
            return None, None, "the training gradient is not finite"
        clipping = fixed = self._recognise(names, G, [m.g for m in mine])
        if clipping.norm is not None:
            clipping = clipping.spread(G, sum(m.energy() for m in micros))

        self._validator.autocast = micros[-1].autocast
        self._validator.draw()
        E, Q = len(self.estimators), len(self.targets)
        values = np.zeros((E, Q, len(ids)))
        maps = [[m.map(e.kind) for m in mine] for e in self.estimators]
        zero = [_cancelling(k, g, micros) for k, g in zip(names, G, strict=True)]
        for q in range(Q):
            gradients: dict[float | None, list[Tensor]] = {}
            for e, estimator in enumerate(self.estimators):
                for x in POINTS[estimator.point]:
                    if x not in gradients:
                        with weights_at(moved, x):
                            loss, gradients[x] = self._validator.gradient(q, params)
                        if not bool(torch.isfinite(loss)):
                            return None, None, f"the validation loss of '{self.targets[q]}' is {float(loss)}"
                at = [gradients[x] for x in POINTS[estimator.point]]
                v = [torch.stack(vs).mean(0) if len(vs) > 1 else vs[0] for vs in zip(*at, strict=True)]
                u = [f(x.to(m.g.dtype)) for f, x, m in zip(maps[e], v, mine, strict=True)]
                u = [x if dead is None else x.masked_fill(dead, 0.0) for x, dead in zip(u, zero, strict=True)]
                u = (clipping if estimator.kind == "secant" else fixed).carry(u, G)
                values[e, q] = self._contract(dict(zip(names, u, strict=True)), micros)
                if not np.isfinite(values[e, q]).all():
                    return None, None, f"values for '{self.targets[q]}' are not finite"
                void = self._verify(names, u, G, values[e, q], micros)
                if void:
                    return None, None, void
        if self._check is not None:
            self._compare(ids, names, micros, values[0].mean(axis=0), clipping)
        audit = None
        if self.config.audit_every and self.step % self.config.audit_every == 0:
            audit = self._audit(moved)
        return values, audit, None

    def _moved(self) -> list[Moved]:
        """All parameters that this step will move."""
        scale = getattr(self.optimizer, "grad_scale", None)
        return [
            Moved.of(p, p.grad if scale is None else p.grad / scale, self.rule,
                     self.optimizer.state.get(p, {}), group)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]  # fmt: skip

    def _accumulated(self, name: str) -> Tensor:
        """G: what the batch accumulated, before clipping and unscaling."""
        grad = self.params[name].grad
        kept, version, copy = self._gradients.get(name, (None, -1, grad))
        return grad if kept is grad and grad._version == version else copy

    def _recognise(self, names: list[str], G: list[Tensor], g: list[Tensor]) -> Clipping:
        same = all(a is self.params[k].grad for k, a in zip(names, G, strict=True))
        fused = getattr(self.optimizer, "grad_scale", None)
        if same and fused is None:
            return Clipping(1.0)
        scale = None
        if fused is not None:
            scale = 1.0 / float(fused)
        elif self._scaler is not None:
            scale = 1.0 / self._scaler.get_scale()
        return self._clipping.recognise(G, g, scale)

    def _contract(self, u: Mapping[str, Tensor], micros: list[MicroBatch]) -> np.ndarray:
        """⟨u, g_i⟩ for every example of the step."""
        parts = []
        for micro in micros:
            total = torch.zeros(micro.B, dtype=torch.float64)
            for node, records in micro.records.items():
                direction = directions(node, u)
                if direction is None:
                    continue
                for record in records:
                    if self._capture.offload:
                        record = record.map(lambda t, d=direction: t.to(d.device))
                    total = total.to(direction.device) + record.dot(direction).double()
            parts.append(total.cpu())
        return torch.cat(parts).numpy()

    def _audit(self, moved: list[Moved]) -> Audit:
        measured = []
        for x in (None, 0.0, 1.0):
            with weights_at(moved, x):
                measured.append(np.array(self._validator.losses()))
        return Audit(*measured)

    # Do the captured gradients add up to .grad?

    def _refuse_unseen(self, names: list[str], micros: list[MicroBatch]) -> None:
        seen = {r for m in micros for node in m.records for r in node.roots}
        unseen = [k for k in names if k not in seen]
        if unseen and not self._verified:
            raise CaptureError(
                f"parameter {', '.join(unseen[:5])} received a gradient, but no operation of it was "
                "seen inside run.batch(ids): it is used in a custom autograd function, or outside "
                f"the with block. Leave it out with watch(..., ignore={unseen[:5]!r})."
            )

    def _verify(
        self, names: list[str], u: list[Tensor], G: list[Tensor], values: np.ndarray,
        micros: list[MicroBatch],
    ) -> str | None:  # fmt: skip
        expected = sum(float((a.double() * b.double()).sum()) for a, b in zip(u, G, strict=True))
        size = float(np.abs(values).sum()) + abs(expected)
        half = {m.autocast[2] for m in micros if m.autocast and m.autocast[1]}
        half |= {g.dtype for g in G} & {torch.float16, torch.bfloat16}
        tolerance = 0.05 if half else 1e-3 if G and G[0].dtype == torch.float32 else 1e-7
        if abs(float(values.sum()) - expected) <= tolerance * size:
            self._verified = True
            return None
        message = (
            f"step {self.step}: the captured per-example gradients do not add up to .grad "
            f"(⟨u, Σg_i⟩ = {values.sum():.6g}, ⟨u, G⟩ = {expected:.6g}). Part of the gradient comes "
            "from outside run.batch(ids), or from an operation that was not seen"
        )
        if self._verified:
            warnings.warn(message + "; the step is recorded as void.", stacklevel=8)
            return "captured gradients do not add up to .grad"
        off = [k for k, e in self._gradient_errors(names, micros).items() if e > tolerance]
        raise CaptureError(message + f". Parameters concerned: {', '.join(off[:5]) or 'unknown'}.")

    def _rows(self, micros: list[MicroBatch]) -> dict[str, Tensor]:
        """Per-example gradients of the whole step by parameter: [B, *W]."""
        parts: list[dict[str, Tensor]] = []
        for micro in micros:
            rows: dict[str, Tensor] = {}
            for node, records in micro.records.items():
                for record in records:
                    for k, g in pull_back(node, record.rows()).items():
                        g = g.to(self.params[k].device, self.params[k].dtype)
                        rows[k] = rows[k] + g if k in rows else g
            parts.append(rows)
        shape = {k: self.params[k].shape for rows in parts for k in rows}
        return {
            k: torch.cat([r.get(k, self.params[k].new_zeros((m.B, *s))) for r, m in zip(parts, micros, strict=True)])
            for k, s in shape.items()
        }

    def _gradient_errors(self, names: list[str], micros: list[MicroBatch]) -> dict[str, float]:
        rows = self._rows(micros)
        errors = {}
        for k in names:
            G = self._accumulated(k)
            got = rows[k].sum(0) if k in rows else torch.zeros_like(G)
            scale = float(rows[k].abs().sum(0).norm()) if k in rows else float(G.norm())
            errors[k] = float((got - G).norm()) / (scale + 1e-30)
        return errors

    def _compare(
        self, ids: np.ndarray, names: list[str], micros: list[MicroBatch], estimate: np.ndarray,
        clipping: Clipping,
    ) -> None:  # fmt: skip
        """The armed check: exact Shapley values by the real optimizer on copies."""
        assert self._check is not None
        check, self._check = self._check, None
        check.step, check.estimator = self.step, self.estimators[0].name
        check.gradient_error = max(self._gradient_errors(names, micros).values())
        rows = self._rows(micros)
        name_of = {id(p): k for k, p in self.params.items()}
        gradients: list[Tensor | None] = []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                own = rows.get(name_of.get(id(p), ""))
                if own is None and p.grad is not None:  # not scored: moves the same for everybody
                    own = p.grad.expand(len(ids), *p.shape) / len(ids)
                gradients.append(own)
        utility = reference.coalition_utility(
            self.model, self.optimizer, gradients,
            lambda: float(np.mean(self._validator.losses())), clipping.function(),
        )  # fmt: skip
        n = len(ids)
        share = utility(frozenset()) - utility(frozenset(range(n)))
        if n <= EXACT_UP_TO:
            check.coalitions = 2**n
            check.fill(ids, estimate, -reference.exact_shapley(n, utility), None, share)
        else:
            phi, error = reference.permutation_shapley(n, utility, check.permutations)
            check.coalitions = check.permutations * n
            check.fill(ids, estimate, -phi, error, share)
        print(check)

    # Bookkeeping

    def _index(self, estimator: str | None) -> int:
        names = [e.name for e in self.estimators]
        if estimator is None:
            return 0
        if estimator not in names:
            raise ValueError(f"estimator {estimator!r} was not recorded; recorded: {names}")
        return names.index(estimator)

    def _ids(self, ids: Any) -> np.ndarray:
        plain = ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else list(ids)
        kinds = {str if isinstance(x, str) else int if isinstance(x, (int, np.integer)) and not isinstance(x, bool) else type(x) for x in plain}
        if not plain:
            raise BatchError("run.batch got no ids: pass one per example")
        if not kinds <= {int, str} or len(kinds | {self._id_type} - {None}) > 1:
            found = ", ".join(sorted(k.__name__ for k in kinds | {self._id_type} - {None} if k))
            raise BatchError(
                f"ids must be all integers or all strings, the same in the whole run, but here are "
                f"{found}"
            )
        self._id_type = kinds.pop()
        return np.asarray(plain, dtype=np.int64 if self._id_type is int else object)

    def _chosen(self) -> bool:
        """Is this step scored? A coin of its own, the same for all batches of a step."""
        if self.config.every == 1:
            return True
        return bool(np.random.default_rng((self.config.seed, self.step)).integers(self.config.every) == 0)

    def _drop_skipped(self) -> None:
        """Captures of a step that never came (GradScaler skipped it): gradients are gone."""
        if not self._pending:
            return
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        kept = self._gradients.values()
        untouched = bool(grads) and all(g._version == version for g, version, _ in kept)
        if not untouched and not any(bool(g.any()) for g in grads):
            self._forget()

    def _forget(self) -> None:
        self._pending, self._gradients, self._held = [], {}, 0

    def _account(self, new: int) -> None:
        if self._limit is None:
            self._limit = _free_memory(next(iter(self.params.values())).device, self._capture.offload)
        self._held += new
        if self._held > self._limit:
            raise MemoryError(
                f"what inrun must keep until optimizer.step() takes more than "
                f"{self._limit / 2**30:.2f} GiB already ({len(self._pending)} earlier batches of this step "
                "included). Use smaller or fewer micro-batches per step, watch(..., offload=True) to "
                "keep it in host memory, ignore=[...] for the largest layers, or raise memory_limit."
            )


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


def _free_memory(device: torch.device, offload: bool) -> int:
    """Bytes that can still be allocated where captures are kept."""
    if device.type == "cuda" and not offload:
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**62


def _scored(
    model: nn.Module, optimizer: Optimizer, ignore: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, str]]]:
    """The parameters to score by name, and the others with the reason they are left alone."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {k.removeprefix("_orig_mod."): p for k, p in model.named_parameters()}
    unknown = [k for k in ignore if k not in named]
    if unknown:
        raise ValueError(f"ignore names parameters the model does not have: {unknown}")
    scored: dict[str, Tensor] = {}
    others: dict[str, tuple[Tensor, str]] = {}
    for name, p in named.items():
        if not p.requires_grad:
            others[name] = (p, "frozen")
        elif id(p) not in held:
            others[name] = (p, "not in the optimizer")
        elif name in ignore:
            others[name] = (p, "ignored")
        else:
            scored[name] = p
    if not scored:
        raise ValueError(
            "no parameter of the model is both trainable and in the optimizer, so there is nothing "
            "to watch (was the optimizer made from another model, or before freezing?)"
        )
    return scored, others

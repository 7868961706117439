"""``estimator="carry"``: the whole step is credited, also what momentum carries into it.

With momentum a step is P[a], a an average of all gradients so far (optimizers/momentum.py). So an
example that was seen at step s has a share of every step t ≥ s:

    value = Σ_{t ≥ s} coef(t, s) · ⟨u_t, C_s g_i(s)⟩,    u_t = P_tᵀ ∇ℓ halfway from w_t to w_{t+1},

with coef(s, s) = own_s and coef(t, s) = old_t · keep_{t−1} ⋯ keep_{s+1} · add_s. It is one product,
⟨A_s, g_i(s)⟩, with A_s = own_s·u_s + add_s·D_{s+1} and D_t = old_t·u_t + keep_t·D_{t+1}. The window
keeps the records and the direction u_t of each step until momentum has forgotten the batch; then a
few steps are finished together, by one walk back through the directions.

What adds up: over a run, Σ values + nobody's part + decay + what is older than the window = Σ_t
⟨∇ℓ halfway, w_t − w_{t+1}⟩, the drop of the validation loss up to third order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from inrun.capture.apart import frozen
from inrun.capture.micro_batch import MicroBatch
from inrun.gradients.records import real, wide
from inrun.ledger.entries import StepEntry
from inrun.optimizers.base import LinearMap, Rule, Scale
from inrun.optimizers.momentum import Share
from inrun.ranks.world import ALONE, World
from inrun.scoring.conclude import Columns, Pending, StepResult
from inrun.scoring.contraction import contract
from inrun.scoring.uses import Direction
from inrun.tensors.autocast import no_autocast
from inrun.torch_compat import foreach_add_, foreach_mul, version_of
from inrun.validation.sweep import Gradients

if TYPE_CHECKING:
    from inrun.scoring.path import Path
    from inrun.scoring.scorer import Step

LEFT = 0.01  # of a gradient's momentum: less is forgotten
NOT_FINITE = "the carried values are not finite"


def window_steps(keep: float) -> int:
    """Steps until less than ``LEFT`` of a gradient is left in an average that keeps ``keep``."""
    if not 0 <= keep < 1:
        raise ValueError(f"momentum {keep} never forgets a gradient: it must be below 1")
    return 1 if keep == 0 else math.floor(math.log(LEFT) / math.log(keep)) + 1


@dataclass(eq=False)
class Kept:
    """What is kept of one step."""

    shares: dict[str, Share]  # by parameter
    cut: set[str]  # parameters whose momentum before the step is not what the last step left
    u: dict[str, Tensor]  # directions [Q, *W]
    micros: list[MicroBatch]
    columns: Columns
    factor: float  # C, where it is the same for all coordinates
    ratios: Mapping[str, Tensor] | None  # C of each coordinate
    device: torch.device
    taken: bool = False  # did the optimizer take the step?
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        records = (r for m in self.micros for rs in m.records.values() for r in rs)
        tensors = [*self.u.values(), *(self.ratios or {}).values()]
        self.bytes = sum(t.nbytes for t in tensors) + sum(r.bytes for r in records)

    def drop(self) -> None:
        """The step is void: its records and its direction do not count."""
        self.u, self.micros, self.ratios, self.bytes = {}, [], None, 0


class Window:
    """The steps whose values are not complete yet.

    Args:
        e: the place of the estimator in the run's list.
        steps: how many steps later the values of a batch are complete, at least.
        offload: keep everything in host memory.
        check_memory: called with the bytes of the step that was kept, those of all steps that are
            kept, and how many there will be in the end.
        world: the ranks that train together. Directions and momentum are the same on all of them;
            each keeps its own examples' records, and asks no other for anything.
    """

    def __init__(
        self, e: int, steps: int, offload: bool, check_memory: Callable[[int, int, int], None],
        world: World = ALONE,
    ) -> None:  # fmt: skip
        self.e, self.steps, self.offload, self.check_memory = e, steps, offload, check_memory
        self._world = world
        self.together = max(1, steps // 4)  # steps that are finished at a time
        self._u: dict[str, list[Tensor]] = {}  # of the step that begins, by group of targets
        self._begun: Kept | None = None
        self._marks: dict[str, tuple[Any, int]] = {}  # the momentum that the last step left
        self.forget()

    def forget(self) -> None:
        """Drop everything that is kept: nothing older is credited from here on."""
        self._open: dict[int, Kept] = {}  # by step, until its result is known
        self._line: list[tuple[StepEntry, Kept | None]] = []
        self._landing: list[tuple[StepEntry, Pending | None]] = []
        self._begun, self._marks = None, {}

    @property
    def bytes(self) -> int:
        """Bytes that are kept now."""
        kept = [*self._open.values(), *(k for _, k in self._line if k is not None)]
        return sum(k.bytes for k in kept)

    # -- a step ------------------------------------------------------------------------------

    def begin(self, numbers: dict[str, Tensor]) -> None:
        """Before the validation passes of a step: make room for what they bring."""
        E, Q, _ = numbers["values"].shape
        numbers["moved"] = numbers["values"].new_full((E, 2, Q), torch.nan)
        self._u, self._begun = {}, None

    def note(
        self, qs: slice, at: Gradients, maps: Mapping[str, LinearMap], step: Step, path: Path,
        numbers: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """Keep the directions of a group of targets; note how far the loss falls along the step,
        and because of decoupled decay."""
        v = at.of(list(step.G), slice(0, qs.stop - qs.start))
        ends, moved = path.point(1.0), numbers["moved"]
        total = moved.new_zeros(2, qs.stop - qs.start)
        for k, i in zip(step.G, step.places, strict=True):
            x, f, m = wide(v[k]), maps[k], step.moved.steps[i]
            if at.scale is not None:
                x = x * at.scale.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
            u = f.K * x if isinstance(f, Scale) else torch.stack([f(own) for own in x])
            self._u.setdefault(k, []).append(u.cpu() if self.offload else u)
            w = m.p.detach()
            flat = real(x).reshape(len(x), -1)
            for row, d in enumerate((w - ends[i], (1 - m.rule.decay(m.options)) * w)):
                total[row] += (flat @ real(d).to(flat.dtype).flatten()).to(total)
        moved[self.e, :, qs] = total

    def keep(self, step: Step, columns: Columns, rules: Sequence[tuple[Optimizer, Rule]]) -> None:
        """Before ``optimizer.step()``: keep the records of the step, which is about to be taken."""
        shares, now = dict[str, Share](), _buffers(rules, step.params)
        for k, i in zip(step.G, step.places, strict=True):
            m = step.moved.steps[i]
            assert m.rule.momentum is not None
            shares[k] = m.rule.momentum.share(m.state, m.options)
        last = self._marks
        cut = {k for k in shares if k not in last or last[k][0] is not now[k][0]}
        cut |= {k for k in shares.keys() - cut if last[k][1] != now[k][1]}
        params = {k: step.params[k] for k in step.G}
        micros = [self._copied(frozen(m, params)) for m in step.micros]
        u = {k: x[0] if len(x) == 1 else torch.cat(x) for k, x in self._u.items()}
        ratios = step.clipping.by_coordinate(step.G)
        if ratios is not None:
            ratios = {k: self._copy(x) for k, x in ratios.items()}
        device = next(iter(params.values())).device
        kept = Kept(shares, cut, u, micros, columns, step.clipping.common, ratios, device)
        self._u, self._begun, self._open[step.number] = {}, kept, kept
        self.check_memory(kept.bytes, self.bytes, self.steps + self.together)

    def taken(self, rules: Sequence[tuple[Optimizer, Rule]], params: Mapping[str, Tensor]) -> None:
        """After ``optimizer.step()``."""
        if self._begun is not None:
            self._begun.taken, self._begun = True, None
        self._marks = _buffers(rules, params)

    def _copied(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch with records in memory of their own: what they refer to (activations,
        memory that every step uses again) will be written to."""
        own = {n: [r.map(self._copy) for r in records] for n, records in micro.records.items()}
        return replace(micro, _records=own, _positions={}, doubts=[], _by_root=None, _counted=0)

    def _copy(self, t: Tensor) -> Tensor:
        return t.detach().to("cpu", copy=True) if self.offload else t.detach().clone()

    # -- results -----------------------------------------------------------------------------

    def settled(self, entry: StepEntry) -> list[StepEntry]:
        """A step's result is known. Returns the entries that are complete now, oldest first."""
        kept = self._open.pop(entry.step, None)
        if kept is not None and not kept.taken:
            kept = None
        if kept is not None and entry.values is None:
            kept.drop()
        self._line.append((entry, kept))
        done = self._landed()
        if len(self._line) >= self.steps + self.together:
            self._landing = self._finished(self.together)
            del self._line[: self.together]
        return done

    def flush(self) -> list[StepEntry]:
        """The run is over: the entries that are left, with what they were credited so far."""
        done = self.so_far()
        self.forget()
        return done

    def so_far(self) -> list[StepEntry]:
        """The entries that are not complete, with what they were credited so far."""
        return [_complete(x, self.e) for x in [*self._landing, *self._finished(len(self._line))]]

    def _landed(self) -> list[StepEntry]:
        landing, self._landing = self._landing, []
        return [_complete(x, self.e) for x in landing]

    @torch.no_grad()
    def _finished(self, n: int) -> list[tuple[StepEntry, Pending | None]]:
        """The values of the n oldest steps, on their way to the host: one walk back."""
        found: list[tuple[StepEntry, Pending | None]] = []
        D: dict[str, Tensor] = {}
        for i, (entry, kept) in reversed(list(enumerate(self._line))):
            pending = None
            if i < n and kept is not None and entry.values is not None:
                pending = self._values(kept, D)
            if i < n:
                found.append((entry, pending))
            if kept is not None:
                _walk_back(D, kept)
        return found[::-1]

    def _values(self, kept: Kept, D: Mapping[str, Tensor]) -> Pending:
        """⟨A_s, C_s g_i⟩ of every column of the step."""
        directions = {}
        for k, u in kept.u.items():
            share = kept.shares[k]
            A = share.own * u
            if k in D:
                A.add_(D[k], alpha=share.add)
            if kept.ratios is not None:
                A = A * kept.ratios[k].to(A)
            directions[k] = A.to(kept.device)
        along = {k: Direction(A) for k, A in directions.items()}
        with no_autocast(kept.device.type):  # (in the place of G: its products are not used)
            V, _ = contract(along, {k: A[0] for k, A in directions.items()}, kept.micros)
        numbers = {"values": self._world.averaged(V) * kept.factor, **kept.columns.moving()}
        numbers.pop("signals", None)  # the step's own result has them
        return Pending(numbers, partial(_result, kept.columns))


def _walk_back(D: dict[str, Tensor], kept: Kept) -> None:
    """D_t from D_{t+1}, in place; nothing where the momentum before the step is another."""
    groups: dict[Share, list[str]] = {}
    for k, share in kept.shares.items():
        if k in D or k in kept.u:
            groups.setdefault(share, []).append(k)
    for share, names in groups.items():
        known = [k for k in names if k in D]
        if known:
            D.update(zip(known, foreach_mul([D[k] for k in known], share.keep), strict=True))
        both = [k for k in known if k in kept.u]
        if both:
            foreach_add_([D[k] for k in both], [kept.u[k] for k in both], alpha=share.old)
        for k in names:
            if k not in D:
                D[k] = share.old * kept.u[k]
    for k in kept.cut:
        D.pop(k, None)


def _buffers(
    rules: Iterable[tuple[Optimizer, Rule]], params: Mapping[str, Tensor]
) -> dict[str, tuple[Any, int]]:
    """The momentum of each parameter in the optimizer's state, and how often it was written to."""
    names, found = {id(p): k for k, p in params.items()}, dict[str, tuple[Any, int]]()
    for optimizer, rule in rules:
        assert rule.momentum is not None
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) in names:
                b = optimizer.state.get(p, {}).get(rule.momentum.buffer)
                found[names[id(p)]] = b, version_of(b) if isinstance(b, Tensor) else 0
    return found


def _result(
    whose: Columns, *, values: np.ndarray, columns: np.ndarray | None = None,
    inputs: np.ndarray | None = None,
) -> StepResult:  # fmt: skip
    """Values [1, Q, B] of the step, nobody's part and those of positions."""
    own = whose.by_example(values[None], columns)
    tokens = whose.tokens(values[None], columns, inputs)
    return StepResult(own[..., :-1], nobody=own[..., -1], tokens=tokens)


def _complete(waiting: tuple[StepEntry, Pending | None], e: int) -> StepEntry:
    """The entry with its carried values."""
    entry, pending = waiting
    if entry.values is None:
        return entry
    assert pending is not None  # a step with values was kept and taken
    result, values = pending.settle(), entry.values.copy()
    assert result.values is not None and result.nobody is not None
    if not np.isfinite(result.values).all():
        return replace(entry, values=None, nobody=None, tokens=None, void=NOT_FINITE)
    values[e] = result.values[0]
    nobody = np.zeros(values.shape[:2]) if entry.nobody is None else entry.nobody.copy()
    nobody[e] = result.nobody[0]
    sums = entry.sums
    if sums is not None:  # of this rank: the ledger adds those of all (ledger/ranks.py)
        sums = sums.copy()
        sums[e] = values[e].sum(axis=-1)
    tokens = entry.tokens
    if tokens is not None and result.tokens is not None:
        positions = tokens.values.copy()
        positions[e] = result.tokens.values[0]
        tokens = replace(tokens, values=positions)
    return replace(entry, values=values, nobody=nobody, tokens=tokens, sums=sums)

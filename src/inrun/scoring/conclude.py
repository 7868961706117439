"""Are the numbers of a step good? Values, or the reason why there are none, told once.

Before ``optimizer.step()`` a step is ``Begun``; after it its numbers may still be on their way to
the host, ``Pending``; ``Conclusion`` makes of them a ``StepResult``.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inrun.capture.later import Later, means
from inrun.capture.micro_batch import MicroBatch
from inrun.capture.signals import of_examples
from inrun.ledger.entries import ELSEWHERE, Audit
from inrun.ledger.tokens import Tokens, moved_by
from inrun.scoring.agreed import OTHER_DIRECTION, SAME_EVERYWHERE, SEE_THERE, Agreed
from inrun.scoring.taken import Prediction

NOT_FINITE = "the training gradient is not finite"
NOT_ADDING_UP = "captured gradients do not add up to .grad"
OTHER_STEP = "the optimizer took another step than its rule describes"


@dataclass(frozen=True)
class StepResult:
    """The result of a step: values [E, Q, B], or the reason why there are none. ``nobody`` [E, Q]
    is what belongs to no example, ``tokens`` the values of positions where they were asked for."""

    values: np.ndarray | None = None
    void: str | None = None
    audit: Audit | None = None
    missed: float = 0.0  # part of the update that the secant could not carry (Muon's first steps)
    nobody: np.ndarray | None = None
    tokens: Tokens | None = None
    sums: np.ndarray | None = None  # [E, Q] of the values of all ranks, where there are several
    moved: np.ndarray | None = None  # [E, 2, Q] of "carry": the drop along the step, and by decay
    signals: np.ndarray | Later | None = None  # [4, B], capture/signals.py
    bend: np.ndarray | None = None  # [E] where orders were sampled: how far the secant was off
    halves: np.ndarray | None = None  # [E, 2, B] by two halves of the validation rows (halving.py)


@dataclass
class Begun:
    """What was computed before ``optimizer.step()`` and is needed after it."""

    step: int
    numbers: dict[str, Tensor]
    tolerance: float  # of the sum of the values
    prediction: Prediction
    flags: dict[str, Tensor]  # by reason: if one is up, the step is void
    losses: list[np.ndarray]  # audited: before the step and without the batch
    columns: Columns  # of the values
    wait: bool  # fetch the values right after the step instead of during the next one


@dataclass(frozen=True)
class Columns:
    """Whose the columns of a step's values are."""

    B: int  # examples of the step
    example: np.ndarray | Tensor  # [C] −1: nobody's; a tensor where that is known on a device only
    token: np.ndarray  # [C] is it a position of its example?
    inputs: Tensor | None  # of these positions, what the model received, if these are integers
    signals: Tensor | Later | None = None  # [5, B] sums over rows of losses (capture/signals.py)

    @staticmethod
    def of(micros: Sequence[MicroBatch]) -> Columns:
        if len(micros) == 1 and micros[0].slots is None and not micros[0].nobody:  # as usual
            B = micros[0].B
            return Columns(B, np.arange(B), np.zeros(B, bool), None, of_examples(micros))
        found, tokens, start = list[Tensor](), list[np.ndarray](), 0
        for m in micros:
            own = torch.arange(m.B, device="cpu") if m.slots is None else m.slots
            found.append(torch.where(own < 0, own, own + start))
            found.append(torch.full((int(m.nobody),), -1, device="cpu"))
            tokens += [np.full(m.rows, m.slots is not None), np.zeros(int(m.nobody), bool)]
            start += m.B
        some = [m.inputs for m in micros if m.slots is not None]
        known = [t for t in some if t is not None]
        inputs = _joined(known) if known and len(known) == len(some) else None
        example = _joined(found)
        on_host = example.numpy() if example.is_cpu else example
        return Columns(start, on_host, np.concatenate(tokens), inputs, of_examples(micros))

    def moving(self) -> dict[str, Tensor]:
        """What must travel to the host with the numbers of the step."""
        found = {} if isinstance(self.example, np.ndarray) else {"columns": self.example}
        found |= {"signals": self.signals} if isinstance(self.signals, Tensor) else {}
        return found if self.inputs is None else {**found, "inputs": self.inputs}

    def by_example(self, values: np.ndarray, columns: np.ndarray | None = None) -> np.ndarray:
        """Values [..., C] added up by example, nobody's last: [..., B + 1]."""
        example = self.example if columns is None else columns.astype(np.int64)
        assert isinstance(example, np.ndarray)
        total = np.zeros((self.B + 1, *values.shape[:-1]))
        if self.token.any():
            np.add.at(total, example, np.moveaxis(values, -1, 0))
        else:
            own = example >= 0
            total[:-1] = np.moveaxis(values[..., own], -1, 0)
            total[-1] = values[..., ~own].sum(-1)
        return np.moveaxis(total, 0, -1)

    def on_host(self, values: Tensor, nobody: bool = False) -> np.ndarray:
        """Values [..., C] of a device by example, with nobody's as the last if asked for. Waits."""
        known = None if isinstance(self.example, np.ndarray) else self.example.cpu().numpy()
        found = self.by_example(values.detach().cpu().numpy(), known)
        return found if nobody else found[..., :-1]

    def tokens(
        self, values: np.ndarray, columns: np.ndarray | None, inputs: np.ndarray | None
    ) -> Tokens | None:
        """The values [E, Q, C] of the positions, those of each example together."""
        if not self.token.any():
            return None
        example = self.example if columns is None else columns.astype(np.int64)
        assert isinstance(example, np.ndarray)
        own = self.token & (example >= 0)
        order = np.argsort(example[own], kind="stable")
        sizes = np.bincount(example[own], minlength=self.B)
        kept = None
        if inputs is not None:
            kept = inputs.astype(np.int64)[example[self.token] >= 0][order]
        return Tokens(sizes, values[:, :, own][:, :, order].astype(np.float32), kept)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One after the other, on the device of one that is not in host memory."""
    device = next((t.device for t in tensors if not t.is_cpu), tensors[0].device)
    return torch.cat([t.flatten().to(device, non_blocking=True) for t in tensors])


class Pending:
    """A result whose numbers are being copied to the host. ``settle`` waits for them."""

    def __init__(self, numbers: Mapping[str, Tensor], conclude: Callable[..., StepResult]) -> None:
        self._shapes = {k: t.shape for k, t in numbers.items()}
        self._conclude, self._event = conclude, None
        self._on_host: dict[str, np.ndarray] | None = None
        if all(t.is_cpu for t in numbers.values()):
            self._on_host = {k: t.detach().double().numpy().copy() for k, t in numbers.items()}
            return
        flat = torch.cat([t.detach().double().flatten() for t in numbers.values()])
        self._numbers = flat
        if flat.is_cuda:
            host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
            self._numbers = host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def settle(self) -> StepResult:
        if self._on_host is not None:
            return self._conclude(**self._on_host)
        if self._event is not None:
            self._event.synchronize()
        parts = self._numbers.split([math.prod(s) for s in self._shapes.values()])
        named = zip(self._shapes.items(), parts, strict=True)
        return self._conclude(**{k: t.reshape(s).numpy() for (k, s), t in named})


class Conclusion:
    """Concludes steps, and remembers which reasons for void steps were told."""

    def __init__(self, targets: Sequence[str]) -> None:
        self.targets = targets
        self.verified = False  # captured gradients have added up to .grad once
        self.message = ""
        self.said: Counter[str] = Counter()  # void steps by their reason

    def void(self, step: int, reason: str, advice: str) -> StepResult:
        """The result of a step without values; the first with this reason also warns."""
        self.said[reason] += 1
        if self.said[reason] == 1:
            warnings.warn(
                f"step {step}: {reason}; the step is recorded as void. {advice}. (Said once; "
                "run.steps()['void'] shows every such step.)",
                stacklevel=7,
            )
        return StepResult(void=reason)

    def loss_not_finite(self, losses: np.ndarray) -> StepResult:
        """The result of a step in which a validation loss [Q] is not finite."""
        target = self.targets[int(np.argmin(np.isfinite(losses)))]
        return StepResult(void=f"the validation loss of '{target}' is not finite")

    def of(
        self, step: int, audit: Audit | None, tolerance: float, advice: dict[str, str],
        whose: Columns, *, values: np.ndarray, expected: np.ndarray, losses: np.ndarray,
        finite: np.ndarray, missed: np.ndarray, flags: np.ndarray,
        columns: np.ndarray | None = None, inputs: np.ndarray | None = None,
        sampled: np.ndarray | None = None, agreed: np.ndarray | None = None,
        moved: np.ndarray | None = None, signals: np.ndarray | None = None,
        bend: np.ndarray | None = None, halves: np.ndarray | None = None,
    ) -> StepResult:  # fmt: skip
        """The result of a step from its numbers on the host.

        ``advice`` says what to do by reason; ``flags`` are up or down in the same order, and one
        that is up makes the step void. ``columns``, ``inputs`` and ``signals`` come from the device
        (``Columns.moving``), ``agreed`` from all ranks (agreed.py). ``sampled`` [E, Q, B + 1]:
        values by example to take instead, where they are not NaN (coalitions.py); what must add up
        are those of the linear maps.
        """
        if not finite:
            return StepResult(void=NOT_FINITE)
        if not np.isfinite(losses).all():
            return self.loss_not_finite(losses)
        for up, (reason, what_to_do) in zip(flags, advice.items(), strict=True):
            if up:
                return self.void(step, reason, what_to_do)
        for q, target in enumerate(self.targets):
            if not np.isfinite(values[:, q]).all():
                return StepResult(void=f"the values for '{target}' are not finite")
        own = whose.by_example(values, columns)
        every = Agreed.alone(own, expected) if agreed is None else Agreed.of(agreed, expected)
        if every.void:
            return self.void(step, ELSEWHERE, SEE_THERE)
        if not every.same_direction(tolerance):
            return self.void(step, OTHER_DIRECTION, SAME_EVERYWHERE)
        if not self.add_up(step, tolerance, every):
            return self.void(step, NOT_ADDING_UP, self.message)
        tokens, nobody = whose.tokens(values, columns, inputs), every.nobody
        if sampled is not None:
            better = np.where(np.isnan(sampled), own, sampled)
            if tokens is not None:
                tokens = moved_by(tokens, (better - own)[..., :-1])
            own = better
            nobody = every.nobody if agreed is not None else own[..., -1]
        sums = None if agreed is None else every.sums - every.nobody
        later = None if isinstance(whose.signals, Tensor) else whose.signals
        kept = later if signals is None else means(signals).astype(np.float32, copy=False)
        by_halves = None if halves is None else halves[..., :-1]
        return StepResult(
            own[..., :-1], None, audit, float(missed), nobody, tokens, sums, moved, kept, bend,
            by_halves,
        )  # fmt: skip

    def add_up(self, step: int, tolerance: float, every: Agreed) -> bool:
        """Is the sum of the values ⟨u, G⟩, up to rounding? Otherwise ``message`` says why not."""
        sums, expected = every.sums, every.expected
        size, off = every.sizes + np.abs(expected), np.abs(sums - expected)
        if not (off > tolerance * size).any():
            self.verified = True
            return True
        worst = np.unravel_index(np.argmax(off / (size + 1e-300)), off.shape)
        self.message = (
            f"step {step}: the captured per-example gradients do not add up to .grad "
            f"(⟨u, Σg_i⟩ = {sums[worst]:.6g}, ⟨u, G⟩ = {expected[worst]:.6g}). Possible causes: "
            "gradients from outside run.batch(ids); clipping, unscaling or torch.autograd.grad "
            "inside it; a hook that changes a parameter's gradient; a custom autograd function; "
            "in several processes, gradients that are not the mean over the ranks"
        )
        return False

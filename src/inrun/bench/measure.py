"""Times the variants: warm-up, rounds, medians, peak memory, stages; a failure is a result too."""

from __future__ import annotations

import copy
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from inrun.bench.models import Problem
from inrun.bench.options import Options
from inrun.bench.stopwatch import measured
from inrun.bench.trainers import VARIANTS, Trainer, make_optimizer
from inrun.bench.verify import verify

LOOKED_INTO = 3  # steps after the timed ones, by stage
_MOST = 50  # scored steps that a round waits for
Tick = Callable[[str], None]  # called after each step with the mode and the variant


@dataclass
class Measurement:
    """One variant in one mode."""

    mode: str
    variant: str
    status: str = "ok"  # or "out of memory", "failed"
    message: str | None = None  # why, or what else there is to say
    rounds: list[list[float]] = field(default_factory=list)  # milliseconds of each timed step
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    stages_ms: dict[str, float] = field(default_factory=dict)
    verify: dict[str, Any] | None = None

    def fail(self, error: Exception) -> None:
        memory = isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))
        self.status = "out of memory" if memory else "failed"
        self.message = _words(error)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def time_steps(step: Callable[[], None], n: int, device: torch.device) -> list[float]:
    """Returns milliseconds of n steps; on a GPU between events, without waiting in between."""
    if device.type != "cuda":
        moments = [time.perf_counter()]
        for _ in range(n):
            step()
            moments.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(moments)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def in_the_long_run(
    rounds: list[list[float]], due: list[list[bool]], p: float
) -> list[list[float]]:
    """The mean time of a step that is scored (``due``) with probability p, of each round: from the
    medians of both kinds, because in a few steps chance would decide how many were scored."""

    def median(own: list[float], of: list[bool], kind: bool) -> float | None:
        found = [ms for ms, d in zip(own, of, strict=True) if d is kind]
        return float(np.median(found)) if found else None

    every = list(itertools.chain(*rounds)), list(itertools.chain(*due))
    usual = {kind: median(*every, kind) for kind in (True, False)}
    if usual[True] is None or usual[False] is None:
        raise RuntimeError("too few steps: scored and other ones were not both among them")
    means = []
    for own, of in zip(rounds, due, strict=True):
        scored, other = (median(own, of, kind) or usual[kind] for kind in (True, False))
        assert scored is not None and other is not None
        means.append([p * scored + (1 - p) * other])
    return means


class Trial:
    """The measurement of one variant: build, warm up, time, then time the stages."""

    def __init__(
        self, problem: Problem, options: Options, mode: str, variant: str, tick: Tick
    ) -> None:
        self.problem, self.options, self.tick = problem, options, tick
        self.result = Measurement(mode, variant)
        self._trainer: Trainer | None = None
        self._due: list[list[bool]] = []  # of each timed step: was it to be scored?

    def attempt(self, part: Callable[..., None], *args: Any) -> None:
        """Run a part of the trial; an error ends the trial and is kept in its result."""
        if self.result.status != "ok":
            return
        try:
            part(*args)
        except Exception as error:
            self.result.fail(error)
        if self.result.status != "ok":  # not inside except, where the error still refers to tensors
            self.close()

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    @property
    def on_gpu(self) -> bool:
        return self.problem.device.type == "cuda"

    def start(self) -> None:
        model = copy.deepcopy(self.problem.model).to(self.problem.device)
        optimizer = make_optimizer(self.options.optimizer, list(model.parameters()))
        make = VARIANTS[self.result.variant]
        self._trainer = make(self.problem, model, optimizer, self.result.mode == "compile")
        for _ in range(self.options.warmup):
            self._step()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def time(self, n: int) -> None:
        due: list[bool] = []

        def step() -> None:
            due.append(self.trainer.due)
            self._step()

        every, device = self.trainer.every, self.problem.device
        times = time_steps(step, n * every, device)  # as many scored ones as of other variants
        while every > 1 and len(set(due)) < 2 and len(due) < _MOST * every:  # chance had it so
            times += time_steps(step, n, device)
        self.result.rounds.append(times)
        self._due.append(due)

    def finish(self) -> None:
        result = self.result
        if self.trainer.every > 1:
            result.rounds = in_the_long_run(result.rounds, self._due, 1 / self.trainer.every)
        if self.on_gpu:
            result.peak_bytes = torch.cuda.max_memory_allocated()
            result.reserved_bytes = torch.cuda.max_memory_reserved()
        with measured() as watch:
            for _ in range(LOOKED_INTO):
                with watch.span("whole step"):
                    self._step()
        result.stages_ms = {k: ms / LOOKED_INTO for k, ms in watch.milliseconds().items()}
        result.message = self.trainer.remark()
        if self.options.verify and self.trainer.estimator is not None:
            try:
                while not self.trainer.due:
                    self._step()
                result.verify = verify(self.trainer)
            except Exception as error:  # the times are still right
                result.verify = {"message": _words(error)}
        self.close()

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _step(self) -> None:
        self.trainer.step()
        self.tick(f"{self.result.mode}: {self.result.variant}")


def measurements(problem: Problem, options: Options, tick: Tick) -> Iterator[Measurement]:
    """One measurement for each mode and variant.

    Eager variants on a CPU take turns, round by round: its speed drifts. Elsewhere one follows the
    other: peak memory is that of a variant alone, and compiled code is not shared.
    """
    for mode in options.modes:
        together = mode == "eager" and problem.device.type == "cpu"
        for group in [options.variants] if together else [(v,) for v in options.variants]:
            if mode == "compile":
                torch.compiler.reset()
            trials = [Trial(problem, options, mode, variant, tick) for variant in group]
            for trial in trials:
                trial.attempt(trial.start)
            for n in options.steps_by_round:
                for trial in trials:
                    trial.attempt(trial.time, n)
            for trial in trials:
                trial.attempt(trial.finish)
                yield trial.result


def summary(result: Measurement, plain: Measurement | None, batch: int) -> dict[str, Any]:
    """The numbers of a measurement; ratios are to plain training in the same mode.

    ``ratio`` is of throughput, ``ratio_range`` its lowest and highest round.
    """
    out: dict[str, Any] = {
        "mode": result.mode, "variant": result.variant, "status": result.status,
        "message": result.message, "step_ms": None, "samples_per_s": None, "ratio": None,
        "ratio_range": None, "peak_bytes": result.peak_bytes,
        "reserved_bytes": result.reserved_bytes, "memory_ratio": None,
        "stages_ms": result.stages_ms, "verify": result.verify,
    }  # fmt: skip
    if result.status != "ok":
        return out
    by_round = [float(np.median(r)) for r in result.rounds]
    p10, median, p90 = np.percentile(np.concatenate(result.rounds), (10, 50, 90)).tolist()
    out["step_ms"] = {"median": median, "p10": p10, "p90": p90, "rounds": by_round}
    out["samples_per_s"] = 1e3 * batch / median
    if plain is not None and plain.status == "ok":
        out["ratio"] = float(np.median(np.concatenate(plain.rounds))) / median
        ratios = [float(np.median(r)) / own for r, own in zip(plain.rounds, by_round, strict=True)]
        out["ratio_range"] = [min(ratios), max(ratios)]
        if result.peak_bytes is not None and plain.peak_bytes:
            out["memory_ratio"] = result.peak_bytes / plain.peak_bytes
    return out

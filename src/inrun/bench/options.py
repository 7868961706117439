"""The options of a benchmark: checked once, completed by what the device suggests."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from inrun.bench.trainers import VARIANTS

DTYPES = ("float32", "bf16", "bf16-weights", "float64")
OPTIMIZERS = ("adamw", "sgd")
MODES = {"eager": ("eager",), "compile": ("compile",), "both": ("eager", "compile")}
USUAL: dict[
    str, dict[str, Any]
] = {  # what is not asked for: the paper's setting on a GPU, something quick on a CPU
    "cuda": {"model": "gpt2", "length": 1024, "dtype": "bf16", "mode": "both"},
    "cpu": {"model": "gpt-4x128", "length": 128, "dtype": "float32", "mode": "eager"},
}


@dataclass(frozen=True)
class Options:
    """What to measure, and how. ``docs/commands/bench.md`` says what each one means."""

    model: str
    length: int
    dtype: str
    mode: str
    device: str
    batch: int = 16
    validation: int = 1
    targets: int = 1
    vocab: int | None = None
    optimizer: str = "adamw"
    variants: tuple[str, ...] = tuple(VARIANTS)
    warmup: int = 5
    steps: int = 20
    rounds: int = 3
    verify: bool = False
    seed: int = 0

    @classmethod
    def of(cls, **given: Any) -> Options:
        """None means the usual value."""
        given = {k: v for k, v in given.items() if v is not None}
        device = given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        if device not in USUAL:
            raise ValueError(f"--device {device}: choose {' or '.join(USUAL)}")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: no CUDA GPU here")
        if isinstance(given.get("variants"), str):
            names = (name.strip() for name in given["variants"].split(","))
            given["variants"] = tuple(dict.fromkeys(name for name in names if name))
        return cls(**(USUAL[device] | given))

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPES), ("mode", MODES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)}: choose {', '.join(known)}")
        unknown = [v for v in self.variants if v not in VARIANTS]
        if unknown or not self.variants:
            what = f"no variant {unknown[0]!r}" if unknown else "no variant given"
            raise ValueError(f"--variants: {what}; choose from {', '.join(VARIANTS)}")
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("warmup", "seed") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ValueError(f"--{field.name} {value}: must be at least {least}")
        if self.steps < self.rounds:
            raise ValueError(f"--steps {self.steps}: fewer than --rounds {self.rounds}")

    @property
    def modes(self) -> tuple[str, ...]:
        return MODES[self.mode]

    @property
    def steps_by_round(self) -> list[int]:
        return [len(range(r, self.steps, self.rounds)) for r in range(self.rounds)]

"""What does writing the ledger cost, as a share of the watched training step of the digits demo?

    python benchmarks/writing.py [--rounds 3] [--out FILE.json]

The training is the demo's own. Time inside the ledger (append with its flushes and fsyncs, and
the final close) is compared with the time of the whole training in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from inrun.demo import digits, stage
from inrun.ledger.saved import Store

TARGET = 0.02


class Clock:
    """Seconds spent in some functions; what one calls of another counts once."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._inside = 0.0, 0, False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, start = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.calls += 1
                self._inside = False

        return timed


def one_round(folder: Path, seed: int, epochs: int) -> dict[str, float]:
    clock = Clock()
    own = {name: getattr(Store, name) for name in ("append", "flush", "close", "update_info")}
    for name, function in own.items():
        setattr(Store, name, clock.around(function))
    try:
        data = digits.load(seed)
        start = time.perf_counter()
        with stage.threads(1):
            run, _ = digits.watched(data, folder, seed, epochs, Console(quiet=True))
        whole = time.perf_counter() - start
    finally:
        for name, function in own.items():
            setattr(Store, name, function)
    size = sum(f.stat().st_size for f in folder.rglob("*.parquet"))
    return {
        "steps": run.step,
        "step_ms": 1e3 * whole / run.step,
        "writing_ms_per_step": 1e3 * clock.seconds / run.step,
        "share": clock.seconds / whole,
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=digits.EPOCHS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/writing.json")
    args = parser.parse_args()
    rounds = []
    for seed in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(Path(folder) / "run", seed, args.epochs))
            print(rounds[-1])
    share = max(r["share"] for r in rounds)
    result = {"largest_share": share, "target": TARGET, "holds": share <= TARGET, "rounds": rounds}
    args.out.write_text(json.dumps(result | {"machine": stage.machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Does the cost model (src/inrun/ops/cost.py) pick the cheaper form of a layer?

    python benchmarks/cost_model.py [--fit] [--seconds S] [--out FILE.json]

For a grid of shapes, what inrun adds to a step for one linear layer is measured in both forms and
both kinds of training: the per-example gradients or not, the sum or the layer's own weight
gradient, and the contraction with one direction. Each is the median over rounds in which the forms
take turns (on a CPU one thread, by its own processor time); several equal layers share a
measurement, as they share launches in a model. The loss of the model's choice is its time over that
of the better form.

``--fit`` prints constants fitted to these measurements (least squares of relative errors), and how
well the model chooses with constants fitted to every other point where it is judged at the rest.
``--from FILE.json`` takes measurements made before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from costs import short_name

from inrun.bench import machine
from inrun.capture.micro_batch import MicroBatch
from inrun.gradients import cost
from inrun.gradients.nodes import Node
from inrun.gradients.records import Dense, Pair, wide_type
from inrun.scoring.contraction import Direction, contract

TOKENS = (1, 8, 32, 128, 512, 1024)
WIDTHS = ((128, 128), (128, 768), (768, 768), (768, 3072), (3072, 768), (3072, 3072))
BATCHES = (4, 16, 64)
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float32)}
NEAR = 1.1  # a choice is good if it takes at most so many times as long as the better form
DEVICE = "device time, launches excluded"
WAIT = 20_000_000  # cycles of a GPU, about 10 ms: longer than the launches of eight layers take
LIMITS = {  # of one layer's products and per-example numbers, so that the grid ends in time
    ("cpu", torch.float32): (2.5e9, 4e7),
    ("cuda", torch.bfloat16): (3e12, 7e8),
    ("cuda", torch.float32): (3e11, 7e8),
}


def grid(device: str, dtype: torch.dtype) -> list[cost.Layer]:
    most, numbers = LIMITS[device, dtype]
    layers = [
        cost.Layer(B, T, *shape, dtype, device)
        for T, shape, B in itertools.product(TOKENS, WIDTHS, BATCHES)
    ]
    return [x for x in layers if most >= products(x) and numbers >= x.B * x.I * x.O]


def products(x: cost.Layer) -> int:
    return x.B * x.T * x.I * x.O


class Bench:
    """The layers of one point of the grid, and what is done with them."""

    def __init__(self, layer: cost.Layer) -> None:
        self.layer = layer
        self.count = self._how_many()
        device, dtype = layer.device, layer.dtype
        self.pairs = [
            Pair(
                torch.randn(layer.B, layer.T, layer.I, device=device, dtype=dtype),
                torch.randn(layer.B, layer.T, layer.O, device=device, dtype=dtype),
            )
            for _ in range(self.count)
        ]
        shape, single = self.pairs[0].shape, {"device": device, "dtype": torch.float32}
        self.params = [torch.nn.Parameter(torch.zeros(shape, **single)) for _ in self.pairs]
        self.nodes = [Node.parameter(str(i), p) for i, p in enumerate(self.params)]
        self.v = [torch.randn(1, *shape, **single) for _ in self.pairs]
        self.K = [torch.rand(shape, **single) for _ in self.pairs]
        self.G = {str(i): torch.randn(shape, **single) for i in range(self.count)}

    def _how_many(self) -> int:
        """As many layers as keep a measurement short, up to eight."""
        x = self.layer
        numbers = x.B * (x.I * x.O + x.T * (x.I + x.O))
        most = (2e8, 4e7) if x.device == "cpu" else (1e12, 2e9)
        return int(max(1, min(8, most[0] // products(x), most[1] // numbers)))

    def ghost(self) -> None:
        for pair in self.pairs:
            self._own(pair)
        self._contract(self.pairs)

    def materialise_fast(self) -> None:
        made = [Dense(pair.rows()) for pair in self.pairs]
        for record in made:
            record.grads.sum(0, dtype=wide_type(record.grads.dtype))
        self._contract(made)

    def materialise_bitwise(self) -> None:
        made = []
        for pair in self.pairs:
            self._own(pair)
            made.append(Dense(pair.rows()))
        self._contract(made)

    def _own(self, pair: Pair) -> Tensor:
        return pair.delta.flatten(0, 1).mT @ pair.a.flatten(0, 1)

    def _contract(self, records: Sequence[Any]) -> Tensor:
        micro = MicroBatch(self.layer.B)
        for node, record in zip(self.nodes, records, strict=True):
            micro.add(node, record)
        u = {n.name: Direction(v, K) for n, v, K in zip(self.nodes, self.v, self.K, strict=True)}
        return contract(u, self.G, [micro])[0]


def times(ways: Sequence[Callable[[], None]], device: str, seconds: float) -> list[list[float]]:
    """Seconds of each way in several rounds of turns: at least five, more while there is time.

    On a GPU the device is kept waiting until the host has launched everything: what is measured is
    the work and not the launches. A time for which that failed is NaN.
    """
    for _ in range(3 if device == "cuda" else 1):
        for way in ways:
            way()
    found: list[list[float]] = [[] for _ in ways]
    now, begun = clock(), time.perf_counter()
    most = 15 if device == "cuda" else 50
    while len(found[0]) < 5 or (time.perf_counter() - begun < seconds and len(found[0]) < most):
        for way, mine in zip(ways, found, strict=True):
            if device == "cuda":
                mine.append(time_on_gpu(way))
                continue
            start = now()
            way()
            mine.append(now() - start)
    return found


def time_on_gpu(way: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(WAIT)
    start.record()
    way()
    end.record()
    launched_in_time = not start.query()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 if launched_in_time else float("nan")


def clock() -> Callable[[], float]:
    """One thread is timed by what it computes, whoever else wants the core. Several threads wait
    for each other, so only a quiet machine can time them."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def measure(layer: cost.Layer, seconds: float) -> dict[str, Any] | None:
    """Of both forms at one point; None where the host was too slow to keep itself out of it."""
    bench = Bench(layer)
    ways = {
        "ghost": bench.ghost,
        "materialise, fast": bench.materialise_fast,
        "materialise, bitwise": bench.materialise_bitwise,
    }
    with torch.no_grad():
        found = times(list(ways.values()), layer.device, seconds)
    out: dict[str, Any] = asdict(layer) | {"dtype": str(layer.dtype).removeprefix("torch.")}
    out["layers"] = bench.count
    found = [[t for t in x if t == t] for x in found]
    if not all(found):
        return None
    out["ms"] = {
        k: 1e3 * statistics.median(x) / bench.count for k, x in zip(ways, found, strict=True)
    }
    out["spread"] = {  # quartiles over the median
        k: [float(q / np.median(x)) for q in np.percentile(x, (25, 75))]
        for k, x in zip(ways, found, strict=True)
    }
    return out


def layer_of(point: dict[str, Any]) -> cost.Layer:
    names = ("B", "T", "I", "O", "device")
    return cost.Layer(**{k: point[k] for k in names}, dtype=getattr(torch, point["dtype"]))


def judged(point: dict[str, Any]) -> list[dict[str, Any]]:
    """The model's choice at a point, for each kind of training."""
    layer, out = layer_of(point), []
    for training in ("fast", "bitwise"):
        fast = training == "fast"
        ms = {"ghost": point["ms"]["ghost"], "materialise": point["ms"][f"materialise, {training}"]}
        choice = "materialise" if cost.materialise(layer, fast) else "ghost"
        by_time = cost.seconds(layer, fast)
        quicker = "materialise" if by_time[1] <= by_time[0] else "ghost"
        best = min(ms, key=lambda k: ms[k])
        out.append(
            {
                "training": training, "choice": choice, "better": best, "for_memory":
                choice != quicker, "loss": ms[choice] / ms[best],
                "by_time": ms[quicker] / ms[best],
            }
        )  # fmt: skip
    return out


def summary(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The share of good choices, and what always taking one form would have lost."""
    out: dict[str, Any] = {}
    for dtype in dict.fromkeys(p["dtype"] for p in points):
        for training in ("fast", "bitwise"):
            mine = [(p, c) for p in points for c in p["choices"] if p["dtype"] == dtype]
            mine = [(p, c) for p, c in mine if c["training"] == training]
            free = [c for _, c in mine if not c["for_memory"]]
            chosen, best, forms = 0.0, 0.0, {"ghost": 0.0, "materialise": 0.0}
            for p, c in mine:
                ms = p["ms"]["ghost"], p["ms"][f"materialise, {training}"]
                best += min(ms)
                chosen += ms[c["choice"] == "materialise"]
                forms["ghost"] += ms[0]
                forms["materialise"] += ms[1]
            out[f"{dtype}, {training}"] = {
                "points": len(mine),
                "within_10_percent": _share(c["loss"] for _, c in mine),
                "by_time_alone": _share(c["by_time"] for _, c in mine),
                "decided_by_memory": len(mine) - len(free),
                "within_10_percent_else": _share(c["loss"] for c in free),
                "worst_else": max((c["loss"] for c in free), default=None),
                "total_over_best": chosen / best,
                "ghost_over_best": forms["ghost"] / best,
                "materialise_over_best": forms["materialise"] / best,
            }
    return out


def _share(losses: Any) -> float | None:
    found = [x <= NEAR for x in losses]
    return sum(found) / len(found) if found else None


def fitted(points: Sequence[dict[str, Any]]) -> cost.Rates:
    """Rates by least squares of relative errors. A coefficient that would be negative is zero."""
    rows, n = [], 0
    for p in points:
        layer = layer_of(p)
        for key, fast in (("ghost", True), ("materialise, fast", True)):
            ghost = key == "ghost"
            count, moved = cost.work(layer, fast)[0 if ghost else 1]
            seconds = p["ms"][key] / 1e3
            row = [count * ghost, count * (not ghost), moved, ghost, not ghost]
            rows.append([x / seconds for x in row])
            n += 1
    A, b = np.array(rows, dtype=float), np.ones(n)
    size = np.linalg.norm(A, axis=0)
    x = nonnegative(A / size, b) / size
    # relative errors of a good fit are what counts, not those of the few points it never fits
    for _ in range(30):
        weight = 1 / np.sqrt(np.maximum(np.abs(A @ x - b), 0.05))
        x = nonnegative(A / size * weight[:, None], b * weight) / size
    per = [1 / c if c > 0 else float("inf") for c in x[:3]]
    return cost.Rates(*(float(f"{c:.2g}") for c in (*per, *x[3:])))


def nonnegative(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min ‖Ax − b‖ with x ≥ 0, for five columns: every set of them that may be other than 0."""
    best, least = np.zeros(A.shape[1]), float(b @ b)
    for n in range(1, A.shape[1] + 1):
        for some in itertools.combinations(range(A.shape[1]), n):
            found = np.linalg.lstsq(A[:, some], b, rcond=None)[0]
            error = float(np.square(A[:, some] @ found - b).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(A.shape[1]), error
                best[list(some)] = found
    return best


def show(points: Sequence[dict[str, Any]]) -> None:
    head = f"{'type':9}{'B':>4}{'T':>6}{'I':>6}{'O':>6}{'ghost':>10}{'mat. fast':>11}"
    print(head + f"{'mat. bitw.':>12}   fast: choice, loss      bitwise: choice, loss   (ms)")
    for p in points:
        ms, cells = p["ms"].values(), []
        for c in p["choices"]:
            note = "M" if c["for_memory"] else " "
            bad = "!" if c["loss"] > NEAR else " "
            cells.append(f"{c['choice']:<12}{c['loss']:6.2f}{note}{bad}")
        numbers = "".join(f"{x:11.4f}" for x in ms)
        print(f"{p['dtype']:9}{p['B']:4}{p['T']:6}{p['I']:6}{p['O']:6}{numbers}    "
              + "    ".join(cells))  # fmt: skip
    for key, x in summary(points).items():
        print(
            f"{key}: {x['points']} points, within 10 %: {x['within_10_percent']:.0%} "
            f"(by time alone {x['by_time_alone']:.0%}; memory decided {x['decided_by_memory']}, "
            f"elsewhere {x['within_10_percent_else']:.0%}, worst {x['worst_else']:.2f}); "
            f"sum over the better forms': {x['total_over_best']:.3f} "
            f"(ghost {x['ghost_over_best']:.3f}, materialise {x['materialise_over_best']:.3f})"
        )


def fit(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Constants by type, and how well a model chooses at points that it was not fitted to."""
    found = {}
    for dtype in dict.fromkeys(p["dtype"] for p in points):
        mine = [p for p in points if p["dtype"] == dtype]
        device = mine[0]["device"]
        key = "cpu" if device == "cpu" else "cuda", device != "cpu" and dtype != "float32"
        before, others = cost.RATES[key], []
        for half in (0, 1):
            cost.RATES[key] = fitted(mine[half::2])
            others += [p | {"choices": judged(p)} for p in mine[1 - half :: 2]]
        cost.RATES[key] = before
        rates = fitted(mine)
        found[dtype] = {"rates": asdict(rates), "judged_elsewhere": summary(others)}
        print(f"\nfitted, {dtype}: {rates}")
        for name, x in summary(others).items():
            print(f"  fitted to one half, judged at the other, {name}: "
                  f"{x['within_10_percent']:.0%} within 10 %")  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="print fitted constants")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="for all points together, about")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--points", type=int, help="a sample of so many points")
    parser.add_argument("--from", dest="given", type=Path, help="measured before")
    parser.add_argument("--note", help="about the machine, for the file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.given is not None:
        data = json.loads(args.given.read_text())
        for p in data["points"]:
            p["choices"] = judged(p)
    else:
        data = measured(args)
    data["summary"] = summary(data["points"])
    show(data["points"])
    if args.fit:
        data["fit"] = fit(data["points"])
    usual = ROOT / "benchmarks" / "results" / f"cost_model-{short_name(args.device)}.json"
    out = args.out or args.given or usual
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(data, indent=1) + "\n")
    print("wrote", out)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    layers = [x for dtype in DTYPES[device.type] for x in grid(device.type, dtype)]
    if args.points is not None:
        layers = layers[:: max(1, len(layers) // args.points)]
    whole = args.seconds or (90.0 if device.type == "cpu" else 20.0)
    begun, points = time.perf_counter(), []
    for layer in layers:
        point = measure(layer, whole / len(layers))
        if point is not None:
            points.append(point | {"choices": judged(point)})
    return {
        "hardware": machine.hardware(device),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "note": args.note,
        "clock": DEVICE if device.type == "cuda" else clock().__name__,
        "left_out": len(layers) - len(points),
        "seconds": round(time.perf_counter() - begun, 1),
        "points": points,
    }


if __name__ == "__main__":
    main()

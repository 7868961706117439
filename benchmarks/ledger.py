"""How fast is a ledger of 100 million recorded values to read, and in how much memory?

    python benchmarks/ledger.py [--rows 100000000] [--folder PATH] [--out FILE.json]

Writes a synthetic ledger in the Store's own format (one estimator, one target, random batches of
64 out of a million examples), then asks ``values`` and ``top`` of it and the same questions of
plain DuckDB on the same files, each in a fresh process; the best of several rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa

from inrun.ledger.saved import Store, open_run

BATCH = 64
EXAMPLES = 1_000_000
PLAIN = {  # what a person would write by hand
    "values": "SELECT id, sum(weight * secant) AS value, count(*) AS steps FROM '{files}' "
    "GROUP BY id ORDER BY id",
    "top": "SELECT id, sum(weight * secant) AS value FROM '{files}' GROUP BY id "
    "ORDER BY value DESC LIMIT 20",
}


def write(folder: Path, rows: int, chunk: int = 4_000_000) -> None:
    """A ledger of this many rows, through the Store's own part writer and manifest."""
    store = Store.create(folder, {"benchmark": rows}, ["validation"], ["secant"])
    store._ids = "int64"
    rng = np.random.default_rng(0)
    for start in range(0, rows, chunk):
        n = min(chunk, rows - start)
        step = (start + np.arange(n)) // BATCH
        value = rng.normal(size=n).astype(np.float32).astype(np.float64) * 2.0**-14
        values = pa.table(
            {
                "step": step,
                "id": rng.integers(EXAMPLES, size=n),
                "weight": np.ones(n),
                "secant": value,
            }
        )
        own = np.unique(step)
        blank = pa.array(np.full(len(own), np.nan), from_pandas=True)
        names = ("loss_before", "loss_without_batch", "loss_with_batch")
        steps = pa.table(
            {
                "step": own,
                "lr": np.full(len(own), 1e-3),
                "examples": np.full(len(own), BATCH),
                "weight": np.ones(len(own)),
                "scored": np.ones(len(own), bool),
                "missed": np.zeros(len(own)),
                "void": pa.nulls(len(own), pa.string()),
                "sum": np.zeros(len(own)),
                **dict.fromkeys(names, blank),
            }
        )
        store._commit([*store._parts, store._write_part([values], [steps])])
        print(f"\r{start + n:,} rows", end="", flush=True)
    store._lock.release()
    store._lock = None
    print()


def measure(folder: Path, question: str, ours: bool) -> dict[str, float]:
    """Ask once, in this process: seconds after the imports, and the peak memory of all of it."""
    import duckdb

    start = time.perf_counter()
    if ours:
        run = open_run(folder)
        table = run.values() if question == "values" else run.top(20)
    else:
        sql = PLAIN[question].format(files=folder / "values" / "*.parquet")
        with duckdb.connect() as db:
            table = db.sql(sql).df()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kB on Linux
    return {"seconds": seconds, "peak_gib": peak, "rows": len(table)}


def ask(folder: Path, question: str, ours: bool) -> dict[str, float]:
    who = "ours" if ours else "plain"
    command = [sys.executable, __file__, "--measure", question, who, "--folder", str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--folder", type=Path, help="where the ledger goes; temporary by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/ledger.json")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        question, who = args.measure
        print(json.dumps(measure(args.folder, question, who == "ours")))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "run"
        if not (folder / "run.json").exists():
            write(folder, args.rows)
        size = sum(f.stat().st_size for f in folder.rglob("*.parquet"))
        result = {"rows": args.rows, "examples": EXAMPLES, "bytes": size, "rounds": args.rounds}
        for question in PLAIN:
            rounds = [
                {who: ask(folder, question, who == "ours") for who in ("plain", "ours")}
                for _ in range(args.rounds)
            ]
            best = {w: min(r[w]["seconds"] for r in rounds) for w in ("plain", "ours")}
            peak = {w: max(r[w]["peak_gib"] for r in rounds) for w in ("plain", "ours")}
            result[question] = {
                "inrun_seconds": round(best["ours"], 3),
                "duckdb_seconds": round(best["plain"], 3),
                "ratio": round(best["ours"] / best["plain"], 3),
                "inrun_peak_gib": round(peak["ours"], 2),
                "duckdb_peak_gib": round(peak["plain"], 2),
            }
            print(question, result[question])
    result["machine"] = {
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("duckdb", "pyarrow", "pandas", "numpy")},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

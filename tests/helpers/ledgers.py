"""Small ledgers for the tests of the store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from inrun.ledger.entries import Audit, MemoryLedger, StepEntry
from inrun.ledger.files import sha256_of, signed
from inrun.ledger.parts import STEPS, content_hash
from inrun.ledger.saved import Store

TABLES = ("values", "history", "harm", "steps")


def records(n, targets=2, estimators=1, seed=0, batch=4, pool=12, first=0):
    rng = np.random.default_rng(seed)
    for step in range(first, first + n):
        ids = rng.choice(pool, batch, replace=False).astype(np.int64)
        audit = Audit(*(rng.normal(size=targets) for _ in range(3))) if step % 3 == 0 else None
        yield StepEntry(step, ids, rng.normal(size=(estimators, targets, batch)), 0.1, audit=audit)


def write(path, rows, targets=("a", "b"), estimators=("secant",), flush=5):
    """A closed ledger of several parts (each flush is one)."""
    store = Store.create(path, {"lr": 0.1}, list(targets), list(estimators))
    for i, row in enumerate(rows):
        store.append(row)
        if i % flush == flush - 1:
            store.flush()
    store.flush()
    store._merge = lambda above: None  # keep the parts apart
    store.close()


def tables(run, estimator=None):
    return {name: getattr(run, name)(estimator) for name in TABLES}


def expected(rows, targets=("a", "b"), estimator=0):
    memory = MemoryLedger(list(targets))
    for row in rows:
        memory.append(row)
    return tables(memory, estimator)


def assert_same(a, b):
    for name in TABLES:
        pd.testing.assert_frame_equal(a[name], b[name], rtol=1e-12, atol=1e-15, obj=name)


def edit(file: Path, change) -> None:
    """Change a JSON file of a ledger as a stranger would who knows of the checksum."""
    content = json.loads(file.read_text())
    file.write_text(json.dumps(signed(change(content) or content)))


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, symlinks=True)
    return target


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder, to see that nothing was written or deleted."""
    return {
        str(f.relative_to(folder)): f.read_bytes()
        for f in sorted(folder.rglob("*"))
        if f.is_file() and f.name not in (".lock", ".writer")
    }


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """Bits flipped, a cut, a piece overwritten, moved or doubled."""
    kind, n = rng.integers(7), len(data)
    a, b = sorted(int(x) for x in rng.integers(0, n, 2))
    if kind <= 2:
        changed = bytearray(data)
        for _ in range(1 if kind == 0 else int(rng.integers(1, 6))):
            changed[int(rng.integers(n))] ^= 1 << int(rng.integers(8))
        return bytes(changed)
    pieces = {3: data[:a], 4: data[:a] + bytes(b - a) + data[b:], 5: data[:a] + data[b:]}
    return pieces.get(int(kind), data[:b] + data[a:])


def as_format_2(folder):
    """As it was written before nobody's part was: parts without these columns."""
    for file in sorted((folder / "steps").glob("*.parquet")):
        table = pq.read_table(file)
        old = table.select([c for c in table.column_names if not c.startswith("nobody")])
        old = old.replace_schema_metadata(
            {**(table.schema.metadata or {}), STEPS.encode(): content_hash(old).encode()}
        )
        pq.write_table(old, file, compression="zstd", write_page_checksum=True)

    def parts(content):
        for part in content["parts"]:
            file = folder / "steps" / f"{part['name']}.parquet"
            part["bytes"][1], part["sha256"][1] = file.stat().st_size, sha256_of(file)

    edit(folder / "manifest.json", parts)
    edit(folder / "run.json", lambda content: content | {"version": 2})


def as_format_1(folder):
    for name, drop in (("run.json", ["check"]), ("manifest.json", ["check", "replaced", "lost"])):
        content = json.loads((folder / name).read_text())
        for key in drop:
            del content[key]
        for part in content.get("parts", []):
            del part["sha256"]
        if name == "run.json":
            content["version"] = 1
        (folder / name).write_text(json.dumps(content))

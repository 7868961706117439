"""Table 1: what does it cost? Standard, Ghost and Direct training of GPT-2 small."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from experiments.common.parts import Context, Experiment, Results, Settings

PAPER = {  # NVIDIA A100: samples per second, peak MB
    "Standard": (255.62, 1437.52),
    "Adam-Ghost": (112.21, 3232.09),
    "Adam-Direct": (50.06, 10540.37),
}


def parts(size: str) -> dict[str, Settings]:
    if size == "paper":
        return {"gpt2": {"model": "gpt2", "batch": 16, "length": 1024, "mode": "both"}}
    return {"gpt2": {"model": "gpt2", "batch": 2, "length": 32, "mode": "both"}}


def measure(settings: Settings, context: Context) -> Any:
    """``inrun bench`` with these settings; what it writes is the result."""
    try:
        from inrun.bench import bench
    except ImportError:
        raise ValueError(
            "efficiency is measured by `inrun bench`, which this version of inrun does not have"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        bench(**settings, out=out)
        return json.loads(out.read_text("utf-8"))


def summarise(results: Results) -> dict[str, Any]:
    return results


def headline(summary: dict[str, Any]) -> str:
    return json.dumps(summary, indent=1)


def table(committed: dict[str, Any]) -> str:
    lines = [
        "| paper, A100 | samples per second | share of Standard | peak MB |",
        "|---|---|---|---|",
    ]
    for name, (speed, memory) in PAPER.items():
        share = speed / PAPER["Standard"][0]
        lines.append(f"| {name} | {speed:.2f} | {share:.1%} | {memory:,.0f} |")
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="efficiency",
    claim="Table 1: Ghost keeps 43.9 % of the plain throughput, Direct 19.6 %",
    parts=parts,
    measure=measure,
    summarise=summarise,
    headline=headline,
    tables={"reproduce-efficiency": table},
)

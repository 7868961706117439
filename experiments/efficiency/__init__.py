"""Table 1: what does it cost? Standard, Ghost and Direct training of GPT-2 small.

Measured by ``inrun bench``: one part for each mode, throughput and peak memory beside plain
training in the same mode.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from experiments.common.markdown import heading, row
from experiments.common.parts import ROOT, Context, Experiment, Results, Settings

PAPER = {  # NVIDIA A100: samples per second, peak MB
    "Standard": (255.62, 1437.52),
    "Adam-Ghost": (112.21, 3232.09),
    "Adam-Direct": (50.06, 10540.37),
}
VARIANTS = {  # of inrun bench: the row of Table 1 that it belongs to
    "plain": "Standard",
    "ghost": "Adam-Ghost",
    "tangent": "Adam-Ghost",
    "fast": "Adam-Ghost",
    "direct-vmap": "Adam-Direct",
    "direct-loop": "Adam-Direct",
}
MODES = {"eager": "eager", "compile": "torch.compile"}
KEPT = ("mode", "variant", "status", "message", "samples_per_s", "ratio", "ratio_range",
        "peak_bytes", "memory_ratio")  # fmt: skip


def parts(size: str) -> dict[str, Settings]:
    common: Settings = {"variants": list(VARIANTS), "optimizer": "adamw"}
    if size == "paper":
        gpt2 = common | {"model": "gpt2", "batch": 16, "length": 1024, "dtype": "bf16"}
        return {f"gpt2-{mode}": gpt2 | {"mode": mode} for mode in MODES}
    small = common | {"batch": 8, "length": 32, "dtype": "float32", "mode": "eager"}
    if size == "tiny":
        small |= {"batch": 3, "length": 6, "warmup": 1, "steps": 2, "rounds": 2}
        return {"gpt-1x32-eager": small | {"model": "gpt-1x32"}}
    return {"gpt-1x64-eager": small | {"model": "gpt-1x64", "warmup": 2, "steps": 9}}


def measure(settings: Settings, context: Context) -> Any:
    """``inrun bench`` with these settings."""
    from rich.console import Console

    from inrun.bench import Options, run_bench

    torch.set_default_dtype(torch.float32)
    own = {"variants": tuple(settings["variants"]), "device": context.device.type}
    return run_bench(Options.of(**settings | own), console=Console(quiet=True))


def with_costs(committed: dict[str, Any]) -> dict[str, Any]:
    """The paper's size, where it was not measured here, from benchmarks/costs.py: the same
    ``inrun bench`` of the same model, batch and variants."""
    file = ROOT / "benchmarks" / "results" / "costs-h200.json"
    if "paper" in committed or not file.exists():
        return committed
    runs = json.loads(file.read_text("utf-8"))["runs"]
    found = summarise({k: runs[k] for k in ("gpt2", "gpt2-compile")})
    for part in found.values():
        part["rows"] = [r for r in part["rows"] if r["variant"] in VARIANTS]
    return committed | {"paper": {"summary": found}}


def summarise(results: Results) -> dict[str, Any]:
    return {
        name: {
            "model": r["options"]["model"],
            "parameters": r["parameters"],
            "dtype": r["options"]["dtype"],
            "shape": [r["options"]["batch"], r["options"]["length"]],
            "hardware": r["hardware"],
            "rows": [{k: row[k] for k in KEPT} for row in r["rows"]],
        }
        for name, r in results.items()
    }


def headline(summary: dict[str, Any]) -> str:
    """The paper's row, throughput and memory beside ours."""
    lines = []
    for part in summary.values():
        lines.append(f"{described(part)}: of plain training (range over rounds) [the paper]")
        for r in part["rows"]:
            speed, memory = shares(VARIANTS[r["variant"]])
            lines.append(
                f"  {r['mode']:8} {r['variant']:12} throughput {here(r, 'ratio')} [{speed}], "
                f"memory {here(r, 'memory_ratio')} [{memory}]"
            )
    return "\n".join(lines)


def table(committed: dict[str, Any]) -> str:
    """Every size, mode and variant beside the paper's row; shares are of plain training.

    Without results, the paper's rows alone.
    """
    lines = heading(
        "size", "training", "Table 1", "`inrun bench`", "throughput: paper", "here",
        "memory: paper", "here",
    )  # fmt: skip
    committed = with_costs(committed)
    if not committed:
        for variant, name in VARIANTS.items():
            speed, memory = shares(name)
            cells = ("–", "not yet measured", name, f"`{variant}`", speed, "–", memory, "–")
            lines.append(row(*cells))
    for size, data in committed.items():
        for part in data["summary"].values():
            for r in part["rows"]:
                name = VARIANTS[r["variant"]]
                speed, memory = shares(name)
                cells = (
                    size, f"{described(part)}, {MODES[r['mode']]}", name, f"`{r['variant']}`",
                    speed, here(r, "ratio"), memory, here(r, "memory_ratio"),
                )  # fmt: skip
                lines.append(row(*cells))
    return "\n".join(lines)


def described(part: dict[str, Any]) -> str:
    (batch, length), found = part["shape"], part["hardware"]
    where = found["gpu"] or f"CPU, {found['threads']} thread{'s' * (found['threads'] > 1)}"
    return f"{part['model']}, {batch} × {length} tokens, {part['dtype']}, {where}"


def shares(name: str) -> tuple[str, str]:
    """Throughput and peak memory of a row of Table 1, of its Standard row."""
    speed, memory = (x / y for x, y in zip(PAPER[name], PAPER["Standard"], strict=True))
    return f"{speed:.1%}", f"{memory:.0%}"


def here(row: dict[str, Any], key: str) -> str:
    """With the range over the rounds; a dash where it was not measured: memory on a CPU."""
    if row["status"] != "ok":
        return row["status"]
    if row[key] is None:
        return "–"
    if key == "memory_ratio":
        return f"{row[key]:.0%}"
    low, high = row["ratio_range"]
    return f"{row[key]:.1%}" if low == high else f"{row[key]:.1%} ({low:.1%} to {high:.1%})"


EXPERIMENT = Experiment(
    name="efficiency",
    claim="Table 1: Ghost keeps 43.9 % of the plain throughput, Direct 19.6 %",
    parts=parts,
    measure=measure,
    summarise=summarise,
    headline=headline,
    tables={"reproduce-efficiency": table},
)

"""``inrun bench --shapes NAME``: a table over the sizes that people train at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inrun.bench.options import Options
from inrun.bench.run import run_bench
from inrun.console import console as make_console
from inrun.output import check_output, write_output

_LLAMA = (
    "hf:llama,hidden_size=2048,intermediate_size=5632,num_hidden_layers=16,"
    "num_attention_heads=16,num_key_value_heads=16,vocab_size=32000"
)
_TINY = "hf:llama,hidden_size=64,intermediate_size=128,num_hidden_layers=4,vocab_size=256"
_TINY_GPT2 = "hf:gpt2,n_layer=12,n_embd=32,n_head=2,vocab_size=256"
Shape = dict[str, Any]
# Fine-tuning as it is done: models of transformers, small batches, mostly eager.
SHAPES: dict[str, dict[str, list[Shape]]] = {
    "finetune": {
        "cuda": [
            {"model": "hf:gpt2", "batch": 16, "length": 1024, "mode": "both"},
            {"model": "hf:gpt2", "batch": 4, "length": 512, "mode": "both"},
            {"model": "hf:gpt2", "batch": 8, "length": 256, "mode": "eager"},
            {"model": "hf:gpt2", "batch": 4, "length": 512, "mode": "eager", "targets": 16},
            {"model": "hf:gpt2", "batch": 4, "length": 512, "mode": "eager", "targets": 256},
            {"model": "hf:vit", "batch": 64, "length": 1, "mode": "eager"},
            {"model": _LLAMA, "batch": 8, "length": 1024, "mode": "eager"},
            {"model": f"{_LLAMA},lora=16", "batch": 8, "length": 1024, "mode": "eager"},
        ],
        "cpu": [
            {"model": _TINY_GPT2, "batch": 4, "length": 16, "mode": "eager"},
            {"model": _TINY_GPT2, "batch": 4, "length": 16, "mode": "eager", "targets": 16},
            {"model": _TINY_GPT2, "batch": 4, "length": 16, "mode": "eager", "targets": 256},
            {"model": "hf:vit,hidden_size=64,intermediate_size=128,num_hidden_layers=4,"
             "num_attention_heads=4,image_size=32,patch_size=8", "batch": 16, "length": 1,
             "mode": "eager"},
            {"model": _TINY, "batch": 4, "length": 32, "mode": "eager"},
            {"model": f"{_TINY},lora=4", "batch": 4, "length": 32, "mode": "eager"},
        ],
    },
}  # fmt: skip


def run_shapes(
    name: str, out: Path | None, console: Console | None, force: bool, **given: Any
) -> dict[str, Any]:
    """Measure all shapes of a list, show one table and return the numbers; ``out`` is written
    after each. ``given``: options that are the same for all."""
    if name not in SHAPES:
        raise ValueError(f"--shapes {name}: choose {', '.join(SHAPES)}")
    console = console or make_console()
    if out is not None:
        check_output(out, force=force, option="--out")
    device = Options.of(device=given.get("device")).device
    given["variants"] = given.get("variants") or "plain,fast,graphs,bitwise,every-4,offload"
    if device == "cuda":  # passes are recorded after some that were equal
        given["warmup"] = max(16, given.get("warmup") or 0)
    runs: list[dict[str, Any]] = []
    with console.status("") as status:
        for shape in SHAPES[name][device]:
            status.update(f"{shape['model'].split(',')[0]} {shape['batch']} × {shape['length']}")
            quiet = Console(quiet=True)
            runs.append(run_bench(Options.of(**given | shape), None, quiet))
            if out is not None:
                text = json.dumps({"shapes": name, "runs": runs}, indent=1)
                write_output(out, text.encode() + b"\n", force or len(runs) > 1)
    console.print(table(runs))
    return {"shapes": name, "runs": runs}


def table(runs: list[dict[str, Any]]) -> Table:
    """One row for each shape and mode: time of a plain step, and what each variant keeps of the
    throughput, with its memory beside plain's."""
    names = [v for v in runs[0]["options"]["variants"] if v != "plain"]
    found = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    found.add_column("model")
    for column in ("batch", "mode", "plain ms", *names):
        found.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        options = run["options"]
        kind, *rest = options["model"].split(",")
        lora = next((f" {x}" for x in rest if x.startswith("lora=")), "")
        label = f"{kind.removeprefix('hf:')}{lora} ({run['parameters'] / 1e6:,.0f} M)"
        size = f"{options['batch']}" + (f" × {options['length']}" if options["length"] > 1 else "")
        size += f", {options['targets']} targets" if options["targets"] > 1 else ""
        for mode in dict.fromkeys(row["mode"] for row in run["rows"]):
            rows = {row["variant"]: row for row in run["rows"] if row["mode"] == mode}
            plain = rows["plain"]["step_ms"]
            cells = [_kept(rows[v]) if v in rows else "" for v in names]
            found.add_row(
                label, size, mode, f"{plain['median']:.1f}" if plain else "failed", *cells
            )
    return found


def _kept(row: dict[str, Any]) -> str:
    if row["step_ms"] is None:
        return "failed"
    memory = f" ({row['memory_ratio']:.2f}×)" if row["memory_ratio"] else ""
    return f"{row['ratio']:.0%}{memory}"

"""The options of ``inrun bench`` on the command line."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Mode(str, Enum):
    eager = "eager"
    compile = "compile"
    both = "both"


class Dtype(str, Enum):
    float32 = "float32"
    bf16 = "bf16"
    bf16_weights = "bf16-weights"
    float64 = "float64"


class OptimizerName(str, Enum):
    adamw = "adamw"
    sgd = "sgd"


class Device(str, Enum):
    cuda = "cuda"
    cpu = "cpu"


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="gpt2, gpt-LAYERSxWIDTH, convnet, hf:NAME or hf:FOLDER with overrides "
            "(hf:llama,hidden_size=256). gpt2 on a GPU, gpt-4x128 on a CPU."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Training examples per step.")] = 16,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; 1024 on a GPU, 128 on a CPU.")
    ] = None,
    validation: Annotated[int, typer.Option(min=1, help="Validation examples per target.")] = 1,
    targets: Annotated[int, typer.Option(min=1, help="Validation targets.")] = 1,
    vocab: Annotated[int | None, typer.Option(min=2, help="Size of the vocabulary.")] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="bf16 is autocast with float32 weights, usual on a GPU."),
    ] = None,
    optimizer: Annotated[OptimizerName, typer.Option(help="Fused on a GPU.")] = OptimizerName.adamw,
    mode: Annotated[
        Mode | None, typer.Option(help="With torch.compile or not; both on a GPU, eager on a CPU.")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            help="Some of plain, fast, bitwise, tangent, ghost, materialise, direct-loop, "
            "direct-vmap, with commas between; all by default."
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before the timed ones.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that the steps are taken in.")] = 3,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare a step's values with float64.")
    ] = False,
    device: Annotated[Device | None, typer.Option(help="A GPU where there is one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and data.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """What watching costs: speed and memory beside plain training, on one batch, in one table.

    plain: training without inrun. fast, bitwise: inrun as it comes, with either promise about the
    training. tangent: the paper's estimator. ghost, materialise: fast with that form forced.
    direct-loop, direct-vmap: the paper's Direct baseline, all per-example gradients at once.
    """
    from inrun.bench import Options, run_bench

    options = Options.of(
        model=model, batch=batch, length=length, validation=validation, targets=targets,
        vocab=vocab, dtype=dtype and dtype.value, optimizer=optimizer.value,
        mode=mode and mode.value, variants=variants, warmup=warmup, steps=steps, rounds=rounds,
        verify=verify, device=device and device.value, seed=seed,
    )  # fmt: skip
    result = run_bench(options, out, Console(stderr=as_json, highlight=False))
    if as_json:
        typer.echo(json.dumps(result, ensure_ascii=False, indent=1))

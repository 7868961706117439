"""The options of ``inrun bench`` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inrun.bench.options import DTYPES, MODES, OPTIMIZERS, USUAL, Options
from inrun.bench.run import run_bench
from inrun.bench.shapes import SHAPES, run_shapes
from inrun.bench.trainers import VARIANTS
from inrun.console import Force, Json, console, plain_errors
from inrun.console import as_json as json_text

Model = Annotated[
    str | None,
    typer.Option(
        help="gpt2, gpt-LAYERSxWIDTH, convnet, hf:NAME or hf:FOLDER with overrides "
        "(hf:llama,hidden_size=256). gpt2 on a GPU, gpt-4x128 on a CPU."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(DTYPES),
        help="bf16 is autocast with float32 weights. bf16 on a GPU, float32 on a CPU.",
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(MODES),
        help="With torch.compile or not. both on a GPU, eager on a CPU.",
    ),
]

Shapes = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(SHAPES),
        help="Measure a list of models and batches, one line each, instead of one model.",
    ),
]


def bench(
    model: Model = None,
    batch: Annotated[int, typer.Option(min=1, help="Training examples per step.")] = 16,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; 1024 on a GPU, 128 on a CPU.")
    ] = None,
    validation: Annotated[int, typer.Option(min=1, help="Validation examples per target.")] = 1,
    targets: Annotated[int, typer.Option(min=1, help="Validation targets.")] = 1,
    vocab: Annotated[int | None, typer.Option(min=2, help="Size of the vocabulary.")] = None,
    dtype: Dtype = None,
    optimizer: Annotated[
        str, typer.Option(metavar="|".join(OPTIMIZERS), help="Fused on a GPU.")
    ] = "adamw",
    mode: Mode = None,
    variants: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help=f"Some of {', '.join(VARIANTS)}; all by default."),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before the timed ones.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that the steps are taken in.")] = 3,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare a step's values with float64.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(metavar="|".join(USUAL), help="A GPU where there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and data.")] = 0,
    shapes: Shapes = None,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """What watching costs: speed and memory beside plain training, on one batch, in one table.

    plain: training without inrun. fast, bitwise: inrun as it comes, with either promise about the
    training. tangent: the paper's estimator. ghost, materialise: fast with that form forced.
    every-4, offload, graphs (cuda_graphs): fast with these options. direct-loop, direct-vmap: the
    paper's Direct baseline, all per-example gradients at once.
    """
    common = {
        "validation": validation, "targets": targets, "dtype": dtype, "optimizer": optimizer,
        "variants": variants, "warmup": warmup, "steps": steps, "rounds": rounds,
        "device": device, "seed": seed,
    }  # fmt: skip
    where = console(stderr=as_json)
    if shapes is not None:
        result = run_shapes(shapes, out, where, force, **common)
    else:
        options = Options.of(
            model=model, batch=batch, length=length, vocab=vocab, mode=mode, verify=verify, **common
        )
        result = run_bench(options, out, where, force)
    if as_json:
        typer.echo(json_text(result))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(plain_errors(bench))

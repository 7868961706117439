"""How right are values in the first steps? ``shapley`` and ``secant`` against exact Shapley values.

    python benchmarks/first_steps.py [--models ...] [--batches 4 8 10] [--seeds N] [--lr 1e-3]
        [--steps 0 1 2 ...] [--out FILE.json [--add]]

Real AdamW steps of small models in float64, all coalitions of batches of 4, 8 and 10: correlation
and relative error of both estimators in one run, and the step from which ``shapley`` needs no more
sampled orders. The examples are random; the models start from random weights. ``--add`` keeps the
runs that are in the file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import inrun
from inrun.bench.machine import commit, hardware, versions
from inrun.scoring import coalitions, thinned

STEPS = (0, 1, 2, 5, 10, 19, 20, 40, 60)
BATCHES = (4, 8, 10)
LR = 1e-3
Batch = dict[str, Tensor]


def language_model(kind: str, width: int = 24, layers: int = 2) -> nn.Module:
    import transformers  # not needed by the others

    sizes = {"vocab_size": 100, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt2":
        sizes = {"vocab_size": 100, "n_embd": width, "n_layer": layers, "n_head": 2}
        sizes |= {"n_positions": 32}
        sizes |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    else:
        sizes |= {"intermediate_size": 32, "num_key_value_heads": 1}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **sizes, **none)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"
    return model


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def tokens(n: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(5, 90, (n, 10), generator=generator)
    return {"input_ids": ids, "labels": ids}


def images(n: int, generator: torch.Generator) -> Batch:
    x = torch.randn(n, 1, 8, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x[:, 0, :, :5].mean(1).argmax(1)}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"]) if "x" in batch else model(**batch).loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Batch]]] = {
    **{k: (lambda k=k: language_model(k), tokens) for k in ("gpt2", "llama", "mistral", "phi")},
    "convnet": (convnet, images),
    # 0.8 million parameters: orders of a part of the coordinates (scoring/thinned.py)
    "gpt2-wide": (lambda: language_model("gpt2", 128, 4), tokens),
}


def measure(
    name: str, B: int, seed: int, lr: float = LR, steps: Sequence[int] = STEPS
) -> dict[str, Any]:
    """One run: correlation and error of both estimators at the steps that are compared."""
    make, draw = MODELS[name]
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed + 5)
    model = make().double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    run = inrun.watch(model, optimizer, validation=[draw(6, rng)], loss=loss_of,
                      estimator=["shapley", "secant"], audit_every=0)  # fmt: skip
    checks = {}
    for step in range(max(steps) + 1):
        if step in steps:
            checks[step] = run.check()
        batch = draw(B, rng)
        with contextlib.redirect_stdout(io.StringIO()):
            with run.batch(range(B)):
                loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    values = {e: run.history(estimator=e)["value"].to_numpy().reshape(-1, B)
              for e in ("shapley", "secant")}  # fmt: skip
    same = (values["shapley"] == values["secant"]).all(1)
    found: dict[str, Any] = {"model": name, "batch": B, "seed": seed, "lr": lr, "steps": {}}
    found["sampled"] = int(np.argmax(same)) if same.any() else None
    for step, check in checks.items():
        assert check.table is not None
        exact = check.table["exact"].to_numpy()
        found["steps"][step] = {
            e: {"R": float(np.corrcoef(x[step], exact)[0, 1]),
                "error": float(np.linalg.norm(x[step] - exact) / np.linalg.norm(exact))}
            for e, x in values.items()
        }  # fmt: skip
    run.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--steps", nargs="+", type=int, default=list(STEPS))
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--whole", action="store_true", help="orders of all coordinates")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/first_steps.json")
    args = parser.parse_args()
    if args.whole:
        thinned.LARGE = coalitions.LARGE = sys.maxsize
    runs = json.loads(args.out.read_text())["runs"] if args.add and args.out.exists() else []
    data: dict[str, Any] = {"runs": runs, "commit": commit(), "versions": versions()}
    data["hardware"] = hardware(torch.device("cpu"))
    for seed, B, name in itertools.product(range(args.seeds), args.batches, args.models):
        data["runs"].append(run := measure(name, B, seed, args.lr, args.steps))
        run |= {"commit": commit(), "whole": args.whole}
        cells = (f"{s}: {x['shapley']['R']:.4f}/{x['shapley']['error']:.3f}"
                 for s, x in run["steps"].items())  # fmt: skip
        print(name, B, seed, f"till {run['sampled']}", *cells, flush=True)
        data["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        args.out.write_text(json.dumps(data, indent=1) + "\n")  # what is there so far


if __name__ == "__main__":
    main()

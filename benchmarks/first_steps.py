"""How right are values in the first steps? ``shapley`` and ``secant`` against exact Shapley values.

    python benchmarks/first_steps.py [--seeds N] [--out FILE.json]

Real AdamW steps of small models in float64, all coalitions of batches of 4, 8 and 10: correlation
and relative error of both estimators in one run, and the step from which ``shapley`` needs no more
sampled orders. The examples are random; the models start from random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable
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

STEPS = (0, 1, 2, 5, 10, 19, 20, 40, 60)
BATCHES = (4, 8, 10)
LR = 1e-3
Batch = dict[str, Tensor]


def language_model(kind: str) -> nn.Module:
    import transformers  # not needed by the others

    sizes = {"vocab_size": 100, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt2":
        sizes = {"vocab_size": 100, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32}
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
}


def measure(name: str, B: int, seed: int) -> dict[str, Any]:
    """One run: correlation and error of both estimators at the steps that are compared."""
    make, draw = MODELS[name]
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed + 5)
    model = make().double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    run = inrun.watch(model, optimizer, validation=[draw(6, rng)], loss=loss_of,
                      estimator=["shapley", "secant"], audit_every=0)  # fmt: skip
    checks = {}
    for step in range(max(STEPS) + 1):
        if step in STEPS:
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
    found: dict[str, Any] = {"model": name, "batch": B, "seed": seed, "steps": {}}
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
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/first_steps.json")
    args = parser.parse_args()
    runs = []
    for name in MODELS:
        for B in BATCHES:
            for seed in range(args.seeds):
                runs.append(measure(name, B, seed))
                row = runs[-1]["steps"]
                cells = (f"{s}: {x['shapley']['R']:.4f}/{x['shapley']['error']:.3f}"
                         for s, x in row.items())  # fmt: skip
                print(name, B, seed, f"till {runs[-1]['sampled']}", *cells, flush=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    data = {"runs": runs, "lr": LR, "date": now, "hardware": hardware(torch.device("cpu")),
            "versions": versions(), "commit": commit()}  # fmt: skip
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

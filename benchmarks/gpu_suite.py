"""The zoo and the estimators on a CUDA GPU against the CPU's float64 reference (`make test-gpu`).

Every model of tests/zoo.py is trained for a few watched AdamW steps on the CPU in float64 (the
reference: per-row copies of the model, finite differences of a real optimizer step). The same
step is then taken on the GPU from the same weights and optimizer state, in float32 and under
bfloat16 autocast, in every form of the capture. Writes benchmarks/results/gpu_suite.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import inrun
from inrun import reference
from zoo import ZOO

KINDS = {"secant": (0.5,), "sgd": (None,)}


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def move(tree, device, dtype):
    if isinstance(tree, torch.Tensor):
        return tree.to(device, dtype if tree.is_floating_point() else None)
    if isinstance(tree, dict):
        return {k: move(v, device, dtype) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(move(v, device, dtype) for v in tree)
    return tree


def optimizer_on(problem, model, state, **options):
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-3, weight_decay=0.1, **options)
    if state is not None:
        fresh = optimizer.state_dict()
        optimizer.load_state_dict(
            {"state": copy.deepcopy(state["state"]), "param_groups": fresh["param_groups"]}
        )
    return optimizer


def watched_step(problem, model, optimizer, batch, validation, device, autocast, **options):
    """One step; values of its examples by estimator, the gradients, and whether it was clean."""

    def val_loss(m, b):
        return problem.loss(problem.forward(m, b), b)

    run = inrun.watch(
        model, optimizer, validation=[validation], loss=val_loss, estimator=list(KINDS),
        batch_dim=problem.batch_dim, audit_every=1, **options,
    )  # fmt: skip
    with run.batch(range(problem.B)):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = problem.loss(problem.forward(model, batch), batch)
        loss.backward()
    optimizer.step()
    covered = run.coverage().query("status != 'frozen'")["status"].eq("scored").all()
    void = run.steps()["void"].notna().any()
    values = {k: run.history(k)["value"].to_numpy() for k in KINDS}
    run.close()
    return values, bool(covered) and not bool(void)


def compare(name, device):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    problem = ZOO[name]()
    validation = ZOO[name]().batch
    model, batch = problem.model, problem.batch
    optimizer = optimizer_on(problem, model, None)
    for _ in range(3):
        problem.train_loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    start, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    rows = reference.per_example_gradients(
        model, batch, problem.B, problem.forward, problem.loss, problem.batch_dim
    )
    problem.train_loss()  # BatchNorm's statistics move in the forward pass
    model.eval()
    truth = {
        kind: reference.values(
            model, optimizer, list(rows.values()),
            lambda m: problem.loss(problem.forward(m, validation), validation), kind, points,
        ).numpy()
        for kind, points in KINDS.items()
    }  # fmt: skip
    torch.set_default_dtype(torch.float32)
    results = []
    settings = [
        (autocast, form, training, extra)
        for autocast in (False, True)
        for form, training, extra in (
            ("ghost", "bitwise", {}), ("materialise", "bitwise", {"fused": True}),
            ("auto", "bitwise", {"foreach": True}), ("materialise", "fast", {"capturable": True}),
        )
    ]  # fmt: skip
    for autocast, form, training, extra in settings:
        if device == "cpu":
            extra = {k: v for k, v in extra.items() if k != "capturable"}
        twin = copy.deepcopy(start).to(device, torch.float32)
        own = optimizer_on(problem, twin, state, **extra)
        values, clean = watched_step(
            problem, twin, own, move(batch, device, torch.float32),
            move(validation, device, torch.float32), device, autocast, form=form, training=training,
        )  # fmt: skip
        for kind, expected in truth.items():
            got = values[kind]
            R = float(np.corrcoef(got, expected)[0, 1])
            error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
            limit = 0.9 if autocast else 0.9999
            results.append({
                "model": name, "dtype": "bfloat16 autocast" if autocast else "float32",
                "form": form, "training": training, "optimizer": extra, "estimator": kind,
                "R": R, "relative_error": error, "clean": clean,
                "passed": clean and limit <= R,
            })  # fmt: skip
    return results


def environment(device):
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__, "python": platform.python_version(), "inrun": inrun.__version__,
        "commit": commit,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", default=list(ZOO))
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/gpu_suite.json"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU here: run with --device cpu to try the suite itself")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    results, started = [], time.time()
    for name in options.only:
        try:
            found = compare(name, options.device)
        except Exception as e:
            found = [{"model": name, "passed": False, "error": f"{type(e).__name__}: {e}"[:500]}]
        results += found
        worst = {}
        for r in found:
            if "error" in r:
                print(f"{name:24} {r['error']}")
                continue
            key = r["dtype"], r["estimator"]
            worst[key] = max(worst.get(key, 0.0), r["relative_error"])
        line = "  ".join(f"{d} {e} {v:.1e}" for (d, e), v in worst.items())
        print(f"{name:24} {'ok ' if all(r['passed'] for r in found) else 'BAD'} {line}", flush=True)
    passed = sum(r["passed"] for r in results)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(
        {"environment": environment(options.device), "seconds": round(time.time() - started, 1),
         "passed": passed, "failed": len(results) - passed, "results": results}, indent=1,
    ))  # fmt: skip
    print(f"{passed} passed, {len(results) - passed} failed")
    sys.exit(passed != len(results))


if __name__ == "__main__":
    main()

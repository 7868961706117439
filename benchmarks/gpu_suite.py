"""The zoo and the estimators on a CUDA GPU against the CPU's float64 reference (`make test-gpu`).

Every model of tests/helpers/zoo.py is trained for a few watched AdamW steps on the CPU in float64
(the reference: per-row copies of the model, finite differences of a real optimizer step). The same
step is then taken on the GPU from the same weights and optimizer state, in float32 and under
bfloat16 autocast, in every form of the capture. Writes benchmarks/results/gpu_suite.json.

Under bfloat16 a gradient smaller than its rounding is noise, and Adam with a tiny eps gives it the
same weight as any other: the step itself is then another one, not only its values. So there the
optimizer has eps = 1e-2 and the validation batch is the training batch, which compares the
computation and not the noise. float32 is compared with Adam as it comes.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import inrun
from helpers.zoo import ZOO
from inrun.bench.machine import commit
from inrun.exact import reference

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


def optimizer_on(model, state, **options):
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


def compare(name, device, autocast):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    problem = ZOO[name]()
    model, batch = problem.model, problem.batch
    validation = batch if autocast else ZOO[name]().batch
    adam = {"eps": 1e-2} if autocast else {}
    optimizer = optimizer_on(model, None, **adam)
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
    settings = (
        ("ghost", "bitwise", {}), ("materialise", "bitwise", {"fused": True}),
        ("auto", "bitwise", {"foreach": True}), ("materialise", "fast", {"capturable": True}),
    )  # fmt: skip
    for form, training, extra in settings:
        if device == "cpu":
            extra = {k: v for k, v in extra.items() if k != "capturable"}
        twin = copy.deepcopy(start).to(device, torch.float32)
        own = optimizer_on(twin, state, **extra, **adam)
        values, clean = watched_step(
            problem, twin, own, move(batch, device, torch.float32),
            move(validation, device, torch.float32), device, autocast, form=form, training=training,
        )  # fmt: skip
        for kind, expected in truth.items():
            got = values[kind]
            R = float(np.corrcoef(got, expected)[0, 1])
            error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
            limit = 0.99 if autocast else 0.9999
            results.append({
                "model": name, "dtype": "bfloat16 autocast" if autocast else "float32",
                "form": form, "training": training, "optimizer": extra, "estimator": kind,
                "R": R, "relative_error": error, "clean": clean,
                "passed": clean and limit <= R,
            })  # fmt: skip
    return results


def loops(device):
    """On the device: checkpoints are recomputed in its own thread; fused optimizers get scaled
    float16 gradients. Training must be bitwise the same with and without the watch."""
    from helpers.loops import MODELS, next_token

    torch.set_default_dtype(torch.float32)
    data = torch.randint(0, 23, (40, 5), generator=torch.Generator().manual_seed(1)).to(device)
    results = []
    for kind in ("gpt", "checkpointed", "reentrant", "dropped"):
        for half in (False, True):
            left = []
            for watched in (False, True):
                torch.manual_seed(0)
                model = MODELS[kind]().to(device)
                fused = {"fused": True} if device == "cuda" else {}
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **fused)
                scaler = torch.amp.GradScaler(device, enabled=half, init_scale=2.0**12)
                run = watched and inrun.watch(
                    model, optimizer, validation=[data[30:]], loss=next_token, audit_every=1,
                    scaler=scaler if half else None,
                )  # fmt: skip
                for step in range(5):
                    optimizer.zero_grad()
                    rows = torch.arange(6, device=device) + 5 * step
                    factor = float("inf") if half and step == 2 else 1.0
                    with run.batch(rows) if watched else torch.enable_grad():
                        with torch.autocast(device, dtype=torch.float16, enabled=half):
                            loss = next_token(model, data[rows])
                        scaler.scale(loss * factor).backward()
                    scaler.step(optimizer)
                    scaler.update()
                left.append([p.detach().clone() for p in model.parameters()])
            same = all(torch.equal(a, b) for a, b in zip(*left, strict=True))
            if device == "cuda":  # whatever was recorded, the loop goes on where it was
                same &= torch.cuda.current_stream() == torch.cuda.default_stream()
            steps = run.steps()
            explained = float(steps["explained"].iloc[-1])
            recorded = len(steps) == (4 if half else 5) and steps["void"].isna().all()
            run.close()
            results.append({
                "model": kind, "loop": "float16, GradScaler" if half else "float32",
                "bitwise": same, "explained": explained, "skipped_step_left_out": bool(recorded),
                "passed": bool(same and recorded and abs(explained - 1) < (0.25 if half else 0.02)),
            })  # fmt: skip
    return results


def recorded(device):
    """Training with ``cuda_graphs=True`` beside training without: the same weights and values? On a
    CPU with a stand-in for CUDA graphs."""
    from helpers.loops import next_token
    from helpers.tape import Dropped, TapeRecorder
    from inrun.capture import signals
    from inrun.gpt import GPT
    from inrun.replay import replays

    if device == "cpu":
        replays.recorder_for = lambda device: TapeRecorder()
        signals.FEW = 0  # NumPy's work is not recorded; a GPU has none of it
    torch.set_default_dtype(torch.float32)
    data = torch.randint(0, 23, (150, 5), generator=torch.Generator().manual_seed(1)).to(device)
    results = []
    for kind, half in itertools.product((GPT, Dropped), (False, True)):
        weights, values = [], []
        for graphs in (False, True):
            torch.manual_seed(0)
            model = kind(23, 8, 2, 2, 64).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
            run = inrun.watch(
                model, optimizer, validation=[data[144:]], loss=next_token, estimator="secant",
                cuda_graphs=graphs,
            )  # fmt: skip
            for step in range(24):
                rows = torch.arange(6) + 6 * step
                batch = data[rows]
                with run.batch(rows):
                    with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
                        loss = next_token(model, batch)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            values.append(run.history()["value"].to_numpy())
            count, why = (run.replays.count, run.replays.why) if graphs else (0, None)
            run.close()
        apart = float((weights[0] - weights[1]).norm() / weights[0].norm())
        R = float(np.corrcoef(*values)[0, 1])
        results.append({
            "model": kind.__name__, "recorded": "bfloat16 autocast" if half else "float32",
            "replays": count, "why": why, "weights_apart": apart, "R": R,
            "passed": count > 0 and apart < (1e-2 if half else 1e-4)
            and (0.99 if half else 0.9999) <= R,
        })  # fmt: skip
    return results


def environment(device):
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__, "python": platform.python_version(), "inrun": inrun.__version__,
        "commit": commit(),
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
            found = [r for half in (False, True) for r in compare(name, options.device, half)]
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
    for r in (*loops(options.device), *recorded(options.device)):
        results.append(r)
        print(r, flush=True)
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

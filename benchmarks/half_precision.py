"""transformers' Trainer and Accelerate in float16 (with a ``GradScaler``) and bfloat16, against the
same loop written out: the same weights, the same values?

    python benchmarks/half_precision.py --out half-precision.json      a GPU, ~60 s
    python benchmarks/half_precision.py --cpu                           bfloat16 only
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn.utils import clip_grad_norm_

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import inrun
from inrun.bench.machine import commit, hardware, versions

N, B, STEPS, LR, CLIP = 64, 8, 8, 1e-3, 0.5
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": torch.float32}


def made(device):
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, use_cache=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).to(device)


def data():
    tokens = torch.randint(3, 512, (N + 16, 32), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": t, "labels": t} for t in tokens]


def batch(rows, device):
    return {k: torch.stack([r[k] for r in rows]).to(device) for k in rows[0]}


def loss_in(precision, device):
    """``loss(model, batch)`` under autocast, as both frameworks run their model."""

    def loss(model, held):
        half = precision != "no"
        with torch.autocast(device, DTYPES[precision]) if half else nullcontext():
            return model(**held).loss

    return loss


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)


def by_hand(rows, precision, device, order):
    """``order``: the ids of each step, as the framework drew them."""
    model = made(device)
    optimizer, loss = adamw(model), loss_in(precision, device)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    run = inrun.watch(
        model, optimizer, validation=[batch(rows[N:], device)], loss=loss, max_norm=CLIP,
        scaler=scaler if precision == "fp16" else None,
    )  # fmt: skip
    model.train()
    for ids in order:
        with run.batch(ids):
            scaler.scale(loss(model, batch([rows[i] for i in ids], device))).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.close()
    return model, run


def trainer(rows, precision, device):
    model = made(device)
    half = {} if precision == "no" else {precision: True}
    args = tf.TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=B, max_steps=STEPS, learning_rate=LR,
        max_grad_norm=CLIP, weight_decay=0.0, lr_scheduler_type="constant", report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=device == "cpu", optim="adamw_torch", **half,
    )  # fmt: skip
    each = tf.Trainer(
        model, args, train_dataset=rows[:N], eval_dataset=rows[N:],
        data_collator=tf.default_data_collator,
    )  # fmt: skip
    held = [batch(rows[N:], device)]
    inrun.integrations.hf.watch(each, validation=held, loss=loss_in(precision, device))
    each.train()
    return model, each.inrun


def accelerated(rows, precision, device):
    AcceleratorState._reset_state(True)  # the Trainer's
    accelerator = Accelerator(mixed_precision=precision, cpu=device == "cpu")
    model = made(device)
    loader = torch.utils.data.DataLoader(inrun.with_ids(rows[:N]), B, shuffle=True)
    prepared, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    run = inrun.watch(
        prepared, optimizer, validation=[batch(rows[N:], device)], max_norm=CLIP,
        loss=loss_in(precision, device),
    )  # fmt: skip
    for held in loader:
        names, held = inrun.take_ids(held)
        with run.batch(**names):
            accelerator.backward(prepared(**held).loss)
        accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return model, run


def compare(name, precision, found, rows, device):
    model, run = found
    history = run.history()
    order = [part["id"].tolist() for _, part in history.groupby("step", sort=True)]
    other, twin = by_hand(rows, precision, device, order)
    a, b = (r.history().sort_values(["step", "id"]) for r in (run, twin))
    weights = max(
        float((p - q).detach().abs().max())
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )
    off = abs(a["value"].to_numpy() - b["value"].to_numpy()).max()
    steps = run.steps()
    return {
        "loop": name,
        "precision": precision,
        "steps": len(steps),
        "void": int(steps["void"].notna().sum()),
        "weights_off": weights,
        "values_off": float(off) / float(b["value"].abs().max()),
        "explained": float(steps["explained"].dropna().iloc[-1]),
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    device, rows, found = "cpu" if args.cpu else "cuda", data(), []
    for precision in ("no", "bf16") if args.cpu else ("no", "bf16", "fp16"):
        for name, train in {"Trainer": trainer, "Accelerate": accelerated}.items():
            try:
                row = compare(name, precision, train(rows, precision, device), rows, device)
            except Exception as error:  # the others are still of use
                row = {"loop": name, "precision": precision, "error": f"{error!r}"[:300]}
            found.append(row)
            print(json.dumps(row), flush=True)
    if args.out:
        about = {"hardware": hardware(torch.device(device)), "versions": versions(),
                 "commit": commit()}  # fmt: skip
        Path(args.out).write_text(json.dumps({**about, "rows": found}, indent=1) + "\n", "utf-8")
    return found


if __name__ == "__main__":
    main()

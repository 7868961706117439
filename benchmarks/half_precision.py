"""transformers' Trainer, Accelerate and Lightning in float16 (with a ``GradScaler``) and bfloat16,
against the same loop written out: the same training, the same values?

    python benchmarks/half_precision.py --out half-precision.json      a GPU, ~60 s
    python benchmarks/half_precision.py --cpu                           float32 and bfloat16 only

"fp16, overflow" begins with a loss scale so large that the first gradients overflow: the scaler
leaves those steps out, and so must the values.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, RandomSampler

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import inrun
from inrun.bench.machine import commit, hardware, versions

N, B, HELD_OUT, LR, CLIP = 96, 8, 16, 1e-3, 0.5
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": torch.float32}
USUAL, LARGE = 2.0**16, 2.0**27  # GradScaler's own first scale, and one that overflows
CASES = {"float32": ("no", USUAL), "bf16": ("bf16", USUAL), "fp16": ("fp16", USUAL),
         "fp16, overflow": ("fp16", LARGE)}  # fmt: skip


class Problem:
    """The rows, the validation batch and the loss in one precision on one device."""

    def __init__(self, precision, scale, device):
        self.precision, self.scale, self.device = precision, scale, device
        first = torch.randint(3, 512, (N + HELD_OUT, 1), generator=torch.Generator().manual_seed(1))
        tokens = 3 + (first + 7 * torch.arange(32)) % 509  # each token tells the next
        self.rows = [{"input_ids": t, "labels": t} for t in tokens]
        self.held_out = self.batch(range(N, N + HELD_OUT))

    def batch(self, ids):
        rows = [self.rows[i] for i in ids]
        return {k: torch.stack([r[k] for r in rows]).to(self.device) for k in rows[0]}

    def loss(self, model, batch):
        """Under autocast, as all frameworks run their model."""
        half = self.precision != "no"
        with torch.autocast(self.device, DTYPES[self.precision]) if half else nullcontext():
            return model(**batch).loss

    def model(self):
        torch.manual_seed(0)
        config = tf.LlamaConfig(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, use_cache=False, pad_token_id=0,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return tf.LlamaForCausalLM(config).to(self.device)

    def scaler(self):
        half = self.precision == "fp16"
        return torch.amp.GradScaler(self.device, init_scale=self.scale) if half else None

    def loader(self):
        sampler = RandomSampler(range(N), generator=torch.Generator().manual_seed(2))
        return DataLoader(inrun.with_ids(self.rows[:N]), B, sampler=sampler)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)


def by_hand(problem, order):
    """``order``: the ids of each batch, as the framework drew them."""
    model = problem.model()
    optimizer, scaler = adamw(model), problem.scaler() or torch.amp.GradScaler(enabled=False)
    run = inrun.watch(
        model, optimizer, validation=[problem.held_out], loss=problem.loss, max_norm=CLIP,
        scaler=scaler if scaler.is_enabled() else None,
    )  # fmt: skip
    model.train()
    for ids in order:
        batch = problem.batch(ids)
        with run.batch(ids):
            scaler.scale(problem.loss(model, batch)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.close()
    return model, run


def with_trainer(problem, watch):
    AcceleratorState._reset_state(True)  # of the training before this one
    half = {} if problem.precision == "no" else {problem.precision: True}
    args = tf.TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=B, num_train_epochs=1, learning_rate=LR,
        max_grad_norm=CLIP, weight_decay=0.0, lr_scheduler_type="constant", report_to=[], seed=2,
        save_strategy="no", disable_tqdm=True, use_cpu=problem.device == "cpu",
        optim="adamw_torch", **half,
    )  # fmt: skip
    each = tf.Trainer(
        problem.model(), args, train_dataset=problem.rows[:N], eval_dataset=problem.rows[N:],
        data_collator=tf.default_data_collator,
    )  # fmt: skip
    each.remove_callback(tf.PrinterCallback)
    if each.accelerator.scaler is not None:
        each.accelerator.scaler._init_scale = problem.scale  # no argument of the trainer's
    order = []
    if watch:
        inrun.integrations.hf.watch(each, validation=[problem.held_out], loss=problem.loss)
        own = each.training_step

        def step(model, inputs, *args):
            order.append(inputs["inrun_id"].tolist())
            return own(model, inputs, *args)

        each.training_step = step
    each.train()
    return each.model, each.inrun.run if watch else None, order


def with_accelerate(problem, watch):
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision=problem.precision, cpu=problem.device == "cpu")
    model, order, run = problem.model(), [], None
    if accelerator.scaler is not None:
        accelerator.scaler._init_scale = problem.scale
    prepared, optimizer, loader = accelerator.prepare(model, adamw(model), problem.loader())
    if watch:
        run = inrun.watch(prepared, optimizer, validation=[problem.held_out], max_norm=CLIP,
                          loss=problem.loss)  # fmt: skip
    prepared.train()
    for batch in loader:
        names, batch = inrun.take_ids(batch)
        order.append(names["ids"].tolist())
        with run.batch(**names) if watch else nullcontext():
            accelerator.backward(prepared(**batch).loss)
        accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    if watch:
        run.close()
    return model, run, order


def with_lightning(problem, watch):
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = problem.model()

        def training_step(self, batch, batch_idx):
            if inrun.ids.ID in batch:  # unwatched: nobody has taken them
                _, batch = inrun.take_ids(batch)
            return self.net(**batch).loss

        def configure_optimizers(self):
            return adamw(self)

    class Order(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            order.append(batch[inrun.ids.ID].tolist())

    order, callbacks, plugins = [], [Order()], None
    if watch:
        callbacks.append(
            inrun.integrations.lightning.Watch(
                [problem.held_out], loss=lambda module, batch: problem.loss(module.net, batch)
            )
        )
    if problem.precision != "no":
        name = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[problem.precision]
        plugins = [MixedPrecision(name, problem.device, problem.scaler())]
    module = Module()
    module.train()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu" if problem.device == "cpu" else "gpu", devices=1,
        logger=False, enable_model_summary=False, enable_checkpointing=False, plugins=plugins,
        enable_progress_bar=False, callbacks=callbacks, gradient_clip_val=CLIP,
    )  # fmt: skip
    trainer.fit(module, problem.loader())
    return module.net.to(problem.device), callbacks[-1].run if watch else None, order


LOOPS = {"Trainer": with_trainer, "Accelerate": with_accelerate, "Lightning": with_lightning}


def off(model, other):
    """The largest difference of a weight."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def compare(train, problem):
    began = time.perf_counter()
    plain, _, _ = train(problem, False)
    model, run, order = train(problem, True)
    written, twin = by_hand(problem, order)
    a, b = (r.history().sort_values(["step", "id"], ignore_index=True) for r in (run, twin))
    same_rows = a[["step", "id"]].equals(b[["step", "id"]])
    values = np.abs(a["value"] - b["value"]).max() / b["value"].abs().max() if same_rows else None
    steps = run.steps()
    return {
        "batches": len(order), "steps": int(steps["void"].isna().sum()),
        "void": int(steps["void"].notna().sum()),
        "training_unchanged": off(plain, model) == 0.0, "weights_off": off(model, written),
        "values_off": None if values is None else float(values),
        "explained": float(steps["explained"].dropna().median()),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def table(rows):
    lines = [f"{'loop':11}{'precision':16}{'steps':>6}{'same':>6}{'weights off':>13}"
             f"{'values off':>13}{'explained':>11}"]  # fmt: skip
    for row in rows:
        where = f"{row['loop']:11}{row['precision']:16}"
        if "error" in row:
            lines.append(where + row["error"][:70])
            continue
        values = "other rows" if row["values_off"] is None else f"{row['values_off']:.1e}"
        taken, same = f"{row['steps']}/{row['batches']}", str(row["training_unchanged"])
        lines.append(f"{where}{taken:>6}{same:>6}{row['weights_off']:13.1e}{values:>13}"
                     f"{row['explained']:11.4f}")  # fmt: skip
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", nargs="*", choices=LOOPS, default=[*LOOPS])
    parser.add_argument("--seconds", type=float, default=80.0, help="begin nothing after these")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", module="lightning|torch|accelerate|transformers")
    device, found, began = "cpu" if args.cpu else "cuda", [], time.perf_counter()
    about = {"hardware": hardware(torch.device(device)), "versions": versions(),
             "commit": commit()}  # fmt: skip
    for case, (precision, scale) in CASES.items():
        if args.cpu and precision == "fp16":
            continue
        for name in args.only:
            row = {"loop": name, "precision": case}
            try:
                if time.perf_counter() - began > args.seconds:
                    raise TimeoutError(f"not begun: {args.seconds:.0f} s were over")
                row |= compare(LOOPS[name], Problem(precision, scale, device))
            except Exception as error:  # the others are still of use
                row["error"] = f"{error!r}"[:1000]
            found.append(row)
            if args.out:
                text = json.dumps({**about, "rows": found}, indent=1) + "\n"
                Path(args.out).write_text(text, "utf-8")
    print(table(found), flush=True)
    return found


if __name__ == "__main__":
    main()

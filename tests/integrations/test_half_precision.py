"""bfloat16, and float16 with a ``GradScaler``, through Accelerate, the Trainer and Lightning,
against the loop written out. The libraries refuse float16 without a GPU before they do anything,
while torch has autocast and the scaler for a CPU, too: what they set on a GPU is set here.
``benchmarks/half_precision.py`` compares the same on a GPU."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import inrun
from helpers.trainers import adamw, arguments, documents, llama, padded, same_weights

tf = pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
accelerate = pytest.importorskip("accelerate", reason="needs the extra inrun[hf]")
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning"),
              pytest.mark.filterwarnings("ignore::UserWarning")]  # fmt: skip

ROWS, HELD_OUT, CLIP = documents(24, seed=1), documents(5, seed=2), 0.5
CASES = {"bf16": None, "fp16": 2.0**16, "fp16, overflow": 2.0**23}  # the first scale of the loss


@pytest.fixture(autouse=True)
def _as_people_train():
    torch.set_default_dtype(torch.float32)


def loss_in(scale):
    half = torch.bfloat16 if scale is None else torch.float16

    def loss(model, batch, **more):
        with torch.autocast("cpu", half):
            return model(**batch, **more).loss

    return loss


def scaler_of(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)


def on_a_cpu(accelerator, scale):
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = scaler_of(scale)


def by_hand(order, scale, first=None):
    """``first``: the first position whose label the Trainer counts, to divide the loss by."""
    model, loss = llama(), loss_in(scale)
    optimizer, scaler = adamw(model.parameters()), scaler_of(scale)
    run = inrun.watch(model, optimizer, validation=[padded(HELD_OUT)], loss=loss, max_norm=CLIP,
                      scaler=scaler if scale else None)  # fmt: skip
    model.train()
    for ids in order:
        batch = padded([ROWS[i] for i in ids])
        by = (
            {}
            if first is None
            else {"num_items_in_batch": (batch["labels"][:, first:] != -100).sum()}
        )
        with run.batch(ids):
            scaler.scale(loss(model, batch, **by)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.close()
    return model, run


def accelerated(scale, watch=True):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=None if scale else "bf16")
    if scale:
        on_a_cpu(accelerator, scale)
    model, order = llama(), []
    loader = DataLoader(inrun.with_ids(ROWS), 4, collate_fn=inrun.carry_ids(padded))
    prepared, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), loader)
    if watch:
        run = inrun.watch(prepared, optimizer, validation=[padded(HELD_OUT)], max_norm=CLIP,
                          loss=loss_in(scale))  # fmt: skip
    prepared.train()
    for batch in loader:
        names, batch = inrun.take_ids(batch)
        order.append(names["ids"].tolist())
        if watch:
            run.begin(**names)
        accelerator.backward(prepared(**batch).loss)
        if watch:
            run.end()
        accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    if not watch:
        return model
    run.close()
    return model, run, order


def trained(scale, watch=True):
    args = arguments(tf.TrainingArguments, lr_scheduler_type="constant", optim="adamw_torch",
                     bf16=scale is None)  # fmt: skip
    each = tf.Trainer(model=llama(), args=args, train_dataset=ROWS, eval_dataset=HELD_OUT,
                      data_collator=padded)  # fmt: skip
    if scale:
        on_a_cpu(each.accelerator, scale)
    order, first = [], int(getattr(each, "_loss_shifts_labels", False))  # transformers 4: all
    if watch:
        inrun.integrations.hf.watch(each, validation=[padded(HELD_OUT)], loss=loss_in(scale))
        own = each.training_step

        def step(model, inputs, *args):
            order.append(inputs["inrun_id"].tolist())
            return own(model, inputs, *args)

        each.training_step = step
    each.train()
    return (each.model, each.inrun.run, order, first) if watch else each.model


def with_lightning(scale, watch=True):
    pl = pytest.importorskip("lightning.pytorch", reason="needs the extra inrun[lightning]")
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = llama()

        def training_step(self, batch, batch_idx):
            return self.net(**batch).loss

        def configure_optimizers(self):
            return adamw(self.parameters())

    order = [list(range(k, k + 4)) for k in range(0, 24, 4)]
    found = [
        inrun.integrations.lightning.Watch(
            [padded(HELD_OUT)], loss=lambda module, batch: loss_in(scale)(module.net, batch)
        )
    ]
    module = Module()
    module.train()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_model_summary=False,
        enable_checkpointing=False, enable_progress_bar=False, gradient_clip_val=CLIP,
        callbacks=found if watch else [],
        plugins=[MixedPrecision("16-mixed", "cpu", scaler_of(scale)) if scale
                 else MixedPrecision("bf16-mixed", "cpu")],
    )  # fmt: skip
    rows, collate = (inrun.with_ids(ROWS), inrun.carry_ids(padded)) if watch else (ROWS, padded)
    trainer.fit(module, DataLoader(rows, 4, collate_fn=collate))
    return (module.net, found[0].run, order) if watch else module.net


LOOPS = {"Accelerate": accelerated, "Trainer": trained, "Lightning": with_lightning}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LOOPS)
def test_half_precision_is_the_loop_written_out(name, case):
    """An overflow leaves the step out, so its examples have no value of it."""
    train, scale = LOOPS[name], CASES[case]
    plain = train(scale, watch=False)
    model, run, *how = train(scale)
    assert same_weights(plain, model)
    written, twin = by_hand(how[0], scale, *how[1:])
    assert same_weights(written, model)
    steps = run.steps()["void"].isna().sum()
    assert 0 < steps < 6 if "overflow" in case else steps == 6
    a, b = (r.history().sort_values(["step", "id"], ignore_index=True) for r in (run, twin))
    assert a[["step", "id"]].equals(b[["step", "id"]]) and len(a) == 4 * steps
    size = b["value"].abs().max()
    assert size > 0
    np.testing.assert_allclose(a["value"], b["value"], rtol=1e-6, atol=1e-6 * size)

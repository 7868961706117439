"""A ``Trainer`` in one of several processes, as ``accelerate launch`` and ``torchrun`` start it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from helpers.trainers import arguments, documents, llama, padded

ROWS, HELD_OUT = documents(14, seed=1), documents(5, seed=2)


def model_loss(model, batch):
    return model(**batch).loss


def work(rank, world, folder):
    """Trains unwatched, watched in memory, watched with a ledger, and that resumed half-way."""
    warnings.simplefilter("ignore")  # the libraries' own
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    import transformers as tf

    import inrun

    def trainer(name, **options):
        usual = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
                 "output_dir": str(Path(folder) / name), "ddp_backend": "gloo"}  # fmt: skip
        args = arguments(tf.TrainingArguments, **usual | options)
        assert args.world_size == world
        return tf.Trainer(
            model=llama(), args=args, train_dataset=ROWS, eval_dataset=HELD_OUT,
            data_collator=padded,
        )  # fmt: skip

    plain = trainer("plain")
    plain.train()
    watched = trainer("watched")
    inrun.integrations.hf.watch(watched, validation=[padded(HELD_OUT)], loss=model_loss)
    order, own = [], watched.training_step  # the ids of each micro-batch of this rank

    def step(model, inputs, *args):
        order.append(inputs["inrun_id"].tolist())
        return own(model, inputs, *args)

    watched.training_step = step
    watched.train()
    saved = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2}
    whole = trainer("whole", **saved)
    inrun.integrations.hf.watch(whole, out=Path(folder) / "ledger")
    whole.train()
    again, whole_history = whole, inrun.open(Path(folder) / "ledger").history()
    again.accelerator.wait_for_everyone()
    if int(tf.__version__.split(".")[0]) >= 5:  # 4.57 cannot: torch.load to the device "cpu:0"
        again = trainer("whole", **saved)
        inrun.integrations.hf.watch(again, out=Path(folder) / "ledger")
        again.train(resume_from_checkpoint=str(Path(folder) / "whole/checkpoint-2"))

    def weights(each):
        return [p.tolist() for p in each.model.parameters()]

    run = watched.inrun
    return {
        "wrapped": type(watched.model_wrapped).__name__,
        "plain": weights(plain), "watched": weights(watched),
        "whole": weights(whole), "again": weights(again), "whole history": whole_history,
        "order": order, "history": run.history(), "void": run.steps()["void"].tolist(),
        "sums": run.steps()["sum"].tolist(),
        "first": getattr(watched, "_loss_shifts_labels", False),
    }  # fmt: skip

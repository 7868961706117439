"""A ``Trainer`` in one of several processes. As a script, for ``accelerate launch``, it writes what
each rank found into ``rank-K.pickle`` in the folder that it is given."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from pathlib import Path

from helpers.trainers import arguments, documents, llama, padded

ROWS, HELD_OUT = documents(14, seed=1), documents(5, seed=2)


def model_loss(model, batch):
    return model(**batch).loss


def launched(rank, world, folder):
    """:func:`values` in a process that no launcher has told about the others."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    return values(folder)


def trainer(folder, name, **options):
    import transformers as tf

    usual = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
             "output_dir": str(Path(folder) / name), "ddp_backend": "gloo"}  # fmt: skip
    args = arguments(tf.TrainingArguments, **usual | options)
    assert args.world_size == int(os.environ["WORLD_SIZE"])
    return tf.Trainer(
        model=llama(), args=args, train_dataset=ROWS, eval_dataset=HELD_OUT, data_collator=padded
    )


def weights(each):
    return [p.tolist() for p in each.model.parameters()]


def values(folder):
    """Trains unwatched and watched."""
    import inrun

    warnings.simplefilter("ignore")  # the libraries' own
    plain = trainer(folder, "plain")
    plain.train()
    watched = trainer(folder, "watched")
    inrun.integrations.hf.watch(watched, validation=[padded(HELD_OUT)], loss=model_loss)
    order, own = [], watched.training_step  # the ids of each micro-batch of this rank

    def step(model, inputs, *args):
        order.append(inputs["inrun_id"].tolist())
        return own(model, inputs, *args)

    watched.training_step = step
    watched.train()
    run = watched.inrun
    return {
        "wrapped": type(watched.model_wrapped).__name__,
        "plain": weights(plain), "watched": weights(watched),
        "order": order, "history": run.history(), "void": run.steps()["void"].tolist(),
        "sums": run.steps()["sum"].tolist(),
        "first": getattr(watched, "_loss_shifts_labels", False),
    }  # fmt: skip


def resumed(folder):
    """Trains watched with a ledger, and resumes that half-way."""
    import transformers as tf

    import inrun

    saved = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2}
    whole = trainer(folder, "whole", **saved)
    inrun.integrations.hf.watch(whole, out=Path(folder) / "ledger")
    whole.train()
    again, history = whole, inrun.open(Path(folder) / "ledger").history()
    again.accelerator.wait_for_everyone()
    if int(tf.__version__.split(".")[0]) >= 5:  # 4.57 cannot: torch.load to the device "cpu:0"
        again = trainer(folder, "whole", **saved)
        inrun.integrations.hf.watch(again, out=Path(folder) / "ledger")
        again.train(resume_from_checkpoint=str(Path(folder) / "whole/checkpoint-2"))
    return {"whole": weights(whole), "again": weights(again), "whole history": history}


if __name__ == "__main__":
    import torch

    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    found = values(sys.argv[1]) | resumed(sys.argv[1])
    with (Path(sys.argv[1]) / f"rank-{os.environ['RANK']}.pickle").open("wb") as file:
        pickle.dump(found, file)

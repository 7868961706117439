"""transformers' Trainer: its training bit for bit, and the values of the same loop written out."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

import inrun
from helpers.trainers import (
    arguments,
    by_hand,
    documents,
    llama,
    padded,
    per_token,
    same_weights,
    sgd,
    with_lora,
)

tf = pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
pytest.importorskip("accelerate", reason="needs the extra inrun[hf]")
# transformers' own: some versions of it use what torch and Python have deprecated
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning"),
              pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")]  # fmt: skip

ROWS, HELD_OUT = documents(14, seed=1), documents(5, seed=2)


def trainer(model=llama, kind=None, rows=ROWS, collate=padded, **options):
    args = arguments(tf.TrainingArguments, gradient_accumulation_steps=2, **options)
    return (kind or tf.Trainer)(
        model=model(), args=args, train_dataset=rows, eval_dataset=HELD_OUT, data_collator=collate
    )


def micro_batches(run, accumulation=2):
    """The ids of each micro-batch of each step, in the order in which they came."""
    steps = run.history().groupby("step", sort=True)["id"].apply(list).tolist()
    return [[ids[k : k + 4] for k in range(0, len(ids), 4)] for ids in steps]


def close(found, wanted, rel=1e-9):
    a, b = (r.history().sort_values(["step", "id"], ignore_index=True) for r in (found, wanted))
    assert a["id"].tolist() == b["id"].tolist()
    scale = np.abs(b["value"]).max()
    np.testing.assert_allclose(a["value"], b["value"], rtol=rel, atol=rel * scale)


class Loss:
    """``model(**batch).loss`` of the padded validation batch."""

    def __call__(self, model, batch):
        return model(**batch).loss


def smoothed(model, batch, tokens):
    smoother = tf.trainer_pt_utils.LabelSmoother(epsilon=0.1)
    labels = batch.pop("labels")
    by = {"num_items_in_batch": tokens}  # transformers 4 takes the mean of each micro-batch
    by = by if "num_items_in_batch" in inspect.signature(smoother.__call__).parameters else {}
    return smoother(model(**batch), labels, shift_labels=True, **by)


class Noised:
    """NEFTune by hand: noise on the embeddings, drawn as it was in the trainer."""

    def __init__(self, model, state):
        self.state = state
        model.get_input_embeddings().register_forward_hook(self.noise)

    @staticmethod
    def noise(module, args, found):  # [B, T, D]
        size = 5.0 / found[0].numel() ** 0.5
        return found + torch.zeros_like(found).uniform_(-size, size) if module.training else None

    def __call__(self, model, batch, tokens):
        if self.state is not None:
            torch.set_rng_state(self.state)
        self.state = None
        return per_token(model, batch, tokens)


CASES = {
    "plain": {},
    "lora": {"model": with_lora},
    "checkpointed": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True,
                  "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "two epochs": {"num_train_epochs": 2},
    "workers": {"dataloader_num_workers": 1},
    "noise": {"neftune_noise_alpha": 5.0},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "evaluated and saved": {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps",
                            "save_steps": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_loop_written_out(name):
    options = CASES[name]
    plain = trainer(**options)
    plain.train()
    watched = trainer(**options)
    inrun.integrations.hf.watch(watched, validation=[padded(HELD_OUT)], loss=Loss())
    drawn, own = [], watched.training_step

    def step(*args):
        drawn.append(torch.get_rng_state())
        return own(*args)

    watched.training_step = step
    watched.train()
    assert same_weights(plain.model, watched.model)
    run = watched.inrun
    assert run.steps()["void"].isna().all() and sorted(run.values()["id"]) == list(range(14))
    model = options.get("model", llama)()
    loss = smoothed if name == "label smoothing" else None
    if name == "noise":
        loss = Noised(model, drawn[0])
    first = int(getattr(watched, "_loss_shifts_labels", False))  # before transformers 5: 0
    twin = by_hand(
        model, ROWS, padded(HELD_OUT), micro_batches(run), loss, first,
        make=sgd if name == "sgd" else None,
    )  # fmt: skip
    close(run, twin)
    for a, b in zip(model.parameters(), watched.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_compiled():
    """Unclipped: the norms of single gradients, which clipping asks for, are estimated otherwise.
    Before transformers 5 the causal mask is made inside vmap, which is refused."""
    plain = trainer(max_grad_norm=0.0)
    inrun.integrations.hf.watch(plain)
    plain.train()  # before the other is made: trainers share what Accelerate has been told
    watched = trainer(max_grad_norm=0.0, torch_compile=True, torch_compile_backend="eager")
    inrun.integrations.hf.watch(watched)
    if int(tf.__version__.split(".")[0]) < 5:
        with (
            pytest.raises(inrun.CaptureError, match=r"inside a transformation of torch\.func"),
            pytest.warns(UserWarning, match="cannot score inside this compiled graph"),
        ):
            watched.train()
        return
    watched.train()
    assert type(watched.model_wrapped).__name__ == "OptimizedModule"
    close(watched.inrun, plain.inrun)


def test_padding_free_rows_have_the_values_of_padded_ones():
    # unclipped: the norms of single gradients, which clipping asks for, are estimated otherwise
    rows = [{**r, "labels": [-100, *r["labels"][1:]]} for r in ROWS]  # as flattening has them
    usual = {"rows": rows, "max_grad_norm": 0.0}
    flat = usual | {"collate": tf.DataCollatorWithFlattening()}
    plain, unwatched, watched = trainer(**usual), trainer(**flat), trainer(**flat)
    unwatched.train()
    for each in (plain, watched):
        inrun.integrations.hf.watch(each, validation=[padded(HELD_OUT)], loss=Loss())
        each.train()
    assert same_weights(unwatched.model, watched.model)
    close(watched.inrun, plain.inrun)


def test_sequence_to_sequence():
    config = tf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                         dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=2)  # fmt: skip

    def model():
        torch.manual_seed(0)
        return tf.T5ForConditionalGeneration(config).to(torch.get_default_dtype())

    made = []
    for watch in (False, True):
        args = arguments(tf.Seq2SeqTrainingArguments, predict_with_generate=True)
        each = tf.Seq2SeqTrainer(model=model(), args=args, train_dataset=ROWS,
                                 eval_dataset=HELD_OUT, data_collator=padded)  # fmt: skip
        if watch:
            inrun.integrations.hf.watch(each, validation=[padded(HELD_OUT)], loss=Loss())
        each.train()
        made.append(each)
    # one unit in the last place: this trainer, unwatched, differs from itself by as much
    for a, b in zip(made[0].model.parameters(), made[1].model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)
    run = made[1].inrun
    assert run.steps()["void"].isna().all()
    assert run.steps()["explained"].iloc[0] == pytest.approx(1, abs=0.05)
    steps = micro_batches(run)
    twin = by_hand(model(), ROWS, padded(HELD_OUT), steps, lambda m, batch, n: m(**batch).loss)
    close(run, twin)


def test_resumed_from_a_checkpoint(tmp_path):
    def made(name, out):
        each = trainer(num_train_epochs=3, save_strategy="steps", save_steps=2, eval_steps=2,
                       eval_strategy="steps", output_dir=str(tmp_path / name))  # fmt: skip
        inrun.integrations.hf.watch(each, out=out)
        return each

    whole = made("whole", tmp_path / "ledger-whole")
    whole.train()
    for out in (tmp_path / "ledger", None):
        first = made(f"parts-{out is None}", out)

        class Stop(tf.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_training_stop = state.global_step == 3

        first.add_callback(Stop())
        first.train()
        assert (
            first.inrun.step == 3
            and (Path(first.args.output_dir) / "checkpoint-2/inrun.pt").is_file()
        )
        again = made(f"parts-{out is None}", out)
        again.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-2"))
        assert same_weights(whole.model, again.model)
        close(again.inrun, whole.inrun, rel=0)
    assert (tmp_path / "ledger/report.html").is_file()
    assert len(inrun.open(tmp_path / "ledger").values()) == 14


def test_resumed_where_nothing_was_watched(tmp_path):
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1,
               "output_dir": str(tmp_path)}  # fmt: skip
    trainer(**options, max_steps=2).train()
    again = trainer(**options)
    inrun.integrations.hf.watch(again)
    with pytest.warns(UserWarning, match="was saved without inrun"):
        again.train(resume_from_checkpoint=True)
    assert again.inrun.step == 2


def test_what_the_trainer_logs(tmp_path, capsys):
    each = trainer(eval_strategy="epoch")
    inrun.integrations.hf.watch(each, audit_every=1)
    each.train()
    logged = [x for x in each.state.log_history if "loss" in x]
    steps = each.inrun.steps()
    assert [x["inrun_sum"] for x in logged] == pytest.approx(steps["sum"].cumsum().tolist())
    assert logged[-1]["inrun_explained"] == pytest.approx(each.inrun.tally.explained)
    assert logged[0]["inrun_validation_loss"] == pytest.approx(steps["loss"].iloc[0])
    assert not any("inrun_sum" in x for x in each.state.log_history if "eval_loss" in x)
    assert "inrun_explained" in capsys.readouterr().out


def test_the_progress_bar_shows_the_values_and_the_report_is_there_at_the_end(tmp_path, capsys):
    each = trainer(disable_tqdm=False)
    inrun.integrations.hf.watch(each, out=tmp_path)
    there = []

    class Last(tf.TrainerCallback):
        def on_train_end(self, *args, **kwargs):  # after inrun's, which was added before
            there.append((tmp_path / "report.html").is_file())

    each.add_callback(Last())
    [bar] = [c for c in each.callback_handler.callbacks if isinstance(c, tf.ProgressCallback)]
    shown, own = [], bar.on_log

    def on_log(*args, logs=None, **kwargs):
        shown.append(logs)
        return own(*args, logs=logs, **kwargs)

    bar.on_log = on_log
    each.train()
    assert there == [True]
    steps = each.inrun.steps()
    assert [x["inrun_sum"] for x in shown if "loss" in x] == pytest.approx(
        steps["sum"].cumsum().tolist()
    )
    assert "inrun_sum" in capsys.readouterr().out
    assert each.inrun.values()["value"].sum() == pytest.approx(steps["sum"].sum())


def test_several_evaluation_sets_are_targets():
    each = trainer()
    each.eval_dataset = {"first": HELD_OUT[:2], "second": HELD_OUT[2:]}
    inrun.integrations.hf.watch(each)
    each.train()
    assert {"first", "second"} <= {*each.inrun.values().columns}


def test_rows_may_be_given_as_a_list():
    found = []
    for options in ({}, {"validation": HELD_OUT}):
        watched = trainer()
        if options:
            watched.eval_dataset = None
        run = inrun.integrations.hf.watch(watched, **options)
        watched.train()
        found.append(run.history())
    assert found[0].equals(found[1])


def test_the_trainer_is_as_it_was_when_it_is_let_go():
    each = trainer()
    before = {*vars(each)}, [type(c) for c in each.callback_handler.callbacks]
    watched = inrun.integrations.hf.watch(each)
    assert "waits for trainer.train()" in repr(watched)
    with pytest.raises(AttributeError, match=r"begins with trainer.train\(\)"):
        watched.values()
    watched.detach()
    del each.inrun
    assert before == ({*vars(each)}, [type(c) for c in each.callback_handler.callbacks])
    each.train()
    inrun.integrations.hf.watch(each)
    second = inrun.integrations.hf.watch(each)  # replaces the first
    each.train()
    assert len(second.values()) == 14


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(TypeError, match="takes a Trainer of transformers"):
        inrun.integrations.hf.watch(llama())
    each = trainer()
    each.eval_dataset = None
    with pytest.raises(inrun.ValidationError, match="no validation data"):
        inrun.integrations.hf.watch(each)
    with pytest.raises(inrun.ValidationError, match="not both"):
        inrun.integrations.hf.watch(each, validation=HELD_OUT, targets={"a": HELD_OUT})


def test_an_error_in_training_closes_the_run():
    each = trainer()
    watched = inrun.integrations.hf.watch(each)
    own = each.compute_loss

    def fails(*args, **kwargs):
        if watched.run.step and each.model.training:
            raise KeyError("mine")
        return own(*args, **kwargs)

    each.compute_loss = fails
    with pytest.raises(KeyError, match="mine"):
        each.train()
    assert watched.step == 1 and len(watched.values()) == 8
    with pytest.raises(inrun.BatchError, match="closed"), watched.run.batch([1]):
        pass

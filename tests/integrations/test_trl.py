"""TRL's trainers, with the losses they have by default: the training and its logs as without inrun,
values for each document and each pair."""

import pytest
import torch

import inrun
from helpers.trainers import arguments, documents, llama, same_weights, with_lora

pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
datasets = pytest.importorskip("datasets", reason="needs the extra inrun[trl]")
trl = pytest.importorskip("trl", reason="needs the extra inrun[trl]")
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning"),
              pytest.mark.filterwarnings("ignore::UserWarning")]  # fmt: skip

ROWS = documents(14, seed=1)


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<bos>": 0, "<eos>": 1, "<pad>": 2, **{f"w{i}": i for i in range(3, 50)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def sft(tokenizer, model=llama, rows=ROWS, **options):
    options = {"max_grad_norm": 0.0, "bf16": False, "gradient_checkpointing": False} | options
    return trl.SFTTrainer(
        model=model(), args=arguments(trl.SFTConfig, **options), processing_class=tokenizer,
        train_dataset=inrun.with_ids(datasets.Dataset.from_list(rows)),
        eval_dataset=datasets.Dataset.from_list(ROWS[:5]),
    )  # fmt: skip


def dpo(tokenizer, model=llama, **options):
    options = {"bf16": False, "gradient_checkpointing": False} | options
    return trl.DPOTrainer(
        model=model(), ref_model=llama() if model is llama else None, processing_class=tokenizer,
        args=arguments(trl.DPOConfig, **options),
        train_dataset=inrun.with_ids(datasets.Dataset.from_list(_texts())),
        eval_dataset=datasets.Dataset.from_list(_texts()[:4]),
    )  # fmt: skip


def _texts():
    rows = [("w3 w4", f" w{5 + i} w7", f" w{30 + i} w8 w9") for i in range(8)]
    return [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in rows]


def logged(trainer):
    drop = ("inrun", "train_runtime", "eval_runtime")
    return [
        {k: x for k, x in entry.items() if not k.startswith(drop) and "per_second" not in k}
        for entry in trainer.state.log_history
    ]


def pair(make, tokenizer, **options):
    """A trainer that was trained, and one that was watched; its run."""
    plain = make(tokenizer, **options)
    plain.train()
    watched = make(tokenizer, **options)
    inrun.integrations.hf.watch(watched)
    watched.train()
    assert same_weights(plain.model, watched.model)
    assert logged(plain) == logged(watched)  # also the metrics that TRL collects in its loss
    steps = watched.inrun.steps()
    assert steps["void"].isna().all()
    assert steps["explained"].iloc[0] == pytest.approx(1, abs=0.05)
    return watched.inrun


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, {"loss_type": "dft"},
     {"model": with_lora}, {"eval_strategy": "steps", "eval_steps": 1}],
    ids=["default", "checkpointed", "dft", "lora", "evaluated"],
)  # fmt: skip
def test_supervised(tokenizer, options):
    run = pair(sft, tokenizer, **options)
    assert sorted(run.values()["id"]) == list(range(14))


def test_only_completions_count(tokenizer):
    rows = [{**r, "labels": [-100, -100, *r["labels"][2:]]} for r in ROWS]
    run = pair(sft, tokenizer, rows=rows)
    assert len(run.values()) == 14


def test_packed_and_padding_free_documents_have_the_values_of_padded_ones(tokenizer):
    """One step over all documents, so that it is the same step however they lie. Of SGD: TRL's loss
    is computed in float32, and Adam's first step divides by the sizes of gradients."""
    whole = {"per_device_train_batch_size": 14, "optim": "sgd", "learning_rate": 0.1}
    padded = pair(sft, tokenizer, **whole).values().set_index("id")["value"]
    flat = pair(sft, tokenizer, padding_free=True, max_length=None, **whole).values()
    within = {"rel": 1e-6, "abs": 1e-6 * padded.abs().max()}
    assert flat.set_index("id")["value"].tolist() == pytest.approx(padded.tolist(), **within)
    packed = pair(sft, tokenizer, packing=True, eval_packing=False, max_length=24, **whole).values()
    found = packed.set_index("id")["value"]
    for i, row in enumerate(ROWS):
        value = found[inrun.row_id(row["input_ids"])]
        assert value == pytest.approx(padded[i], **within)


@pytest.mark.parametrize(
    "options", [{}, {"precompute_ref_log_probs": True}, {"model": with_lora}],
    ids=["default", "precomputed", "lora"],
)  # fmt: skip
def test_preferences(tokenizer, options):
    torch.set_default_dtype(torch.float32)
    run = pair(dpo, tokenizer, **options)
    assert sorted(run.values()["id"]) == list(range(8))


def test_text_that_was_not_prepared_is_refused(tokenizer):
    trainer = sft(tokenizer)
    text = datasets.Dataset.from_list([{"text": "w3"}])
    with pytest.raises(inrun.ValidationError, match="give it to the trainer as eval_dataset="):
        inrun.integrations.hf.watch(trainer, validation=text)

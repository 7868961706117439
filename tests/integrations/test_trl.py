"""TRL's trainers, with the losses they have by default: the training and its logs as without inrun,
values for each document and each pair."""

import numpy as np
import pandas as pd
import pytest
import torch

import inrun
from helpers.trainers import (
    adamw,
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


def by_step(run):
    return run.history().groupby(["step", "id"])["value"].sum()


def in_steps(run):
    """The ids of each micro-batch of 4 of each step, in the order in which they came."""
    rows = run.history().groupby("step", sort=True)["id"].apply(list).tolist()
    return [[ids[k : k + 4] for k in range(0, len(ids), 4)] for ids in rows]


def same_values(found, wanted, rel):
    a, b = by_step(found), by_step(wanted)
    assert a.index.equals(b.index)
    np.testing.assert_allclose(a, b, rtol=rel, atol=rel * b.abs().max())


@pytest.mark.parametrize("own_loss", [True, False])
def test_supervised_is_the_loop_written_out(tokenizer, own_loss):
    """A linear schedule, clipping, accumulation, the mean over the tokens of a step. With TRL's own
    loss: AdamW, to 1e-9. With the model's: SGD, to 1e-6, since TRL's is computed in float32."""
    held_out, how = [padded(ROWS[:5])], {} if own_loss else {"optim": "sgd", "learning_rate": 0.1}
    trainer = sft(tokenizer, gradient_accumulation_steps=2, max_grad_norm=0.5, **how)
    inrun.integrations.hf.watch(trainer, validation=held_out, loss=lambda m, b: m(**b).loss)
    trainer.train()
    run, other = trainer.inrun, sft(tokenizer, gradient_accumulation_steps=2)

    def loss(model, batch, tokens):
        return other.compute_loss(model, batch, num_items_in_batch=tokens)

    model = other.model if own_loss else llama()
    twin = by_hand(
        model, ROWS, held_out[0], in_steps(run), loss if own_loss else None,
        int(getattr(trainer, "_loss_shifts_labels", False)), adamw if own_loss else sgd,
    )  # fmt: skip
    close = 1e-9 if own_loss else 1e-6
    same_values(run, twin, close)
    for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=1e-12 if own_loss else 1e-8)


CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w4 {% generation %}"
    "{{ m['content'] }} <eos>{% endgeneration %} {% else %}w3 {{ m['content'] }} <eos> {% endif %}"
    "{% endfor %}"
)


def conversation(i):
    """The words of two turns and of two answers."""
    return [f"w{10 + i} w6", f"w{20 + i} w{i + 5}", f"w7 w{11 + i} w8", f"w{30 + i}"]


def only(kind, i):
    """A row for the trainer, and its tokens and labels by hand."""
    first, answer, second, last = conversation(i)

    def tokens(*words):
        known = {"<eos>": 1} | {f"w{k}": k for k in range(3, 50)}
        return [known[w] for text in words for w in text.split()]

    if kind == "completion":
        prompt, rest = tokens(first), tokens(answer, "<eos>")
        row = {"prompt": first, "completion": f" {answer}"}
        return row, prompt + rest, [-100] * len(prompt) + rest
    said = zip(["user", "assistant"] * 2, conversation(i), strict=True)
    asked, then = tokens("w3", first, "<eos>", "w4"), tokens("w3", second, "<eos>", "w4")
    parts = [(asked, False), (tokens(answer, "<eos>"), True),
             (then, False), (tokens(last, "<eos>"), True)]  # fmt: skip
    row = {"messages": [{"role": role, "content": text} for role, text in said]}
    return (
        row,
        [t for part, _ in parts for t in part],
        [t if counts else -100 for part, counts in parts for t in part],
    )


@pytest.mark.parametrize("kind", ["assistant", "completion"])
def test_only_answers_count(tokenizer, kind):
    """``assistant_only_loss`` and ``completion_only_loss``: the loop over tokens and labels that
    were written by hand. A loss over all tokens is another one."""
    tokenizer.chat_template = CHAT
    made = [only(kind, i) for i in range(14)]
    data = inrun.with_ids(datasets.Dataset.from_list([row for row, _, _ in made]))
    rows = [{"input_ids": tokens, "labels": labels} for _, tokens, labels in made]
    held_out, trained = padded(rows[:5]), []
    for watch in (False, True):
        args = arguments(
            trl.SFTConfig, bf16=False, gradient_checkpointing=False, optim="sgd", learning_rate=0.1,
            gradient_accumulation_steps=2, **{f"{kind}_only_loss": True},
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model=llama(), args=args, processing_class=tokenizer, train_dataset=data,
            eval_dataset=data.select(range(5)),
        )  # fmt: skip
        if watch:
            inrun.integrations.hf.watch(trainer)  # by the eval_dataset, as TRL has prepared it
        trainer.train()
        trained.append(trainer)
    assert same_weights(*(t.model for t in trained)) and logged(trained[0]) == logged(trained[1])
    run, first = trainer.inrun, int(getattr(trainer, "_loss_shifts_labels", False))
    model = llama()
    twin = by_hand(model, rows, held_out, in_steps(run), first=first, make=sgd)
    same_values(run, twin, 1e-6)
    for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    everything = [{**row, "labels": row["input_ids"]} for row in rows]
    other = by_hand(llama(), everything, held_out, in_steps(run), first=first, make=sgd)
    with pytest.raises(AssertionError):
        same_values(run, other, 1e-2)


def test_packed_and_padding_free_documents_have_the_values_of_padded_ones(tokenizer):
    """One step over all documents, so that it is the same step however they lie. Of SGD: TRL's loss
    is computed in float32, and Adam's first step divides by the sizes of gradients. First tokens
    have no label, as in flattened rows: transformers 4 counts those of padded rows otherwise."""
    rows = [{**r, "labels": [-100, *r["labels"][1:]]} for r in ROWS]
    whole = {"per_device_train_batch_size": 14, "optim": "sgd", "learning_rate": 0.1, "rows": rows}
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


def test_packed_documents_have_the_ids_of_their_rows(tokenizer):
    words = [" ".join(f"w{t}" for t in row["input_ids"]) for row in ROWS]
    texts = [{"text": text} for text in [*words, words[3]]]  # the last is a copy
    data = inrun.with_ids(datasets.Dataset.from_list(texts), ids=[f"doc {i}" for i in range(15)])
    options = {"packing": True, "eval_packing": False, "max_length": 24, "bf16": False,
               "gradient_checkpointing": False, "optim": "sgd", "learning_rate": 0.1}  # fmt: skip

    def values(documents, **more):
        trainer = trl.SFTTrainer(
            model=llama(), args=arguments(trl.SFTConfig, **options | more), train_dataset=data,
            eval_dataset=data.select(range(3)), processing_class=tokenizer,
        )  # fmt: skip
        inrun.integrations.hf.watch(trainer, documents=documents)
        assert trainer.args.max_length == (options | more)["max_length"]
        trainer.train()
        return trainer.inrun.values().set_index("id")["value"]

    named, hashed = values(data), values(None)
    assert sorted(named.index) == sorted(f"doc {i}" for i in range(14))  # a copy is its original
    for i, row in enumerate(ROWS):
        assert named[f"doc {i}"] == hashed[inrun.row_id([*row["input_ids"], 1])]  # with <eos>
    split = values(data, packing_strategy="bfd_split", max_length=6)
    assert sorted(split.index) == sorted(named.index)  # the pieces of a document add up
    pieces = values(None, packing_strategy="bfd_split", max_length=6)
    assert len(pieces) > 14 and split.sum() == pytest.approx(pieces.sum(), rel=1e-9)
    with pytest.raises(inrun.BatchError, match="none of documents="):
        values(data.select(range(5)))
    with pytest.raises(ValueError, match="where nothing is packed"):
        values(data, packing=False)


WRAPPED = {"packing": True, "packing_strategy": "wrapped", "eval_packing": False, "max_length": 8,
           "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant",
           "per_device_train_batch_size": 100}  # fmt: skip


def wrapped(tokenizer, documents, **options):
    trainer = sft(tokenizer, **WRAPPED | options)
    inrun.integrations.hf.watch(trainer, documents=documents, validation=[padded(ROWS[:5])],
                                loss=lambda m, b: m(**b).loss)  # fmt: skip
    return trainer


@pytest.mark.parametrize("flat", [False, True], ids=["rows", "flat"])
def test_documents_cut_anywhere_have_the_values_of_their_pieces(tokenizer, flat):
    """One step of SGD over rows of 8 tokens: the joined documents, cut by hand."""
    data = inrun.with_ids(datasets.Dataset.from_list(ROWS), ids=[f"doc {i}" for i in range(14)])
    flat = {"padding_free": True} if flat else {}
    plain = sft(tokenizer, shuffle_dataset=False, **WRAPPED | flat)
    plain.train()
    trainer = wrapped(tokenizer, data, shuffle_dataset=False, **flat)
    assert trainer.args.max_length == 8 and not trainer.args.shuffle_dataset
    trainer.train()
    assert same_weights(plain.model, trainer.model) and trainer.inrun.step == 1
    joined = [t for row in ROWS for t in row["input_ids"]]
    owner = [i for i, row in enumerate(ROWS) for _ in row["input_ids"]]
    rows = [joined[k : k + 8] for k in range(0, len(joined), 8)]
    assert {*map(len, rows)} == {8, len(joined) % 8} and len(joined) % 8
    batch = padded([{"input_ids": r, "labels": [-100, *r[1:]] if flat else r} for r in rows])
    whose = torch.tensor(owner + [-1] * (-len(joined) % 8)).view(-1, 8)
    model, held_out = llama(), padded(ROWS[:5])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = inrun.watch(model, optimizer, validation=[held_out])
    first = int(getattr(trainer, "_loss_shifts_labels", False))  # before transformers 5: 0
    tokens = (batch["labels"][:, first:] != -100).sum()
    with twin.batch([f"doc {i}" for i in range(14)], owner=whose):
        per_token(model, batch, tokens).backward()
    optimizer.step()
    twin.close()
    same_values(trainer.inrun, twin, 1e-6)
    for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_the_pieces_of_documents_are_found_where_the_trainer_shuffles(tokenizer):
    texts = [{"text": " ".join(f"w{t}" for t in row["input_ids"])} for row in ROWS]
    data = datasets.Dataset.from_list([*texts, texts[3]])  # a copy is a row of its own
    trainer = trl.SFTTrainer(
        model=llama(), args=arguments(trl.SFTConfig, bf16=False, gradient_checkpointing=False,
        shuffle_dataset=True, **WRAPPED), processing_class=tokenizer, train_dataset=data,
        eval_dataset=data.select(range(2)),
    )  # fmt: skip
    watched = inrun.integrations.hf.watch(trainer, documents=data)
    rows = [torch.tensor(r) for r in trainer.train_dataset["input_ids"]]
    pieces = dict.fromkeys(range(15), 0)
    for r, tokens in enumerate(rows):
        found = watched._documents.of({"ids": torch.tensor([r])}, {"input_ids": tokens[None]})
        assert found["owner"].shape == (1, len(tokens)) and found["owner"].min() == 0
        for k, i in enumerate(found["ids"]):
            own = " " + " ".join(str(t) for t in tokens[found["owner"][0] == k].tolist()) + " "
            whole = [*ROWS[3 if i == 14 else i]["input_ids"], 1]  # with <eos>
            assert own in " " + " ".join(map(str, whole)) + " "
            pieces[i] += (found["owner"] == k).sum().item()
    assert pieces == {i: len(ROWS[3 if i == 14 else i]["input_ids"]) + 1 for i in range(15)}
    trainer.train()
    assert sorted(trainer.inrun.values()["id"]) == list(range(15))


def test_rows_cut_anywhere_are_refused_without_their_documents(tokenizer):
    with pytest.raises(ValueError, match=r"packing_strategy='wrapped'.*documents="):
        wrapped(tokenizer, None)
    with pytest.raises(inrun.BatchError, match="not what the trainer trains on"):
        wrapped(tokenizer, datasets.Dataset.from_list(ROWS[::-1]))
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(TypeError, match="streamed dataset packed as 'wrapped'"):
        wrapped(tokenizer, stream)


def preference_loss(model, reference, pairs):
    """DPO (Rafailov et al., equation 7) with β = 0.1, each answer in a row of its own."""

    def log_prob(net, row, key):
        tokens = torch.tensor([row["prompt_ids"] + row[key]])
        logits = net(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        each = logits.gather(2, tokens[:, 1:, None])[0, :, 0]
        return each[len(row["prompt_ids"]) - 1 :].sum()

    ratios = []
    for row in pairs:
        with torch.no_grad():
            was = log_prob(reference, row, "chosen_ids") - log_prob(reference, row, "rejected_ids")
        now = log_prob(model, row, "chosen_ids") - log_prob(model, row, "rejected_ids")
        ratios.append(now - was)
    return -torch.nn.functional.logsigmoid(0.1 * torch.stack(ratios)).mean()


def test_preferences_are_the_loss_written_out(tokenizer):
    """The values against one step of SGD, differentiated: ⟨∇ℓ at the midpoint, η g_i⟩, pair by
    pair, and the weights after it."""
    options = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type":
               "constant", "per_device_train_batch_size": 8}  # fmt: skip
    trainer = dpo(tokenizer, **options)
    inrun.integrations.hf.watch(trainer)
    trainer.train()
    rows, held = list(trainer.train_dataset), list(trainer.eval_dataset)
    model, reference = llama(), llama()
    params = list(model.parameters())
    grads = {
        row["inrun_id"]: torch.autograd.grad(preference_loss(model, reference, [row]) / 8, params)
        for row in rows
    }
    with torch.no_grad():
        moves = [0.1 * torch.stack(g).sum(0) for g in zip(*grads.values(), strict=True)]
        for p, move in zip(params, moves, strict=True):
            p -= move / 2
    at_midpoint = torch.autograd.grad(preference_loss(model, reference, held), params)
    with torch.no_grad():
        for p, move, after in zip(params, moves, trainer.model.parameters(), strict=True):
            torch.testing.assert_close(p - move / 2, after, rtol=1e-6, atol=1e-8)
    want = pd.Series(
        {
            i: 0.1 * sum((u * g).sum().item() for u, g in zip(at_midpoint, gs, strict=True))
            for i, gs in grads.items()
        }
    )
    got = trainer.inrun.values().set_index("id")["value"]
    np.testing.assert_allclose(got, want[got.index], rtol=1e-6, atol=1e-6 * want.abs().max())


def test_text_that_was_not_prepared_is_refused(tokenizer):
    trainer = sft(tokenizer)
    text = datasets.Dataset.from_list([{"text": "w3"}])
    with pytest.raises(inrun.ValidationError, match="give it to the trainer as eval_dataset="):
        inrun.integrations.hf.watch(trainer, validation=text)

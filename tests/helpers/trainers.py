"""Small models and data for trainers, and the loop that a trainer stands for."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch

import inrun

VOCABULARY = 50


def llama(seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, bos_token_id=0,
        eos_token_id=1, pad_token_id=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.get_default_dtype())


def with_lora(seed=0):
    from peft import LoraConfig, get_peft_model

    model = llama(seed)
    torch.manual_seed(seed + 1)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def documents(n, seed, shortest=4, longest=11):
    """Rows of token ids of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (n,), generator=generator).tolist()
    rows = [torch.randint(3, VOCABULARY, (k,), generator=generator).tolist() for k in lengths]
    return [{"input_ids": row, "labels": list(row)} for row in rows]


def padded(rows):
    T = max(len(r["input_ids"]) for r in rows)
    sizes = [len(r["input_ids"]) for r in rows]

    def fill(key, by):
        return torch.tensor([r[key] + [by] * (T - len(r[key])) for r in rows])

    mask = torch.tensor([[1] * n + [0] * (T - n) for n in sizes])
    return {"input_ids": fill("input_ids", 2), "attention_mask": mask,
            "labels": fill("labels", -100)}  # fmt: skip


def arguments(kind, **options):
    usual = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 4, "num_train_epochs": 1,
        "logging_steps": 1, "use_cpu": True, "report_to": [], "save_strategy": "no", "seed": 1,
        "disable_tqdm": True, "learning_rate": 1e-3, "max_grad_norm": 0.5,
    }  # fmt: skip
    return kind(**{**usual, **options})


def by_hand(model, rows, held_out, steps, loss=None, first=1, make=None, **options):
    """The trainer's training, written out: AdamW (or ``make(groups)``), linear schedule, clipping,
    mean over the tokens of a step. ``steps``: the ids of each micro-batch of each step,
    [[[0, 3], [1, 2]], ...]. ``first``: the first position whose label counts."""
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and "norm" not in n]
    others = [p for n, p in model.named_parameters() if p.requires_grad and "norm" in n]
    groups = [{"params": decayed}, {"params": others}]
    optimizer = (make or adamw)(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - s / len(steps))
    run = inrun.watch(model, optimizer, validation=[held_out], max_norm=0.5, **options)
    model.train()
    for micros in steps:
        batches = [padded([rows[i] for i in ids]) for ids in micros]
        tokens = sum((b["labels"][:, first:] != -100).sum() for b in batches)
        for ids, batch in zip(micros, batches, strict=True):
            with run.batch(ids):
                (loss or per_token)(model, batch, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    run.close()
    return run


def adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1)


def per_token(model, batch, tokens):
    """The model's own cross-entropy (transformers: in float32) by the tokens of the step."""
    return model(**batch, num_items_in_batch=tokens).loss


def same_weights(a, b):
    states = zip(a.state_dict().items(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for (_, x), y in states)

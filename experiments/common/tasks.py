"""Tasks: a model, its loss, training examples and a fixed validation batch.

Without ``--data`` they use what comes with the dependencies: CPython's documentation texts and
scikit-learn's digits. With ``--data DIR`` language is ``enwik8/enwik8_clean.txt.xz`` (and
``gpt2-bpe/`` its tokens for GPT-2 small), and the encoder reads ``sst2/train.tsv``.
"""

from __future__ import annotations

import functools
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common.models import Transformer, convnet, mlp
from experiments.common.parts import Context

Batch = tuple[Tensor, ...]
BYTES = 128
# vocabulary (50,257; up to a multiple of 64, as fast products want it), width, layers, heads
GPT2 = {"gpt2-small": (50_257, 768, 12, 12), "distilgpt2": (50_304, 768, 6, 12)}


@dataclass
class Task:
    """``loss`` is a mean over rows, so the gradient of a row is that of its own loss / rows."""

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    train: Batch
    validation: Batch

    def batch(self, ids: Tensor) -> Batch:
        return tuple(x[ids] for x in self.train)

    @property
    def examples(self) -> int:
        return len(self.train[0])


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    (ids,) = batch
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make(settings: dict[str, Any], context: Context, dtype: torch.dtype) -> Task:
    """The task of a part's settings.

    ``model`` (gpt, gpt2-small, distilgpt2, encoder, convnet, mlp), ``seed`` (of weights, and of
    which examples are taken unless ``data_seed`` is given), ``examples`` and ``validation`` (how
    many), and for transformers ``length``, ``width``, ``layers``, ``heads``.
    """
    kind, seed = settings["model"], settings.get("seed", 0)
    s = {"length": 32, "width": 32, "layers": 2, "heads": 2} | settings
    loss = next_token
    if kind == "gpt" or kind in GPT2:
        data: Batch = (tokens(s["length"], context.data, kind in GPT2, s["examples"]),)
        shape = GPT2.get(kind, (BYTES, s["width"], s["layers"], s["heads"]))
        build = lambda: Transformer(*shape, s["length"])  # noqa: E731
    elif kind == "encoder":
        loss, data = classify, passages(s["length"], context.data)
        classes = int(data[1].max()) + 1
        shape = (BYTES, s["width"], s["layers"], s["heads"])
        build = lambda: Transformer(*shape, s["length"], classes)  # noqa: E731
    elif kind in ("convnet", "mlp"):
        loss, data = classify, digits(dtype)
        build = convnet if kind == "convnet" else mlp
    else:
        known = ", ".join(("gpt", *GPT2, "encoder", "convnet", "mlp"))
        raise ValueError(f"there is no model {kind!r}: use {known}")
    wanted = s["validation"] + s["examples"]
    if len(data[0]) < wanted:
        raise ValueError(
            f"{kind}: {wanted:,} examples are wanted and the data hold {len(data[0]):,}: pass "
            "--data DIR with a larger text (experiments/README.md says which)"
        )
    chosen = torch.Generator().manual_seed(settings.get("data_seed", seed))
    order = torch.randperm(len(data[0]), generator=chosen)[:wanted]
    rows = tuple(x[order].to(context.device) for x in data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().to(context.device, dtype)
    cut = s["validation"]
    return Task(model, loss, tuple(x[cut:] for x in rows), tuple(x[:cut] for x in rows))


def optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """By name; "sgd-momentum" is SGD with momentum 0.9."""
    params = list(model.parameters())
    fused = {"fused": True} if params[0].is_cuda else {}
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(params, lr=lr, **fused),
        "nadam": lambda: torch.optim.NAdam(params, lr=lr),
        "rmsprop": lambda: torch.optim.RMSprop(params, lr=lr),
        "sgd": lambda: torch.optim.SGD(params, lr=lr),
        "sgd-momentum": lambda: torch.optim.SGD(params, lr=lr, momentum=0.9),
    }
    return made[name]()


@functools.cache  # parts of one run read the same text
def tokens(length: int, data: Path | None, gpt2: bool, rows: int) -> Tensor:
    """Rows of tokens of a running text: bytes, or GPT-2's tokens where they are at hand."""
    text = running_text(data, max(500_000, 8 * length * rows))
    if gpt2 and data is not None:
        from transformers import GPT2TokenizerFast

        encode = GPT2TokenizerFast.from_pretrained(str(data / "gpt2-bpe"))
        lines = [line + "\n" for line in text.splitlines()]
        ids = np.concatenate([np.asarray(x, np.int64) for x in encode(lines)["input_ids"]])
    else:
        ids = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    return torch.from_numpy(ids[: len(ids) // length * length].copy()).view(-1, length)


def running_text(data: Path | None, characters: int) -> str:
    """The beginning of enwik8, or CPython's documentation texts, all of them."""
    if data is None:
        from pydoc_data.topics import topics

        return "".join(topics.values())
    with lzma.open(data / "enwik8" / "enwik8_clean.txt.xz", "rt", encoding="utf-8") as file:
        return file.read(characters)


def passages(length: int, data: Path | None) -> Batch:
    """Texts to classify, as bytes: sentiment (SST-2), or from which of the 8 longest topics of
    CPython's documentation a passage is."""
    if data is None:
        from pydoc_data.topics import topics

        longest = sorted(topics.values(), key=len, reverse=True)[:8]
        found = [
            (text[i : i + length], label)
            for label, text in enumerate(longest)
            for i in range(0, len(text) - length, length)
        ]
    else:
        lines = (data / "sst2" / "train.tsv").read_text("utf-8").splitlines()[1:]
        split = [line.rsplit("\t", 1) for line in lines]
        found = [(text, int(label)) for text, label in split if len(text) >= 8]
    rows = np.zeros((len(found), length), np.int64)
    for row, (text, _) in zip(rows, found, strict=True):
        own = np.frombuffer(text.encode("ascii", "replace")[:length], np.uint8)
        row[: len(own)] = own
    return torch.from_numpy(rows), torch.tensor([label for _, label in found])


def digits(dtype: torch.dtype) -> Batch:
    """scikit-learn's 1,797 handwritten digits, 8 × 8."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError(
            "scikit-learn is needed for the digits: pip install 'inrun[experiments]'"
        ) from None
    X, y = load_digits(return_X_y=True)
    return torch.tensor(X / 16.0, dtype=dtype).view(-1, 1, 8, 8), torch.tensor(y)

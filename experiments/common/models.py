"""Small models of three kinds, without dropout: what a step does is a function of its batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from inrun.gpt import GPT, Block, gpt2_weights

PAD = 0


class PlainBlock(Block):
    """Attention is written out: it has to run under ``torch.vmap`` and in float64."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        """``hidden`` is True where a token [.., T, 1] must not see another [.., 1, T]."""
        assert hidden is not None
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ v


class Transformer(GPT):
    """GPT-2's architecture and weights with a tied head; with ``classes``, an encoder that reads
    both ways and classifies the mean over tokens that are not padding."""

    block = PlainBlock

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, length: int,
        classes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(vocabulary, width, layers, heads, length, gelu="tanh")
        self.head = None if classes is None else nn.Linear(width, classes)
        gpt2_weights(self)

    def forward(self, ids: Tensor) -> Tensor:
        here = torch.arange(ids.shape[1], device=ids.device)
        causal = self.head is None
        hidden = here[:, None] < here if causal else (ids == PAD)[:, None, None, :]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, hidden)
        if self.head is None:
            return self.logits(x)
        words = (ids != PAD).unsqueeze(-1).to(x.dtype)
        return self.head((self.norm(x) * words).sum(1) / words.sum(1))


def convnet(channels: int = 8, classes: int = 10, side: int = 8) -> nn.Sequential:
    """Two convolutions and a linear layer, for small grey pictures."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * (side // 2) ** 2, classes),
    )


def mlp(width: int = 32, classes: int = 10, side: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(side * side, width), nn.ReLU(), nn.Linear(width, classes)
    )

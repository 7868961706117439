"""Small models of three kinds, without dropout: what a step does is a function of its batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

PAD = 0


class Block(nn.Module):
    """Pre-norm attention and feed-forward, as in GPT-2. Attention is written out: it has to run
    under ``torch.vmap`` and in float64."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        B, T, width = x.shape
        q, k, v = (
            y.reshape(B, T, self.heads, -1).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)).masked_fill(
            hidden, -torch.inf
        )
        y = scores.softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(B, T, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """GPT-2's architecture and initialisation with a tied head; with ``classes``, an encoder that
    reads both ways and classifies the mean over tokens that are not padding."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, length: int,
        classes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = None if classes is None else nn.Linear(width, classes)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        here = torch.arange(T, device=ids.device)
        causal = self.head is None
        hidden = here[:, None] < here if causal else (ids == PAD)[:, None, None, :]
        x = self.embed(ids) + self.position(here)
        for block in self.blocks:
            x = block(x, hidden)
        x = self.norm(x)
        if self.head is None:
            return nn.functional.linear(x, self.embed.weight)
        words = (ids != PAD).unsqueeze(-1).to(x.dtype)
        return self.head((x * words).sum(1) / words.sum(1))


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

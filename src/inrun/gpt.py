"""A small GPT: what the demo, ``inrun bench``, the experiments and the tests train.

Not part of the public interface. B examples, T tokens, D width, H heads, V words.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, gelu: str = "none") -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(gelu), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """``x`` is [B, T, D]; ``hidden`` is for ``attend``."""
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = self.attend(q, k, v, hidden)  # [B, H, T, D / H]
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.norm2(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        """Each token sees itself and the tokens before it. A block that overrides this may be told
        by ``hidden`` which tokens it must not see."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class GPT(nn.Module):
    """A decoder of GPT-2's shape: learned positions, LayerNorm first, tied head, no dropout.

    ``gelu`` is "none" (exact) or "tanh" (GPT-2's approximation). Weights are torch's defaults; see
    ``gpt2_weights``.
    """

    block = Block  # the class of its layers

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, length: int, gelu: str = "none"
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(self.block(width, heads, gelu) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, T, V] of the token that follows each of ``ids`` [B, T]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def embed(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.token.weight)


def gpt2_weights(model: GPT) -> None:
    """Draw the weights as GPT-2's were: smaller in the two layers of a block that are added to its
    input, the deeper the model; biases are zero."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            added = name.endswith(("out.weight", "mlp.2.weight"))
            nn.init.normal_(p, std=0.02 / (2 * len(model.blocks)) ** 0.5 if added else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(p)

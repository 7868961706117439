"""Who joins a step before whom: sampled orders of the examples, or all coalitions of a few.

Legend: C players (examples), N coordinates in blocks of ``BLOCK``, M coalitions of each block,
Q targets. Every block has orders of its own, so that their noise averages out.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from inrun.optimizers.common import widest

BLOCK = {"cpu": 8, "cuda": 32}  # coordinates that share their orders
FEW = 2**12  # coalitions, to take all of them


class Joining(Protocol):
    """Which coalitions are evaluated, and how values follow from them."""

    @property
    def rows(self) -> int:
        """M."""

    @property
    def samples(self) -> int:
        """How many values of each example are drawn."""

    def draw(self, blocks: int, device: torch.device) -> Any:
        """What is left to chance for so many blocks."""

    def coalitions(
        self, rows: Tensor, gram: Tensor | None, drawn: Any, first: int
    ) -> tuple[Tensor, Tensor | None]:
        """From per-example gradients [C, N], from block ``first`` on, to gradients of coalitions
        [M, N]; where ``gram`` is given, their squared norms over all parameters [M, blocks or 1].
        """

    def whole(self, coalitions: Tensor) -> Tensor:
        """Those that all have joined."""

    def values(self, v: Tensor, gained: Tensor, drawn: Any, first: int) -> Tensor:
        """From ∇ℓ [Q, N] and Ψ(S) − Ψ(∅) [M, N] to samples of values [samples, Q, C]."""


class Orders:
    """``pairs`` of an order and its reverse for every block. Every example stands
    once in every place of C blocks side by side."""

    def __init__(self, players: int, pairs: int, generator: torch.Generator) -> None:
        self.players, self.pairs, self.generator = players, pairs, generator
        self.rows, self.samples = 2 * pairs * players, pairs

    def draw(self, blocks: int, device: torch.device) -> Tensor:
        """Permutations [pairs, groups of C blocks, C]."""
        groups = -(-blocks // self.players)
        shape = (self.pairs, groups, self.players)
        return torch.rand(shape, generator=self.generator, device=device).argsort(-1)

    def orders(self, drawn: Tensor, first: int, n: int) -> Tensor:
        """Who comes at each place in n blocks [2·pairs, C, n]."""
        C = self.players
        block = torch.arange(first, first + n, device=drawn.device)
        place = (torch.arange(C, device=drawn.device)[:, None] + block) % C  # rotated
        order = drawn[:, (block // C)[None], place]
        return torch.stack([order, order.flip(1)], 1).flatten(0, 1)

    @staticmethod
    def sizes(gram: Tensor, orders: Tensor) -> Tensor:
        """The squared norms over all parameters of those who have joined [2·pairs, C, n]:
        ‖g(S ∪ i)‖² = ‖g(S)‖² + 2⟨g(S ∪ i), g_i⟩ − ‖g_i‖²."""
        inner = gram[orders].cumsum(1).gather(3, orders[..., None])[..., 0]
        return (2 * inner - gram.diagonal()[orders]).cumsum(1)

    def coalitions(
        self, rows: Tensor, gram: Tensor | None, drawn: Any, first: int
    ) -> tuple[Tensor, Tensor | None]:
        N, n = rows.shape[1], _blocks(rows.shape[1], rows.device)
        orders = self.orders(drawn, first, n)
        sizes = None if gram is None else self.sizes(gram, orders).flatten(0, 1)
        some = rows.view(len(rows), n, -1)[orders, torch.arange(n, device=rows.device)]
        return some.cumsum(1).view(self.rows, N), sizes

    def whole(self, coalitions: Tensor) -> Tensor:
        return coalitions[self.players - 1 :: self.players]

    def values(self, v: Tensor, gained: Tensor, drawn: Any, first: int) -> Tensor:
        Q, C, n = len(v), self.players, _blocks(v.shape[1], v.device)
        gained = gained.view(self.rows, n, -1)
        if Q == 1:
            worth = (gained * v.view(n, -1)).sum(-1)[None]
        else:
            worth = torch.einsum("qnk,mnk->qmn", v.view(Q, n, -1), gained)
        worth = worth.to(widest(v.device)).view(Q, 2 * self.pairs, C, n)
        gains = worth.diff(dim=2, prepend=torch.zeros_like(worth[:, :, :1]))
        return self.credited(gains, self.orders(drawn, first, n))

    def credited(self, gains: Tensor, orders: Tensor) -> Tensor:
        """From gains by place [Q, 2·pairs, C, n] to samples of values [pairs, Q, C]."""
        Q, C = len(gains), self.players
        found = gains.new_zeros(Q, 2 * self.pairs, C, dtype=widest(gains.device))
        flat = gains.flatten(2).to(found)
        found.scatter_add_(2, orders.flatten(1).expand_as(flat), flat)
        return found.view(Q, self.pairs, 2, C).mean(2).transpose(0, 1)


class All:
    """Every coalition of few players: nothing is left to chance."""

    def __init__(self, players: int, device: torch.device) -> None:
        self.players, self.rows, self.samples = players, 2**players, 1
        masks = torch.arange(self.rows)[:, None] >> torch.arange(players) & 1  # [M, C]
        size, weights = masks.sum(1, keepdim=True), list[float]()
        for k in range(players):  # of joining k others
            weights.append(1 / (players * math.comb(players - 1, k)))
        table = torch.tensor([*weights, 0.0], dtype=torch.float64)
        inside = torch.where(size > 0, table[(size - 1).clamp(min=0)], 0.0)
        share = torch.where(masks > 0, inside, -table[size])
        self.masks, self.share = masks.to(device), share.to(device, widest(device))

    def draw(self, blocks: int, device: torch.device) -> None:
        return None

    def coalitions(
        self, rows: Tensor, gram: Tensor | None, drawn: Any, first: int
    ) -> tuple[Tensor, Tensor | None]:
        sizes = None
        if gram is not None:
            own = self.masks.to(gram)
            sizes = (own @ gram * own).sum(1, keepdim=True)
        return self.masks.to(rows) @ rows, sizes

    def whole(self, coalitions: Tensor) -> Tensor:
        return coalitions[-1:]

    def values(self, v: Tensor, gained: Tensor, drawn: Any, first: int) -> Tensor:
        worth = (v @ gained.T).to(widest(v.device))
        return (worth @ self.share.to(worth))[None]


def block(device: torch.device) -> int:
    return BLOCK.get(device.type, BLOCK["cpu"])


def _blocks(N: int, device: torch.device) -> int:
    """How many blocks N coordinates are: whole ones, or the rest that is left of a parameter."""
    size = block(device)
    assert size >= N or N % size == 0
    return max(1, N // size)

"""⟨u, g_i⟩ of all simple uses of a model in a few launches: Triton kernels for GPUs.

A use is contracted as Σ δ ⊙ op(x; u) over the numbers of each example (gradients/use.py). Where
the operation is affine in its last dimension (``Affine``: a product with a matrix, or a
multiplication with a vector, perhaps after a normalisation), a kernel does that for many uses: it
reads x, δ and u, forms op(x; u) tile by tile and keeps nothing but its sums with δ. uses.py does
the same with torch, one kind of use after the other; tests/scoring/test_uses_kernel.py compares
both.

Training repeats the same uses, so how they are arranged is kept from step to step; a step only
looks where their tensors are.

Legend: B examples, R rows of x (the tokens of one example after those of another), I inputs,
O outputs.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inrun import kernels
from inrun.gradients.call import Affine
from inrun.gradients.use import Use
from inrun.scoring.contraction_kernel import exact
from inrun.scoring.laid import Laid, Wanted, lay
from inrun.scoring.uses import Direction, Product, add_uses

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

    from inrun.kernels import read_length, tensor_at

TILE = 128  # rows and columns of a product at a time, at most
DEPTH = {torch.bfloat16: 64, torch.float32: 32}  # and inputs, by the type of the product
WIDE = 2**14  # numbers of a row that a program can hold
MEMORY = 2**28  # bytes of sums of tiles
_KEPT = 32  # arrangements
_known: OrderedDict[Any, Arranged] = OrderedDict()
# products are rounded to bfloat16 in one of the ways that are compared, and not in the other
_KERNEL = kernels.Trust("remembered operations", 0.02, "their contraction takes longer")
_NORMS = {"": 0, "layer_norm": 1, "rms_norm": 2}
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


class _Kind(NamedTuple):
    """What uses of one launch have in common."""

    matrix: bool
    R: int
    B: int
    I: int  # noqa: E741
    x: torch.dtype
    delta: torch.dtype
    tile: tuple[int, int, int]  # rows; columns and inputs, or room for the numbers of a row
    even: bool  # is O a multiple of 16?
    transposed: bool = False
    norm: str = ""


@dataclass(eq=False)
class _Group:
    """The programs of a launch: use, tile of rows, tile of columns, row of ``partial``."""

    tiles: list[tuple[int, int, int, int]] = field(default_factory=list)
    rows: int = 0  # of ``partial``
    there: Tensor | None = None  # the tiles on the device

    def add(self, use: int, R: int, rows: int, columns: int) -> None:
        """A use with so many tiles of columns."""
        for n in range(columns):
            self.tiles += [(use, m, n, self.rows + n) for m in range(-(-R // rows))]
        self.rows += columns

    def on(self, device: torch.device) -> Tensor:
        if self.there is None:
            self.there = torch.tensor(self.tiles, dtype=torch.int32, device="cpu").to(device)
        return self.there


class Arranged:
    """The uses of a step, sorted by kind.

    Attributes:
        wanted: the directions that the kernels read.
        left: the places of uses that they do not know.
    """

    def __init__(self, uses: Sequence[Use | Product], moving: Mapping[str, Any]) -> None:
        self._origins = [weakref.ref(use.origin) for use in uses]
        self._simple = [i for i, use in enumerate(uses) if use.affine is not None]
        self._marks, self._addresses = self._read(uses)
        self._groups: dict[_Kind, _Group] = {}
        self._table: list[tuple[int, Wanted, Wanted | None, float]] = []
        self.taken = [i for i in self._simple if self._take(uses[i], moving)]
        self.left = sorted(set(range(len(uses))).difference(self.taken))
        at, n = {i: at for at, i in enumerate(self._simple)}, len(self._simple)
        self._places = [place for i in self.taken for place in (at[i], n + at[i])]  # x, δ, x, …
        found = [w for row in self._table for w in row[1:3] if isinstance(w, tuple)]
        self.wanted = list(dict.fromkeys(found))
        self.kinds = frozenset([kind._replace(R=0, B=0) for kind in self._groups])
        self._laid: Mapping[Wanted, int] = {}  # where directions are, and the tables made for that
        self._tables: tuple[Tensor, Tensor] | None = None

    def again(self, uses: Sequence[Use | Product]) -> bool:
        """Are these the same uses in another step? Then their tensors are taken from now on."""
        if len(uses) != len(self._origins):
            return False
        if any(use.origin is not own() for use, own in zip(uses, self._origins, strict=True)):
            return False
        marks, self._addresses = self._read(uses)
        return marks == self._marks

    def _read(self, uses: Sequence[Use | Product]) -> tuple[list[Any], list[int]]:
        """What arranging depends on, and the addresses of all x and then of all δ."""
        own = [uses[i] for i in self._simple]
        both = [use.x for use in own] + [use.delta for use in own]
        addresses = list(map(Tensor.data_ptr, both))
        marks = [
            *map(_shape, both), *map(_dtype, both), *map(Tensor.is_contiguous, both),
            *[a % 16 for a in addresses], *[use.by_rows for use in own],
        ]  # fmt: skip
        return marks, addresses

    def _take(self, use: Use | Product, moving: Mapping[str, Any]) -> bool:
        """Give a use to the kernels, if they can read it."""
        a, (weight, bias) = use.affine, use.operands
        assert a is not None
        if not use.in_rows() or not kernels.usable((use.x, use.delta)):
            return False
        if weight is None or weight.param is None or weight.name not in moving:
            return False
        if bias is not None and bias.param is None:
            return False
        kind, columns = _kind(a, use.x, use.delta, use.B, weight.param.shape)
        if kind is None:
            return False
        of_weight = weight.name, kind.x if a.matrix else torch.float32
        of_bias = None
        if bias is not None and bias.name in moving:
            of_bias = bias.name, torch.float32
        self._table.append((use.delta.shape[-1], of_weight, of_bias, a.eps))
        group = self._groups.setdefault(kind, _Group())
        group.add(len(self._table) - 1, kind.R, kind.tile[0], columns)
        return True

    def products(self, like: Tensor, laid: Laid) -> Tensor:
        """⟨u_q, g_i⟩ of all uses that were taken, as ``like`` [Q, columns]."""
        total, Q, device = torch.zeros_like(like), len(like), like.device
        own = tuple([self._addresses[i] for i in self._places])
        given = kernels.uploaded(own, torch.int64, device), *self._looked_up(laid.at, device)
        for kind, group in self._groups.items():
            some = max(1, MEMORY // (4 * group.rows * kind.R))
            for q in range(0, Q, some):
                targets = min(some, Q - q)
                partial = torch.empty((targets, group.rows, kind.R), device=device)
                launch = _products if kind.matrix else _scaled
                launch(kind, *given, group.on(device), laid, partial, q)
                sums = partial.sum(1, dtype=torch.float64).view(targets, kind.B, -1).sum(2)
                total[q : q + targets, : kind.B] += sums
        return total

    def _looked_up(self, at: Mapping[Wanted, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """For each use O and where its directions begin, of the bias −1 if there is none; and ε of
        its normalisation."""
        if self._tables is None or self._laid is not at:
            rows = [(o, at[w], -1 if b is None else at[b]) for o, w, b, _ in self._table]
            table = torch.tensor(rows, dtype=torch.int64, device="cpu")
            eps = torch.tensor([row[3] for row in self._table], device="cpu")
            self._laid, self._tables = at, (table.to(device), eps.to(device))
        return self._tables


def arranged(uses: Sequence[Use | Product], moving: Mapping[str, Any]) -> Arranged:
    """The uses, sorted by kind; ``moving`` has the names of the parameters that have directions."""
    key = tuple([id(use.origin) for use in uses]), tuple(moving)
    found = _known.pop(key, None)
    if found is None or not found.again(uses):
        found = Arranged(uses, moving)
    _known[key] = found
    while len(_known) > _KEPT:
        _known.popitem(last=False)
    return found


class AtOnce:
    """What the kernels do of a contraction.

    Attributes:
        sums: ⟨u, G⟩ [Q] of all parameters; None if they were not asked for.
    """

    def __init__(
        self, batches: Sequence[Sequence[Use | Product]], u: Mapping[str, Direction], laid: Laid,
        by_batch: Sequence[Arranged],
    ) -> None:  # fmt: skip
        self._batches, self._u, self._laid, self._arranged = batches, u, laid, by_batch
        self.sums = laid.sums

    @staticmethod
    def of(
        batches: Sequence[Sequence[Use | Product]], u: Mapping[str, Direction],
        G: Mapping[str, Tensor] | None,
    ) -> AtOnce | None:  # fmt: skip
        """For the uses of each micro-batch; None where the kernels cannot do it."""
        if not kernels.reachable(next(iter(u.values())).v):
            return None
        found = [arranged(uses, u) for uses in batches]
        if not any(own.taken for own in found):
            return None
        laid = lay(u, G, list(dict.fromkeys(w for own in found for w in own.wanted)))
        return None if laid is None else AtOnce(batches, u, laid, found)

    def add(self, total: Tensor, batch: int) -> list[Use | Product]:
        """Add what the uses of a micro-batch contribute to ``total`` [Q, columns]; returns those
        that are left."""
        uses, own = self._batches[batch], self._arranged[batch]
        if own.taken:
            taken = [uses[i] for i in own.taken]
            for use in taken:
                use.check()
            made = partial(own.products, total, self._laid)
            total += _KERNEL.result(
                total.device, made, partial(_plain, total, taken, self._u), own.kinds
            )
        return [uses[i] for i in own.left]


def _plain(total: Tensor, uses: Sequence[Use | Product], u: Mapping[str, Direction]) -> Tensor:
    found = torch.zeros_like(total)
    add_uses(found, uses, u)
    return found


def _kind(a: Affine, x: Tensor, delta: Tensor, B: int, W: torch.Size) -> tuple[_Kind | None, int]:
    """The kind of a use and how many tiles of columns it has; None: the kernels do not know it."""
    I, O = x.shape[-1], delta.shape[-1]  # noqa: E741
    R = x.numel() // max(I, 1)
    if not R or R % B or delta.numel() != R * O:
        return None, 0
    even = O % 16 == 0
    if not a.matrix:
        room = _power(I, 1)
        if I != O or W != (I,) or room > WIDE:
            return None, 0
        tile = max(1, min(16, 2048 // room)), room, 0
        return _Kind(False, R, B, I, x.dtype, delta.dtype, tile, even, norm=a.norm), 1
    shape = (I, O) if a.transposed else (O, I)
    if x.dtype != delta.dtype or x.dtype not in DEPTH or shape != W:
        return None, 0
    tile = min(TILE, _power(R)), min(TILE, _power(O)), min(DEPTH[x.dtype], _power(I))
    kind = _Kind(True, R, B, I, x.dtype, delta.dtype, tile, even, a.transposed)
    return kind, -(-O // tile[1])


def _power(n: int, least: int = 16) -> int:
    """The power of two that has room for n."""
    return max(least, 1 << (n - 1).bit_length())


def _products(
    kind: _Kind, addresses: Tensor, table: Tensor, eps: Tensor, tiles: Tensor, laid: Laid,
    partial: Tensor, q: int,
) -> None:  # fmt: skip
    """Sums of δ ⊙ (x Wᵀ + b) by row, for targets from ``q`` on."""
    weights = laid.flat[kind.x][q:]
    biases = laid.flat.get(torch.float32, weights)[q:]
    rows, columns, depth = kind.tile
    _of_products[(len(tiles), len(partial))](
        addresses, table, tiles, weights, weights.stride(0), biases, biases.stride(0), partial,
        partial.stride(0), kind.R, kind.I, X=kernels.READABLE[kind.x], TRANSPOSED=kind.transposed,
        ROWS=rows, COLUMNS=columns, DEPTH=depth, EVEN=kind.even,
        EXACT=exact(partial.device), num_warps=8 if rows * columns == TILE**2 else 4,
    )  # fmt: skip


def _scaled(
    kind: _Kind, addresses: Tensor, table: Tensor, eps: Tensor, tiles: Tensor, laid: Laid,
    partial: Tensor, q: int,
) -> None:  # fmt: skip
    """The same of δ ⊙ (x̂ w + b)."""
    weights = laid.flat[torch.float32][q:]
    _of_scaled[(len(tiles), len(partial))](
        addresses, table, eps, tiles, weights, weights.stride(0), partial, partial.stride(0),
        kind.R, kind.I, X=kernels.READABLE[kind.x], D=kernels.READABLE[kind.delta],
        NORM=_NORMS[kind.norm], ROWS=kind.tile[0], ROOM=kind.tile[1],
    )  # fmt: skip


if kernels.AVAILABLE:

    @triton.jit  # type: ignore[untyped-decorator]
    def _of_products(  # type: ignore[no-untyped-def]
        addresses, table, tiles, weights, weight_stride, biases, bias_stride, partial,
        partial_stride, R, inputs, X: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
        COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        tile, q = tiles + tl.program_id(0) * 4, tl.program_id(1).to(tl.int64)
        use = tl.load(tile)
        O = read_length(table + use * 3, EVEN)  # noqa: E741
        at_weight, at_bias = tl.load(table + use * 3 + 1), tl.load(table + use * 3 + 2)
        of_x, of_d = tensor_at(addresses, use, 0, 2, X), tensor_at(addresses, use, 1, 2, X)
        w = weights + q * weight_stride + tl.multiple_of(at_weight, 16)
        rows = tl.load(tile + 1) * ROWS + tl.arange(0, ROWS)
        columns = tl.load(tile + 2) * COLUMNS + tl.arange(0, COLUMNS)
        inside, some = rows < R, columns < O
        row, column = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
        y = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, inputs, DEPTH):
            depth = k + tl.arange(0, DEPTH)
            deep = depth < inputs
            x = tl.load(
                of_x + row * inputs + depth[None, :],
                mask=inside[:, None] & deep[None, :],
                other=0.0,
            )
            where = depth[:, None] * O + column if TRANSPOSED else column * inputs + depth[:, None]
            u = tl.load(w + where, mask=deep[:, None] & some[None, :], other=0.0)
            y = tl.dot(x, u, y, input_precision=EXACT)
        if at_bias >= 0:
            b = tl.load(biases + q * bias_stride + at_bias + columns, mask=some, other=0.0)
            y += b[None, :]
        d = tl.load(of_d + row * O + column, mask=inside[:, None] & some[None, :], other=0.0)
        out = partial + q * partial_stride + tl.load(tile + 3).to(tl.int64) * R
        tl.store(out + rows, tl.sum(y * d.to(tl.float32), axis=1), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _of_scaled(  # type: ignore[no-untyped-def]
        addresses, table, eps, tiles, weights, weight_stride, partial, partial_stride, R, n,
        X: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
        ROOM: tl.constexpr,
    ):  # fmt: skip
        tile, q = tiles + tl.program_id(0) * 4, tl.program_id(1).to(tl.int64)
        use = tl.load(tile)
        at_weight, at_bias = tl.load(table + use * 3 + 1), tl.load(table + use * 3 + 2)
        of_x, of_d = tensor_at(addresses, use, 0, 2, X), tensor_at(addresses, use, 1, 2, D)
        of_u = weights + q * weight_stride
        rows, columns = tl.load(tile + 1) * ROWS + tl.arange(0, ROWS), tl.arange(0, ROOM)
        inside, some = rows < R, columns < n
        where = rows.to(tl.int64)[:, None] * n + columns[None, :]
        mask = inside[:, None] & some[None, :]
        x = tl.load(of_x + where, mask=mask, other=0.0).to(tl.float32)
        if NORM == 1:
            x = tl.where(mask, x - (tl.sum(x, axis=1) / n)[:, None], 0.0)
        if NORM > 0:
            x *= tl.rsqrt(tl.sum(x * x, axis=1) / n + tl.load(eps + use))[:, None]
        y = x * tl.load(of_u + at_weight + columns, mask=some, other=0.0)[None, :]
        if at_bias >= 0:
            y += tl.load(of_u + at_bias + columns, mask=some, other=0.0)[None, :]
        d = tl.load(of_d + where, mask=mask, other=0.0).to(tl.float32)
        out = partial + q * partial_stride + tl.load(tile + 3).to(tl.int64) * R
        tl.store(out + rows, tl.sum(y * d, axis=1), mask=inside)

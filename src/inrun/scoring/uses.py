"""⟨u, g_i⟩ of what is kept as inputs and δ: uses (gradients/use.py), and ``Pair`` where it is a
record (of a compiled graph, say). Their operations run again along the directions, and all products
with δ are summed by example together, on a GPU in one launch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inrun import kernels
from inrun.gradients.call import Affine
from inrun.gradients.nodes import Node, directions
from inrun.gradients.records import Pair, in_one_type, inner, wide
from inrun.gradients.use import Use
from inrun.optimizers.base import Factors, Part
from inrun.scoring import contraction_kernel
from inrun.tensors.autocast import no_autocast
from inrun.torch_compat import flatten_dense_tensors, foreach_copy_, foreach_mul
from inrun.validation.identity import same

MEMORY = 2**29  # bytes of results that wait for their sums
# Uses of one kind run at once if their tensors have at most so many numbers: a launch costs more
# than copies of these beside each other. And how many bytes such copies may have together.
STACKED = {"cpu": 2**15, "cuda": 2**23}
STACKED_MEMORY = 2**27
_SMALL = 2**14  # numbers: so few are copied sooner than summed on their own
_SORTED = 4  # sets of uses that are kept with their first one
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


class Direction:
    """u_q of one parameter for Q targets: K ⊙ v_q, or v_q where there is no factor K. ``part``: K
    belongs to a pack of parameters. ``single``: v of the only target, instead of all."""

    __slots__ = ("_K", "_full", "_one", "_v", "part", "single")

    def __init__(
        self, v: Tensor | None, K: Tensor | None = None, part: Part | None = None,
        single: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._v, self._K, self.part, self.single = v, K, part, single
        self._full: Tensor | None = None
        self._one: Tensor | None = None  # of the only target

    @property
    def v(self) -> Tensor:
        """[Q, *W]"""
        if self._v is None:
            assert self.single is not None
            self._v = self.single[None]
        return self._v

    @property
    def K(self) -> Tensor | None:  # noqa: N802
        return self._K if self.part is None else self.part.K

    @property
    def full(self) -> Tensor:
        """u itself, computed when it is first asked for [Q, *W]."""
        if self._full is None and self._one is not None:
            self._full = self._one[None]
        if self._full is None:
            self._full = wide(self.v) if self.K is None else self.K * self.v
        return self._full

    def free(self) -> None:
        """Keep v and K only: u is computed again when it is asked for."""
        self._full = self._one = None

    @property
    def known(self) -> bool:
        """Is u computed already?"""
        return self._full is not None or self._one is not None

    def of(self, q: int) -> Tensor:
        """u_q [*W]."""
        return self.full[q] if self._one is None else self._one

    @staticmethod
    def fill(some: Sequence[Direction]) -> None:
        """Compute u of all these together, for one target."""
        left = [d for d in some if d._full is None and d._one is None]
        if len(left) > 1 and len(left[0].v) == 1:
            v = [d.v.squeeze(0) for d in left]
            if any(d.K is None for d in left):
                made = [wide(x) if d.K is None else d.K * x for d, x in zip(left, v, strict=True)]
            else:
                made = list(foreach_mul([d.K for d in left if d.K is not None], v))
            for d, x in zip(left, made, strict=True):
                d._one = x


class Packed(NamedTuple):
    """Directions of the members of a pack."""

    names: list[str]
    factors: Factors
    u: Tensor  # flat

    def along(self, G: Mapping[str, Tensor]) -> Tensor:
        """⟨u, G⟩ over all members, in float64."""
        own, g = [G[k] for k in self.names], self.factors.g
        if g is None or not all(map(is_, own, self.factors.members)):  # clipped, for example
            g = flatten_dense_tensors(own)
        return (self.u * g).sum(dtype=torch.float64)


def fill_packs(u: Mapping[str, Direction]) -> list[Packed]:
    """Compute u of one target for each pack all of whose members are here, in one product. On a
    host; a GPU has kernels that need no packs."""
    some = next(iter(u.values())).v
    if len(some) > 1 or not some.is_cpu:
        return []
    places: dict[Factors, dict[int, str]] = {}
    for k, d in u.items():
        if (part := d.part) is not None:
            places.setdefault(part.factors, {})[part.place] = k
    found = []
    for factors, own in places.items():
        if len(own) == len(factors.members):
            names = [own[i] for i in range(len(own))]
            packed = [u[k] for k in names]
            whole = factors.K * flatten_dense_tensors(
                [d.v if d.single is None else d.single for d in packed]
            )
            for d, x in zip(packed, factors.place(whole), strict=True):
                d._one = x
            found.append(Packed(names, factors, whole))
    return found


_AFFINE = Affine(0, 1), Affine(0, 1, transposed=True)


class Product:
    """A ``Pair`` of a node, to be contracted with uses, whose attributes it has."""

    def __init__(self, node: Node, pair: Pair) -> None:
        self.x, self.delta = in_one_type(pair.a, pair.delta)  # [B, T, I], [B, T, O]
        self.nodes, self.origin, self.operands = (node,), node, (node, None)
        self.B, self.dtype, self.affine = len(self.x), self.x.dtype, _AFFINE[pair.transposed]
        self.transposed = pair.transposed

    def check(self) -> None:
        """Its tensors are nobody else's."""

    @property
    def kind(self) -> Hashable:
        """Equal for products that run at once."""
        return self.x.shape, self.delta.shape, self.dtype, self.transposed

    @property
    def numbers(self) -> int:
        """Of its largest tensor."""
        inputs, outputs = self.x.shape[-1], self.delta.shape[-1]
        return max(self.x.numel(), self.delta.numel(), inputs * outputs)

    def along(self, u: Mapping[Any, Tensor]) -> Tensor:
        d = u[self.nodes[0]]
        return self.x @ (d if self.transposed else d.mT)

    @staticmethod
    def stacked(products: Sequence[Product], u: Mapping[Any, Tensor]) -> Tensor:
        """The same for several products of one kind [n, B, T, O]."""
        a = torch.stack([p.x for p in products])  # [n, B, T, I]
        d = torch.stack([u[p.nodes[0]] for p in products])
        y = a.flatten(1, 2) @ (d if products[0].transposed else d.mT)
        return y.view(*a.shape[:-1], y.shape[-1])

    by_rows = True  # see ``Use``

    def in_rows(self) -> bool:
        return self.delta.is_contiguous()

    def dots(self, y: Tensor) -> Tensor:
        return inner(y, self.delta)


class _Sorted:
    """Uses in the groups that run at once, and the names of their parameters. Training repeats the
    same operations, so this is found once and kept with the first of them (``Linear``)."""

    def __init__(self, uses: Sequence[Use], limit: int) -> None:
        self.limit, self.linears, self.marks = limit, [use.linear for use in uses], _marks(uses)
        numbers = {id(use): i for i, use in enumerate(uses)}
        self.groups: list[tuple[list[int], list[list[str]]]] = []  # uses, names for each leaf
        self.left: list[int] = []  # uses that run one by one, or are not linear in parameters alone
        for group in _at_once(uses, limit):
            own = [numbers[id(use)] for use in group]
            operands = zip(*(self.linears[i].operands for i in own), strict=True)
            nodes = [[n for n in of_leaf if n is not None and n.param is not None]
                     for of_leaf in operands]  # fmt: skip
            if len(own) > 1 and all(len(some) == len(own) for some in nodes):
                self.groups.append((own, [[n.name for n in some] for some in nodes]))
            else:
                self.left += own
        names = [k for _, leaves in self.groups for some in leaves for k in some]
        self.names = dict.fromkeys(names).keys()

    @staticmethod
    def of(uses: Sequence[Use | Product], limit: int) -> _Sorted | None:
        """None: there are others among them."""
        own = [use for use in uses if type(use) is Use]
        if not own or len(own) < len(uses):
            return None
        known: list[_Sorted] = own[0].linear.sorted_with
        linears, marks = [use.linear for use in own], _marks(own)
        for x in known:
            if x.limit == limit and same(x.linears, linears) and x.marks == marks:
                return x
        del known[: len(known) - _SORTED + 1]
        known.append(_Sorted(own, limit))
        return known[-1]


def _marks(uses: Sequence[Use]) -> list[Any]:
    """What groups depend on beside the operations."""
    deltas = [use.delta for use in uses]
    return [*map(_shape, deltas), *map(_dtype, deltas), *[use.by_rows for use in uses]]


def add_uses(total: Tensor, uses: Sequence[Use | Product], u: Mapping[str, Direction]) -> None:
    """Add ⟨u_q, g_i⟩ of these uses to ``total`` [Q, columns]."""
    limit = STACKED.get(total.device.type, STACKED["cpu"])
    known = _Sorted.of(uses, limit) if total.is_cpu else None
    if known is None or not known.names <= u.keys():
        _add_uses(total, uses, u, limit)
        return
    for use in uses:
        use.check()
    with no_autocast("cpu"):
        Direction.fill([u[k] for k in known.names])
        for q, row in enumerate(total):
            waiting: list[tuple[Use | Product, Tensor]] = []
            for places, names in known.groups:
                group: list[Any] = [uses[i] for i in places]
                given = [torch.stack([u[k].of(q) for k in own]) for own in names]
                y = Use.run(group, [x.to(group[0].dtype) for x in given])
                if group[0].by_rows and y.is_cpu:
                    row[: group[0].B] += _stacked_dots(y, [x.delta for x in group], group[0].B)
                else:
                    waiting += zip(group, y.unbind(), strict=True)
            _add_dots(row, waiting)
    _add_uses(total, [uses[i] for i in known.left], u, limit)


def _add_uses(
    total: Tensor, uses: Sequence[Use | Product], u: Mapping[str, Direction], limit: int
) -> None:
    """The same, of any uses."""
    moved = {n: not n.roots.isdisjoint(u) for n in {n for use in uses for n in use.nodes}}
    own = list(uses)
    if not all(moved.values()):
        own = [use for use in uses if any(moved[n] for n in use.nodes)]
    if not own:
        return
    for use in own:
        use.check()
    groups = list(_at_once(own, limit))
    with no_autocast(total.device.type):
        for q, row in enumerate(total):
            moving = _moving(own, [n for n, yes in moved.items() if yes], u, q)
            waiting: list[tuple[Use | Product, Tensor]] = []
            size = 0
            for group in groups:
                first = group[0]
                if len(group) == 1:
                    results: Sequence[Tensor] = [first.along(moving[first.dtype])]
                else:
                    y = type(first).stacked(group, moving[first.dtype])  # type: ignore[arg-type]
                    if first.by_rows and y.is_cpu:
                        row[: first.B] += _stacked_dots(y, [use.delta for use in group], first.B)
                        continue
                    results = y.unbind()
                waiting += zip(group, results, strict=True)
                size += sum([y.nbytes for y in results])
                if size > MEMORY:
                    _add_dots(row, waiting)
                    waiting, size = [], 0
            _add_dots(row, waiting)


def _stacked_dots(y: Tensor, deltas: list[Tensor], B: int) -> Tensor:
    """Σ ⟨y_i, δ_i⟩ over uses of one kind for each example i [B], in float64; y [n, *shape]."""
    products = wide(y) * wide(torch.stack(deltas))
    return products.reshape(len(deltas), B, -1).sum(2).sum(0, dtype=torch.float64)


def _at_once(uses: Sequence[Use | Product], limit: int) -> Iterator[list[Use | Product]]:
    """The uses in groups that run at once: small ones of one kind, as many as fit the memory."""
    kinds: dict[Any, list[Use | Product]] = {}
    for use in uses:
        kind = use.kind
        if kind is None or use.numbers > limit:
            yield [use]
        else:
            kinds.setdefault((type(use), kind), []).append(use)
    for members in kinds.values():
        n = max(1, STACKED_MEMORY // max(1, members[0].numbers * members[0].dtype.itemsize))
        yield from (members[i : i + n] for i in range(0, len(members), n))


def _moving(
    uses: Sequence[Use | Product], nodes: Sequence[Node], u: Mapping[str, Direction], q: int
) -> dict[torch.dtype, dict[Node, Tensor]]:
    """The directions of the nodes, in the type of the uses that want them."""
    Direction.fill([u[k] for k in dict.fromkeys(k for n in nodes for k in n.roots if k in u)])
    full = {node: _direction(node, u, q) for node in nodes}
    found: dict[torch.dtype, dict[Node, Tensor]] = {}
    for use in uses:
        of_type = found.setdefault(use.dtype, {})
        for n in use.nodes:
            if n in full:
                of_type[n] = full[n]
    for dtype, own in found.items():
        other = [n for n, x in own.items() if x.dtype != dtype]
        if other:
            given = [own[n] for n in other]
            cast = kernels.alike(given, dtype)
            foreach_copy_(cast, given)
            own.update(zip(other, cast, strict=True))
    return found


def _direction(node: Node, u: Mapping[str, Direction], q: int) -> Tensor:
    if node.param is not None:
        return u[node.name].of(q)
    moving = {k: u[k].full[q : q + 1] for k in node.roots if k in u}
    return directions(node, moving)[0]


def _add_dots(row: Tensor, waiting: Sequence[tuple[Use | Product, Tensor]]) -> None:
    """Add Σ δ ⊙ y by example to ``row``, for all pairs of a use and its y."""
    kinds: dict[tuple[int, torch.dtype, bool], list[tuple[Tensor, Tensor]]] = {}
    others: dict[int, list[Tensor]] = {}
    for use, y in waiting:
        delta = use.delta
        if use.in_rows() and y.is_contiguous():
            kernel = kernels.usable((delta, y))
            kinds.setdefault((use.B, delta.dtype, kernel), []).append((y, delta))
        else:
            found = use.dots(y)
            others.setdefault(len(found), []).append(found)
    for (B, _, kernel), pairs in kinds.items():
        row[:B] += (contraction_kernel.row_dots if kernel else joined_row_dots)(pairs, B)
    for n, parts in others.items():
        row[:n] += torch.stack(parts).sum(0, dtype=torch.float64)


def joined_row_dots(pairs: Sequence[tuple[Tensor, Tensor]], B: int) -> Tensor:
    """Σ over pairs of ⟨y_i, δ_i⟩ for each example i [B], in float64. Both tensors of a pair hold
    the numbers of each of the B examples one after the other."""
    sums = [(wide(y) * wide(d)).view(B, -1).sum(1) for y, d in pairs if y.numel() > _SMALL]
    small = [(wide(y), wide(d)) for y, d in pairs if y.numel() <= _SMALL]
    if small:
        products = foreach_mul([y for y, _ in small], [d for _, d in small])
        sums.append(torch.cat([x.view(B, -1) for x in products], dim=1).sum(1))
    return torch.stack(sums).sum(0, dtype=torch.float64)

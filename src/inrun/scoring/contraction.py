"""From validation gradients and records to values: ⟨u_q, g_i⟩ for every target q and example i.

``group_values`` carries the gradients of a group of targets through the update map to directions u,
a few parameters and targets at a time; ``contract`` forms ⟨u, g_i⟩ from the records of the batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from inrun import kernels
from inrun.capture.micro_batch import MicroBatch
from inrun.gradients import Dense, Record
from inrun.gradients.cost import TOGETHER
from inrun.gradients.embedding import Lookup
from inrun.gradients.nodes import Node, directions
from inrun.gradients.records import Pair, wide
from inrun.gradients.use import Use
from inrun.optimizers.base import LinearMap, Part, Scale
from inrun.ranks.world import ALONE, World
from inrun.scoring import contraction_kernel
from inrun.scoring.uses import Direction, Product, add_uses, fill_packs, joined_row_dots
from inrun.scoring.uses_kernel import AtOnce
from inrun.validation.sweep import Gradients

MEMORY = 2**28  # numbers of the directions of several targets that are held at a time
NODE_MEMORY = 2**26  # the same for a tensor that is made of parameters
_LONG = 4  # numbers: so many are below four times bfloat16's rounding once in a million times
_SMALL = 2**14  # numbers: so few are copied sooner than multiplied on their own
Keep = Callable[[Mapping[str, Direction], Tensor | None], None]
Products = tuple[Tensor, Tensor]  # ⟨u_q, g_i⟩ [Q, B] and ⟨u_q, G⟩ [Q]


def group_values(
    points: Sequence[Gradients], maps: Sequence[Mapping[str, LinearMap]],
    ratios: Mapping[str, Tensor] | None, G: Mapping[str, Tensor], micros: Sequence[MicroBatch],
    parts: Sequence[Sequence[str]], Q: int, contract: Callable[..., Products],
    keep: Sequence[Keep | None] | None = None,
) -> list[Products]:  # fmt: skip
    """The products of a group of Q targets, through the maps of each estimator.

    ``keep``: of each estimator, what receives its directions and factors on their values.
    ``ratios`` is ḡ/G where clipping gave each coordinate its own, ``contract`` the function below
    or the one for shards (sharded.py). One target: the whole model at once. Several: a few
    parameters at a time, and no more targets at a time than fit the memory; their gradients are
    formed once for all estimators.
    """

    def some(names: Sequence[str], qs: slice) -> list[Products]:
        v, single = _gradients(points, names, qs)
        own, found = {k: G[k] for k in names}, []
        for f, receive in zip(maps, keep or [None] * len(maps), strict=True):
            u = directions_through(f, v, ratios, single)
            found.append(contract(u, own, micros))
            if receive is not None:
                receive(u, points[0].scale if Q > 1 else None)
        return found

    if Q == 1:
        return some(list(G), slice(0, 1))
    small, large = _fitting(next(iter(G.values())).device)
    pieces = []
    for names in _pieces(parts, G, small // Q):
        n = _targets_at_once(Q, large // sum(G[k].numel() for k in names))
        pieces.append([some(names, slice(q, min(q + n, Q))) for q in range(0, Q, n)])
    return [_whole([[f[e] for f in p] for p in pieces], points[0].scale) for e in range(len(maps))]


def _gradients(
    points: Sequence[Gradients], names: Sequence[str], qs: slice
) -> tuple[Mapping[str, Tensor], bool]:
    """The validation gradients of some parameters and targets [Q, *W], the mean over the points; or
    [*W], and True, of the only target on a host."""
    single = points[0].single if len(points) == 1 else None
    if single is not None and next(iter(single.values())).is_cpu:
        return {k: single[k] for k in names}, True
    v = _mean([p.of(names, qs) for p in points])
    if next(iter(v.values())).is_cuda:  # once, for all kernels that will read them
        v = dict(zip(v, contraction_kernel.all_rows_in_order([*v.values()]), strict=True))
    return v, False


def _whole(pieces: Sequence[Sequence[Products]], scale: Tensor | None) -> Products:
    """The products by all parameters and for all targets, from those of each piece of the model and
    each few targets; times ``scale`` [Q]."""
    each = [[torch.cat(x) for x in zip(*piece, strict=True)] for piece in pieces]
    values, sums = (sum(x[1:], x[0]) for x in zip(*each, strict=True))
    return (values, sums) if scale is None else (values * scale[:, None], sums * scale)


def directions_through(
    maps: Mapping[str, LinearMap], v: Mapping[str, Tensor], ratios: Mapping[str, Tensor] | None,
    single: bool = False,
) -> dict[str, Direction]:  # fmt: skip
    """The validation gradients v [Q, *W] carried through the maps and, with ``ratios``, through
    clipping by value. ``single``: v [*W] are those of the only target."""
    found: dict[str, Direction] = {}
    if single and not {Part, Scale}.issuperset(map(type, maps.values())):
        v, single = {k: x[None] for k, x in v.items()}, False
    for k, x in v.items():
        if k in found:
            continue
        f = maps[k]
        if type(f) is Part and ratios is None:
            found[k] = Direction(None if single else x, part=f, single=x if single else None)
            continue
        if single:
            x = x[None]
        if (together := getattr(f, "together", None)) is not None:  # of several parameters at once
            for name, u in together(v).items():
                found[name] = Direction(u if ratios is None else ratios[name] * u)
            continue
        K = f.K if isinstance(f, Scale) else None
        if K is None:
            x = torch.stack([f(own) for own in wide(x)])
        if ratios is not None and K is not None:
            K = ratios[k] * K
        elif ratios is not None:
            x = ratios[k] * x
        found[k] = Direction(x, K)
    return found


def _mean(points: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """The mean of the gradients at several points, by parameter."""
    if len(points) == 1:
        return points[0]
    return {k: torch.stack([p[k] for p in points]).mean(0) for k in points[0]}


def _fitting(device: torch.device) -> tuple[int, int]:
    """How many numbers of the directions of several targets to hold at a time: of small parameters
    together, and of a large one. A GPU has memory for more, each piece costs the host some
    launches, and of a large parameter all examples' gradients are read again for every few
    targets."""
    if device.type != "cuda":
        return MEMORY, MEMORY
    free, memory = torch.cuda.mem_get_info(device)
    small = max(MEMORY, memory // 256)
    return small, max(small, min(memory // 64, free // 16))


def _targets_at_once(Q: int, fit: int) -> int:
    """How many targets to contract at a time: at most ``fit``, in multiples of TOGETHER."""
    n = max(1, min(Q, fit))
    return n if n == Q or n < TOGETHER else n // TOGETHER * TOGETHER


def _pieces(
    parts: Sequence[Sequence[str]], G: Mapping[str, Tensor], size: int
) -> Iterator[list[str]]:
    """Joins parts up to ``size`` numbers; a larger part is a piece of its own."""
    piece: list[str] = []
    held = 0
    for names in parts:
        more = sum(G[k].numel() for k in names)
        if piece and held + more > size:
            yield piece
            piece, held = [], 0
        piece += names
        held += more
    yield piece


def contract(
    u: Mapping[str, Direction], G: Mapping[str, Tensor], micros: Sequence[MicroBatch],
    sums: bool = True,
) -> Products:  # fmt: skip
    """⟨u_q, g_i⟩ of every example of the step [Q, B], and ⟨u_q, G⟩ [Q], in float64. A micro-batch
    of which a part belongs to nobody has a column more (``MicroBatch.columns``). Not ``sums``: the
    latter are zero, and of G only the type counts."""
    some = next(iter(u.values())).v
    Q, device = len(some), some.device
    values, covered = [], set[str]()
    expected = torch.zeros(Q, dtype=torch.float64, device=device)
    packs = fill_packs(u)
    uses = [_uses(micro, u.keys(), device) for micro in micros]
    at_once = AtOnce.of(uses, u, G if sums else None)
    if at_once is not None and at_once.sums is not None:
        expected, covered = at_once.sums, set(u)
    for i, micro in enumerate(micros):
        total = torch.zeros(Q, micro.columns, dtype=torch.float64, device=device)
        dense: list[tuple[str, Tensor]] = []
        left = uses[i] if at_once is None else at_once.add(total, i)
        for node, records in micro.nodes(u.keys()):
            for record in records:
                if type(record) is Dense and node.param is not None:
                    rows = record.grads
                    dense.append((node.name, rows if rows.device == device else rows.to(device)))
                elif not _is_product(record):
                    found = _products(node, record.to(device), u)
                    total[:, : found.shape[1]] += found
                elif record.like().device != device:
                    left.append(_product(node, record, device))
        add_uses(total, left, u)
        for kernel, pairs in _kinds(dense, u, G):
            names = [k for k, _ in pairs]
            with_G = sums and covered.isdisjoint(names)
            if kernel:
                with_G = with_G and kernels.usable([G[k] for k in names])
            products = _kernel_products if kernel else joined_products
            found = products(pairs, u, G if with_G else None)
            total[:, : found.shape[1] - 1] += found[:, :-1]
            if with_G:
                expected += found[:, -1]
                covered.update(names)
        values.append(total)
    if sums:
        for pack in packs:
            if covered.isdisjoint(pack.names):
                expected += pack.along(G)
                covered.update(pack.names)
        add_gradient(expected, {k: d for k, d in u.items() if k not in covered}, G)
    return torch.cat(values, dim=1), expected


def _is_product(record: Record) -> bool:
    return type(record) is Pair and not record.a.is_complex()


def _product(node: Node, record: Record, device: torch.device) -> Product:
    assert isinstance(record, Pair)
    return Product(node, record.to(device))


def _uses(micro: MicroBatch, names: Collection[str], device: torch.device) -> list[Use | Product]:
    """What a micro-batch keeps on this device as inputs and δ, in records of these parameters as
    well."""
    found: list[Use | Product] = [*micro.uses]
    for node, records in micro.nodes(names):
        own = [r for r in records if _is_product(r) and r.like().device == device]
        found += [_product(node, r, device) for r in own]
    return found


def add_gradient(expected: Tensor, u: Mapping[str, Direction], G: Mapping[str, Tensor]) -> None:
    """Add ⟨u_q, G⟩ to ``expected`` [Q]: of directions that were computed as they are, of the others
    with the batch as one example."""
    left, known = [], dict[Any, list[tuple[Tensor, Tensor]]]()
    for k, d in u.items():
        g = G[k]
        if len(expected) == 1 and d.known and g.is_contiguous() and not g.is_complex():
            pair = (contraction_kernel.in_order(d.of(0)), g)
            kernel = kernels.usable(pair)
            known.setdefault((g.dtype, pair[0].dtype, kernel), []).append(pair)
        else:
            left.append((k, g[None]))
    for (*_, kernel), pairs in known.items():
        expected += (contraction_kernel.row_dots if kernel else joined_row_dots)(pairs, 1)
    for kernel, rows in _kinds(left, u, G):
        expected += (_kernel_products if kernel else joined_products)(rows, u, None)[:, 0]


def _kinds(
    rows: Sequence[tuple[str, Tensor]], u: Mapping[str, Direction], G: Mapping[str, Tensor]
) -> Iterator[tuple[bool, list[tuple[str, Tensor]]]]:
    """Gradients that can be contracted together, and whether the Triton kernel can do it."""
    kinds: dict[Any, list[tuple[str, Tensor]]] = {}
    by_kernel = contraction_kernel.usable_rows([x for _, x in rows])
    for (k, x), kernel in zip(rows, by_kernel, strict=True):
        kind = kernel, len(x), x.dtype, u[k].v.dtype, G[k].dtype
        kinds.setdefault(kind, []).append((k, x))
    for (kernel, *_), pairs in kinds.items():
        yield kernel, pairs


def _products(node: Node, record: Record, u: Mapping[str, Direction]) -> Tensor:
    """⟨u_q, g_i⟩ of one record [Q, B]."""
    if node.param is not None:
        d = u[node.name]
        if isinstance(record, Lookup) and d.K is not None:  # few rows of a large table
            return record.dots(d.v, d.K).double()
        return record.dots(d.full).double()
    moving = {k: u[k].full for k in node.roots if k in u}
    some = max(1, NODE_MEMORY // math.prod(record.shape))
    found = [
        record.dots(directions(node, {k: x[q : q + some] for k, x in moving.items()}))
        for q in range(0, len(next(iter(moving.values()))), some)
    ]
    return torch.cat(found).double()


def _kernel_products(
    rows: Sequence[tuple[str, Tensor]], u: Mapping[str, Direction], G: Mapping[str, Tensor] | None
) -> Tensor:
    """As ``joined_products``, by the Triton kernel."""
    names = [k for k, _ in rows]
    factors = [contraction_kernel.in_order(x) for k in names if (x := u[k].K) is not None]
    K = factors if len(factors) == len(names) else None
    v = [contraction_kernel.rows_in_order(u[k].v if K is not None else u[k].full) for k in names]
    own = None if G is None else [G[k] for k in names]
    return contraction_kernel.contract([g for _, g in rows], K, v, own)


def joined_products(
    rows: Sequence[tuple[str, Tensor]], u: Mapping[str, Direction], G: Mapping[str, Tensor] | None
) -> Tensor:
    """Σ over parameters of ⟨u_q, g_i⟩ for materialised gradients, and in the last column ⟨u_q, G⟩:
    [Q, B + 1]. Small tensors (the many vectors of a model) are multiplied in one product."""
    groups = [[x] for x in rows if x[1].numel() > _SMALL]
    small = [x for x in rows if x[1].numel() <= _SMALL]
    found, own = [], []
    for group in [*groups, small] if small else groups:
        d = _directions([u[k] for k, _ in group])
        found.append(d @ _side_by_side([wide(x) for _, x in group]).T)
        if G is not None:
            own.append(d @ _row([G[k] for k, _ in group], d.dtype))
    total = torch.stack(found).sum(0, dtype=torch.float64)
    last = torch.stack(own).sum(0, dtype=torch.float64) if own else total.new_zeros(len(total))
    return torch.cat([total, last[:, None]], dim=1)


def _directions(group: Sequence[Direction]) -> Tensor:
    """K ⊙ v of all directions as one matrix [Q, numbers]."""
    if len(group) == 1 or any(d.K is None for d in group):
        return _side_by_side([d.full for d in group])
    factors = [d.K[None] for d in group if d.K is not None]
    return _side_by_side(factors) * _side_by_side([d.v for d in group])


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [n, *W] as one matrix [n, numbers], their columns side by side."""
    flat = [t if t.ndim == 2 else t.flatten(1) if t.ndim > 2 else t[:, None] for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _row(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The numbers of all tensors, one after the other."""
    flat = [t if t.ndim == 1 else t.flatten() for t in tensors]
    row = flat[0] if len(flat) == 1 else torch.cat(flat)
    return row if row.dtype == dtype else row.to(dtype)


def components(
    names: Iterable[str], micros: Sequence[MicroBatch], others: Iterable[Collection[str]] = ()
) -> list[list[str]]:
    """Parameters that must be scored together because one tensor is made of several of them, or
    because they are among ``others``."""
    group = {k: {k} for k in names}
    nodes = (node.roots for micro in micros for node in micro.met_nodes)
    for together in itertools.chain(nodes, others):
        joined = set().union(*(group[k] for k in together if k in group))
        for k in joined:
            group[k] = joined
    seen: set[str] = set()
    found = []
    for k, members in group.items():
        if k not in seen:
            seen |= members
            found.append(sorted(members))
    return found


def cancelling(
    G: Mapping[str, Tensor], micros: Sequence[MicroBatch], among: Collection[str] | None = None,
    world: World = ALONE,
) -> dict[str, Tensor]:  # fmt: skip
    """For each 1-D parameter (or those ``among``), a flag on its device: is its gradient zero up to
    rounding although the per-example gradients are not? Example: a bias before BatchNorm. The batch
    does not move it, but an adaptive optimizer's slope at zero is of the order lr/eps, which would
    give examples meaningless values.

    The norm of the whole vector decides, because single coordinates may be small by chance. For the
    same reason the rounding of half precision is allowed for only in longer vectors.
    """
    sizes: dict[str, Tensor] = {}
    coarse = 0.0
    vectors = {k: None for k, g in G.items() if g.ndim <= 1 and (not among or k in among)}
    for micro in micros:
        if micro.autocast is not None and micro.autocast[1]:
            coarse = max(coarse, torch.finfo(micro.autocast[2]).eps)
    for names in world.in_turn(vectors):
        for node, records in (x for micro in micros for x in micro.by_example(names)):
            k = node.name
            for record in records:
                size = record.to(G[k].device).rows().square().sum()
                sizes[k] = sizes[k] + size if k in sizes else size
    norms = world.norms({k: G[k] for k in vectors})
    kinds = {k: size.dtype for k, size in sizes.items()}
    found = {}
    for k, size in world.total_by_name(sizes, vectors, world.share**2).items():
        limit = math.sqrt(torch.finfo(kinds.get(k, G[k].dtype)).eps)
        limit = max(limit, 4 * coarse) if G[k].numel() >= _LONG else limit
        own = norms[k]  # of the same order by chance, however many examples
        each = size.sqrt().to(own.device)
        found[k] = (own <= limit * each) & (each > 0) & own.isfinite()
    return found


def unless(cancelled: Tensor, f: LinearMap) -> LinearMap:
    """The map ``f``, or the zero map of the same kind if the flag ``cancelled`` is True."""
    if isinstance(f, Scale):
        return Scale(f.K.masked_fill(cancelled, 0.0))
    return lambda v: f(v).masked_fill(cancelled, 0.0)

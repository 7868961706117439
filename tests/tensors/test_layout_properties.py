"""Layouts of random shapes through random chains of operations, against what index tensors say.

The oracle knows nothing of dimensions: for each example a tensor that is 1 in its entries and 0
elsewhere goes through the same operation, as the tangent of the input, and the ones show where the
example arrived. (Operations that mix rows in place, as BatchNorm does, are not among them: there a
row stays the example's whose copy of the parameters it uses.)
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from inrun.tensors.follow import follow
from inrun.tensors.layout import Layout, to_rows

ENTRIES = 400  # of the largest tensor
FEW, MANY = 200, 3_000


def first(out):
    return out if isinstance(out, Tensor) else out[0]


class Input:
    """Stands for the tensor in the arguments of a call."""

    def __repr__(self):
        return "x"


X = Input()


def filled(call, x):
    func, *args = call
    return func, tuple(tree_map(lambda leaf: x if leaf is X else leaf, args))


def moved(call, x, tangent):
    """What the call does to a tangent: it goes where the numbers go, also where they are sorted."""
    with forward_ad.dual_level():
        func, args = filled(call, forward_ad.make_dual(x.contiguous(), tangent))
        return forward_ad.unpack_dual(first(func(*args))).tangent


def marks(shape, layout, B):
    """[B, *shape]: tensor i is 1 in the entries that the layout gives to example i."""
    owner = torch.arange(shape[layout.dim]) // layout.inner % B
    sizes = [1] * len(shape)
    sizes[layout.dim] = -1
    return torch.stack([(owner == i).double().view(sizes).expand(shape) for i in range(B)])


def right(layout, arrived):
    """Is each entry that example i reached in a slice that the layout gives to i?"""
    B, *shape = arrived.shape
    if shape[layout.dim] != layout.outer * B * layout.inner:
        return False
    return not bool((arrived.bool() & ~marks(shape, layout, B).bool()).any())


def possible(arrived):
    """Is there any layout that is right? Tries all."""
    B, *shape = arrived.shape
    return any(
        right(Layout(dim, outer, size // outer // B), arrived)
        for dim, size in enumerate(shape)
        for outer in range(1, size // B + 1)
        if size % (outer * B) == 0
    )


@st.composite
def shapes(draw, count):
    """A shape with so many entries: prime factors in any order, some multiplied, ones between."""
    primes = []
    while count > 1:
        primes.append(next(p for p in range(2, count + 1) if count % p == 0))
        count //= primes[-1]
    sizes = [1]
    for factor in draw(st.permutations(primes)):
        if draw(st.booleans()):
            sizes.append(factor)
        else:
            sizes[-1] *= factor
    return tuple(sizes[draw(st.integers(0, 1)) if sizes[0] == 1 and len(sizes) > 1 else 0 :])


@st.composite
def starts(draw):
    """Batch size, shape and layout. Sizes are few, so that others than the batch's equal it."""
    B = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, B)
    return B, tuple(shape), Layout(dim)


@st.composite
def rearrangements(draw, shape):
    """A call that keeps every number of a tensor."""
    n, total = len(shape), math.prod(shape)
    d = draw(st.integers(0, n - 1))

    def dim():
        return draw(st.integers(-n, n - 1))

    def times():
        return draw(st.integers(1, max(1, min(4, ENTRIES // total))))

    kinds = [  # chosen before their arguments are drawn
        lambda: (Tensor.reshape, X, draw(shapes(total))),
        lambda: (torch.reshape, X, draw(shapes(total))),
        lambda: (Tensor.flatten, X, d, draw(st.integers(d, n - 1))),
        lambda: (torch.unflatten, X, d, draw(shapes(shape[d]))),
        lambda: (Tensor.squeeze, X, d),
        lambda: (torch.squeeze, X),
        lambda: (Tensor.unsqueeze, X, draw(st.integers(-n - 1, n))),
        lambda: (Tensor.transpose, X, dim(), dim()),
        lambda: (torch.swapaxes, X, dim(), dim()),
        lambda: (Tensor.permute, X, draw(st.permutations(range(n)))),
        lambda: (torch.movedim, X, dim(), dim()),
        lambda: (Tensor.contiguous, X),
        lambda: (Tensor.expand, X, (times(), *shape)),
    ]
    if shape[d] == 1:
        kinds.append(lambda: (Tensor.expand, X, (*shape[:d], times(), *shape[d + 1 :])))
    return draw(st.sampled_from(kinds))()


@st.composite
def changes(draw, shape):
    """A call that moves rows, leaves some out, repeats them or adds them up."""
    n, total = len(shape), math.prod(shape)
    d = draw(st.integers(0, n - 1))
    size, before = shape[d], (slice(None),) * d

    def place():
        return draw(st.integers(0, size - 1))

    def rows():
        return torch.tensor([place() for _ in range(size)])

    def few():
        return draw(st.integers(1, 3))

    def other():
        return (d + draw(st.integers(1, n - 1))) % n

    kinds = [
        lambda: (torch.sum, X, d, draw(st.booleans())),
        lambda: (Tensor.mean, X, d),
        lambda: (torch.amax, X, d, draw(st.booleans())),
        lambda: (Tensor.select, X, d, place()),
        lambda: (Tensor.narrow, X, d, 0, place() + 1),
        lambda: (Tensor.__getitem__, X, (*before, slice(place(), None, few()))),
        lambda: (Tensor.__getitem__, X, (*before, place())),
        lambda: (Tensor.__getitem__, X, (*before, None, ..., None)),
        lambda: (Tensor.__getitem__, X, (*before, rows())),
        lambda: (torch.index_select, X, d, rows()),
        lambda: (torch.flip, X, (d,)),
        lambda: (Tensor.flip, X, d),
        lambda: (torch.roll, X, few(), d),
        lambda: (Tensor.roll, X, few()),
        lambda: (torch.sort, X, d),
        lambda: (torch.add, X, torch.zeros(shape[d:])),
        lambda: (torch.mul, X, torch.ones(1, *shape)),
    ]
    if n > 1:
        kinds += [
            lambda: (torch.rot90, X, few(), (d, other())),
            lambda: (torch.diagonal, X, 0, d, other()),
            lambda: (torch.tril, X),
        ]
    if 2 * total <= ENTRIES:
        kinds += [
            lambda: (Tensor.repeat, X, tuple(2 if k == d else 1 for k in range(n))),
            lambda: (Tensor.repeat, X, (2, *(1,) * n)),
            lambda: (torch.tile, X, (2, *(1,) * (n - d - 1))),
            lambda: (torch.repeat_interleave, X, 2, d),
            lambda: (torch.cat, [X, X], d),
            lambda: (torch.stack, [X, X], d),
        ]
    return draw(st.sampled_from(kinds))()


def step(call, x, arrived, layout):
    """Output of the call, where the examples arrived in it, and its layout (None: refused)."""
    B = len(arrived)
    func, args = filled(call, x)
    out = first(func(*args))
    there = torch.stack([moved(call, x, one) for one in arrived])
    found = follow(func, args, {}, out, lambda t: layout if t is x else None, B)
    return out, there, found if isinstance(found, Layout) else None


def begin(data):
    torch.manual_seed(0)  # the same numbers when hypothesis repeats a case
    B, shape, layout = data.draw(starts())
    return B, torch.randn(shape), marks(shape, layout, B), layout


def rearranged(data):
    """Chains of views, transpositions and expansions: found where there is one, and right."""
    B, x, arrived, layout = begin(data)
    for _ in range(data.draw(st.integers(1, 6))):
        call = data.draw(rearrangements(tuple(x.shape)))
        x, arrived, layout = step(call, x, arrived, layout)
        if layout is None:
            assert B == 1 or x.ndim == 0 or not possible(arrived)
            return
        assert right(layout, arrived)
        for i in range(B):
            rows = to_rows(arrived[i], layout, B)  # as capture takes the examples apart
            assert bool(rows[i].all()) and not bool(rows[torch.arange(B) != i].any())


def changed(data):
    """Chains with operations that move rows as well: right or refused."""
    _, x, arrived, layout = begin(data)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from((changes, rearrangements)))
        call = data.draw(kind(tuple(x.shape)))
        x, arrived, layout = step(call, x, arrived, layout)
        if layout is None:
            return
        assert right(layout, arrived)


def examples(count):
    """The same random cases on every machine; no deadline, for busy ones."""
    return settings(max_examples=count, derandomize=True, deadline=None, database=None)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", [rearranged, changed])
def test_layouts_are_what_index_tensors_say(check, count):
    examples(count)(given(st.data())(check))()

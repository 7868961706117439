"""Whole models in which rows move, are chosen, repeated or sent to experts, with sizes that equal
the batch's: the values are right to 1e-9, or the model is refused by an error that names an
operation. Never a wrong number.

Sums cannot see a wrong owner. The truth is found without inrun: each number of the output makes one
term of the loss; the input of one example is changed by a little, too little to change any sorting
or routing, and the terms that change are that example's. Its gradient is that of its terms.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from helpers.captures import gradients_of
from inrun.capture.capture import Capture
from inrun.exact import reference

B = T = E = 4
IN, H, OUT = 6, 5, 3
ORDER = [2, 0, 3, 1]
P = torch.tensor(ORDER)

CASES = {}  # name: (model, inputs that hold one row per example, inputs that all share)


def case(name, shape=(B, IN), shared=()):
    """Registers a model by its ``forward(self, *inputs)``; layers are a: IN → H, b: H → OUT,
    c: H → H and the experts e: IN → H."""

    def register(forward):
        given = shape if isinstance(shape, list) else [shape]
        CASES[name] = forward, given, shared
        return forward

    return register


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(IN, H), nn.Linear(H, OUT), nn.Linear(H, H)
        self.e = nn.ModuleList([nn.Linear(IN, H) for _ in range(E)])
        self.register_buffer("order", P.clone())
        self.register_buffer("scale", torch.linspace(0.5, 2.0, B))
        self._forward = forward

    def forward(self, *inputs):
        return self._forward(self, *inputs)


def hidden(name, f):
    """b(f(tanh(a(x))))"""
    CASES[name] = lambda m, x: m.b(f(torch.tanh(m.a(x)))), [(B, IN)], ()


# Every case of the list of programs with wrong credit


def states(m, x):
    h, out = x.new_zeros(len(x), H), []
    for t in range(x.shape[1]):
        h = torch.tanh(m.a(x[:, t]) + m.c(h))
        out.append(h)
    return out


for length in (3, T):

    @case(f"states stacked behind, T = {length}", (B, length, IN))
    def _(m, x):
        return m.b(torch.stack(states(m, x), 1))

    @case(f"states stacked in front, T = {length}", (B, length, IN))
    def _(m, x):
        return m.b(torch.stack(states(m, x))).transpose(0, 1)

    @case(f"states stacked in front and left there, T = {length}", (B, length, IN))
    def _(m, x):
        return m.b(torch.stack(states(m, x)))


@case("states stacked last", (B, T, IN))
def _(m, x):
    return m.b(torch.stack(states(m, x), -1).mT)


@case("states in a buffer", (B, T, IN))
def _(m, x):
    kept = x.new_zeros(T, B, H)
    for t, h in enumerate(states(m, x)):
        kept[t] = h
    return m.b(kept)


hidden("flip", lambda h: h.flip(0))
hidden("flipud", torch.flipud)
hidden("roll", lambda h: h.roll(1, 0))
hidden("roll without dims", lambda h: h.roll(H))
hidden("rot90 twice", lambda h: torch.rot90(h, 2).fliplr())
hidden("cat of slices", lambda h: torch.cat([h[2:], h[:2]]))
hidden("cat of chunks", lambda h: torch.cat(h.chunk(2)[::-1]))
hidden("cat of split", lambda h: torch.cat([h.split([1, 3])[i] for i in (1, 0)]))
hidden("vstack of rows", lambda h: torch.vstack([h[i] for i in ORDER]))
hidden("stack of unbind", lambda h: torch.stack(h.unbind()[::-1]))
hidden("stack of rows", lambda h: torch.stack([h[i] for i in ORDER]))
hidden("index by list", lambda h: h[ORDER])
hidden("index by tensor", lambda h: h[P])
hidden("index_select", lambda h: h.index_select(0, P))
hidden("gather", lambda h: h.gather(0, P[:, None].expand(B, H)))
hidden("take_along_dim", lambda h: torch.take_along_dim(h, P[:, None], 0))
hidden("embedding of rows", lambda h: F.embedding(P, h))
hidden("permutation matrix", lambda h: torch.eye(B)[P] @ h)
hidden("index_copy", lambda h: torch.zeros(B, H).index_copy(0, P, h))
hidden("index_put", lambda h: torch.zeros(B, H).index_put((P,), h))
hidden("scatter", lambda h: torch.zeros(B, H).scatter(0, P[:, None].expand(B, H), h))
hidden("sorted by a number of each", lambda h: h[h[:, 0].argsort()])
hidden("topk rows", lambda h: h[h[:, 0].topk(2).indices])
hidden("shifted by padding", lambda h: F.pad(h, (0, 0, 1, -1)))
hidden("every second row", lambda h: h[::2])
hidden("fewer rows", lambda h: h[1:])
hidden("one row", lambda h: h[1])


@case("index by a buffer")
def _(m, x):
    return m.b(torch.tanh(m.a(x))[m.order])


@case("setitem by a buffer")
def _(m, x):
    h = torch.tanh(m.a(x))
    out = torch.zeros_like(h)
    out[m.order] = h
    return m.b(out)


@case("sorted and put back")
def _(m, x):
    order = x[:, 0].argsort(descending=True)
    h = m.b(torch.tanh(m.a(x[order])))
    return h[order.argsort()]


@case("sorted inside and put back by writing")
def _(m, x):
    h = torch.tanh(m.a(x))
    order = h[:, 0].argsort()
    out = torch.empty_like(h)
    out[order] = m.c(h[order])
    return m.b(out)


@case("sorted and left so")
def _(m, x):
    return m.b(torch.tanh(m.a(x[x[:, 0].argsort()])))


@case("sorted by length, unsorted", [(B, T, IN), "lengths"])
def _(m, x, lengths):
    order = lengths.argsort(descending=True)
    mask = torch.arange(T)[None] < lengths[order][:, None]
    h = torch.tanh(m.a(x[order])) * mask[..., None]
    pooled = m.c(h.sum(1)) / lengths[order][:, None]
    return m.b(pooled[torch.argsort(order)])


for dim in (0, 1):

    @case(f"experts stacked in dimension {dim}")
    def _(m, x, dim=dim):
        return m.b(torch.tanh(torch.stack([e(x) for e in m.e], dim))).mean(dim)

    @case(f"experts stacked in dimension {dim}, weighted")
    def _(m, x, dim=dim):
        weights = torch.softmax(m.a(x)[:, :E], -1)
        stacked = torch.stack([e(x) for e in m.e], dim)
        shape = (B, E, 1) if dim else (E, B, 1)
        return m.b((stacked * (weights if dim else weights.T).reshape(shape)).sum(dim))


# More of the kind


@case("shared memory of length B", shared=[(B, IN)])
def _(m, x, memory):
    weights = torch.softmax(m.a(x) @ m.a(memory).T, 1)
    return m.b(weights @ torch.tanh(m.e[0](memory)))


@case("shared bias of length B", (B, B, IN), shared=[(B, H)])
def _(m, x, bias):
    return m.b(torch.tanh(m.a(x)) + bias)


@case("second input of each example", [(B, IN), (B, IN)])
def _(m, x, z):
    return m.b(torch.tanh(m.a(x) + m.e[0](z)))


@case("buffer of length B along the tokens", (B, T, IN))
def _(m, x):
    return m.b(torch.tanh(m.a(x)) * m.scale[:, None])


@case("buffer of length B along the features", (B, T, IN))
def _(m, x):
    return m.b(F.pad(torch.tanh(m.a(x))[..., :B] * m.scale, (0, H - B)))


@case("positions made of arange(B)", (B, T, IN))
def _(m, x):
    return m.b(torch.tanh(m.a(x)) + m.c.weight[torch.arange(T)])


@case("transposed and back, T = B", (B, T, IN))
def _(m, x):
    return m.b(m.c(torch.tanh(m.a(x)).transpose(0, 1).contiguous()).transpose(0, 1))


@case("transposed and left so, T = B", (B, T, IN))
def _(m, x):
    return m.b(torch.tanh(m.a(x)).transpose(0, 1))


@case("flattened tokens in another order", (B, T, IN))
def _(m, x):
    return m.b(torch.tanh(m.a(x)).transpose(0, 1).reshape(B * T, H).view(T, B, H))


@case("flattened tokens, shuffled", (B, T, IN))
def _(m, x):
    order = torch.arange(B * T - 1, -1, -1)
    return m.b(torch.tanh(m.a(x)).reshape(B * T, H)[order])


@case("beams next to each other")
def _(m, x):
    h = torch.tanh(m.a(x)).repeat_interleave(2, 0)
    return m.b(m.c(h)).view(B, 2, OUT)


@case("beams one after the other")
def _(m, x):
    h = torch.tanh(m.a(x)).repeat(2, 1)
    return m.b(m.c(h)).view(2, B, OUT)


@case("beams reordered")
def _(m, x):
    h = torch.tanh(m.a(x)).repeat_interleave(2, 0)
    beams = torch.stack([h, m.c(h)], 1).view(B, 2, 2, H)
    best = beams[..., 0].argmax(2)
    return m.b(beams.gather(2, best[..., None, None].expand(B, 2, 1, H)).squeeze(2))


@case("chosen and rejected in 2B rows", [(B, IN), (B, IN)])
def _(m, chosen, rejected):
    both = m.b(torch.tanh(m.a(torch.cat([chosen, rejected]))))
    good, bad = both.chunk(2)
    return F.logsigmoid(good - bad)


@case("chosen and rejected, halves by slicing", [(B, IN), (B, IN)])
def _(m, chosen, rejected):
    both = m.b(torch.tanh(m.a(torch.cat([rejected, chosen], 0))))
    return F.logsigmoid(both[B:] - both[:B])


@case("chosen and rejected interleaved", [(B, IN), (B, IN)])
def _(m, chosen, rejected):
    both = torch.stack([chosen, rejected], 1).flatten(0, 1)
    out = m.b(torch.tanh(m.a(both)))
    return F.logsigmoid(out[::2] - out[1::2])


@case("best tokens of each example", (B, T, IN))
def _(m, x):
    h = torch.tanh(m.a(x))
    best = h[..., 0].topk(2, 1).indices
    return m.b(h.gather(1, best[..., None].expand(B, 2, H)))


@case("best tokens by two indices", (B, T, IN))
def _(m, x):
    h = torch.tanh(m.a(x))
    best = h[..., 0].topk(2, 1).indices
    return m.b(h[torch.arange(B)[:, None], best])


@case("last token of each example", [(B, T, IN), "lengths"])
def _(m, x, lengths):
    h = torch.tanh(m.a(x))
    return m.b(h[torch.arange(B), lengths - 1])


@case("boolean mask then linear", [(B, T, IN), "lengths"])
def _(m, x, lengths):
    h = torch.tanh(m.a(x))
    return m.b(h[torch.arange(T)[None] < lengths[:, None]])


@case("masked before the first layer", [(B, T, IN), "lengths"])
def _(m, x, lengths):
    return m.b(torch.tanh(m.a(x[torch.arange(T)[None] < lengths[:, None]])))


@case("masked by the numbers", (B, T, IN))
def _(m, x):
    h = torch.tanh(m.a(x))
    return m.b(h[h[..., 0] > 0])


@case("masked and put back", (B, T, IN))
def _(m, x):
    h = torch.tanh(m.a(x))
    mask = h[..., 0] > 0
    out = torch.zeros_like(h)
    out[mask] = m.c(h[mask])
    return m.b(out + h)


@case("masked_select of the output", (B, T, IN))
def _(m, x):
    out = m.b(torch.tanh(m.a(x)))
    return out.masked_select(x[..., :OUT] > 0)


@case("rows chosen by a mask over the batch")
def _(m, x):
    h = torch.tanh(m.a(x))
    return m.b(h[x[:, 0] > -10])


def expert_of(x):
    return x[..., 0].abs().mul(10).long() % E


@case("index_add routing")
def _(m, x):
    out = torch.zeros(B, H)
    expert = expert_of(x)
    for k, e in enumerate(m.e):
        rows = torch.where(expert == k)[0]
        out = out.index_add(0, rows, torch.tanh(e(x[rows])))
    return m.b(out)


@case("index_add routing of tokens", (B, T, IN))
def _(m, x):
    flat = x.view(-1, IN)
    out, expert = torch.zeros(B * T, H), expert_of(flat)
    for k, e in enumerate(m.e):
        rows = (expert == k).nonzero()[:, 0]
        out.index_add_(0, rows, torch.tanh(e(flat[rows])))
    return m.b(out.view(B, T, H))


@case("routing of tokens to the best two of E experts", (B, T, IN))
def _(m, x):
    flat = x.reshape(-1, IN)
    scores = torch.softmax(m.a(flat)[:, :E], -1)
    weights, chosen = scores.topk(2, -1)
    out = torch.zeros(B * T, H)
    mask = F.one_hot(chosen, E).permute(2, 1, 0)
    for k, e in enumerate(m.e):
        rank, row = torch.where(mask[k])
        out.index_add_(0, row, torch.tanh(e(flat[row])) * weights[row, rank, None])
    return m.b(out).view(B, T, OUT)


@case("routing by assignment", (B, T, IN))
def _(m, x):
    flat = x.reshape(-1, IN)
    out, expert = torch.zeros(B * T, H), expert_of(flat)
    for k, e in enumerate(m.e):
        out[expert == k] = torch.tanh(e(flat[expert == k]))
    return m.b(out)


@case("buckets and back", (B, T, IN))
def _(m, x):
    flat = x.reshape(-1, IN)
    order = expert_of(flat).argsort(stable=True)
    sizes = torch.bincount(expert_of(flat), minlength=E).tolist()
    parts = flat[order].split(sizes)
    done = torch.cat([torch.tanh(e(part)) for e, part in zip(m.e, parts, strict=True)])
    return m.b(torch.zeros(B * T, H).index_add(0, order, done))


@case("capacity buffers [E, C, D]", (B, T, IN))
def _(m, x):
    flat, C = x.reshape(-1, IN), B * T
    expert = expert_of(flat)
    place = F.one_hot(expert, E).cumsum(0).gather(1, expert[:, None])[:, 0] - 1
    held = torch.zeros(E, C, IN)
    held[expert, place] = flat
    done = torch.stack([torch.tanh(e(held[k])) for k, e in enumerate(m.e)])
    return m.b(done[expert, place]).view(B, T, OUT)


@case("capacity buffers by products with one-hot tensors", (B, T, IN))
def _(m, x):
    flat, C = x.reshape(-1, IN), B * T
    expert = expert_of(flat)
    place = F.one_hot(expert, E).cumsum(0).gather(1, expert[:, None])[:, 0] - 1
    sent = F.one_hot(expert, E)[:, :, None] * F.one_hot(place, C)[:, None].double()
    held = torch.einsum("nec,ni->eci", sent, flat)
    weight = torch.stack([e.weight for e in m.e])
    done = torch.einsum("eci,ehi->ech", held, weight)
    return m.b(torch.einsum("nec,ech->nh", sent, done))


@case("experts with stacked weights, E = B")
def _(m, x):
    weight = torch.stack([e.weight for e in m.e])
    return m.b(torch.einsum("bi,ehi->ebh", x, weight))


@case("experts with a weight for each row")
def _(m, x):
    weight = torch.stack([e.weight for e in m.e])[expert_of(x)]
    return m.b(torch.einsum("bi,bhi->bh", x, weight))


@case("a graph of nodes with shared edges", (B, IN))
def _(m, x):
    h = torch.tanh(m.a(x))
    return m.b(torch.zeros(B, H).index_add(0, torch.arange(B), h[torch.arange(B)]))


@case("examples next to constant rows")
def _(m, x):
    h = torch.tanh(m.a(x))
    return m.b(torch.cat([torch.ones(B, H), h]))[B:]


@case("a class token in front", (B, T - 1, IN))
def _(m, x):
    h = torch.cat([m.a.weight.mean(1).expand(B, 1, H), torch.tanh(m.a(x))], 1)
    return m.b(m.c(h))[:, 0] + m.b(h).sum(1)


@case("a number of each example, in another order")
def _(m, x):
    h = torch.tanh(m.a(x))
    numbers = torch.stack(h.mean(1).unbind()[::-1])
    return m.b(torch.zeros_like(h) + numbers[:, None])


@case("written through a view")
def _(m, x):
    h = torch.tanh(m.a(x))
    out = h.clone()
    out.narrow(0, 0, 2).copy_(h[2:])
    return m.b(out)


@case("a row written through a view")
def _(m, x):
    h = torch.tanh(m.a(x))
    out = h.clone()
    out[3].copy_(h[2])
    return m.b(out)


@case("written in place in the other order")
def _(m, x):
    h = torch.tanh(m.a(x))
    out = torch.zeros_like(h)
    out.copy_(h.flip(0))
    return m.b(out)


@case("rows of a loop")
def _(m, x):
    return torch.stack([m.b(torch.tanh(m.a(row))) for row in x])


@case("rows of a loop from the last to the first")
def _(m, x):
    return torch.cat([m.b(torch.tanh(m.a(x[i : i + 1]))) for i in reversed(range(B))])


@case("halves with layers of their own")
def _(m, x):
    first, second = x.split(2)
    return m.b(torch.tanh(torch.cat([m.e[1](second), m.e[0](first)])))


@case("windows of a sequence, as many as examples", (B, T + 1, IN))
def _(m, x):
    return m.b(torch.tanh(m.a(x.unfold(1, 2, 1).mean(-1).transpose(0, 1))))


@case("parameter with a row for each state", (B, IN))
def _(m, x):
    rows = torch.stack([m.a(x), m.e[0](x)])
    weight = torch.stack([m.c.weight[:B], m.c.weight[1:]])
    return m.b(torch.tanh(rows + weight))


# Constants that examples have placed: theirs, not nobody's


def both(m, x, placed):
    return m.b(placed) + m.b(m.a(x))


@case("ones written where each example says")
def _(m, x):
    places = (x[:, :2] > 0).long()
    return both(m, x, torch.zeros(B, H).scatter(1, places, torch.ones(B, 2)))


@case("a number written where each example says")
def _(m, x):
    return both(m, x, torch.zeros(B, H).scatter_(1, (x[:, :2] > 0).long(), 2.0))


@case("ones written where each example says, in another order")
def _(m, x):
    x = x.flip(0)
    return both(m, x, torch.zeros(B, H).scatter(1, (x[:, :2] > 0).long(), torch.ones(B, 2)))


@case("ones put where each example says, in another order")
def _(m, x):
    x = x.flip(0)
    where = torch.arange(B), (x[:, 0] > 0).long()
    return both(m, x, torch.zeros(B, H).index_put(where, torch.tensor(1.0)))


@case("constants selected by a mask of the examples", (B, T, IN))
def _(m, x):
    mask = x[..., 0] > -0.5
    places = torch.arange(T).expand(B, T).masked_select(mask)
    return m.b(m.a(x)[mask] + F.embedding(places, m.c.weight))


@case("constants repeated as often as each example says")
def _(m, x):
    times = 1 + (x[:, 0] > 0).long()
    rows = torch.arange(B).repeat_interleave(times, 0)
    return m.b(m.a(x)[rows] + F.embedding(rows, m.c.weight))


# Cases that have to work once owners are followed.
MUST_WORK = [
    "flip", "roll", "sorted and put back", "sorted inside and put back by writing",
    "sorted by length, unsorted", "cat of slices", "cat of chunks", "stack of unbind",
    "stack of rows", "index by tensor", "index by a buffer", "index_select", "gather",
    "sorted by a number of each", "boolean mask then linear", "masked by the numbers",
    "index_add routing", "index_add routing of tokens", "ones written where each example says",
    "a number written where each example says", "constants selected by a mask of the examples",
    "ones written where each example says, in another order",
    "constants repeated as often as each example says",
]  # fmt: skip
# Cases that work already.
WORKS = [
    "states stacked behind, T = 4", "states stacked in front, T = 4",
    "states stacked in front and left there, T = 4", "experts stacked in dimension 0",
    "experts stacked in dimension 1", "experts stacked in dimension 0, weighted",
    "transposed and left so, T = B", "beams next to each other", "beams one after the other",
    "buffer of length B along the tokens", "best tokens of each example",
]  # fmt: skip


def given(name):
    """Model and inputs, and how many of these hold one row per example."""
    forward, shapes, shared = CASES[name]
    model = Net(forward)
    rows = [torch.tensor([3, 1, 4, 2]) if s == "lengths" else torch.randn(s) for s in shapes]
    return model, [*rows, *(torch.randn(s) for s in shared)], len(shapes)


def terms(model, batch):
    """One for each number of the output; no two are alike."""
    out = model(*batch)
    return (out - torch.linspace(-1, 1, out.numel()).view(out.shape)).pow(2)


def loss_of(model, batch):
    return terms(model, batch).sum() / B


def truth(model, batch, rows):
    """Gradients of each example, and of what belongs to none: [B + 1, *W] for each parameter."""
    with torch.no_grad():
        before = terms(model, batch)
        owned = []
        for i in range(B):
            changed = [t.clone() for t in batch]
            for t in changed[:rows]:
                if t.is_floating_point():
                    t[i] += 1e-7 * (0.5 + torch.rand(t[i].shape))
            owned.append(terms(model, changed) != before)
    assert (sum(owned) <= 1).all(), "not a case of rows that move: examples are mixed"
    owned.append(~sum(owned).bool())
    each = terms(model, batch) / B
    params = list(model.parameters())
    found = [
        torch.autograd.grad((each * mine).sum(), params, retain_graph=True, allow_unused=True)
        for mine in owned
    ]
    assert any(g is not None for g in found[0])
    return [
        torch.stack([torch.zeros_like(p) if g is None else g for g in of_one])
        for p, of_one in zip(params, zip(*found, strict=True), strict=True)
    ]


def valued(model, batch, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with inrun.watch(
        model, optimizer, validation=[batch], loss=loss_of, estimator="secant", **options
    ) as run:
        with run.batch(range(B)):
            loss_of(model, batch).backward()
        optimizer.step()
        return run.values()["value"].to_numpy()


def check(name, **options):
    """The values are right; raises CaptureError if the model is refused."""
    model, batch, rows = given(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients = truth(model, batch, rows)
    expected = reference.values(model, optimizer, gradients, lambda m: loss_of(m, batch))[:B]
    got = valued(model, batch, **options)
    assert np.allclose(got, expected, rtol=1e-9, atol=1e-12), (got, expected)


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("name", CASES)
def test_values_are_right_or_the_model_is_refused_by_name(name, training):
    try:
        check(name, training=training)
    except inrun.CaptureError as e:
        message = str(e)
        assert "operation '" in message or "meets it in '" in message or "since '" in message


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("name", [*WORKS, *MUST_WORK])
def test_values_are_right(name, form, training):
    check(name, form=form, training=training)


@pytest.mark.parametrize("move", [lambda t: t.flip(0), lambda t: t[P], lambda t: t.roll(1, 0)])
def test_rows_moved_before_the_model_receives_them_are_the_users_own(move):
    """ids[k] is row k of the model's input."""
    x, y = torch.randn(B, IN), torch.randn(B, OUT)

    def moved(model, batch):
        return (model(move(batch[0])) - move(batch[1])).pow(2).sum(1).mean()

    def plain(model, batch):
        return (model(batch[0]) - batch[1]).pow(2).sum(1).mean()

    model, values = nn.Linear(IN, OUT), []
    for loss, batch in (moved, (x, y)), (plain, (move(x), move(y))):
        m = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        with inrun.watch(m, optimizer, validation=[batch], loss=loss, estimator="secant") as run:
            with run.batch(range(B)):
                loss(m, batch).backward()
            optimizer.step()
            values.append(run.values()["value"].to_numpy())
    assert np.allclose(*values, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "move",
    [
        lambda h, k: h.roll(k, 0),
        lambda h, k: h.narrow(0, k, 2),
        lambda h, k: h.select(0, k),
        lambda h, k: torch.cat([h, h])[k : k + B],
    ],
    ids=["roll", "narrow", "select", "slice"],
)
def test_a_tensor_that_stands_for_a_number_is_read_in_every_step(move):
    """The same call with the same shapes, and another number in it."""
    model = Net(lambda m, x: m.b(move(torch.tanh(m.a(x)), m.shift)))
    capture = Capture(model, dict(model.named_parameters()))
    for k in (1, 2, 1):
        model.shift, x = torch.tensor(k), torch.randn(B, IN)
        expected = truth(model, (x,), 1)
        with capture.batch(B) as micro:
            loss_of(model, (x,)).backward()
        got = gradients_of(micro)
        for (name, _), rows in zip(model.named_parameters(), expected, strict=True):
            assert name not in got or torch.allclose(got[name], rows[:B], rtol=1e-9, atol=1e-12)
        assert got["b.weight"].any()


def test_differences_of_neighbouring_examples_are_refused():
    """Of positions they have owners (padding-free rows); of numbers with gradients nobody's."""
    model = Net(lambda m, x: m.b(m.a(x).diff(dim=0, prepend=m.a(x)[:1])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(B, IN)
    with (
        inrun.watch(model, optimizer, validation=[x], loss=lambda m, x: m(x).sum()) as run,
        pytest.raises(inrun.CaptureError, match="'diff'"),
        run.batch(range(B)),
    ):
        model(x).pow(2).sum().backward()

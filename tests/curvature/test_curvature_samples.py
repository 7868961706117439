"""Sampled gradients are the examples' own, in every form, and give the same curvature."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.curvature.layer import Layer
from inrun.curvature.places import Place, places
from inrun.curvature.samples import Formed, Product, apart, joined, samples

IGNORED = 6


class Tied(nn.Module):
    """Embedding and head are one; a norm, a LoRA pair, a convolution, a vector."""

    def __init__(self, conv=True):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.A, self.B = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))
        self.conv = nn.Conv1d(6, 6, 3, padding=1) if conv else None
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, ids):
        z = self.norm(self.table(ids))
        z = z + F.linear(F.linear(z, self.A), self.B) * self.scale
        if self.conv is not None:
            z = z + self.conv(z.mT).mT
        return z @ self.table.weight.t()


def lm(model, ids):
    out = model(ids)
    return F.cross_entropy(out.flatten(0, 1), ids.roll(1, 1).flatten(), ignore_index=IGNORED)


def captured(model, ids, monkeypatch, **options):
    """Run one step and return what the curvature was given: name → (g, factor)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = options.pop("tokens", False)
    run = inrun.watch(model, optimizer, validation=[ids], loss=lm, estimator="influence", **options)
    found = {}

    def noted(*args):
        for name, sample in samples(*args):
            found[name] = sample
            yield name, sample

    monkeypatch.setattr("inrun.curvature.curvature.samples", noted)
    with run.batch(range(len(ids)), tokens=tokens):
        lm(model, ids).backward()
    optimizer.step()
    run.close()
    assert run.steps()["void"].isna().all()
    return found


@pytest.mark.parametrize(
    "options", [{}, {"form": "ghost"}, {"form": "materialise"}, {"training": "fast"},
                {"tokens": True}, {"offload": True}],
)  # fmt: skip
def test_gradients_of_single_examples(options, monkeypatch):
    torch.manual_seed(0)
    model = Tied(conv="tokens" not in options).double()  # positions that meet are refused
    ids = torch.randint(0, 6, (5, 4))
    ids[1, 2:] = ids[3, 1:] = IGNORED  # texts of 4, 2, 4, 1 and 4 tokens
    count = (ids != IGNORED).sum(1)
    twin = copy.deepcopy(model)
    found = captured(model, ids, monkeypatch, **options)
    params = dict(twin.named_parameters())
    own = places(twin.modules(), params)
    assert found.keys() == own.keys()
    assert own["table.weight"].table and own["norm.weight"].bias is None
    if twin.conv is not None:
        assert own["conv.weight"].bias == "conv.bias"
    for name, place in own.items():
        # B times a row's part of the mean over all tokens, √n times as much for its n tokens
        each = [
            torch.autograd.grad(
                lm(twin, ids[i : i + 1]) * n * n**0.5 * 5 / count.sum(),
                [params[k] for k in place.names],
            )
            for i, n in enumerate(count)
        ]
        g = joined(place, [torch.stack(rows) for rows in zip(*each, strict=True)], params[name])
        layer = Layer(place, params[name].shape)
        U = [
            torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] if yes else None
            for n, yes in zip(layer.matrix or (0, 0), layer.rotated, strict=True)
        ]
        wanted = Formed(g)
        torch.testing.assert_close(
            found[name].squares(*U), wanted.squares(*U), rtol=1e-9, atol=1e-14
        )
        if layer.matrix is not None:
            for side in ("left", "right"):
                a, b = getattr(found[name], side)(), getattr(wanted, side)()
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_bias_is_one_more_column(transposed):
    """Joined gradients of a linear layer are those of its product with a constant input of 1."""
    torch.manual_seed(0)
    place = Place("w", "b", transposed)
    W, b = torch.randn(5, 3, 4), torch.randn(5, 4 if transposed else 3)
    g = joined(place, [W, b], W[0])
    assert g.shape == ((5, 4, 4) if transposed else (5, 3, 5))
    assert all(map(torch.equal, apart(place, g, W[0]), (W, b)))
    zeros = joined(place, [W, None], W[0])
    assert torch.equal(zeros, joined(place, [W, torch.zeros_like(b)], W[0]))
    assert torch.equal(joined(place, [None, b], W[0]), g - joined(place, [W, None], W[0]))


def test_which_bias_belongs_to_which_weight():
    """Torch's own layers are known; a bias or weight that is frozen or shared stands alone."""

    class Conv1D(nn.Module):  # as in transformers
        def __init__(self):
            super().__init__()
            self.nf, self.weight, self.bias = 3, nn.Parameter(torch.ones(3, 3)), None
            self.bias = nn.Parameter(torch.ones(3))

    model = nn.ModuleDict({
        "a": nn.Linear(2, 3), "b": nn.Linear(2, 3, bias=False), "c": Conv1D(),
        "d": nn.MultiheadAttention(4, 2), "e": nn.ConvTranspose2d(3, 3, 2), "f": nn.LayerNorm(3),
        "g": nn.EmbeddingBag(3, 2), "h": nn.Linear(2, 3), "i": nn.Linear(2, 3),
    })  # fmt: skip
    model["h"].bias = model["a"].bias
    model["i"].bias.requires_grad_(requires_grad=False)
    params = {k: p for k, p in model.named_parameters() if p.requires_grad}
    found = places(model.modules(), params)
    paired = {k: (p.bias, p.transposed) for k, p in found.items() if p.bias is not None}
    assert paired == {
        "a.weight": ("a.bias", False), "c.weight": ("c.bias", True),
        "d.in_proj_weight": ("d.in_proj_bias", False),
        "d.out_proj.weight": ("d.out_proj.bias", False),
    }  # fmt: skip
    assert [k for k, p in found.items() if p.table] == ["g.weight"]
    alone = {k for k, p in found.items() if p.bias is None}
    assert alone == {
        "b.weight", "e.weight", "e.bias", "f.weight", "f.bias", "g.weight", "h.weight", "i.weight"
    }  # fmt: skip


@pytest.mark.parametrize("T", [1, 3])
def test_products_need_not_be_formed(T):
    torch.manual_seed(T)
    a, delta = torch.randn(4, T, 5).double(), torch.randn(4, T, 3).double()
    formed, product = Formed(delta.mT @ a), Product(a, delta)
    U_S, U_A = (torch.linalg.qr(torch.randn(n, n).double())[0] for n in (3, 5))
    torch.testing.assert_close(product.left(), formed.left(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(product.right(), formed.right(), rtol=1e-12, atol=1e-13)
    for bases in ((None, None), (U_S, None), (None, U_A), (U_S, U_A)):
        torch.testing.assert_close(
            product.squares(*bases), formed.squares(*bases), rtol=1e-12, atol=1e-13
        )


def test_wide_sides_keep_their_coordinates(monkeypatch):
    monkeypatch.setattr("inrun.curvature.layer.WIDEST", 4)
    torch.manual_seed(0)
    layer = Layer(Place("w"), torch.Size((6, 3)))
    assert layer.kind == "one-sided" and Layer(Place("w"), torch.Size((6, 5))).kind == "diagonal"
    g = torch.randn(9, 4, 6, 3).double()
    for sample in g:
        layer.see(Formed(sample))
    layer.pass_time(torch.tensor(2.0).double())
    assert layer.S is None and layer.U_S is None and layer.U_A is not None
    v = torch.randn(2, 6, 3).double()
    layer.scale([None], v[0])
    (u,) = layer.directions([v], 1.0)
    assert layer.spectrum is not None
    for row in range(6):  # each row has a matrix of its own
        F_ = layer.U_A @ torch.diag(layer.spectrum[row]) @ layer.U_A.T + torch.eye(3).double() / 2
        wanted = torch.linalg.solve(F_, v[:, row].T).T
        torch.testing.assert_close(u[:, row], wanted, rtol=1e-10, atol=1e-12)


def test_a_sample_that_is_not_finite_changes_nothing():
    layer = Layer(Place("w"), torch.Size((3, 2)))
    torch.manual_seed(0)
    for _ in range(8):
        layer.see(Formed(torch.randn(4, 3, 2)))
    layer.renewal = 100  # Λ goes with new eigenbases
    before = [x.clone() for x in (layer.S, layer.A, layer.spectrum)]
    bad = torch.randn(4, 3, 2)
    bad[0, 0, 0] = torch.inf
    layer.see(Formed(bad))
    assert all(map(torch.equal, before, (layer.S, layer.A, layer.spectrum)))


def test_nothing_has_moved_yet():
    """A learning rate of 0 (warm-up): τ = 0, and no influence, not NaN."""
    layer = Layer(Place("w"), torch.Size((2,)))
    layer.see(Formed(torch.ones(3, 2)))
    layer.pass_time(torch.zeros(()))
    layer.scale([None], torch.ones(2))
    assert torch.equal(layer.directions([torch.ones(1, 2)], 0.3)[0], torch.zeros(1, 2))


@pytest.mark.parametrize("shape", [(3, 4), (3,), (2, 3, 2, 2)])
def test_a_mean_square_of_zero_has_no_scale(shape):
    """Nothing was received yet: κ is 1; and a row that is never received is not infinite."""
    layer, weight = Layer(Place("w"), torch.Size(shape)), torch.zeros(shape)
    layer.scale([weight], weight)
    assert all((x == 1).all() for x in (layer.left, layer.right) if x is not None)
    squares = torch.ones(shape)
    squares[0] = 0
    layer.scale([squares], weight)
    assert layer.left.isfinite().all() and layer.left[0].max() > layer.left[1].max()
    before = [layer.left.clone(), None if layer.right is None else layer.right.clone()]
    squares[-1] = torch.inf  # a step that mixed precision skips
    layer.scale([squares], weight)
    for x, old in zip((layer.left, layer.right), before, strict=True):
        assert x is old or torch.equal(x, old)

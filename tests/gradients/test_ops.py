"""Every operation rule against the reference, in every form, for batches of one and more."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.captures import captured, close, gradients_of, reference_rows
from helpers.zoo import Problem
from inrun.capture.capture import Capture
from inrun.errors import CaptureError
from inrun.gradients.embedding import Lookup
from inrun.gradients.nodes import _linear, directions
from inrun.gradients.records import Dense, Pair
from inrun.scoring.contraction import Direction, contract
from inrun.tensors.derivative import VMAP_PAYS, each


class Op(nn.Module):
    """One operation with parameters ``w``, ``b``, …"""

    def __init__(self, function, **shapes):
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.rand(4) + 0.5)

    def forward(self, x):
        return self.function(self, x)


def masked(m, x):
    return torch.where(x > 0, x, m.w)


def padded(m, x):
    return F.embedding(x, m.w, padding_idx=2)


def weighted_bags(m, x):
    return F.embedding_bag(x, m.w, mode="sum", per_sample_weights=m.b.expand(len(x), -1))


def reused(m, x):
    return F.linear(F.linear(x, m.w), m.w.t()) + x @ m.w.t() @ m.w


def positions(m, x):
    return x + F.embedding(torch.arange(x.shape[1]), m.w)


def class_token(m, x):
    return torch.cat([m.w.expand(len(x), -1, -1), x, m.b.repeat(len(x), 1, 1)], 1)


def written_in_place(m, x):
    y = x * 2
    y += m.w
    y *= m.b
    return y.relu_()


def shifted(m, x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return y * m.w


def merged_rows(m, x):
    return F.linear(x.reshape(-1, x.shape[-1]), m.w, m.b).view(*x.shape[:-1], -1)


def two_scales(m, x):
    return torch.exp(m.w) * x / (1 + m.b**2)


def weight_norm(m, x):
    return F.linear(x, m.g * m.v / m.v.norm(dim=1, keepdim=True))


def sequence_inside(m, x):
    y = F.linear(x.transpose(0, 1).reshape(-1, x.shape[-1]), m.w)  # tokens first, then examples
    return y.view(x.shape[1], x.shape[0], -1).transpose(0, 1)


def spectrum(operation):
    """On complex numbers made of the input; the result as pairs of real ones."""
    return lambda m, x: torch.view_as_real(operation(m, torch.fft.rfft(x)))


def pairs(w):
    return torch.view_as_complex(w)


def written_in_place_complex(m, x):
    y = torch.fft.rfft(x)
    y *= pairs(m.w)
    y += m.b
    return torch.view_as_real(y)


def state_space(m, x):
    """A convolution by FFT with a kernel of complex exponentials, as S4 has it."""
    powers = torch.exp(torch.complex(-m.a.exp(), m.b)[..., None] * torch.arange(4.0))
    kernel = 2 * torch.einsum("hn,hnl->hl", torch.complex(m.c, m.d), powers).real
    return torch.fft.irfft(torch.fft.rfft(x, n=8) * torch.fft.rfft(kernel, n=8), n=8)[..., :4]


FLOAT, IDS = "float", "ids"
CASES = {
    "linear-2d": (lambda m, x: F.linear(x, m.w, m.b), (4,), {"w": (3, 4), "b": (3,)}),
    "linear-3d": (lambda m, x: F.linear(x, m.w, m.b), (5, 4), {"w": (3, 4), "b": (3,)}),
    "linear-4d": (lambda m, x: F.linear(x, m.w), (2, 5, 4), {"w": (3, 4)}),
    "linear-merged": (merged_rows, (5, 4), {"w": (3, 4), "b": (3,)}),
    "linear-sequence-inside": (sequence_inside, (5, 4), {"w": (3, 4)}),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), (4,), {"w": (4, 3), "b": (3,)}),
    "addmm-scaled": (
        lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0), (4,), {"w": (4, 3), "b": (3,)}
    ),
    "matmul": (lambda m, x: x @ m.w, (5, 4), {"w": (4, 3)}),
    "matmul-left": (lambda m, x: m.w @ x, (4, 5), {"w": (3, 4)}),
    "matmul-vector": (lambda m, x: x @ m.w, (5, 4), {"w": (4,)}),
    "bmm": (lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)), (5, 4), {"w": (1, 4, 3)}),
    "einsum": (lambda m, x: torch.einsum("btd,hdk->bhtk", x, m.w), (5, 4), {"w": (2, 4, 3)}),
    "linear-vector": (
        lambda m, x: F.linear(x, m.w, m.b)[..., None], (5, 4), {"w": (4,), "b": ()}
    ),
    "embedding-2d": (lambda m, x: F.embedding(x, m.w), IDS, {"w": (7, 3)}),
    "embedding-padding": (padded, IDS, {"w": (7, 3)}),
    "embedding-padding-last": (
        lambda m, x: F.embedding(x, m.w, padding_idx=-1), IDS, {"w": (7, 3)}
    ),
    "torch-embedding": (lambda m, x: torch.embedding(m.w, x), IDS, {"w": (7, 3)}),
    "bag-mean": (lambda m, x: F.embedding_bag(x, m.w), IDS, {"w": (7, 3)}),
    "bag-sum": (lambda m, x: F.embedding_bag(x, m.w, mode="sum"), IDS, {"w": (7, 3)}),
    "bag-max": (lambda m, x: F.embedding_bag(x, m.w, mode="max"), IDS, {"w": (7, 3)}),
    "bag-mean-padding": (
        lambda m, x: F.embedding_bag(x % 3, m.w, padding_idx=2), IDS, {"w": (3, 3)}
    ),
    "bag-max-padding": (
        lambda m, x: F.embedding_bag(x % 3, m.w, mode="max", padding_idx=-1), IDS, {"w": (3, 3)}
    ),
    "bag-weighted": (weighted_bags, IDS, {"w": (7, 3), "b": (5,)}),
    "bag-several": (
        lambda m, x: F.embedding_bag(x.repeat(1, 2).view(-1, 5), m.w).view(len(x), 2, -1), IDS,
        {"w": (7, 3)},
    ),
    "layer_norm": (
        lambda m, x: F.layer_norm(x, (4,), m.w, m.b), (5, 4), {"w": (4,), "b": (4,)}
    ),
    "layer_norm-2": (lambda m, x: F.layer_norm(x, (5, 4), m.w), (5, 4), {"w": (5, 4)}),
    "layer_norm-2d": (lambda m, x: F.layer_norm(x, (4,), m.w, m.b), (4,), {"w": (4,), "b": (4,)}),
    "rms_norm": (lambda m, x: F.rms_norm(x, (4,), m.w, 1e-6), (5, 4), {"w": (4,)}),
    "group_norm": (
        lambda m, x: F.group_norm(x, 2, m.w, m.b), (4, 3, 3), {"w": (4,), "b": (4,)}
    ),
    "instance_norm": (
        lambda m, x: F.instance_norm(x, weight=m.w, bias=m.b), (4, 3, 3), {"w": (4,), "b": (4,)}
    ),
    "batch_norm-evaluating": (
        lambda m, x: F.batch_norm(x, m.mean, m.var, m.w, m.b), (4, 3), {"w": (4,), "b": (4,)}
    ),
    "torch-batch_norm": (
        lambda m, x: torch.batch_norm(x, m.w, m.b, m.mean, m.var, False, 0.1, 1e-5, False),
        (4, 3), {"w": (4,), "b": (4,)},
    ),
    "conv1d": (
        lambda m, x: F.conv1d(x, m.w, m.b, padding=1), (2, 7), {"w": (4, 2, 3), "b": (4,)}
    ),
    "conv2d-strided": (
        lambda m, x: F.conv2d(x, m.w, m.b, stride=2, padding=(1, 0)), (2, 7, 6),
        {"w": (4, 2, 3, 2), "b": (4,)},
    ),
    "conv2d-dilated-grouped": (
        lambda m, x: F.conv2d(x, m.w, dilation=2, groups=2), (4, 7, 7), {"w": (6, 2, 3, 3)}
    ),
    "conv2d-same": (lambda m, x: F.conv2d(x, m.w, padding="same"), (2, 6, 6), {"w": (3, 2, 4, 3)}),
    "conv2d-valid": (
        lambda m, x: F.conv2d(x, m.w, padding="valid"), (2, 6, 6), {"w": (3, 2, 3, 3)}
    ),
    "conv3d": (lambda m, x: F.conv3d(x, m.w, m.b), (2, 4, 4, 4), {"w": (3, 2, 2, 2, 2), "b": (3,)}),
    "conv_transpose2d": (
        lambda m, x: F.conv_transpose2d(x, m.w, stride=2), (2, 4, 4), {"w": (2, 3, 3, 3)}
    ),
    "mul-scalar": (lambda m, x: x * m.w, (5, 4), {"w": ()}),
    "mul-row": (lambda m, x: m.w * x, (5, 4), {"w": (4,)}),
    "mul-column": (lambda m, x: x * m.w, (5, 4), {"w": (5, 1)}),
    "add-positions": (positions, (5, 4), {"w": (9, 4)}),
    "sub": (lambda m, x: m.w - x, (5, 4), {"w": (5, 4)}),
    "rsub": (lambda m, x: torch.sub(x, m.w, alpha=0.3), (5, 4), {"w": (4,)}),
    "div": (lambda m, x: x / m.w, (5, 4), {"w": (4,)}),
    "pow": (lambda m, x: x.abs() ** m.w, (5, 4), {"w": (4,)}),
    "prelu": (lambda m, x: F.prelu(x, m.w), (4, 3), {"w": (4,)}),
    "where": (masked, (5, 4), {"w": (4,)}),
    "exp-and-square": (two_scales, (5, 4), {"w": (4,), "b": (5, 1)}),
    "class-token": (class_token, (5, 4), {"w": (1, 1, 4), "b": (1, 2, 4)}),
    "in-place": (written_in_place, (5, 4), {"w": (4,), "b": (5, 4)}),
    "setitem": (shifted, (5, 4), {"w": (4,)}),
    "reused-and-tied": (reused, (5, 4), {"w": (3, 4)}),
    "weight-norm": (weight_norm, (5, 4), {"v": (3, 4), "g": (3, 1)}),
    "cast": (lambda m, x: F.linear(x, m.w.to(torch.float64).mul(2)), (4,), {"w": (3, 4)}),
    "lerp": (lambda m, x: torch.lerp(x, x.flip(-1), m.w), (5, 4), {"w": (4,)}),
    "bilinear": (
        lambda m, x: F.bilinear(x, x.flip(-1), m.w, m.b), (4,), {"w": (3, 4, 4), "b": (3,)}
    ),
    "complex-mul": (spectrum(lambda m, x: x * pairs(m.w)), (5, 6), {"w": (4, 2)}),
    "complex-mul-by-real": (spectrum(lambda m, x: x * m.w), (5, 6), {"w": (4,)}),
    "complex-mul-of-real": (
        lambda m, x: torch.view_as_real(x * pairs(m.w)), (5, 4), {"w": (4, 2)}
    ),
    "complex-add-real": (spectrum(lambda m, x: x + m.w), (5, 6), {"w": (4,)}),
    "complex-sub-scaled": (
        spectrum(lambda m, x: torch.sub(x, pairs(m.w), alpha=2j)), (5, 6), {"w": (4, 2)}
    ),
    "complex-add-merged": (
        spectrum(lambda m, x: (x.flatten(0, 1) + m.w.repeat(len(x), 1)).view(x.shape)), (5, 6),
        {"w": (5, 4)},
    ),
    "complex-div": (spectrum(lambda m, x: x / pairs(m.w)), (5, 6), {"w": (4, 2)}),
    "complex-linear": (
        spectrum(lambda m, x: F.linear(x, pairs(m.w), pairs(m.b))), (5, 6),
        {"w": (3, 4, 2), "b": (3, 2)},
    ),
    "complex-matmul-conjugate": (
        spectrum(lambda m, x: x.conj() @ pairs(m.w).conj()), (5, 6), {"w": (4, 3, 2)}
    ),
    "complex-matmul-real": (
        spectrum(lambda m, x: x @ m.w.to(x.dtype)), (5, 6), {"w": (4, 3)}
    ),
    "complex-addmm": (
        spectrum(lambda m, x: torch.addmm(pairs(m.b), x, pairs(m.w), alpha=2j)), (6,),
        {"w": (4, 3, 2), "b": (3, 2)},
    ),
    "complex-einsum": (
        spectrum(lambda m, x: torch.einsum("btd,dk->btk", x, torch.complex(m.w, m.b))), (5, 6),
        {"w": (4, 3), "b": (4, 3)},
    ),
    "complex-cat-with-real": (
        spectrum(lambda m, x: torch.cat([x, m.w.expand(len(x), -1, -1)], 1)), (5, 6),
        {"w": (1, 2, 4)},
    ),
    "complex-conv1d": (
        spectrum(lambda m, x: F.conv1d(x, pairs(m.w), pairs(m.b))), (5, 6),
        {"w": (3, 5, 2, 2), "b": (3, 2)},
    ),
    "complex-polar": (
        spectrum(lambda m, x: x * torch.polar(m.w.abs(), m.b)), (5, 6), {"w": (4,), "b": (4,)}
    ),
    "complex-in-place": (written_in_place_complex, (5, 6), {"w": (4, 2), "b": (4,)}),
    "complex-state-space": (state_space, (5, 4), dict.fromkeys("abcd", (5, 3))),
    "vector-of-weights": (lambda m, x: x @ m.w + m.b, (6,), {"w": (6,), "b": (1,)}),
    "vector-mv": (lambda m, x: torch.mv(x, m.w) - m.b, (6,), {"w": (6,), "b": ()}),
    "vector-temperature": (lambda m, x: x.sum(1) / m.w, (6,), {"w": ()}),
    "vector-scaled": (lambda m, x: m.w * x.sum(1), (6,), {"w": (1,)}),
    "vector-power": (lambda m, x: x.abs().sum(1) ** m.w, (6,), {"w": ()}),
    "vector-where": (lambda m, x: torch.where(x[:, 0] > 0, x[:, 1], m.w), (6,), {"w": ()}),
    "layer_norm-transposed": (
        lambda m, x: F.layer_norm(x.transpose(0, 1), (4,), m.w, m.b).transpose(0, 1), (5, 4),
        {"w": (4,), "b": (4,)},
    ),
    "batch_norm-examples-last": (
        lambda m, x: F.batch_norm(x.permute(1, 2, 0), m.mean, m.var, m.w, m.b).permute(2, 0, 1),
        (5, 4), {"w": (4,), "b": (4,)},
    ),
}  # fmt: skip


def problem(name: str, B: int) -> Problem:
    function, shape, shapes = CASES[name]
    x = torch.randint(0, 7, (B, 5)) if shape == IDS else torch.randn(B, *shape)

    def loss(out, batch):
        rows = out.reshape(len(out), -1).pow(3).sum(1)
        return (rows * torch.arange(1.0, len(out) + 1)).mean()

    return Problem(Op(function, **shapes), (x,), B, lambda m, b: m(b[0]), loss)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("name", CASES)
def test_every_operation_gives_per_example_gradients(name, form, B):
    torch.manual_seed(1)
    p = problem(name, B)
    expected = reference_rows(p)
    for fast in (False, True):
        _, micro = captured(p, form=form, fast=fast)
        for Q in (1, 3):  # before anyone asks for records: what is only remembered, as it is
            u = {k: torch.randn(Q, *g[0].shape, dtype=g.dtype) for k, g in expected.items()}
            along = {k: Direction(x, torch.full_like(x[0], 2.0)) for k, x in u.items()}
            sums = 2 * sum(u[k].reshape(Q, -1) @ expected[k].reshape(B, -1).T for k in u)
            values, total = contract(along, {k: g.sum(0) for k, g in expected.items()}, [micro])
            assert close(values, sums, 1e-9) and close(total, sums.sum(1), 1e-9)
        rows = gradients_of(micro)
        assert rows.keys() == expected.keys()
        for k, g in expected.items():
            assert rows[k].shape == g.shape
            assert close(rows[k], g, 1e-9), (k, fast)
            assert close(p.model.get_parameter(k).grad, g.sum(0), 1e-9), (k, fast)
        for Q in (1, VMAP_PAYS):
            u = {k: torch.randn(Q, *g[0].shape, dtype=g.dtype) for k, g in expected.items()}
            dots = sum(r.dots(directions(n, u)) for n, rs in micro.records.items() for r in rs)
            sums = sum(u[k].reshape(Q, -1) @ expected[k].reshape(B, -1).T for k in u)
            assert close(dots, sums, 1e-9)


@pytest.mark.parametrize(
    ("name", "form", "kind"),
    [
        ("embedding-2d", "ghost", "Lookup"),
        ("embedding-2d", "materialise", "Dense"),
        ("embedding-padding", "materialise", "Dense"),
        ("embedding-2d", "auto", "Lookup"),  # the table is longer than the text
    ],
)
def test_look_ups_take_the_form_asked_for(name, form, kind):
    _, micro = captured(problem(name, 3), form=form)
    assert [type(r).__name__ for rs in micro.records.values() for r in rs] == [kind]


class Bagged(nn.Module):
    """Texts of any length in one row, as torch's own tutorial has them."""

    def __init__(self, **options):
        super().__init__()
        self.bags = nn.EmbeddingBag(7, 3, **options)

    def forward(self, text, offsets, weights=None):
        return self.bags(text, offsets, weights)


@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize(
    "options",
    [{"mode": "mean", "padding_idx": 2}, {"mode": "sum"}, {"mode": "max"}, {"mode": "weighted"}],
    ids=lambda x: x["mode"],
)
def test_bags_at_offsets(options, form):
    """Bag k is example k; one is empty."""
    torch.manual_seed(1)
    weights = torch.rand(9) if options["mode"] == "weighted" else None
    options = options if weights is None else {"mode": "sum"}
    text, offsets = torch.randint(0, 7, (9,)), torch.tensor([0, 4, 4, 5])
    model = Bagged(**options)
    table = model.bags.weight
    capture = Capture(model, {"bags.weight": table}, form=form, directions=2)
    with capture.batch(4) as micro:
        out = model(text, offsets, weights)
        (out.pow(3).sum(1) * torch.arange(1.0, 5.0)).sum().backward()
    ((_, (record,)),) = micro.records.items()
    rows = model(text, offsets, weights).pow(3).sum(1) * torch.arange(1.0, 5.0)
    expected = torch.stack([torch.autograd.grad(r, table, retain_graph=True)[0] for r in rows])
    assert close(record.rows(), expected, 1e-9)
    assert close(table.grad, expected.sum(0), 1e-9)
    u = torch.randn(2, 7, 3)
    assert close(record.dots(u), torch.einsum("qij,bij->qb", u, expected), 1e-9)
    assert close(record.cut(1, 4).rows(), expected[1:4], 1e-9)
    assert close(record.groups([1, 3]), torch.stack([expected[0], expected[1:].sum(0)]), 1e-9)
    assert close(
        record.some_groups(1, [2, 1]), torch.stack([expected[1:3].sum(0), expected[3]]), 1e-9
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"sparse": True}, "sparse=False"),
    ],
)  # fmt: skip
def test_bags_that_are_refused(options, message):
    p = Problem(
        nn.EmbeddingBag(7, 3, **options), (torch.randint(0, 7, (3, 4)),), 3,
        lambda m, b: m(b[0]), lambda out, b: out.square().mean(),
    )  # fmt: skip
    with pytest.raises(CaptureError, match=f"'embedding_bag'.*{message}"):
        captured(p)


def test_bags_of_several_examples_are_refused():
    """The examples are in the columns, and a bag is a row."""
    p = Problem(
        nn.EmbeddingBag(7, 3), (torch.randint(0, 7, (3, 4)),), 4,
        lambda m, b: m(b[0]), lambda out, b: out.square().mean(), batch_dim=1,
    )  # fmt: skip
    with pytest.raises(CaptureError, match="cannot be told apart"):
        captured(p)


MADE = {
    "looked up": lambda w: F.embedding(torch.tensor([1, 0, 1]), w),
    "looked up, short": lambda w: F.embedding(torch.tensor([1, 0, 1]), w.clone(), max_norm=0.1),
    "cut": lambda w: w[:3],
    "turned": lambda w: w.t().reshape(4, 5)[:3, :4],
    "seen": lambda w: w.view(20)[:12].view(3, 4),
    "expanded": lambda w: w[1].expand(3, 4),
    "scaled": lambda w: w[:3] * 2,
    "squared": lambda w: (w * w)[:3],
}


@pytest.mark.parametrize("made", MADE)
def test_directions_of_tensors_made_of_a_parameter(made):
    torch.manual_seed(1)
    p = Problem(
        Op(lambda m, x: x * MADE[made](m.w), w=(5, 4)), (torch.randn(2, 3, 4),), 2,
        lambda m, b: m(b[0]), lambda out, b: out.square().mean(),
    )  # fmt: skip
    _, micro = captured(p)
    (node,) = micro.records
    assert _linear(node) == (made not in ("looked up, short", "scaled", "squared"))
    for Q in (2, VMAP_PAYS):
        u, w = torch.randn(Q, 4, 5).mT, p.model.w.detach()  # its numbers in another order
        before = u.clone()
        expected = torch.stack([torch.func.jvp(MADE[made], (w,), (x.contiguous(),))[1] for x in u])
        assert close(directions(node, {"w": u}), expected, 1e-6)
        assert torch.equal(u, before)


def test_padding_in_a_table_that_meets_no_example():
    """It has no gradient, so its row of a direction moves nothing."""
    torch.manual_seed(1)
    p = Problem(
        Op(lambda m, x: x * F.embedding(torch.tensor([1, 0, 1]), m.w, padding_idx=1), w=(5, 4)),
        (torch.randn(2, 3, 4),), 2, lambda m, b: m(b[0]), lambda out, b: out.square().mean(),
    )  # fmt: skip
    _, micro = captured(p)
    u, expected = torch.randn(2, 5, 4), reference_rows(p)["w"]
    dots = sum(r.dots(directions(n, {"w": u})) for n, rs in micro.records.items() for r in rs)
    assert close(dots, torch.einsum("qij,bij->qb", u, expected), 1e-6)


@pytest.mark.parametrize("fast", [False, True])
def test_layer_norms_share_the_memory_of_what_they_do_not_keep(fast):
    """Of different sizes, one after the other, from the statistics of the forward pass."""
    torch.manual_seed(1)
    shapes = {"w": (4,), "b": (4,), "v": (8,), "c": (8,), "s": (4,)}

    def norms(m, x):
        inner = F.layer_norm(x + m.s, (4,), m.w, m.b)
        outer = F.layer_norm(torch.cat([inner, inner.tanh()], 2), (8,), m.v, m.c)
        return F.layer_norm(outer[..., :4], (4,), m.w * 2)

    p = Problem(
        Op(norms, **shapes), (torch.randn(3, 5, 4),), 3,
        lambda m, b: m(b[0]), lambda out, b: out.flatten(1).pow(3).sum(1).mean(),
    )  # fmt: skip
    expected = reference_rows(p)
    capture, micro = captured(p, fast=fast, form="materialise")
    assert len(capture.blocks._scratch) == 8 * 3 * 5 * 8
    for k, rows in gradients_of(micro).items():
        assert close(rows, expected[k], 1e-9), k


@pytest.mark.parametrize("V", [7, 700])
def test_lookups_with_a_factor(V):
    """Whether the table is shorter than the text or longer."""
    torch.manual_seed(0)
    record = Lookup(torch.randint(0, V, (6, 5)), torch.randn(6, 5, 4), V)
    u, K = torch.randn(2, V, 4), torch.rand(V, 4)
    expected = torch.einsum("qvo,bvo->qb", K * u, record.rows())
    assert close(record.dots(u, K), expected, 1e-5)


def test_the_energy_of_ghost_records_is_unbiased():
    p = problem("linear-3d", 5)
    _, dense = captured(p, form="materialise")
    _, ghost = captured(p, form="ghost")
    rows = reference_rows(p)
    exact = dense.energy(rows.keys())
    assert ghost.energy(rows.keys()) == pytest.approx(exact, rel=0.8)
    assert exact == pytest.approx(sum(float(g.square().sum()) for g in rows.values()))


@pytest.mark.parametrize("room", [0, 3, "transposed", "one for all"])
def test_groups_of_a_lookup_are_added_in_place(room):
    """Whether rows lie one after the other or with others between; else to a copy."""
    torch.manual_seed(0)
    V, width, sizes = 7, 4, (2, 1, 3)
    record = Lookup(torch.randint(0, V, (6, 5)), torch.randn(6, 5, width), V)
    total = torch.randn(3, V + (room if isinstance(room, int) else 0), width)[:, :V]
    if room == "transposed":
        total = total.mT.contiguous().mT
    if room == "one for all":
        total = total[:1].expand(3, V, width)
    expected = total + record.groups(sizes)
    found = record.add_groups(total, sizes)
    assert close(found, expected, 1e-6)
    assert (found.data_ptr() == total.data_ptr()) == isinstance(room, int)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_lookups_join_gradients_that_are_formed_anyway(dtype):
    torch.manual_seed(0)
    table = torch.randn(6, 7, 4, dtype=dtype)
    ids, delta = torch.randint(0, 7, (6, 50)), torch.randn(6, 50, 4, dtype=dtype)
    record = Lookup(ids, delta, 7)
    expected = table.double() + Lookup(ids, delta.double(), 7).rows()
    record.add_to(table)
    rounding = torch.finfo(dtype).eps
    assert ((table.double() - expected).abs() <= rounding * expected.abs() + 1e-6 * rounding).all()
    assert record.joins(Dense(table, own=True))
    assert not record.joins(Dense(table)), "its memory may be the training's"
    assert not record.joins(Pair(delta, delta))


def test_what_vmap_does_not_know_is_done_one_by_one():
    rows = torch.randn(VMAP_PAYS, 3)

    def known(x):
        return (float(x.sum()) * x,)  # asks for a number

    (found,) = each(known, [rows], known)
    assert torch.equal(found, rows.sum(1, keepdim=True) * rows)


def test_rows_that_are_alike_have_memory_of_their_own():
    def constant(x):
        return (torch.ones(2),)

    (found,) = each(constant, [torch.randn(VMAP_PAYS, 3)], constant)
    found[0] += 1
    assert found[:, 0].tolist() == [2, 1, 1, 1, 1]


def test_each_example_has_its_own_weight_where_channels_are_examples():
    """BatchNorm of [T, B, C] as it is: example i has the i-th weight for itself."""
    torch.manual_seed(1)
    p = Problem(
        Op(lambda m, x: F.batch_norm(x.transpose(0, 1), m.mean, m.var, m.w, m.b), w=(4,), b=(4,)),
        (torch.randn(4, 5, 3),), 4, lambda m, b: m(b[0]), lambda out, b: out.pow(3).mean(),
    )  # fmt: skip
    _, micro = captured(p)
    for k, rows in gradients_of(micro).items():
        assert close(rows, torch.diag(p.model.get_parameter(k).grad), 1e-9), k


def test_a_norm_over_the_merged_examples():
    """Each row of the weight belongs to one example."""
    torch.manual_seed(1)
    p = Problem(
        Op(lambda m, x: F.layer_norm(x.flatten(0, 1), (12, 3), m.w, m.b), w=(12, 3), b=(12, 3)),
        (torch.randn(4, 3, 3),), 4, lambda m, b: m(b[0]), lambda out, b: out.pow(3).mean(),
    )  # fmt: skip
    _, micro = captured(p)
    for k, rows in gradients_of(micro).items():
        grad = p.model.get_parameter(k).grad.view(4, 3, 3)
        expected = torch.stack([grad * (torch.arange(4) == i)[:, None, None] for i in range(4)])
        assert close(rows, expected.view(4, 12, 3), 1e-9), k


def test_the_energy_of_look_ups_is_exact():
    """Tokens that look up the same row are added before they are squared."""
    ids = torch.tensor([[0, 2, 0, 5], [5, 5, 5, 1]])
    record = Lookup(ids, torch.randn(2, 4, 3), 7)
    assert float(record.energy()) == pytest.approx(float(record.rows().square().sum()), rel=1e-12)

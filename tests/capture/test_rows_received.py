"""What the model receives, where sizes coincide: every program is right to rounding or refused."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.capture.tensor_map import own_tensors

B = 4
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.5])


def score(out):
    """Rows that count differently, so that no permutation of them gives the same values."""
    return (out.sin().flatten(1).sum(1) * WEIGHTS.to(out)).sum() + out.square().mean()


class Net(nn.Module):
    def __init__(self, f=None):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.f = f

    def forward(self, *args):
        return self.f(self, *args)


def values(model, loss, batch, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = inrun.watch(
        model, optimizer, validation=[batch], loss=loss, estimator="sgd", **options
    )
    with watched as run:
        with run.batch(range(B)):
            loss(model, batch).backward()
        optimizer.step()
        return run.values()["value"].to_numpy()


def attended(model, x, memory):
    """[B, T, 4] attends to a memory that all examples share, of B slots."""
    return torch.softmax(model.a(x) @ model.b(memory).T, -1)


def called_directly(model, batch):
    x, memory, z = batch
    return score(attended(model, x, memory) + model.b(z))


def without_modules(model, batch):
    x, memory, z = batch
    q, k, v = (F.linear(t, w.weight) for t, w in ((x, model.a), (memory, model.b), (z, model.b)))
    return score(torch.softmax(q @ k.T, -1) + v)


@pytest.mark.parametrize("loss", [called_directly, without_modules])
def test_what_one_call_proves_says_nothing_of_another_call(loss):
    """The rows of z lie beside the batch's; those of the memory, which comes the same way, do
    not."""
    batch = torch.randn(B, 4, 4), torch.randn(B, 4), torch.randn(B, 4, 4)
    with pytest.raises(inrun.CaptureError, match="has one entry for each id"):
        values(Net(), loss, batch)


def test_an_input_after_something_made_of_the_batch_is_not_certain_to_be_the_batch():
    """Embedded outside the model: the first tensor with an entry for each id is not the batch."""
    net = Net(lambda m, h, memory: torch.softmax(h @ m.b(memory).T, -1))
    batch = torch.randn(B, 4, 4), torch.randn(B, 4)
    with pytest.raises(inrun.CaptureError, match=r"input\.1 has one entry for each id"):
        values(net, lambda m, b: score(m(m.a(b[0]), b[1])), batch)


@pytest.mark.parametrize("length", [3, 5])
def test_a_first_input_of_another_length_does_not_make_the_others_constant(length):
    def f(model, table, x, y):
        h, z = model.a(x), model.b(y)
        return h + torch.softmax(h @ z.T, 1) @ z.tanh()

    batch = torch.randn(length, 4), torch.randn(B, 4), torch.randn(B, 4)
    with pytest.raises(inrun.CaptureError, match=r"input\.2 has one entry for each id"):
        values(Net(f), lambda m, b: score(m(*b)), batch)


@pytest.mark.parametrize(
    "move", [lambda x: x.transpose(0, 1), lambda x: x.permute(1, 0, 2).contiguous()]
)
def test_data_that_the_loop_transposes_is_refused_where_both_sizes_are_the_batch(move):
    net = Net(lambda m, x: m.b(m.a(x).tanh()))
    with pytest.raises(inrun.CaptureError, match="may be in dimension 0"):
        values(net, lambda m, b: score(m(move(b[0]))), (torch.randn(B, 4, 4),))


def test_where_the_loop_moves_the_examples_is_known_from_another_length():
    """A model of sequences [T, B, …], data of [B, T, …]: T = B is no riddle after T = 6."""
    torch.manual_seed(1)
    net = Net(lambda m, x: m.b(m.a(x).tanh()).transpose(0, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    batch = (torch.randn(B, 4, 4),)
    loss = lambda m, b: score(m(b[0].transpose(0, 1)))  # noqa: E731
    with inrun.watch(net, optimizer, validation=[batch], loss=loss, estimator="sgd") as run:
        for x in (torch.randn(B, 6, 4), batch[0]):
            with run.batch(range(B)):
                loss(net, (x,)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not run.steps()["void"].any()


def test_a_list_of_as_many_tensors_as_examples_is_refused():
    """Images [3, H, W] in a batch of three: each tensor is an example, or has a row of each."""
    net = Net(lambda m, images: m.a(torch.stack(images)))
    with pytest.raises(inrun.CaptureError, match=r"a list of 4 tensors"):
        values(net, lambda m, b: score(m(list(b[0]))), (torch.randn(B, 4, 4),))


def test_a_list_of_different_inputs_is_none_of_examples():
    """Two inputs for a batch of two: ids and features."""
    table = nn.Embedding(5, 4)
    net = Net(lambda m, pair: m.a(pair[1]) + m.table(pair[0]))
    net.table = table
    batch = torch.randint(0, 5, (2,)), torch.randn(2, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = lambda m, b: (m(b).sin().sum(1) * WEIGHTS[:2].to(b[1])).sum()  # noqa: E731
    with inrun.watch(net, optimizer, validation=[batch], loss=loss, estimator="sgd") as run:
        with run.batch(range(2)):
            loss(net, batch).backward()
        gradients = [p.grad for p in (table.weight, net.a.weight, net.a.bias)]
        out = net(batch)
        expected = []
        for k in range(2):
            own = torch.autograd.grad(
                (out[k].sin() * WEIGHTS[k]).sum(), [table.weight, net.a.weight, net.a.bias],
                retain_graph=True,
            )  # fmt: skip
            pairs = zip(own, gradients, strict=True)
            expected.append(0.1 * sum(float((g * v).sum()) for g, v in pairs))
        optimizer.step()
        assert np.allclose(run.values()["value"], expected, rtol=1e-9, atol=1e-12)


def test_a_model_that_finds_its_data_itself_may_find_something_else_first():
    def f(model, source):
        x, memory = source()
        return torch.softmax(model.b(memory) @ model.a(x).transpose(1, 2), -1)

    memory = torch.randn(B, 4)
    with pytest.raises(inrun.CaptureError, match="has one entry for each id"):
        values(Net(f), lambda m, b: score(m(lambda: (b[0], memory))), (torch.randn(B, 4, 4),))


def written_repeated(model, x):
    h, out = model.a(x[:, 0]), torch.zeros_like(model.b(x))
    out[:, [0, 1, 2, 3]] = h  # h has fewer dimensions: its examples go into dimension 1
    return model.c(out).sum(0)


def written_apart(model, x):
    h, i = model.b(x), torch.arange(4)
    out = torch.zeros(4, 4, 4, 4) + 0 * h[:, None]
    out[:, i, :, i] = h  # indices apart from each other come first: so do h's examples
    return model.c(out).sum((0, 2))


def test_rows_written_into_another_dimension_keep_their_examples():
    batch, model = (torch.randn(B, 4, 4),), Net(written_repeated)
    plain = copy.deepcopy(model)
    plain.f = lambda m, x: 4 * m.c(m.a(x[:, 0]))  # the same numbers, in their place
    got, expected = (values(m, lambda m, b: score(m(*b)), batch) for m in (model, plain))
    assert np.allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_rows_written_between_others_are_refused():
    with pytest.raises(inrun.CaptureError, match="cannot be told apart"):
        values(Net(written_apart), lambda m, b: score(m(*b)), (torch.randn(B, 4, 4),))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4))

    def forward(self, ids):
        return self.table[ids].tanh() + self.table[:, ids].movedim(0, -1)


def test_a_parameter_is_indexed_by_the_examples():
    ids = torch.randint(0, 4, (B, 4))
    model, loss = Table(), lambda m, b: score(m(*b))
    table = model.table.detach()
    copies = table.expand(B, 4, 4).clone().requires_grad_()
    out = torch.stack([copies[k][i].tanh() + copies[k][:, i].T for k, i in enumerate(ids)])
    (rows,) = torch.autograd.grad(score(out), [copies])
    (gradient,) = torch.autograd.grad(loss(model, (ids,)), [model.table])
    expected = 0.1 * (rows * gradient).sum((1, 2)).numpy()
    assert np.allclose(values(model, loss, (ids,)), expected, rtol=1e-9, atol=1e-12)


def test_the_check_is_not_confused_by_a_gradient_of_rounding_errors():
    """The bias of attention's keys has no effect."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1) @ self.v(x)

    model, batch = Attention().float(), (torch.randn(B, 5, 4).float(),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = lambda m, b: score(m(*b))  # noqa: E731
    with inrun.watch(model, optimizer, validation=[batch], loss=loss) as run:
        check = run.check()
        with run.batch(range(B)):
            loss(model, batch).backward()
        optimizer.step()
    assert check.unverified is None
    assert check.credit_error < 1e-5


class Early(nn.Linear):
    """Has an attribute before ``nn.Module`` has any."""

    def __init__(self, t):
        self.early = t
        super().__init__(2, 2)


def test_all_tensors_of_modules_are_their_own():
    t = [torch.ones(2) for _ in range(8)]
    early, late = Early(t[0]), nn.Linear(2, 2)
    late.plain, late.some, late.table = t[1], [1, t[2]], {"a": t[3], "b": 1}
    late.numbers, late.pair, late.in_features = [1, 2.0, None], (t[4], {"c": t[5]}), t[6]
    late.register_buffer("mask", t[7])
    own = own_tensors([early, late])
    assert all(id(x) in own for x in (*t, *early.parameters(), *late.parameters()))
    assert id(torch.ones(2)) not in own

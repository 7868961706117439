"""Rows that change places inside the model, and sizes that happen to equal the batch's.

Sums cannot see a permutation: the values of a wrong owner add up as well as the right ones. So
every model here is either right to rounding, against copies of the model that see one row each, or
refused by name.
"""

import copy
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.exact import reference
from inrun.exact.check import Check
from inrun.tensors import follow

B = 4
ORDER = torch.tensor([2, 0, 3, 1])
P = torch.eye(B, dtype=torch.float64)[ORDER]


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.flip(0)

    @staticmethod
    def backward(ctx, g):
        return g.flip(0)


class Unseen(torch.autograd.Function):
    """Moves rows where torch does not see it."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy()[::-1].copy())

    @staticmethod
    def backward(ctx, g):
        return g.flip(0)


def written(h):
    out = torch.zeros_like(h)
    out[ORDER] = h
    return out


def written_through_a_view(h):
    out = torch.zeros_like(h)
    out.narrow(0, 0, 2).copy_(h[2:])
    out.narrow(0, 2, 2).copy_(h[:2])
    return out


def written_twice(h):
    out = torch.zeros(B, 2, 5)
    out[:, 0] = h
    out[:, 1] = h.flip(0)
    return out.mean(1)


def copied_into_a_view(h):
    out = torch.zeros(B, 2, 5)
    view = out[:, 0]
    view.copy_(h.flip(0))
    return out.sum(1)


def rows_in_a_list(h):
    return torch.stack([h[i] for i in ORDER.tolist()])


def same(h):
    return h


# What moves the rows, and the same without moving them
FOLLOWED = {
    "flip": (lambda h: h.flip(0), same),
    "flip-dims": (lambda h: torch.flip(h, dims=(0, 1)), lambda h: h.flip(1)),
    "flipud": (torch.flipud, same),
    "roll": (lambda h: h.roll(1, 0), same),
    "roll-keywords": (lambda h: torch.roll(h, shifts=1, dims=0), same),
    "roll-everything": (lambda h: h.roll(5), same),
    "cat": (lambda h: torch.cat([h[2:], h[:2]]), same),
    "stack-unbind": (lambda h: torch.stack(h.unbind()[::-1]), same),
    "stack-rows": (rows_in_a_list, same),
    "index": (lambda h: h[ORDER], same),
    "index-list": (lambda h: h[ORDER.tolist()], same),
    "index-select": (lambda h: h.index_select(0, ORDER), same),
    "take-along": (lambda h: torch.take_along_dim(h, ORDER[:, None], 0), same),
    "gather": (lambda h: h.gather(0, ORDER[:, None].expand(B, 5)), same),
    "index-data": (lambda h: h[h[:, 0].argsort()], same),
    "scatter": (lambda h: torch.zeros(B, 5).scatter(0, ORDER[:, None].expand(B, 5), h), same),
    "index-add": (lambda h: torch.zeros(B, 5).index_add(0, ORDER, h), same),
    "index-copy": (lambda h: torch.zeros(B, 5).index_copy(0, ORDER, h), same),
    "masked-select": (lambda h: h[torch.ones(B, dtype=torch.bool)].flip(0), same),
    "rows-twice": (lambda h: h[[2, 0, 2, 3, 1, 1, 3, 0]], lambda h: h.repeat_interleave(2, 0)),
    "written": (written, same),
    "own-function": (Flip.apply, same),
}  # fmt: skip

# What cannot be followed, or mixes examples; and the operation that the refusal names
REFUSED = {
    "rot90": (lambda h: torch.rot90(torch.rot90(h)), "rot90"),
    "sort": (lambda h: h.sort(0).values, "linear"),
    "sort-keyword": (lambda h: torch.sort(h, dim=0, descending=True)[0], "linear"),
    "topk": (lambda h: h.topk(B, 0).values, "linear"),
    "msort": (torch.msort, "msort"),
    "permutation-matrix": (lambda h: P @ h, "matmul"),
    "einsum": (lambda h: torch.einsum("ij,jk->ik", P, h), "einsum"),
    "embedding": (lambda h: F.embedding(ORDER, h), "embedding"),
    "masked-scatter": (
        lambda h: torch.zeros(B, 5).masked_scatter(torch.ones(B, 5, dtype=torch.bool), h.flip(0)),
        "masked_scatter",
    ),
    "written-twice": (written_twice, "mean"),
    "copied-into-a-view": (copied_into_a_view, "an operation that writes in place"),
    "written-through-a-view": (written_through_a_view, "an operation that writes in place"),
    "added-to-itself": (lambda h: h + h.flip(0), "add"),
    "beside-itself": (lambda h: torch.cat([h, h.flip(0)], 1)[:, 3:8], "linear"),
    "unseen-function": (Unseen.apply, "a function that torch does not show"),
    "where": (lambda h: torch.where(torch.ones(B, 1, dtype=torch.bool), h.roll(1, 0), h), "where"),
    "as-strided": (lambda h: h.as_strided((B, 5), (5, 1)).flip(0), "as_strided"),
}  # fmt: skip


class Hidden(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.a, self.b, self.f = nn.Linear(6, 5), nn.Linear(5, 3), f

    def forward(self, x):
        return self.b(self.f(torch.tanh(self.a(x))))


def step(model, loss, batch, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"validation": [batch]} | options
    with inrun.watch(model, optimizer, loss=loss, estimator="secant", **options) as run:
        with run.batch(range(B)):
            loss(model, batch).backward()
        optimizer.step()
        return run.values()["value"].to_numpy()


def mse(model, batch):
    *inputs, y = batch
    return (model(*inputs) - y).pow(2).flatten(1).sum(1).mean()


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_rows_that_move_inside_the_model_keep_their_examples(name, form, training):
    """All rows have the same target, so the loss is the same wherever they lie."""
    move, undone = FOLLOWED[name]
    batch = torch.randn(B, 6), torch.randn(3)
    moved = Hidden(move)
    plain = copy.deepcopy(moved)
    plain.f = undone
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (moved, plain)]
    options = {"validation": [batch], "loss": mse, "form": form, "training": training}
    options["estimator"] = "secant"
    expected = []
    with inrun.watch(moved, optimizers[0], **options) as run:
        for _ in range(2):  # the second step finds its calls in the memo
            with run.batch(range(B)):
                mse(moved, batch).backward()
            mse(plain, batch).backward()
            expected.append(truth(plain, batch, optimizers[1]))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        got = run.history()["value"].to_numpy()
    assert np.allclose(got, np.concatenate(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(name, training):
    move, operation = REFUSED[name]
    batch = torch.randn(B, 6), torch.randn(B, 3)
    with pytest.raises(inrun.CaptureError, match="cannot be told apart") as caught:
        step(Hidden(move), mse, batch, training=training)
    since = f"since '{operation}'" if operation != "linear" else "the operation 'linear'"
    assert since in str(caught.value) and "b.weight" in str(caught.value)


def shifted(h):
    return F.pad(h, (0, 0, 1, -1))


@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_a_row_without_an_example_is_nobodys(form):
    """Padding goes through the layer, too: its part of the gradient is in the step, and no
    example's."""
    batch = torch.randn(B, 6), torch.randn(B, 3)
    model = Hidden(shifted)
    terms = (model(batch[0]) - batch[1]).pow(2).sum(1) / B
    params = list(model.parameters())
    parts = [
        torch.autograd.grad(terms[k], params, retain_graph=True, materialize_grads=True)
        for k in (1, 2, 3, 0)  # of the examples 0, 1 and 2, and of nobody; 3 is cut off
    ]
    rows = [torch.stack(g) for g in zip(*parts, strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = reference.values(model, optimizer, rows, lambda m: mse(m, batch))
    assert abs(expected[3]) > 1e-6
    got = step(model, mse, batch, form=form)
    assert np.allclose(got, [*expected[:3], 0.0], rtol=1e-9, atol=1e-12)


def test_rows_sorted_before_the_first_parameter_keep_their_examples():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, x):
            order = x[:, 0].argsort()
            return self.a(x[order])[order.argsort()]

    batch = torch.randn(B, 6), torch.randn(B, 3)
    model = Sorted()
    expected = truth(model, batch)
    assert np.allclose(step(model, mse, batch), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["flip", "index", "stack-rows", "index-select"])
def test_the_loop_may_reorder_its_data(name):
    """ids[k] is row k of what the model receives."""
    x, y = torch.randn(B, 5), torch.randn(B, 3)
    model = nn.Linear(5, 3)
    f, _ = FOLLOWED[name]
    moved = step(copy.deepcopy(model), lambda m, b: mse(m, (f(b[0]), f(b[1]))), (x, y))
    assert np.allclose(moved, step(model, mse, (f(x), f(y))), rtol=1e-12, atol=0)


class States(nn.Module):
    """One state per time step, T = B, stacked in front or behind."""

    def __init__(self, dim):
        super().__init__()
        self.a, self.h, self.o, self.dim = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3), dim

    def forward(self, x):
        h, states = x.new_zeros(len(x), 5), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.a(x[:, t]) + self.h(h))
            states.append(h)
        out = self.o(torch.stack(states, self.dim))
        return out if self.dim == 1 else out.transpose(0, 1)


class Experts(nn.Module):
    """As many experts as examples."""

    def __init__(self, dim):
        super().__init__()
        self.e = nn.ModuleList([nn.Linear(6, 5) for _ in range(B)])
        self.o, self.dim = nn.Linear(5, 3), dim

    def forward(self, x):
        return self.o(torch.tanh(torch.stack([e(x) for e in self.e], self.dim))).mean(self.dim)


class Separated(nn.Module):
    """Index tensors with a slice between them go in front: [4, B, …]."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        i, j = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
        return self.b(self.a(x)[:, i, :, j].transpose(0, 1).flatten(2)[..., :5]).mean(1)


def truth(model, batch, optimizer=None):
    rows = reference.per_example_gradients(
        model, batch, B, lambda m, b: m(*b[:-1]),
        lambda out, b: (out - b[-1]).pow(2).flatten(1).sum(1).mean(),
    )  # fmt: skip
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    return reference.values(model, optimizer, list(rows.values()), lambda m: mse(m, batch))


@pytest.mark.parametrize("model", [States, Experts])
@pytest.mark.parametrize("dim", [0, 1])
def test_stacks_as_long_as_the_batch_keep_their_examples(model, dim):
    x = torch.randn(B, B, 6) if model is States else torch.randn(B, 6)
    y = torch.randn(B, B, 3) if model is States else torch.randn(B, 3)
    net = model(dim)
    expected = truth(net, (x, y))
    assert np.allclose(step(net, mse, (x, y)), expected, rtol=1e-9, atol=1e-12)


def test_index_tensors_with_a_slice_between_them():
    batch = torch.randn(B, 4, 4, 4, 5), torch.randn(B, 3)
    model = Separated()
    expected = truth(model, batch)
    assert np.allclose(step(model, mse, batch), expected, rtol=1e-9, atol=1e-12)


class Memory(nn.Module):
    """Attends to a memory that all examples share."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 3)

    def forward(self, x, memory):
        weights = torch.softmax(self.q(x) @ self.k(memory).T, 1)
        return weights @ self.v(memory)


def test_a_shared_input_as_long_as_the_batch_is_refused():
    batch = torch.randn(B, 6), torch.randn(B, 6), torch.randn(B, 3)
    with pytest.raises(inrun.CaptureError, match=r"input\.1 has one entry for each id"):
        step(Memory(), mse, batch)


@pytest.mark.filterwarnings("ignore:the targets' validation batches cannot be joined")
def test_a_shared_input_beside_targets_that_share_a_pass_is_refused():
    """In the joined pass, which is inrun's own, both have eight rows."""
    batch = torch.randn(B, 6), torch.randn(B, 6), torch.randn(B, 3)
    targets = {k: [(torch.randn(B, 6), batch[1], torch.randn(B, 3))] for k in "ab"}
    with pytest.raises(inrun.CaptureError, match=r"input\.1 has one entry for each id"):
        step(Memory(), mse, batch, validation=None, targets=targets)


def test_a_shared_input_in_chunks_is_refused():
    batch = torch.randn(B, 6), torch.randn(B, 6), torch.randn(B, 3)
    with pytest.raises(inrun.CaptureError, match=r"input\.1 has one entry for each id"):
        step(Memory(), mse, batch, chunk=2)


def test_a_first_input_of_another_length_is_not_taken_for_the_batch():
    """A tensor of another length is the first argument."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(7, 3)

        def forward(self, weights, x, z):
            return weights * self.a(x) + self.b(z)

    batch = torch.randn(3), torch.randn(B, 6), torch.randn(B, 7), torch.randn(B, 3)
    model = Weighted()
    expected = truth(model, batch)
    assert np.allclose(step(model, mse, batch), expected, rtol=1e-9, atol=1e-12)


def test_a_shared_input_is_known_from_a_batch_of_another_size():
    x, memory, y = torch.randn(B, 6), torch.randn(B, 6), torch.randn(B, 3)
    model, other = Memory(), (torch.randn(7, 6), memory, torch.randn(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with inrun.watch(
        model, optimizer, validation=[(x, memory, y)], loss=mse, estimator="secant"
    ) as run:
        with run.batch(range(7)):  # seven rows, and a memory of four
            mse(model, other).backward()
        optimizer.step()
        optimizer.zero_grad()
        with run.batch(range(B)):
            mse(model, (x, memory, y)).backward()
        rows = reference.per_example_gradients(
            model, (x, y), B, lambda m, b: m(b[0], memory),
            lambda out, b: (out - b[1]).pow(2).flatten(1).sum(1).mean(),
        )  # fmt: skip
        expected = reference.values(
            model, optimizer, list(rows.values()), lambda m: mse(m, (x, memory, y))
        )
        optimizer.step()
        got = run.history().query("step == 1")["value"]
        assert np.allclose(got, expected, rtol=1e-9, atol=1e-12)


class Towers(nn.Module):
    """Each example has an image and a text; similarities mix all of them."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 5), nn.Linear(7, 5)

    def forward(self, image, text):
        return self.image(image) @ self.text(text).T


def contrast(model, batch):
    logits = model(*batch)
    return F.cross_entropy(logits, torch.arange(len(logits)))


def test_two_inputs_of_each_example_are_known_from_two_batch_sizes():
    batch, other = (torch.randn(B, 6), torch.randn(B, 7)), (torch.randn(3, 6), torch.randn(3, 7))
    model = Towers()
    with pytest.raises(inrun.CaptureError, match=r"input\.1 has one entry for each id"):
        step(model, contrast, batch)
    model.zero_grad()
    u = model.image(batch[0]).detach().requires_grad_()
    v = model.text(batch[1]).detach().requires_grad_()
    F.cross_entropy(u @ v.T, torch.arange(B)).backward()
    rows = [
        torch.einsum("bo,bi->boi", u.grad, batch[0]), u.grad,
        torch.einsum("bo,bi->boi", v.grad, batch[1]), v.grad,
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = reference.values(model, optimizer, rows, lambda m: contrast(m, other))
    got = step(model, contrast, batch, validation=[other])
    assert np.allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_a_second_input_is_proven_by_an_operation_that_needs_its_size():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(7, 3)

        def forward(self, x, z):
            return self.a(x) + self.b(z)

    batch = torch.randn(B, 6), torch.randn(B, 7), torch.randn(B, 3)
    model = Added()
    expected = truth(model, batch)
    assert np.allclose(step(model, mse, batch), expected, rtol=1e-9, atol=1e-12)


def test_a_constant_that_the_model_finds_elsewhere_is_not_the_batch():
    """A tensor of the module's surroundings with B entries, met by a parameter."""
    table = torch.randn(B, 6)

    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(6, 5), nn.Linear(6, 5)

        def forward(self, x):
            return self.q(x) @ self.k(table).T

    batch = torch.randn(B, 6), torch.randn(B, B)
    model = Outside()
    expected = truth(model, batch)
    assert np.allclose(step(model, mse, batch), expected, rtol=1e-9, atol=1e-12)


# run.check() does not rest on the capture


def twice(f, back):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
            self.dropout = nn.Dropout(0.0)

        def forward(self, x):
            return self.c(back(self.dropout(self.b(f(torch.tanh(self.a(x)))))))

    return Twice()


def checked(model, loss, batch, steps=25):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with inrun.watch(model, optimizer, validation=[batch], loss=loss) as run:
        for s in range(steps):
            check = run.check() if s == steps - 1 else None
            with run.batch(range(B)):
                loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return check


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_check_finds_values_of_the_wrong_example(p, monkeypatch, capsys):
    """A rule that is wrong about flip: the sums are right, each value is another example's."""
    batch = torch.randn(B, 6), torch.randn(B, 3)
    model = twice(lambda h: h.flip(0), lambda h: h.flip(0))
    model.dropout.p = p
    monkeypatch.setitem(follow._LAYOUT_RULES, "flip", follow._first)
    check = checked(model, mse, batch)
    assert check.credit_error > 0.1
    assert check.verdict.startswith("do not trust this run")
    assert check.gradient_error < 1e-9


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_check_says_that_credit_is_right(p, capsys):
    batch = torch.randn(B, 6), torch.randn(B, 3)
    model = twice(lambda h: h, lambda h: h)
    model.dropout.p = p
    check = checked(model, mse, batch)
    assert check.credit_error < 1e-9
    assert check.unverified is None
    assert check.verdict.startswith(("trustworthy", "usable"))


def test_check_does_not_vouch_for_what_it_cannot_repeat(monkeypatch, capsys):
    batch = torch.randn(B, 6), torch.randn(B, 3)
    model = Hidden(lambda h: h.flip(0))
    monkeypatch.setitem(follow._LAYOUT_RULES, "flip", follow._first)
    check = checked(model, mse, batch)
    assert "change places" in check.unverified
    assert check.verdict.startswith("not verified")
    assert "not measured" in str(check)


def test_check_does_not_vouch_for_a_loss_beside_the_models_output(capsys):
    batch = torch.randn(B, 6), torch.randn(B, 3)
    model = Hidden(lambda h: h)

    def loss(m, b):
        return mse(m, b) + m.a(b[0]).pow(2).mean()

    check = checked(model, loss, batch)
    assert "do not add up" in check.unverified


@pytest.mark.parametrize("column", ["value", "exact"])
def test_a_check_that_is_not_a_number_is_not_trustworthy(column):
    check = Check(credit_error=0.0)
    ids, good = np.arange(3), np.array([1.0, 2.0, 3.0])
    bad = np.array([1.0, math.nan, 3.0])
    given = (bad, good) if column == "value" else (good, bad)
    check.fill(ids, *given, None, 6.0)
    assert check.verdict.startswith("do not trust")
    check = Check(credit_error=math.nan)
    check.fill(ids, good, good, None, 6.0)
    assert check.verdict.startswith("do not trust")
    check = Check(credit_error=0.0)
    check.fill(ids, good, np.zeros(3), None, 0.0)
    assert check.relative_error == math.inf and check.verdict.startswith("do not trust")
    assert isinstance(check.table, pd.DataFrame)

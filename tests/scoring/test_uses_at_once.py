"""Uses of one kind run at once: the same numbers as one by one, whatever is grouped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.captures import close
from inrun.capture.capture import Capture
from inrun.exact import reference
from inrun.gradients.records import Pair
from inrun.gradients.use import Use
from inrun.scoring import uses
from inrun.scoring.contraction import Direction, contract
from inrun.scoring.uses import add_uses

B, T, N = 3, 5, 4


class Net(nn.Module):
    """Several operations of each kind, one after the other; one weight is used twice."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.weights = nn.ParameterList([torch.randn(N, N) for _ in range(3)])
        self.vectors = nn.ParameterList([torch.randn(N) for _ in range(3)])

    def forward(self, x):
        for w, b in [*zip(self.weights, self.vectors, strict=True), (self.weights[0], None)]:
            x = torch.tanh(KINDS[self.kind](x, w, b))
        return x


KINDS = {
    "linear": F.linear,
    "linear without bias": lambda x, w, b: F.linear(x, w),
    "linear of rows": lambda x, w, b: F.linear(x.flatten(0, 1), w, b).view(x.shape),
    "linear, examples second": lambda x, w, b: F.linear(x.transpose(0, 1), w, b).transpose(0, 1),
    "frozen bias": lambda x, w, b: F.linear(x, w, None if b is None else b.detach()),
    "addmm": lambda x, w, b: torch.addmm(
        torch.zeros(N) if b is None else b, x.flatten(0, 1), w
    ).view(x.shape),
    "matmul": lambda x, w, b: x @ w,
    "mm": lambda x, w, b: torch.mm(x.flatten(0, 1), w).view(x.shape),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (N,), w[0], b),
    "layer_norm without bias": lambda x, w, b: F.layer_norm(x, (N,), w[0]),
    "layer_norm of two dimensions": lambda x, w, b: F.layer_norm(x[:, :N], (N, N), w).repeat(
        1, 2, 1
    )[:, :T],
    "rms_norm": lambda x, w, b: F.rms_norm(x, (N,), w[0], 1e-5),
    "mul": lambda x, w, b: x * (w[0] if b is None else b),
    "mul, the parameter first": lambda x, w, b: (w[1] if b is None else b) * x,
    "mul by a number": lambda x, w, b: x * w[0, 0],
}


def loss_of(out):
    return (out.reshape(B, -1).pow(3).sum(1) * torch.arange(1.0, B + 1)).mean()


@pytest.fixture
def counted(monkeypatch):
    """How many uses each run at once had."""
    sizes = []
    own = Use.run

    def run(some, given):
        sizes.append(len(some))
        return own(some, given)

    monkeypatch.setattr(Use, "run", staticmethod(run))
    return sizes


@pytest.mark.parametrize("how", ["at once", "alone", "little memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_uses_of_one_kind_run_at_once(kind, how, counted, monkeypatch):
    if how == "alone":
        monkeypatch.setattr(uses, "STACKED", {"cpu": 0})
    if how == "little memory":  # for two tensors
        monkeypatch.setattr(uses, "STACKED_MEMORY", 2 * 8 * B * T * N)
    model, x = Net(kind), torch.randn(B, T, N)
    loss_of(model(x)).backward()
    params = {k: p for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    capture = Capture(model, params, form="ghost")
    with capture.batch(B) as micro:
        loss_of(model(x)).backward()
    torch.manual_seed(1)
    u = {k: torch.randn(2, *p.shape) for k, p in params.items()}
    G = {k: p.grad for k, p in params.items()}
    with torch.no_grad():
        found, _ = contract({k: Direction(v) for k, v in u.items()}, G, [micro])
    capture.close()
    rows = reference.per_example_gradients(
        model, (x,), B, lambda m, batch: m(batch[0]), lambda out, batch: loss_of(out), 0
    )
    wanted = sum(u[k].flatten(1) @ rows[k].reshape(B, -1).T for k in params)
    assert close(found, wanted, 1e-9)
    if how == "alone":
        assert not counted
    elif how == "little memory":
        assert counted and max(counted) == 2
    else:
        assert max(counted) >= 3


def test_what_is_known_of_uses_serves_only_for_the_same_ones(monkeypatch):
    """Steps that repeat, with other batches in between, parameters that are not asked for, and
    other limits: as if nothing was known."""
    made = []
    own = uses._Sorted.__init__
    monkeypatch.setattr(
        uses._Sorted, "__init__", lambda self, *args: made.append(1) or own(self, *args)
    )
    torch.manual_seed(0)
    model = Net("linear")
    capture = Capture(model, dict(model.named_parameters()), form="ghost")
    names = [k for k, p in model.named_parameters()]

    def values(n, some, forget):
        model.zero_grad()
        x = torch.randn(n, T, N)
        with capture.batch(n) as micro:
            model(x).reshape(n, -1).pow(3).sum(1).mean().backward()
        u = {k: torch.randn(1, *p.shape) for k, p in model.named_parameters() if k in some}
        if forget:
            for use in micro.uses:
                use.linear.sorted_with.clear()
        total = torch.zeros(1, n, dtype=torch.float64)
        add_uses(total, list(micro.uses), {k: Direction(v) for k, v in u.items()})
        return total

    def all_values(forget):
        torch.manual_seed(1)
        found = []
        for n, some in ((B, names), (B, names), (2, names), (B, names[1:]), (B, names), (2, names)):
            found.append(values(n, some, forget))
        monkeypatch.setattr(uses, "STACKED", {"cpu": 0})
        found.append(values(B, names, forget))
        monkeypatch.undo()
        return found

    known = all_values(forget=False)
    assert len(made) < len(known)
    for a, b in zip(known, all_values(forget=True), strict=True):
        assert torch.equal(a, b)
    capture.close()


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_one_kind_run_at_once(transposed):
    """Ghost records, of a compiled graph say: several shapes and types among each other."""

    class Parameter:
        param = object()

    def product(dtype, n_out):
        a, delta = torch.randn(B, T, N, dtype=dtype), torch.randn(B, T, n_out, dtype=dtype)
        return uses.Product(Parameter(), Pair(a, delta, transposed))

    some = [product(d, o) for d in (torch.float64, torch.float32) for o in (N, 3) for _ in range(3)]
    groups = list(uses._at_once(some, 2**15))
    assert sorted(map(len, groups)) == [3, 3, 3, 3]
    for group in groups:
        n_out, dtype = group[0].delta.shape[-1], group[0].dtype
        shape = (N, n_out) if transposed else (n_out, N)
        u = {p.nodes[0]: torch.randn(shape, dtype=dtype) for p in group}
        for p, y in zip(group, uses.Product.stacked(group, u), strict=True):
            assert torch.allclose(y, p.along(u), rtol=1e-5, atol=1e-5)


def test_uses_whose_inputs_have_other_types_run_at_once():
    """Under autocast one use may hold what the operation was given, another what it ran with."""
    torch.manual_seed(0)
    model, half = nn.Linear(N, N), torch.randn(B, T, N).bfloat16()
    capture = Capture(model, dict(model.named_parameters()), form="ghost")
    with capture.batch(B) as micro:
        model(half.double()).sum().backward()
    (use,) = micro.uses
    some = []
    for x in (half, half.float()):
        call = use.call.with_(leaves=[x, *use.call.leaves[1:]])
        some.append(Use.of(call, use.linear, use.delta.bfloat16(), [0], use.rule))
    u = {n: n.param.detach().bfloat16() for n in use.nodes}
    capture.close()
    assert [len(group) for group in uses._at_once(some, 2**15)] == [2]
    first, second = Use.stacked(some, u)
    assert first.dtype == torch.bfloat16 and torch.equal(first, second)

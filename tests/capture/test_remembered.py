"""Operations of which only δ is remembered: what is kept stays what it was, or is refused."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.captures import close
from inrun.capture.capture import Capture
from inrun.errors import CaptureError
from inrun.exact import reference
from inrun.scoring.contraction import Direction, contract

B, T, N = 3, 5, 4


class Net(nn.Module):
    """Linear layers, norms and a factor; ``body`` says how they are put together."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.tied = nn.Linear(N, N), nn.Linear(N, N, bias=False), nn.Linear(N, N)
        self.norm, self.rms = nn.LayerNorm(N), nn.RMSNorm(N, eps=1e-5)
        self.scale = nn.Parameter(torch.randn(N))
        self.conv = nn.Conv1d(T, T, 1)
        self.groups = nn.GroupNorm(1, T)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def in_place(m, x):
    """δ of each layer arrives after its output was written to."""
    y = F.relu(m.tied(x.flatten(0, 1)), inplace=True)
    return m.norm(torch.relu_(m.a(x))) + y.view(x.shape) + m.b(x).mul_(2)


def written_factor(m, x):
    """A parameter multiplied into the output of a layer, in its place."""
    y = m.a(x)
    y.mul_(m.scale)
    return y


def shared(m, x):
    """One δ for several operations, and gradients that are added up where they meet."""
    h = m.a(x)
    return m.b(h) + m.tied(h) + h + m.tied(h * m.scale)


BODIES = {
    "in-place": in_place,
    "written-factor": written_factor,
    "shared": shared,
    "norms": lambda m, x: m.rms(m.norm(x)) * m.scale + m.groups(m.conv(x)),
    "frozen-bias": lambda m, x: F.linear(x, m.a.weight, m.a.bias.detach()),
    "transposed": lambda m, x: (m.a(x.transpose(0, 1)) @ m.b.weight).transpose(0, 1),
    "turned-weight": lambda m, x: F.linear(x, m.a.weight.t(), m.a.bias * 2),
    "rows-elsewhere": lambda m, x: m.a(m.norm(x.flip(0)) * m.scale).flip(0),
}


def loss_of(out):
    rows = out.reshape(len(out), -1).pow(3).sum(1)
    return (rows * torch.arange(1.0, len(out) + 1)).mean()


def used(model, x):
    """The parameters that take part."""
    loss_of(model(x)).backward()
    found = {k: p for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def values(micros, params, Q=2):
    """⟨u, g_i⟩ along random directions, and the directions."""
    torch.manual_seed(7)
    u = {k: torch.randn(Q, *p.shape) for k, p in params.items()}
    G = {k: p.grad for k, p in params.items()}
    with torch.no_grad():
        return contract({k: Direction(v) for k, v in u.items()}, G, micros)[0], u


def expected(model, x, params, u):
    def forward(m, batch):
        return m(batch[0])

    rows = reference.per_example_gradients(
        model, (x,), len(x), forward, lambda out, batch: loss_of(out), 0
    )
    return sum(u[k].flatten(1) @ rows[k].reshape(len(x), -1).T for k in params)


@pytest.mark.parametrize("form", ["auto", "ghost"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_remembered_gradients_are_those_of_each_example(name, fast, form):
    model, x = Net(BODIES[name]), torch.randn(B, T, N)
    params = used(model, x)
    capture = Capture(model, params, fast=fast, form=form)
    for _ in range(2):  # the second time from the memo
        model.zero_grad()
        with capture.batch(B) as micro:
            loss_of(model(x)).backward()
        assert micro.uses
        found, u = values([micro], params)
        assert close(found, expected(model, x, params, u), 1e-9)
        assert micro.uses, "the contraction leaves them as they are"


def test_training_is_the_same_bit_for_bit():
    x, grads = torch.randn(B, T, N), []
    for watched in (False, True):
        model = Net(shared)
        params = used(model, x)
        capture = Capture(model, params)
        if watched:
            with capture.batch(B):
                loss_of(model(x)).backward()
        else:
            loss_of(model(x)).backward()
        grads.append([p.grad for p in params.values()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("offload", [False, True])
def test_several_micro_batches_and_several_backward_passes(offload):
    """Also where the graph is kept and run through again."""
    model = Net(shared)
    xs = [torch.randn(B, T, N) for _ in range(2)]
    params = used(model, xs[0])
    capture, micros = Capture(model, params, form="ghost", offload=offload), []
    for x in xs:
        with capture.batch(B) as micro:
            loss = loss_of(model(x))
            loss.backward(retain_graph=True)
            loss.backward()
        micros.append(micro)
    assert bool(micros[0].uses) != offload
    found, u = values(micros, params)
    wanted = torch.cat([2 * expected(model, x, params, u) for x in xs], dim=1)
    assert close(found, wanted, 1e-9)


def test_data_may_be_written_to_after_the_backward_pass():
    model, x = Net(lambda m, x: m.norm(x) + m.a(x)), torch.randn(B, T, N)
    params, before = used(model, x), x.clone()
    with Capture(model, params).batch(B) as micro:
        loss_of(model(x)).backward()
    x.zero_()
    assert len(micro.uses) == 2
    found, u = values([micro], params)
    assert close(found, expected(model, before, params, u), 1e-9)


@pytest.mark.parametrize("what", ["input", "gradient"])
@pytest.mark.parametrize("when", ["contraction", "records"])
def test_what_is_written_to_before_the_step_is_refused(what, when):
    held = []

    def body(m, x):
        h = x * 1.0
        h.requires_grad_()
        held.append(h)
        y = m.a(h)
        y.register_hook(lambda g: held.append(g))
        return y.tanh() if what == "input" else y * 1.0

    model, x = Net(body), torch.randn(B, T, N)
    params = used(model, x)
    held.clear()
    with Capture(model, params, form="ghost").batch(B) as micro:
        loss_of(model(x)).backward()
    h, delta = held
    with torch.no_grad():
        (h if what == "input" else delta).mul_(2)
    with pytest.raises(CaptureError, match=r"a.bias, a.weight met in 'linear'.*written to"):
        values([micro], params) if when == "contraction" else micro.records


def test_in_place_sums_of_autograd_leave_delta_alone():
    """δ of an addition goes on to both sides, where more is added to it."""

    def body(m, x):
        h = m.a(x)
        y = m.norm(h)
        return y + h + m.tied(y) * h

    model, x = Net(body), torch.randn(B, T, N)
    params = used(model, x)
    with Capture(model, params, form="ghost").batch(B) as micro:
        loss_of(model(x)).backward()
    assert len(micro.uses) == 3
    found, u = values([micro], params)
    assert close(found, expected(model, x, params, u), 1e-9)


def test_a_loss_that_the_loop_keeps_does_not_keep_activations():
    seen = []

    def body(m, x):
        h = m.norm(x)
        seen.append(weakref.ref(h.untyped_storage()))
        return m.a(h)

    model, x = Net(body), torch.randn(B, T, N)
    params = used(model, x)
    seen.clear()
    with Capture(model, params, form="ghost").batch(B) as micro:
        loss = loss_of(model(x))
        loss.backward()
    assert len(micro.uses) == 2
    micro.forget()
    gc.collect()
    assert seen[0]() is None and loss.grad_fn is not None and not micro.records


def test_the_gradient_of_a_gradient_is_refused():
    model, x = Net(lambda m, x: m.a(x)), torch.randn(B, T, N)
    capture = Capture(model, used(model, x))
    with pytest.raises(CaptureError, match="differentiated again"), capture.batch(B):
        torch.autograd.grad(loss_of(model(x)), model.a.weight, create_graph=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_is_remembered_inside_a_checkpoint(reentrant):
    """It is there to keep no activations."""

    def body(m, x):
        return checkpoint(lambda h: m.norm(m.a(h)), x + m.scale, use_reentrant=reentrant)

    model, x = Net(body), torch.randn(B, T, N)
    params = used(model, x)
    with Capture(model, params).batch(B) as micro:
        loss_of(model(x)).backward()
    if not reentrant:
        assert not micro.uses
    found, u = values([micro], params)
    assert close(found, expected(model, x, params, u), 1e-9)


def test_memory_is_counted():
    counted = []
    model, x = Net(lambda m, x: m.a(m.norm(x))), torch.randn(B, T, N)
    capture = Capture(model, used(model, x), check_memory=counted.append)
    with capture.batch(B):
        loss_of(model(x)).backward()
    assert counted == [2 * x.nbytes, 2 * x.nbytes]  # input and δ of each


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """In the type that the operation ran in; float16, whose range is small, in float32."""
    model = Net(lambda m, x: m.a(m.norm(x)) + m.b(x)).float()
    x = torch.randn(B, 64, N, dtype=torch.float32)
    params = dict.fromkeys(("a.weight", "a.bias", "norm.weight", "norm.bias", "b.weight"))
    params = {k: model.get_parameter(k) for k in params}
    with Capture(model, params).batch(B) as micro:
        with torch.autocast("cpu", dtype=dtype):
            out = model(x)
        (out.float().square().mean() * (1e-3 if dtype == torch.bfloat16 else 1.0)).backward()
    assert {use.call.name: use.dtype for use in micro.uses}["linear"] == (
        torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    )
    u = {k: Direction(1e-7 * torch.randn(1, *p.shape, dtype=torch.float32))
         for k, p in params.items()}  # fmt: skip
    with torch.no_grad():
        found, total = contract(u, {k: p.grad for k, p in params.items()}, [micro])
    assert close(found.sum(1), total, 1e-2, floor=0.0) and bool(total.abs() > 0)

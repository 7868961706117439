"""Ways of writing a model or a loop that a simpler capture gets wrong, often without noticing.

Sizes coincide on purpose: batch = tokens = width = 4.
"""

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from helpers.captures import captured, close, gradients_of, reference_rows
from helpers.small_models import Model, square, watched
from helpers.zoo import Problem
from inrun.exact import reference

N = 4


def recurrent(m, x):
    out, h = torch.zeros(len(x), x.shape[1], N), torch.zeros(len(x), N)
    for t in range(x.shape[1]):
        h = torch.tanh(m.a(x[:, t]) + m.b(h))
        out[:, t] = h
    return m.c(out)


def frames(layer):
    """Examples and time merged, as video models do."""

    def function(m, x):
        y = layer(m, x.flatten(0, 1))
        return y.view(len(x), -1)

    return function


def frames_time_first(m, x):
    y = m.norm(x.transpose(0, 1).reshape(-1, N))
    return y.view(x.shape[1], len(x), N).transpose(0, 1)


def learned_queries(m, x):
    q = m.q.expand(len(x), -1, -1)
    return m.attention(q, x, x, need_weights=False)[0]


def learned_memory(m, x):
    k, v = (p.expand(len(x), -1, -1, -1) for p in (m.k, m.v))
    return F.scaled_dot_product_attention(x[:, None], k, v)


def unbound_heads(m, x):
    q, k, v = m.qkv(x).view(len(x), x.shape[1], 3, 2, -1).unbind(2)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    return y.transpose(1, 2).reshape(x.shape)


def latents(m, x):
    q = F.scaled_dot_product_attention(m.q, m.q, m.q)
    return x @ q.mT


def class_token_written(m, x):
    y = torch.zeros(len(x), x.shape[1] + 1, N)
    y[:, 1:] = x
    y[:, 0] = m.token
    return m.c(y)


def masked_token(m, x):
    h = m.c(x)
    h[x[..., 0] > 0] = m.token
    return h


def merged_add(m, x):
    return (x.reshape(-1, N) + m.w.repeat(len(x), 1)).view(x.shape)


def constant_of_batch_size(m, x):
    return m.conv(x[:, None] - MEAN)


def converted_positions(m, x):
    return x + m.table(torch.arange(x.shape[1]).type_as(torch.zeros_like(x)).long())


MEAN = torch.arange(float(N)).view(N, 1) / 10
CASES = {
    "setitem-per-step": lambda: Model(
        recurrent, a=nn.Linear(N, N), b=nn.Linear(N, N), c=nn.Linear(N, N)
    ),
    "frames-conv": lambda: Model(
        frames(lambda m, x: m.conv(x[:, None])), conv=nn.Conv1d(1, 3, 2)
    ),
    "frames-groupnorm": lambda: Model(
        frames(lambda m, x: m.norm(x[..., None])), norm=nn.GroupNorm(2, N)
    ),
    "frames-batchnorm": lambda: Model(
        frames(lambda m, x: F.batch_norm(x, m.mean, m.var, m.w, m.b)), w=(N,), b=(N,),
        mean=torch.zeros(N), var=torch.ones(N),
    ),
    "frames-time-first": lambda: Model(frames_time_first, norm=nn.LayerNorm(N)),
    "matmul-square": lambda: Model(lambda m, x: x @ m.w @ m.w.T, w=(N, N)),
    "learned-queries": lambda: Model(
        learned_queries, q=(1, 3, N), attention=nn.MultiheadAttention(N, 2, batch_first=True)
    ),
    "learned-memory": lambda: Model(learned_memory, k=(1, 1, 5, N), v=(1, 1, 5, N)),
    "unbound-heads": lambda: Model(unbound_heads, qkv=nn.Linear(N, 3 * N)),
    "latent-attention": lambda: Model(latents, q=(1, 3, N)),
    "weight-norm": lambda: Model(
        lambda m, x: m.l(x), l=nn.utils.parametrizations.weight_norm(nn.Linear(N, 3))
    ),
    "spectral-norm": lambda: Model(
        lambda m, x: m.l(x), l=nn.utils.parametrizations.spectral_norm(nn.Linear(N, 3)).eval()
    ),
    "class-token-written": lambda: Model(class_token_written, token=(N,), c=nn.Linear(N, N)),
    "masked-token": lambda: Model(masked_token, token=(N,), c=nn.Linear(N, N)),
    "merged-add": lambda: Model(merged_add, w=(N, N)),
    "cat-by-keyword": lambda: Model(
        lambda m, x: torch.cat(dim=1, tensors=[x, m.w.expand(len(x), -1, -1)]), w=(1, 2, N)
    ),
    "constant-outside": lambda: Model(constant_of_batch_size, conv=nn.Conv2d(1, 2, 2)),
    "converted-positions": lambda: Model(converted_positions, table=nn.Embedding(9, N)),
    "type-as-weight": lambda: Model(lambda m, x: m.l(x.type_as(m.l.weight)), l=nn.Linear(N, 3)),
}  # fmt: skip


def problem(name):
    def loss(out, batch):
        return (out.flatten(1).pow(3).sum(1) * torch.arange(1.0, len(out) + 1)).mean()

    return Problem(CASES[name](), (torch.randn(N, N, N),), N, lambda m, b: m(b[0]), loss)


@pytest.mark.parametrize("fast", [False, True], ids=["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("name", CASES)
def test_every_pattern_gives_per_example_gradients(name, form, fast):
    p = problem(name)
    expected = reference_rows(p)
    _, micro = captured(p, form=form, fast=fast)
    rows = gradients_of(micro)
    assert rows.keys() == expected.keys()
    for k, g in expected.items():
        assert close(rows[k], g, 1e-9), k
        assert close(p.model.get_parameter(k).grad, g.sum(0), 1e-9), k


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.inner(m.w, x[:, 0]).T,
        lambda m, x: torch.tensordot(x[:, 0], m.w, ([1], [1])),
        lambda m, x: m.l(x[x > 0.5].view(-1)[: N * N].view(N, N)),
    ],
    ids=["inner", "tensordot", "mask"],
)
def test_lost_examples_are_refused_not_guessed(function):
    model = Model(function, w=(N, N), l=nn.Linear(N, 3))
    x = torch.randn(N, N, N).abs()
    x[0, 0, 0] = 0.0  # the mask cuts rows in pieces
    run, _ = watched(model, square, x)
    with pytest.raises(inrun.CaptureError, match="cannot be told apart"), run.batch(range(N)):
        square(model, x).backward()


@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_a_mask_that_leaves_whole_rows_keeps_their_examples(form):
    x = torch.randn(N, N, N).abs() + 0.1
    x[1] = x[3] = -1.0
    model = Model(lambda m, x: m.l(x[x > 0].view(-1, N)), l=nn.Linear(N, 3))

    def loss(m, x):
        out = m(x)
        return (out.pow(3) * torch.linspace(1, 2, len(out))[:, None]).sum()

    run, optimizer = watched(model, loss, x, form=form, estimator="secant")
    out = model(x)
    terms = (out.pow(3) * torch.linspace(1, 2, len(out))[:, None]).view(2, -1).sum(1)
    params = list(model.parameters())
    own = [torch.autograd.grad(t, params, retain_graph=True) for t in terms]
    rows = [torch.stack([g[0], torch.zeros_like(g[0]), g[1], torch.zeros_like(g[0])])
            for g in zip(*own, strict=True)]  # fmt: skip
    expected = reference.values(model, optimizer, rows, lambda m: loss(m, x))
    with run.batch(range(N)):
        loss(model, x).backward()
    optimizer.step()
    assert np.allclose(run.values()["value"], expected, rtol=1e-9, atol=1e-12)


def test_the_contents_of_an_index_tensor_are_read_in_every_step():
    """Calls are recognised from step to step; what an index tensor holds is looked at each time."""
    order = torch.arange(N)
    model = Model(lambda m, x: m.second(m.first(x)[order]), first=nn.Linear(N, N),
                  second=nn.Linear(N, 2))  # fmt: skip
    twin = Model(lambda m, x: m.second(m.first(x)), first=nn.Linear(N, N), second=nn.Linear(N, 2))
    twin.load_state_dict(model.state_dict())
    x, tables = torch.randn(N, N), []
    for m in (model, twin):  # square() is the same for rows in any order
        order.copy_(torch.arange(N))
        run, optimizer = watched(m, square, x)
        for _ in range(3):
            with run.batch(range(N)):
                square(m, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            order.copy_(order.roll(1))
        tables.append(run.history()["value"].to_numpy())
    assert np.allclose(*tables, rtol=1e-9, atol=1e-12)


def aminmax_has_a_derivative():
    """torch 2.11 has none."""
    try:
        torch.aminmax(torch.ones(1, 2, requires_grad=True), dim=1)[0].sum().backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("how", ["hook", "tuple"])
def test_calls_that_are_remembered_keep_nothing_alive(how):
    if how == "tuple" and not aminmax_has_a_derivative():
        pytest.skip("needs the derivative of torch.aminmax")
    kept = []

    def function(m, x):
        h = m.first(x)
        if m.training and how == "hook":
            large = h.detach() * 2
            kept.append(weakref.ref(large))
            h.register_hook(lambda g: g + 0 * large)
        elif m.training:
            pair = torch.aminmax(h, dim=1)
            kept.append(weakref.ref(pair[0]))
            h = h + torch.stack(pair, 1).sum(1, keepdim=True)
        return m.second(h)

    model = Model(function, first=nn.Linear(N, N), second=nn.Linear(N, 2))
    x = torch.randn(N, N)
    run, optimizer = watched(model, square, x)
    for _ in range(3):
        with run.batch(range(N)):
            square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert kept and all(r() is None for r in kept)


def test_a_loss_that_is_kept_keeps_no_records():
    model = nn.Linear(N, 2)
    x = torch.randn(N, N)
    run, optimizer = watched(model, square, x)
    with run.batch(range(N)):
        loss = square(model, x)
        loss.backward()
    ((_, micro),) = run._steppers[0].micros
    assert micro.records
    optimizer.step()
    assert loss.grad_fn is not None and not micro.records


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_gradient_that_cancels_once_by_chance_does_not_spoil_later_values(name):
    """A head of zeros and a balanced batch: the head's bias gets no gradient in the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    X, y = torch.randn(160, 5), torch.randint(0, 4, (160,))
    y[:8] = torch.arange(8) % 4
    held_out = torch.randn(16, 5), torch.arange(16) % 3

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    with inrun.watch(
        model, optimizer, validation=[held_out], loss=loss, audit_every=0, estimator="secant"
    ) as run:
        for step, ids in enumerate(torch.arange(160).split(8)):
            check = run.check() if step == 19 else None
            with run.batch(ids):
                loss(model, (X[ids], y[ids])).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert check is not None and check.relative_error < 0.03


def test_a_bias_that_begins_to_cancel_gets_no_large_values():
    """A bias before BatchNorm is unfrozen on the way, and nobody audits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    x = torch.randn(16, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with inrun.watch(model, optimizer, validation=[x], loss=square, audit_every=0) as run:
        for step in range(5):
            model[0].bias.requires_grad_(step >= 2)
            with run.batch(range(16)):
                square(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.history()["value"].abs().max() < 0.1


def test_rows_collated_inside_the_block_give_the_same_values():
    """Each row has as many tokens as the batch has rows: T = B."""
    data = torch.randint(0, 9, (20, N))
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 3))
    values = []
    for collated in (False, True):
        torch.manual_seed(0)
        for layer in model:
            layer.reset_parameters()
        run, optimizer = watched(model, lambda m, b: m(b).pow(2).mean(), data[:3])
        x = data[4:8]
        with run.batch(range(N)):
            if collated:
                x = torch.stack([data[i] for i in range(4, 8)])
            (model(x).pow(2).mean((1, 2)) * torch.arange(N)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(run.values()["value"].to_numpy())
        run.close()
    assert np.allclose(*values, rtol=1e-9)


def test_dropout_on_a_parameter_alone_is_refused():
    model = Model(lambda m, x: x + F.dropout(m.w, 0.5, True), w=(N, N))
    x = torch.randn(N, N, N)
    run, _ = watched(model, square, x)
    with pytest.raises(inrun.CaptureError, match="random choice"), run.batch(range(N)):
        square(model, x).backward()


def test_layers_can_be_unfrozen_and_frozen_on_the_way():
    model = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, 2))
    model[0].requires_grad_(False)
    x = torch.randn(6, N)
    run, optimizer = watched(model, square, x[:2])
    for step in range(6):
        if step == 2:
            model[0].requires_grad_(True)
        if step == 4:
            model[2].requires_grad_(False)
        with run.batch(range(6)):
            square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert run.steps()["explained"].iloc[1:].between(0.95, 1.05).all(), run.steps()
    status = run.coverage().set_index("parameter")["status"]
    assert status["0.weight"] == "scored" and status["2.weight"] == "frozen"


def test_buffers_written_while_evaluating_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(N, 2)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(N))

        def forward(self, x):
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            return self.l(x)

    x = torch.randn(6, N)
    states = []
    for watching in (False, True):
        torch.manual_seed(0)
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = watched(model, square, x[:2], optimizer)[0] if watching else None
        for _ in range(3):
            with run.batch(range(6)) if run else torch.enable_grad():
                square(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items())


def test_a_batch_without_a_step_leaves_no_values():
    model = nn.Linear(N, 2)
    x = torch.randn(6, N)
    run, optimizer = watched(model, square, x[:2])
    for step in range(4):
        with run.batch(range(10 * step, 10 * step + 6)):
            optimizer.zero_grad()
            square(model, x).backward()
        if step != 1:  # a spike: the user goes on without a step
            optimizer.step()
    assert run.steps()["void"].isna().all() and len(run.steps()) == 3
    assert not run.values()["id"].between(10, 15).any()


def test_check_leaves_attributes_of_the_optimizer_alone(capsys):
    class Counting(torch.optim.AdamW):
        def __init__(self, params):
            super().__init__(params, lr=1e-3)
            self.calls = 0

        def step(self, closure=None):
            self.calls += 1
            return super().step(closure)

    model = nn.Linear(N, 2)
    x = torch.randn(5, N)
    run, optimizer = watched(model, square, x[:2], Counting(model.parameters()))
    check = run.check()
    with run.batch(range(5)):
        square(model, x).backward()
    optimizer.step()
    assert check.done and optimizer.calls == 1


def test_sparse_embeddings_are_refused():
    model = nn.Embedding(9, 3, sparse=True)
    x = torch.randint(0, 9, (5, 2))
    run, _ = watched(model, square, x, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(inrun.CaptureError, match="sparse=False"), run.batch(range(5)):
        square(model, x).backward()


def test_closing_inside_a_batch_keeps_nothing():
    model = nn.Linear(N, 2)
    x = torch.randn(6, N)
    run, _ = watched(model, square, x)
    with run.batch(range(6)):
        square(model, x).backward()
        run.close()
    assert not run._steppers[0].micros and not run._steppers[0].scorer.accumulated._held

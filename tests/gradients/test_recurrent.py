"""Recurrent operations against row-by-row autograd: as functions, and captured in whole models."""

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import inrun
from helpers.captures import captured, close, gradients_of, reference_rows, trainable
from helpers.zoo import Problem
from inrun.capture.capture import Capture
from inrun.gradients import Call
from inrun.gradients.arguments import flatten
from inrun.gradients.recurrent import recurrent
from inrun.tensors.layout import Layout, tensors_in

T, D, H = 5, 3, 4
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
OPTIONS = {
    "plain": {},
    "batch-first": {"batch_first": True},
    "deep": {"num_layers": 2, "batch_first": True},
    "both-ways": {"bidirectional": True},
    "deep-both-ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no-bias": {"bias": False, "num_layers": 2},
}


def module(kind, **options):
    if kind.startswith("rnn"):
        options["nonlinearity"] = kind.removeprefix("rnn_")
    return KINDS[kind](D, H, **options)


def states(m, N):
    rows = m.num_layers * (2 if m.bidirectional else 1)
    h = torch.randn(rows, N, m.proj_size or H)
    return (h, torch.randn(rows, N, H)) if m.mode == "LSTM" else h


def arguments(m, x, hx, sizes=None):
    dropout = m.dropout, m.training, m.bidirectional
    rest = m._flat_weights, m.bias, m.num_layers, *dropout
    return (x, hx, *rest, m.batch_first) if sizes is None else (x, sizes, hx, *rest)


def described(func, args, weights, layout, B, form="ghost"):
    """The call as the capture describes it; nodes are names."""
    leaves, spec = flatten(args, {})
    names = {id(w): name for name, w in weights.items()}
    nodes = tuple(names.get(id(x)) for x in leaves)
    leaves = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in leaves)
    return Call(func, spec, leaves, nodes, (None,) * len(leaves), layout, B, form)


def summed(pairs):
    rows = {}
    for node, record in pairs:
        rows[node] = rows[node] + record.rows() if node in rows else record.rows()
    return rows


def check(func, args, weights, layout, B, owners):
    """``owners``: for each output, δ of example k alone."""
    outs = func(*args)
    outs = outs if isinstance(outs, tuple) else (outs,)
    for used in itertools.product((True, False), repeat=len(outs)):
        if not any(used):
            continue
        deltas = [torch.randn_like(y) if on else None for y, on in zip(outs, used, strict=True)]
        for form in ("ghost", "materialise"):
            call = described(func, args, weights, layout, B, form)
            rows = summed(recurrent(call, deltas if len(outs) > 1 else deltas[0]))
            assert rows.keys() == weights.keys()
            for k in range(B):
                pairs = [
                    (y, d * owners[i](y, k))
                    for i, (y, d) in enumerate(zip(outs, deltas, strict=True))
                    if d is not None
                ]
                ys, ds = zip(*pairs, strict=True)
                expected = torch.autograd.grad(
                    ys, list(weights.values()), ds, retain_graph=True, allow_unused=True
                )
                for name, g in zip(weights, expected, strict=True):
                    g = torch.zeros_like(weights[name]) if g is None else g
                    assert close(rows[name][k], g, 1e-9), (name, used, form)


def column(dim, of=lambda n: n):
    """1 where the column of the output belongs to example k."""

    def own(y, k):
        n = torch.tensor([of(i) == k for i in range(y.shape[dim])], dtype=y.dtype)
        return n.view([-1 if d == dim else 1 for d in range(y.ndim)])

    return own


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize(
    ("kind", "options"), [*itertools.product(KINDS, OPTIONS), ("lstm", "projected")]
)
def test_sequences(kind, options, B):
    torch.manual_seed(1)
    projected = {"proj_size": 2, "num_layers": 2, "bidirectional": True}
    m = module(kind, **OPTIONS.get(options, projected))
    x = torch.randn(B, T, D) if m.batch_first else torch.randn(T, B, D)
    args = arguments(m, x, states(m, B))
    dim = 0 if m.batch_first else 1
    owners = [column(dim), column(1), column(1)]
    check(getattr(torch, kind), args, dict(m.named_parameters()), Layout(dim), B, owners)


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences_of_an_example(kind):
    """[B, 3] merged into the columns; initial states and input may be made of parameters."""
    torch.manual_seed(1)
    m, B = module(kind, bidirectional=True), 2
    hx, x = states(m, 6), torch.randn(T, 6, D)
    free = {f"state{i}": t.requires_grad_() for i, t in enumerate(tensors_in(hx))}
    weights = {**dict(m.named_parameters()), **free, "input": x.requires_grad_()}
    owners = [column(1, lambda n: n // 3)] * 3
    check(getattr(torch, kind), arguments(m, x, hx), weights, Layout(1, 1, 3), B, owners)
    owners = [column(1, lambda n: n % 2)] * 3
    check(getattr(torch, kind), arguments(m, x, hx), weights, Layout(1, 3, 1), B, owners)


@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_cells(kind, bias, B):
    torch.manual_seed(1)
    m = module(kind, bias=bias)
    h = torch.randn(B, H, requires_grad=True)
    hx = (h, torch.randn(B, H)) if kind == "lstm" else h
    biases = () if bias else (None, None)
    args = (torch.randn(B, D), hx, *m._flat_weights, *biases)
    weights = {**dict(m.named_parameters()), "h": h}
    check(getattr(torch, f"{kind}_cell"), args, weights, Layout(0), B, [column(0), column(0)])


V = 11


class Reader(nn.Module):
    """Text → classes, from the output, from the last states, or from all of them."""

    def __init__(self, kind="lstm", reads="output", **options):
        super().__init__()
        self.embed, self.rnn, self.reads = nn.Embedding(V, D), module(kind, **options), reads
        both = 2 if self.rnn.bidirectional else 1
        self.head = nn.Linear((self.rnn.proj_size or H) * both, 3)

    def forward(self, ids):
        out, last = self.rnn(self.embed(ids))
        dim = 1 if self.rnn.batch_first else 0
        if self.reads == "output":
            return self.head(out.tanh_().mean(dim))
        states = last if isinstance(last, tuple) else (last,)
        both = 2 if self.rnn.bidirectional else 1
        summed = sum(torch.cat(s[-both:].unbind(), -1) for s in states)
        return self.head(summed + (out.select(dim, -1) if self.reads == "all" else 0))


READERS = {
    "lstm": {"batch_first": True},
    "lstm-sequence-first": {},
    "lstm-state": {"reads": "state", "batch_first": True},
    "lstm-both-ways-deep": {
        "reads": "all", "bidirectional": True, "num_layers": 2, "batch_first": True
    },
    "lstm-both-ways-deep-sequence-first": {
        "reads": "all", "bidirectional": True, "num_layers": 2
    },
    "lstm-projected": {"proj_size": 2, "batch_first": True},
    "gru": {"kind": "gru", "reads": "all", "batch_first": True},
    "gru-deep": {"kind": "gru", "num_layers": 2, "bias": False},
    "rnn": {"kind": "rnn_relu", "reads": "state", "batch_first": True},
}  # fmt: skip


def loss(out, batch):
    rows = out.reshape(len(out), -1).pow(3).sum(1)
    return (rows * torch.arange(1.0, len(out) + 1)).mean()


def reader(B, **options):
    model = Reader(**options)
    ids = torch.randint(0, V, (B, T))
    if model.rnn.batch_first:
        return Problem(model, (ids,), B, lambda m, b: m(b[0]), loss)
    # outputs have the examples where the inputs have them
    turned = Problem(model, (ids.t(),), B, lambda m, b: m(b[0]).t(), lambda y, b: loss(y.t(), b))
    turned.batch_dim = 1
    return turned


def agrees(problem, **options):
    """Captured gradients are the reference's, and training is not disturbed."""
    expected = reference_rows(problem)
    for form, fast in itertools.product(("ghost", "materialise", "auto"), (False, True)):
        _, micro = captured(problem, form=form, fast=fast, **options)
        rows = gradients_of(micro)
        assert rows.keys() == expected.keys()
        for k, g in expected.items():
            assert close(rows[k], g, 1e-9), (k, form, fast)
            assert close(problem.model.get_parameter(k).grad, g.sum(0), 1e-9), (k, form, fast)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("B", [1, T])
@pytest.mark.parametrize("name", READERS)
def test_models(name, B):
    """B = T: an example and a step cannot be told apart by their numbers."""
    agrees(reader(B, **READERS[name]))


@pytest.mark.parametrize("name", ["lstm", "lstm-both-ways-deep", "gru", "lstm-sequence-first"])
def test_training_is_bit_for_bit_the_same(name):
    p = reader(T, **READERS[name])
    p.train_loss().backward()
    alone = {k: w.grad.clone() for k, w in p.model.named_parameters()}
    captured(p)
    for k, w in p.model.named_parameters():
        assert torch.equal(w.grad, alone[k]), k


class Made(nn.Module):
    """A module of parts, and what it does with them."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def stepwise(m, x):
    """A cell in a loop, fed with its own output."""
    state = None
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
    h = state[0] + state[1] if isinstance(state, tuple) else state
    return m.head(h)


def learned_start(m, x):
    h0, c0 = (s.expand(-1, len(x), -1) for s in (m.h, m.c))
    return m.rnn(x, (h0.contiguous(), c0 * 2))[0]


def decoder(m, x):
    """The input is a learned token, the states are the examples'."""
    h = m.rnn(x)[1]
    return m.second(m.token.expand(len(x), 3, -1), h)[0]


def sentences(m, x):
    """Each example has two sequences."""
    out = m.rnn(torch.stack([x, x.flip(1)], 1).flatten(0, 1))[0]
    return out.reshape(len(x), 2, -1)


def frozen_first(m, x):
    out, (h, _) = m.first(x)
    return m.head(out.mean(1) + h[-1])


def normalised(m, x):
    return m.rnn(x)[0]


def tied(m, x):
    return m.rnn(torch.cat([m.rnn(x)[0], x], 1))[0]


def checkpointed(reentrant):
    def run(m, x):
        def rows(y):
            return m.rnn(y)[0]

        y = m.head(x)
        return torch.utils.checkpoint.checkpoint(rows, y, use_reentrant=reentrant)

    return run


def weight_norm_of(rnn):
    return nn.utils.parametrizations.weight_norm(rnn, "weight_hh_l0")


def first_frozen():
    return nn.LSTM(D, H, 2, batch_first=True).requires_grad_(False)


MADE = {
    "lstm-cell": lambda: Made(stepwise, cell=nn.LSTMCell(D, H), head=nn.Linear(H, 2)),
    "gru-cell": lambda: Made(stepwise, cell=nn.GRUCell(D, H), head=nn.Linear(H, 2)),
    "rnn-cell": lambda: Made(stepwise, cell=nn.RNNCell(D, H, bias=False), head=nn.Linear(H, 2)),
    "learned-start": lambda: Made(
        learned_start, rnn=nn.LSTM(D, H, 2, batch_first=True),
        h=torch.randn(2, 1, H), c=torch.randn(2, 1, H),
    ),
    "decoder": lambda: Made(
        decoder, rnn=nn.GRU(D, H, batch_first=True), second=nn.GRU(2, H, batch_first=True),
        token=torch.randn(1, 1, 2),
    ),
    "sentences": lambda: Made(sentences, rnn=nn.GRU(D, H, batch_first=True)),
    "frozen-first": lambda: Made(frozen_first, first=first_frozen(), head=nn.Linear(H, 2)),
    "weight-norm": lambda: Made(normalised, rnn=weight_norm_of(nn.RNN(D, H, batch_first=True))),
    "tied": lambda: Made(tied, rnn=nn.LSTM(D, D, batch_first=True)),
    "checkpoint": lambda: Made(
        checkpointed(False), head=nn.Linear(D, D), rnn=nn.LSTM(D, H, batch_first=True)
    ),
    "checkpoint-reentrant": lambda: Made(
        checkpointed(True), head=nn.Linear(D, D), rnn=nn.LSTM(D, H, batch_first=True)
    ),
}  # fmt: skip


def made(name, B, shape=(T, D)):
    return Problem(MADE[name](), (torch.randn(B, *shape),), B, lambda m, b: m(b[0]), loss)


@pytest.mark.parametrize("B", [1, T])
@pytest.mark.parametrize("name", MADE)
def test_ways_to_use_them(name, B):
    agrees(made(name, B))


def test_frozen_weights_beside_trained_ones():
    model = Made(normalised, rnn=nn.LSTM(D, H, batch_first=True))
    model.rnn.weight_hh_l0.requires_grad_(False)
    agrees(Problem(model, (torch.randn(3, T, D),), 3, lambda m, b: m(b[0]), loss))


LENGTHS = {True: [5, 5, 3, 2, 1], False: [2, 5, 1, 5, 3]}  # by enforce_sorted; T = B = 5


class Packed(nn.Module):
    """Sequences of different lengths without padding between them."""

    def __init__(self, kind, reads, enforce_sorted, **options):
        super().__init__()
        self.embed, self.rnn = nn.Linear(D, D), module(kind, **options)
        both = 2 if self.rnn.bidirectional else 1
        self.head, self.reads = nn.Linear(H * both, 3), reads
        self.enforce_sorted = enforce_sorted

    def forward(self, x, lengths):
        first = self.rnn.batch_first
        x = torch.tanh(self.embed(x))
        packed = pack_padded_sequence(
            x if first else x.transpose(0, 1), lengths, first, self.enforce_sorted
        )
        out, state = self.rnn(packed)
        if self.reads == "packed":
            return self.head(out.data)  # in the order of the packed data
        if self.reads == "padded":
            padded, _ = pad_packed_sequence(out, batch_first=first)
            return self.head(padded if first else padded.transpose(0, 1))
        state = state[0] + state[1] if isinstance(state, tuple) else state
        both = 2 if self.rnn.bidirectional else 1
        return self.head(torch.cat(state[-both:].unbind(), -1))


def packed_loss(model, x, lengths, weights):
    """Every number counts as much as its example says, which packed data does not show."""
    out = model(x, lengths)
    if model.reads == "packed":
        rows = pack_padded_sequence(
            weights[:, None, None].expand(-1, int(max(lengths)), -1),
            lengths,
            True,
            model.enforce_sorted,
        ).data
    elif model.reads == "padded":
        inside = torch.arange(out.shape[1]) < torch.as_tensor(lengths)[:, None]
        rows = (weights[:, None] * inside)[..., None]
    else:
        rows = weights[:, None]
    return (out.pow(3) * rows).sum()


@pytest.mark.parametrize("enforce_sorted", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("reads", ["packed", "padded", "state"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("lstm", "plain"), ("lstm", "deep-both-ways"), ("gru", "batch-first"), ("gru", "both-ways"),
     ("rnn_tanh", "deep"), ("rnn_relu", "no-bias")],
)  # fmt: skip
def test_packed_sequences_are_those_of_each_sequence_alone(kind, options, reads, enforce_sorted):
    torch.manual_seed(1)
    model = Packed(kind, reads, enforce_sorted, **OPTIONS[options])
    B, lengths = T, LENGTHS[enforce_sorted]
    x, weights = torch.randn(B, T, D), torch.linspace(0.5, 2.0, B)
    expected = []
    for k, n in enumerate(lengths):
        model.zero_grad()
        packed_loss(model, x[k : k + 1, :n], [n], weights[k : k + 1]).backward()
        expected.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for form, fast in itertools.product(("ghost", "materialise"), (False, True)):
        capture = Capture(model, trainable(model), form=form, fast=fast)
        for _ in range(2):
            model.zero_grad()
            with capture.batch(B) as micro:
                packed_loss(model, x, lengths, weights).backward()
            rows = gradients_of(micro)
            assert rows.keys() == expected[0].keys()
            for name, p in model.named_parameters():
                own = torch.stack([e[name] for e in expected])
                assert close(rows[name][:B], own, 1e-9), (name, form, fast)
                assert close(p.grad, own.sum(0), 1e-9), (name, form, fast)


def test_lengths_of_packed_sequences_change_from_step_to_step():
    model = Packed("gru", "padded", False, batch_first=True)
    capture = Capture(model, trainable(model))
    x, weights = torch.randn(4, T, D), torch.ones(4)
    for lengths in ([2, 5, 1, 3], [5, 1, 3, 2], [2, 5, 1, 3], [4, 4, 4, 4]):
        model.zero_grad()
        with capture.batch(4) as micro:
            packed_loss(model, x, lengths, weights).backward()
        rows = gradients_of(micro)
        for k, n in enumerate(lengths):
            model.zero_grad()
            packed_loss(model, x[k : k + 1, :n], [n], weights[k : k + 1]).backward()
            for name, p in model.named_parameters():
                assert close(rows[name][k], p.grad, 1e-9), (name, lengths)


def test_training_with_packed_sequences_is_bit_for_bit_the_same():
    model = Packed("lstm", "padded", False, bidirectional=True)
    x, weights, lengths = torch.randn(4, T, D), torch.ones(4), [2, 5, 1, 3]
    packed_loss(model, x, lengths, weights).backward()
    alone = {k: w.grad.clone() for k, w in model.named_parameters()}
    model.zero_grad()
    with Capture(model, trainable(model)).batch(4):
        packed_loss(model, x, lengths, weights).backward()
    for k, w in model.named_parameters():
        assert torch.equal(w.grad, alone[k]), k


def test_one_packed_example():
    def packed(m, x):
        rows = pack_padded_sequence(x, [T - 1], batch_first=True)
        return pad_packed_sequence(m.rnn(rows)[0], batch_first=True)[0]

    model = Made(packed, rnn=nn.LSTM(D, H, bidirectional=True))
    agrees(Problem(model, (torch.randn(1, T, D),), 1, lambda m, b: m(b[0]), loss))


def test_a_buffer_may_be_filled_anew_after_the_backward_pass():
    x, h = torch.randn(T, 3, D), torch.randn(1, 3, H)
    model = Made(lambda m, x: m.rnn(x, h)[0].transpose(0, 1), rnn=nn.GRU(D, H))
    problem = Problem(model, (x,), 3, lambda m, b: m(b[0]), loss, batch_dim=1)
    _, micro = captured(problem, form="ghost")
    before = gradients_of(micro)
    x.zero_()
    h.zero_()
    for k, rows in gradients_of(micro).items():
        assert torch.equal(rows, before[k]), k


REFUSED = {
    "dropout": (
        lambda m, x: m.rnn(x)[0], {"num_layers": 2, "dropout": 0.5, "batch_first": True},
        "dropout between its layers.*num_layers=1",
    ),
    "examples are steps": (lambda m, x: m.rnn(x)[0], {}, "cannot be told apart"),
    "unbatched": (lambda m, x: m.rnn(x.mean(1))[0], {}, "cannot be told apart"),
    "packed across examples": (
        lambda m, x: m.rnn(pack_padded_sequence(x, [T] * T))[1][0], {}, "cannot be told apart",
    ),
}  # fmt: skip


def test_learned_states_of_packed_sequences_are_refused():
    def packed(m, x):
        rows = pack_padded_sequence(x, [5, 3, 2], batch_first=True)
        return m.rnn(rows, m.h.expand(1, len(x), H).contiguous())[0].data

    model = Made(packed, rnn=nn.GRU(D, H), h=torch.randn(1, 1, H))
    p = Problem(model, (torch.randn(3, T, D),), 3, lambda m, b: m(b[0]), loss)
    with pytest.raises(inrun.CaptureError, match=r"'gru'.*state .*of packed sequences is made of"):
        captured(p)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, options, message = REFUSED[name]
    p = Problem(Made(function, rnn=nn.LSTM(D, H, **options)), (torch.randn(T, T, D),), T,
                lambda m, b: m(b[0]), loss)  # fmt: skip
    with pytest.raises(inrun.CaptureError, match=rf"'lstm'.*{message}"):
        captured(p)


def compiled(model, x):
    """Gradients of a model under torch.compile, and what inrun warned of."""
    torch._dynamo.reset()
    capture, run = Capture(model, trainable(model)), torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            with capture.batch(len(x)) as micro:
                loss(run(x), None).backward()
    capture.close()
    return gradients_of(micro), [str(w.message) for w in said if "inrun" in str(w.message)]


def layered(m, x):
    return m.head(m.rnn(x)[0])


COMPILED = {
    "gru-cell": (MADE["gru-cell"], ""),
    "lstm-cell": (MADE["lstm-cell"], "'lstm_cell'"),  # two outputs: runs eagerly
    "lstm": (  # breaks the graph in two
        lambda: Made(layered, rnn=nn.LSTM(D, H, batch_first=True), head=nn.Linear(H, 2)), ""
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param("gru-cell", marks=pytest.mark.slow), "lstm-cell", "lstm"]
)
def test_compiled(name):
    make, warned = COMPILED[name]
    model, x = make(), torch.randn(3, 2, D)
    expected = reference_rows(Problem(model, (x,), 3, lambda m, b: m(b[0]), loss))
    rows, said = compiled(model, x)
    assert [warned in s for s in said] == [True] * bool(warned)
    for k, g in expected.items():
        assert close(rows[k], g, 1e-9), k


def test_a_gradient_of_gradients_is_refused():
    model = Made(normalised, rnn=nn.LSTM(D, H, batch_first=True))
    capture, x = Capture(model, trainable(model)), torch.randn(3, T, D)
    with pytest.raises(inrun.CaptureError, match=r"'lstm'.*create_graph"), capture.batch(3):
        torch.autograd.grad(loss(model(x), None), list(model.parameters()), create_graph=True)


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(autocast):
    """Run again in float32, the recurrence differs from torch's by rounding alone."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(1)
    model = Reader("lstm", batch_first=True)
    model = model if autocast else model.bfloat16()
    ids = torch.randint(0, V, (4, T))
    capture = Capture(model, trainable(model))
    with capture.batch(4) as micro, torch.autocast("cpu", enabled=autocast):
        loss(model(ids).float(), None).backward()
    for k, rows in gradients_of(micro).items():
        assert close(rows.sum(0).float(), model.get_parameter(k).grad.float(), 0.05), k

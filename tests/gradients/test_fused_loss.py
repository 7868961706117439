"""Losses fused with the head, of torch, TRL, Liger and one's own, against plain cross-entropy."""

import importlib
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import inrun
from helpers.captures import captured, close, gradients_of, reference_rows
from helpers.zoo import Problem
from inrun.capture.capture import Capture
from inrun.gradients import fused_loss
from inrun.gradients.nodes import directions

V, T, D = 11, 5, 4
TORCH = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch.nn.functional has it since 2.13"
)


def fused(plain, name):
    """An autograd function that computes what ``plain`` does, and keeps no graph."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.args = args
            return plain(*args)

        @staticmethod
        def backward(ctx, *grads):
            args = list(ctx.args)
            wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
            for i in wanted:
                args[i] = args[i].detach().requires_grad_()
            with torch.enable_grad():
                outs = plain(*args)
            outs = outs if isinstance(outs, tuple) else (outs,)
            pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if o is not None]
            pairs = [(o, g) for o, g in pairs if o.requires_grad]
            found = torch.autograd.grad(
                [o for o, _ in pairs], [args[i] for i in wanted], [g for _, g in pairs]
            )
            given = dict(zip(wanted, found, strict=True))
            return tuple(given.get(i) for i in range(len(args)))

    Fused.__name__ = Fused.__qualname__ = name
    return Fused


def log_probs(hidden, weight, bias, targets, temperature, chunk, cap=None, scale=1.0, outputs=()):
    """What TRL's function computes."""
    z = F.linear(hidden, weight, bias) * scale
    z = (z if cap is None else cap * torch.tanh(z / cap)) / temperature
    entropy = torch.distributions.Categorical(logits=z).entropy() if "entropy" in outputs else None
    top = z.argmax(-1) == targets if "is_top1" in outputs else None
    return -F.cross_entropy(z, targets, reduction="none"), entropy, None, None, top


def liger(
    x, weight, target, bias=None, classes=None, ignore=-100, squares=0.0, smoothing=0.0,
    reduction="mean", cap=None, *others,
):  # fmt: skip
    """What Liger's function computes."""
    z = F.linear(x, weight, bias)
    z = z if cap is None else cap * torch.tanh(z / cap)
    loss = F.cross_entropy(z, target, classes, None, ignore, None, reduction, smoothing)
    counted = target != ignore
    extra = squares * z.logsumexp(-1).square() * counted
    extra = extra if reduction == "none" else extra.sum()
    return loss + (extra / counted.sum() if reduction == "mean" else extra), None, None, None


Log = fused(log_probs, "ChunkedLogProbFunction")
Liger = fused(liger, "LigerFusedLinearCrossEntropyFunction")
Own = fused(
    lambda x, weight, t: F.cross_entropy(F.linear(x, weight).flatten(0, -2), t.flatten()), "Own"
)


@inrun.register_function(Own)
def describe_own(x, weight, t):
    return inrun.LinearLoss(
        x, weight, t, [lambda z, t: F.cross_entropy(z, t, reduction="none") / tokens]
    )


tokens = 0  # of the batch


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """Both libraries, with functions that need no GPU and compute in float64."""
    trl, ops = types.ModuleType("trl.kernels.chunked_logprob"), types.ModuleType("liger_kernel.ops")
    trl.ChunkedLogProbFunction, ops.LigerFusedLinearCrossEntropyFunction = Log, Liger
    monkeypatch.setitem(sys.modules, trl.__name__, trl)
    monkeypatch.setitem(sys.modules, ops.__name__, ops)


class Speaker(nn.Module):
    """Calls a fused loss where it is given one, else returns logits."""

    def __init__(self, bias):
        super().__init__()
        self.embed, self.body = nn.Embedding(V, D), nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=bias)

    def forward(self, ids, loss=None, targets=None):
        h = torch.tanh(self.body(self.embed(ids)))
        return self.head(h) if loss is None else loss(self.head, h, targets)


CLASSES = torch.linspace(0.5, 1.5, V, dtype=torch.float64)


def of_torch(**options):
    def loss(head, h, t):
        h, t = h.flatten(0, 1), t.flatten()
        tiles = nn.LinearCrossEntropyOptions(batch_chunk_size=4)
        found = F.linear_cross_entropy(
            h, head.weight, t, linear_bias=head.bias, options=tiles, **options
        )
        return found.square().mean() if options.get("reduction") == "none" else 2 * found

    def plain(z, t):
        found = F.cross_entropy(z.flatten(0, 1), t.flatten(), **options)
        return found.square().mean() if options.get("reduction") == "none" else 2 * found

    return loss, plain


def of_trl(outputs=("log_probs", "entropy", "is_top1"), spread=0.0, cap=None, scale=1.0, heat=1.0):
    """As ``SFTTrainer`` has it, here with a part of the entropies."""

    def total(log_prob, entropy, t):
        mask = t != -100
        loss = -log_prob.view(mask.shape).masked_fill(~mask, 0)
        loss = loss * loss.detach().exp() if spread else loss
        if spread:
            loss = loss + spread * entropy.view(mask.shape).masked_fill(~mask, 0)
        return loss.sum() / mask.sum()

    def loss(head, h, t):
        found = sys.modules["trl.kernels.chunked_logprob"].ChunkedLogProbFunction.apply(
            h.reshape(-1, D), head.weight, head.bias, t.clamp(min=0).reshape(-1), heat, 32768, cap,
            scale, outputs,
        )  # fmt: skip
        return total(found[0], found[1], t)

    def plain(z, t):
        z = z * scale
        z = (z if cap is None else cap * torch.tanh(z / cap)) / heat
        p = z.softmax(-1)
        return total(p.gather(-1, t.clamp(min=0)[..., None]).log(), -(p * p.log()).sum(-1), t)

    return loss, plain


def of_liger(*options):
    def loss(head, h, t):
        function = sys.modules["liger_kernel.ops"].LigerFusedLinearCrossEntropyFunction
        found, *_ = function.apply(
            h.reshape(-1, D), head.weight, t.reshape(-1), head.bias, *options
        )
        return found.square().mean() if found.ndim else 3 * found

    def plain(z, t):
        eye, zero = torch.eye(V), torch.zeros(V)  # logits through a head that changes nothing
        found, *_ = liger(z.reshape(-1, V), eye, t.reshape(-1), zero, *options)
        return found.square().mean() if found.ndim else 3 * found

    return loss, plain


def of_own(moved):
    def loss(head, h, t):
        global tokens
        tokens = t.numel()
        x = (h.transpose(0, 1), head.weight, t.t()) if moved else (h, head.weight, t)
        return Own.apply(*x)

    return loss, lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten())


def turned(pair):
    """Rows in the other order, targets with them."""
    loss, plain = pair
    return lambda head, h, t: loss(head, h.flip(0), t.flip(0)), plain


def without_masked(pair):
    """Only tokens that count reach the loss, as TRL does it on a GPU."""
    loss, plain = pair
    return lambda head, h, t: loss(head, h[t != -100], t[t != -100]), plain


# loss, the same of logits, has the head a bias, are some tokens left out
CASES = {
    "torch-mean": (*of_torch(), True, True),
    "torch-sum": (*of_torch(reduction="sum", ignore_index=3), False, False),
    "torch-tokens": (*of_torch(reduction="none"), True, True),
    "torch-classes": (*of_torch(weight=CLASSES), True, True),
    "trl": (*of_trl(), False, True),
    "trl-log-probs-alone": (*of_trl(("log_probs",)), True, True),
    "trl-entropy-dft": (*of_trl(spread=0.3), True, True),
    "trl-gemma": (*of_trl(spread=0.2, cap=2.0, scale=0.7, heat=1.3), False, True),
    "liger-mean": (*of_liger(), True, True),
    "liger-sum": (*of_liger(None, 3, 0.0, 0.0, "sum"), False, False),
    "liger-tokens": (*of_liger(None, -100, 0.0, 0.0, "none"), True, True),
    "liger-smooth-z-loss": (*of_liger(None, -100, 0.1, 0.2, "mean", 3.0), True, True),
    "liger-classes-z-loss": (*of_liger(CLASSES, -100, 0.1), False, True),
    "liger-turned": (*turned(of_liger()), True, True),
    "liger-without-masked": (*without_masked(of_liger()), True, True),
    "trl-turned": (*turned(of_trl()), False, True),
    "trl-without-masked": (*without_masked(of_trl()), True, True),
    "own": (*of_own(False), False, False),
    "own-tokens-first": (*of_own(True), False, False),
}
CASES = {k: pytest.param(*x, id=k, marks=[TORCH] if "torch" in k else []) for k, x in CASES.items()}


def problems(loss, plain, bias, padded, B):
    """The fused one, and one of logits with the same parameters."""
    torch.manual_seed(1)
    model, ids = Speaker(bias), torch.randint(0, V, (B, T))
    targets = torch.randint(0, V, (B, T))
    if padded:
        targets[0, 1:3] = targets[-1, T - 1] = -100
    batch = (ids, targets)
    return (
        Problem(model, batch, B, lambda m, b: m(b[0], loss, b[1]), lambda out, b: out),
        Problem(model, batch, B, lambda m, b: m(b[0]), lambda out, b: plain(out, b[1])),
    )


@pytest.mark.parametrize("B", [1, T])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize(("loss", "plain", "bias", "padded"), CASES.values())
def test_per_example_gradients(loss, plain, bias, padded, form, B):
    p, logits = problems(loss, plain, bias, padded, B)
    expected = reference_rows(logits)
    p.model.zero_grad()
    p.train_loss().backward()
    alone = {k: w.grad.clone() for k, w in p.model.named_parameters()}
    for fast in (False, True):
        _, micro = captured(p, form=form, fast=fast)
        rows = gradients_of(micro)
        assert rows.keys() == expected.keys()
        for k, g in expected.items():
            assert close(rows[k], g, 1e-9), (k, fast)
            grad = p.model.get_parameter(k).grad
            assert close(grad, g.sum(0), 1e-9) if fast else torch.equal(grad, alone[k]), (k, fast)
        u = {k: torch.randn(3, *g[0].shape) for k, g in expected.items()}
        dots = sum(r.dots(directions(n, u)) for n, rs in micro.records.items() for r in rs)
        sums = sum(u[k].reshape(3, -1) @ expected[k].reshape(B, -1).T for k in u)
        assert close(dots, sums, 1e-9)


@pytest.mark.parametrize("tokens", [1, 2, T, 2 * T, 10 * T])
def test_logits_are_computed_some_tokens_at_a_time(tokens, monkeypatch):
    p, logits = problems(*of_liger(), True, True, 4)
    expected = reference_rows(logits)
    monkeypatch.setattr(fused_loss, "_LOGITS", tokens * V)
    seen, slopes = [], fused_loss._slopes
    monkeypatch.setattr(fused_loss, "_slopes", lambda z, *x: seen.append(len(z)) or slopes(z, *x))
    _, micro = captured(p, form="ghost")
    ((_, (record,)),) = [x for x in micro.records.items() if x[0].name == "head.weight"]
    u, g = torch.randn(V, D), expected["head.weight"]
    assert close(record.dot(u), (u * g).sum((1, 2)), 1e-9)
    assert close(record.rows(), g, 1e-9)
    assert close(record.cut(1, 3).rows(), g[1:3], 1e-9)
    for sizes in ((2, 2), (1, 3)):
        sums = torch.stack([x.sum(0) for x in g.split(sizes)])
        assert close(record.groups(sizes), sums, 1e-9)
        assert close(record.some_groups(0, sizes), sums, 1e-9)
    assert max(seen) <= tokens
    assert record.bytes == 4 * T * (D + 2) * 8, "no logits are kept"
    assert type(record).__name__ == "Recomputed"


def test_the_smaller_form_is_taken(monkeypatch):
    """Few tokens: inputs; many directions: gradients, so that logits are not computed for each."""
    p, _ = problems(*of_liger(), False, False, 3)
    for directions_, kind in ((1, "Recomputed"), (8, "Dense")):
        capture, micro = captured(p, directions=directions_)
        ((_, (record,)),) = [x for x in micro.records.items() if x[0].name == "head.weight"]
        assert type(record).__name__ == kind
        assert capture.keeper.coverage["head.weight"] == {
            ("LigerFusedLinearCrossEntropyFunction", kind.lower())
        }


def test_half_precision_under_autocast():
    p, logits = problems(*of_trl(), False, True, 3)
    p.model.float()
    with torch.autocast("cpu", torch.bfloat16):
        _, micro = captured(p, form="ghost")
    logits.model.double()
    expected = reference_rows(logits)["head.weight"]
    ((_, (record,)),) = [x for x in micro.records.items() if x[0].name == "head.weight"]
    u = torch.randn(V, D)
    assert record.head.dtype == torch.bfloat16
    assert close(record.dot(u), (u * expected).sum((1, 2)), 0.03)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["trl", "liger-mean", "own"])
def test_inside_a_checkpoint(name, reentrant):
    loss, plain, bias, padded = CASES[name].values

    def again(head, h, t):
        return checkpoint(lambda h: loss(head, h, t), h, use_reentrant=reentrant)

    p, logits = problems(again, plain, bias, padded, 4)
    expected = reference_rows(logits)
    _, micro = captured(p)
    rows = gradients_of(micro)
    assert all(close(rows[k], g, 1e-9) for k, g in expected.items())


def test_the_functions_are_put_back():
    class Child(Own):
        @staticmethod
        def forward(ctx, x, weight, t):
            return x.sum() * 0 + 7

    p, _ = problems(*of_own(False), False, False, 3)
    capture = Capture(p.model, dict(p.model.named_parameters()))
    with capture.batch(3):
        assert "apply" in vars(Own)
        with Capture(nn.Linear(1, 1), {}).batch(3) as inner:  # of another run
            inner.fired = True
        assert "apply" in vars(Own)
        assert float(Child.apply(torch.ones(2), torch.ones(2), torch.ones(2))) == 7
        p.train_loss().backward()
    with pytest.raises(ZeroDivisionError), capture.batch(3):
        p.train_loss()
        raise ZeroDivisionError
    for function in (Own, Log, Liger):
        assert "apply" not in vars(function)


@pytest.mark.parametrize("name", ["trl", "liger-mean"])
def test_a_frozen_head(name):
    """Nothing is recorded of it, and the layers before it are scored."""
    loss, plain, bias, padded = CASES[name].values
    p, logits = problems(loss, plain, bias, padded, 4)
    p.model.head.requires_grad_(False)
    expected = reference_rows(logits)
    _, micro = captured(p)
    rows = gradients_of(micro)
    assert rows.keys() == {"embed.weight", "body.weight", "body.bias"}
    assert all(close(rows[k], expected[k], 1e-9) for k in rows)


def trained(loss, model, call=None, before=lambda run: None, **options):
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(2)
    ids, targets = torch.randint(0, V, (2, 4, T)), torch.randint(0, V, (2, 4, T))

    def plain(m, b):
        return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())

    run = inrun.watch(model, opt, validation=[(ids[1], targets[1])], loss=plain, **options)
    for _ in range(3):
        before(run)
        with run.batch(ids=range(4)):
            opt.zero_grad()
            (model if call is None else call)(ids[0], loss, targets[0]).backward()
        opt.step()
    return run


@pytest.mark.parametrize("name", ["trl", "liger-mean", "own"])
def test_a_run_has_the_values_of_the_plain_loss(name):
    loss, plain, bias, _ = CASES[name].values
    torch.manual_seed(0)
    first = Speaker(bias)
    second = Speaker(bias)
    second.load_state_dict(first.state_dict())
    got = trained(loss, first).values()
    expected = trained(lambda head, h, t: plain(head(h), t), second).values()
    assert len(got) == 4
    assert close(torch.tensor(got["value"]), torch.tensor(expected["value"]), 1e-9)


def refused(loss, bias=True, B=3, **parts):
    p, _ = problems(loss, None, bias, False, B)
    for name, part in parts.items():
        setattr(p.model.head, name, part)
    with pytest.raises(inrun.CaptureError) as e:
        captured(p)
    return str(e.value)


def test_what_is_refused():
    unusual = refused(of_liger(None, -100, 0.0, 0.0, "mean", None, False, None, True)[0])
    assert "parameter head.bias, head.weight takes part" in unusual
    assert "LigerFusedLinearCrossEntropyFunction" in unusual
    assert "it scales tokens by their probability" in unusual

    def mixed(head, h, t):
        return of_liger()[0](head, h + h.flip(0), t)

    assert "the examples cannot be told apart in its input since 'add'" in refused(mixed)

    def classes(head, h, t):
        return Liger.apply(h.flatten(0, 1), head.weight, t.flatten(), None, head.classes)[0]

    learned = nn.Parameter(torch.ones(V))
    assert "a parameter other than the head's" in refused(classes, False, classes=learned)

    def per_example(head, h, t):
        weight = head.weight + h[0].mean()
        return Liger.apply(h.flatten(0, 1), weight, t.flatten(), head.bias)[0]

    assert "its head is not the same for all examples" in refused(per_example)


def test_a_function_that_is_described_wrongly_is_refused():
    Wrong = fused(lambda x, w, t: F.cross_entropy(F.linear(x, w), t), "Wrong")

    @inrun.register_function(Wrong)
    def describe(x, w, t):  # a sum
        return inrun.LinearLoss(x, w, t, [lambda z, t: F.cross_entropy(z, t, reduction="none")])

    def loss(head, h, t):
        return Wrong.apply(h.flatten(0, 1), head.weight, t.flatten())

    torch.manual_seed(0)
    with pytest.raises(inrun.CaptureError, match=r"do not add up.*concerned: head.weight\."):
        trained(loss, Speaker(False))

    @inrun.register_function(Wrong)
    def describe_a_copy(x, w, t):
        return inrun.LinearLoss(x.clone(), w, t, [])

    with pytest.raises(inrun.CaptureError, match="changes the input"):
        trained(loss, Speaker(False))


def test_a_function_that_was_bound_before_is_not_seen():
    """``loss = Function.apply`` at the import of a library."""
    bound = Liger.apply

    def loss(head, h, t):
        return bound(h.flatten(0, 1), head.weight, t.flatten(), head.bias)[0]

    with pytest.raises(inrun.CaptureError, match=r"head.*custom autograd function"):
        trained(loss, Speaker(True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch.compile does
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["trl", "own", "torch-mean"])
def test_in_a_compiled_model(name):
    """Its function runs outside the graphs, and is seen there."""
    if name == "torch-mean" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch.nn.functional has it since 2.13")
    loss, _, bias, _ = CASES[name].values
    torch.manual_seed(0)
    first, second = Speaker(bias), Speaker(bias)
    second.load_state_dict(first.state_dict())
    got = trained(loss, second, torch.compile(second, backend="eager"), training="fast")
    torch._dynamo.reset()
    expected = trained(loss, first, training="fast")
    tables = [run.coverage().drop(columns="forms") for run in (got, expected)]
    assert tables[0].equals(tables[1])
    assert close(
        torch.tensor(got.values()["value"]), torch.tensor(expected.values()["value"]), 1e-9
    )


def test_the_check_of_a_step(capsys):
    """Coalitions of the batch, from the records."""
    checks = []
    trained(of_trl()[0], Speaker(False), before=lambda run: checks.append(run.check()))
    assert checks[-1].gradient_error < 1e-9
    assert checks[-1].credit_error < 1e-9


def test_trl_itself():
    """Its own function on a CPU. It computes in float32, whatever it is given."""
    pytest.importorskip("trl")
    del sys.modules["trl.kernels.chunked_logprob"]
    importlib.import_module("trl.kernels.chunked_logprob")
    p, logits = problems(*of_trl(spread=0.2, cap=2.0, scale=0.7, heat=1.3), True, True, 4)
    expected = reference_rows(logits)
    for form in ("ghost", "materialise"):
        _, micro = captured(p, form=form)
        rows = gradients_of(micro)
        assert all(close(rows[k], g, 1e-5) for k, g in expected.items())

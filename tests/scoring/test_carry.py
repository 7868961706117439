"""``estimator="carry"`` against the obvious way: every visit of an example has a momentum buffer of
its own, which the optimizer's own recursion moves; each step credits what is in it."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from helpers.library_optimizers import PLAIN
from inrun.ledger.audits import carry_summary
from inrun.report.data import payload
from inrun.report.facts import describe, facts_of
from inrun.scoring.carry import window_steps

STEPS, B, ALL = 12, 4, 1000


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def data(n=20, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=rng, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=rng)


def model_():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(steps=STEPS, seed=3):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 20, (B,), generator=rng) for _ in range(steps)]


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


X, Y = data()
VALIDATION = [data(8, seed=9)]


def adam(o, s, b, g, first):
    """The share of a step of visits with buffers b and gradients g (zero but at their own step):
    (share, new buffers). ``s`` is the optimizer's state after the step."""
    beta1, beta2 = o["betas"]
    t, b = float(s["step"]), beta1 * b + (1 - beta1) * g
    r = (s["exp_avg_sq"] / (1 - beta2**t)).sqrt()
    return o["lr"] / (1 - beta1**t) * b / (r + o["eps"]), b


def sgd(o, s, b, g, first):
    mu = o["momentum"]
    b = mu * b + (g if first else (1 - o["dampening"]) * g)
    return o["lr"] * ((g + mu * b) if o["nesterov"] else b), b


def nadam(o, s, b, g, first):
    (beta1, beta2), t = o["betas"], float(s["step"])
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (k * o["momentum_decay"])) for k in (t, t + 1))
    b, P = beta1 * b + (1 - beta1) * g, float(s["mu_product"])
    d = (s["exp_avg_sq"] / (1 - beta2**t)).sqrt() + o["eps"]
    return o["lr"] * ((1 - mu) / (1 - P) * g + mu_next / (1 - P * mu_next) * b) / d, b


def lion(o, s, b, g, first):
    beta1, beta2 = o["betas"]
    own = beta1 * b + (1 - beta1) * g
    whole = own.sum(0)
    return o["lr"] * own / whole.abs(), beta2 * b + (1 - beta2) * g


CASES = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1), adam),
    "adam, maximize": (lambda p: torch.optim.Adam(p, lr=0.02, maximize=True), adam),
    "amsgrad off, betas": (lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.5, 0.7)), adam),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), sgd),
    "sgd, dampening": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.4), sgd),
    "sgd, nesterov": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True), sgd),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=0.02, momentum_decay=0.1), nadam),
    "lion": (lambda p: PLAIN["lion_pytorch.Lion"](p, lr=0.01, betas=(0.9, 0.95)), lion),
}


def gradients(model, ids):
    """Per-example gradients of the mean loss [B, *W] by name, as the definition says."""
    params, found = dict(model.named_parameters()), []
    for i in ids:
        loss = loss_of(model, (X[i][None], Y[i][None])) / len(ids)
        found.append(torch.autograd.grad(loss, list(params.values())))
    return {k: torch.stack([g[j] for g in found]) for j, k in enumerate(params)}


def obvious(make, share, window=None, max_norm=None, lr=None, steps=STEPS):
    """Values [visits] and the drop along each step: no captures, no window, one loop."""
    model = model_()
    optimizer, plan = make(model.parameters()), batches(steps)
    sign = -1 if optimizer.param_groups[0].get("maximize") else 1
    params = dict(model.named_parameters())
    N = B * steps
    b = {k: torch.zeros(N, *p.shape) for k, p in params.items()}
    values, drops = torch.zeros(N), []
    for t, ids in enumerate(plan):
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr(t)
        rows = gradients(model, ids)
        G = {k: g.sum(0) for k, g in rows.items()}
        c = 1.0
        if max_norm is not None:
            size = math.sqrt(sum(float(g.square().sum()) for g in G.values()))
            c = min(1.0, max_norm / (size + 1e-6))
        for k, p in params.items():
            p.grad = c * G[k]
        before = {k: p.detach().clone() for k, p in params.items()}
        optimizer.step()
        after = {k: p.detach().clone() for k, p in params.items()}
        with torch.no_grad():
            for k, p in params.items():
                p.copy_((before[k] + after[k]) / 2)
        v = torch.autograd.grad(loss_of(model, VALIDATION[0]), list(params.values()))
        with torch.no_grad():
            for k, p in params.items():
                p.copy_(after[k])
        drops.append(
            sum(float((x * (before[k] - after[k])).sum()) for x, k in zip(v, params, strict=True))
        )
        for x, (k, p) in zip(v, params.items(), strict=True):
            g = torch.zeros_like(b[k])
            g[t * B : (t + 1) * B] = sign * c * rows[k]
            o, s = optimizer.param_groups[0], optimizer.state.get(p, {})
            part, b[k] = share(o, s, b[k], g, t == 0)
            own = (part * x).flatten(1).sum(1)
            if window is not None:
                own = torch.where(window(t), own, 0.0)
            values += own
    return values.numpy(), np.array(drops)


def watched(make, max_norm=None, lr=None, steps=STEPS, between=None, **options):
    """The same loop as a user has it."""
    model = model_()
    optimizer, plan = make(model.parameters()), batches(steps)
    options = {"estimator": "carry", "window": ALL, "audit_every": 5} | options
    run = inrun.watch(model, optimizer, validation=VALIDATION, loss=loss_of, **options)
    for t, ids in enumerate(plan):
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr(t)
        with run.batch(list(range(t * B, (t + 1) * B))):
            loss_of(model, (X[ids], Y[ids])).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(t, run, model, optimizer)
    run.close()
    return run


def of(run):
    """Values by visit."""
    return run.values("carry").sort_values("id")["value"].to_numpy()


@pytest.mark.parametrize("case", CASES)
def test_the_obvious_way(case):
    make, share = CASES[case]
    values, drops = obvious(make, share)
    run = watched(make)
    np.testing.assert_allclose(of(run), values, rtol=1e-9, atol=1e-12)
    steps = run.steps("carry")
    np.testing.assert_allclose(steps["drop"], drops, rtol=1e-9, atol=1e-12)
    whole = carry_summary(steps)
    assert whole["older"] == pytest.approx(0, abs=1e-12)
    assert whole["credited"] + whole["decay"] == pytest.approx(drops.sum(), rel=1e-9)


@pytest.mark.parametrize("make, close", [
    (lambda p: torch.optim.RAdam(p, lr=0.02), 1e-9),
    (lambda p: torch.optim.Adamax(p, lr=0.02), 1e-9),
    (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1e-9),
    (lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True), 1e-9),
    (lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.02), 2e-2),  # in bfloat16
], ids=["radam", "adamax", "sgd", "amsgrad", "muon"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:the loss inside run.batch also trains")  # biases, beside Muon
def test_with_other_optimizers_everything_adds_up(make, close):
    """With a window as long as the run nothing is older: all of each step is somebody's."""
    run = watched(make)
    found = carry_summary(run.steps("carry"))
    size = run.steps("carry")["drop"].abs().sum()
    assert abs(found["older"]) <= close * size
    assert np.abs(of(run)).sum() > 0.5 * size > 0


def test_the_values_of_a_run_are_the_drop_of_the_loss():
    make, _ = CASES["adamw"]
    losses = []

    def note(t, run, model, optimizer):
        losses.append(float(loss_of(model, VALIDATION[0]).detach()))

    start = float(loss_of(model_(), VALIDATION[0]).detach())
    run = watched(make, steps=60, between=note, estimator=["secant", "carry"])
    whole = carry_summary(run.steps("carry"))
    assert whole["drop"] == pytest.approx(start - losses[-1], rel=0.01)
    assert whole["credited"] + whole["decay"] == pytest.approx(whole["drop"], rel=1e-9)
    one_step = run.values("secant")["value"].sum()
    assert abs(one_step - whole["drop"]) > 0.2 * abs(whole["drop"])  # the momentum share is missing
    audited = run.steps("carry").dropna(subset="explained")
    assert len(audited) == 12
    np.testing.assert_allclose(audited["explained"], 1, atol=0.05)


def test_clipping_and_a_changing_learning_rate():
    make, share = CASES["adamw"]
    lr = lambda t: 0.02 * (1 - t / STEPS)  # noqa: E731
    values, _ = obvious(make, share, max_norm=0.3, lr=lr)
    run = watched(make, max_norm=0.3, lr=lr, estimator=["secant", "carry"])
    assert run.steps()["void"].isna().all()
    np.testing.assert_allclose(of(run), values, rtol=1e-6, atol=1e-10)  # 1e-6 of clip_grad_norm_


def test_the_window_and_what_is_older():
    make, share = CASES["adamw"]
    W, M = 4, 1
    visit = torch.arange(B * STEPS) // B
    values, drops = obvious(make, share, window=lambda t: t <= visit // M * M + W + M - 1)
    run = watched(make, window=W)
    np.testing.assert_allclose(of(run), values, rtol=1e-9, atol=1e-12)
    whole = carry_summary(run.steps("carry"))
    assert abs(whole["older"]) > 1e-4
    assert whole["older"] == pytest.approx(drops.sum() - values.sum() - whole["decay"], rel=1e-9)
    W, M = 8, 2
    values, _ = obvious(make, share, window=lambda t: t <= visit // M * M + W + M - 1)
    np.testing.assert_allclose(of(watched(make, window=W)), values, rtol=1e-9, atol=1e-12)


def test_how_long_a_window_is():
    assert window_steps(0.9) == 44 and 0.9**44 < 0.01 < 0.9**43
    assert window_steps(0.0) == 1 and window_steps(0.5) == 7
    with pytest.raises(ValueError, match="never forgets"):
        window_steps(1.0)
    run = inrun.watch(
        m := model_(), torch.optim.AdamW(m.parameters()), validation=VALIDATION, loss=loss_of,
        estimator="carry",
    )  # fmt: skip
    assert run._entries._carry.steps == 44 and run._entries._carry.together == 11
    run.close()


@pytest.mark.parametrize("options", [
    {"offload": True}, {"form": "ghost"}, {"form": "materialise"}, {"training": "fast"},
    {"estimator": ["tangent", "carry", "secant"], "point": "current"},
], ids=str)  # fmt: skip
def test_every_way_to_keep_records(options):
    values, _ = obvious(*CASES["adamw"])
    np.testing.assert_allclose(of(watched(CASES["adamw"][0], **options)), values, rtol=1e-9)


def test_training_is_untouched():
    make, _ = CASES["adamw"]
    seen = []
    for options in ({"estimator": "secant", "window": None}, {}):

        def last(t, run, model, optimizer):
            if t == STEPS - 1:
                seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

        watched(make, between=last, **options)
    assert torch.equal(*seen)


def test_other_estimators_are_as_without_it():
    make, _ = CASES["adamw"]
    both, alone = (
        watched(make, estimator=["secant", "carry"]),
        watched(make, estimator="secant", window=None),
    )
    kept = ["sum", "batch_share", "momentum_share", "explained", "drop"]
    a, b = (run.steps("secant")[kept].to_numpy() for run in (both, alone))
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-14)  # other forms of records: rounding
    a, b = (run.values("secant")["value"] for run in (both, alone))
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-14)


# What breaks the chain


def test_momentum_that_was_loaded_or_moved_by_others_is_nobodys():
    """After step 5 the optimizer's state is another object, or a step is taken without a batch:
    what was seen before is credited for the steps up to there."""
    make, share = CASES["adamw"]
    visit = torch.arange(B * STEPS) // B
    values, _ = obvious(make, share, window=lambda t: (visit > 5) | torch.tensor(t <= 5))

    def load(t, run, model, optimizer):
        if t == 5:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    run = watched(make, between=load)
    np.testing.assert_allclose(of(run), values, rtol=1e-9, atol=1e-12)
    assert carry_summary(run.steps("carry"))["older"] != 0


def test_a_void_step_is_nobodys_and_the_others_keep_theirs():
    make, _ = CASES["adamw"]
    plan, void = batches(), 4
    model = model_()
    optimizer = make(model.parameters())
    run = inrun.watch(
        model, optimizer, validation=VALIDATION, loss=loss_of, estimator="carry", window=ALL
    )
    for t, ids in enumerate(plan):
        with run.batch(list(range(t * B, (t + 1) * B))):
            loss_of(model, (X[ids], Y[ids])).backward()
        if t == void:  # another step than the rule describes
            hook = optimizer.register_step_post_hook(
                lambda o, a, k: model[0].weight.data.mul_(1.5),
            )
            optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
            with pytest.warns(UserWarning, match="another step than its rule"):
                optimizer.step()
            hook.remove()
        else:
            optimizer.step()
        optimizer.zero_grad()
    run.close()
    steps = run.steps("carry")
    assert list(steps["void"].notna()) == [t == void for t in range(STEPS)]
    values = run.values("carry").set_index("id")["value"]
    assert values[void * B : (void + 1) * B].isna().all()
    assert values.drop(range(void * B, (void + 1) * B)).notna().all()
    whole = carry_summary(steps)
    assert whole["older"] != 0  # the void step's momentum in the steps after it


def test_a_step_without_a_batch():
    make, share = CASES["adamw"]

    def extra(t, run, model, optimizer):
        if t == 5:
            loss_of(model, VALIDATION[0]).backward()
            with pytest.warns(UserWarning, match="without run.batch"):
                optimizer.step()
            optimizer.zero_grad()

    run = watched(make, between=extra)
    visit = torch.arange(B * STEPS) // B
    values, _ = obvious(make, share, window=lambda t: torch.tensor(t <= 5), steps=6)
    np.testing.assert_allclose(of(run)[: B * 6], values[: B * 6], rtol=1e-9, atol=1e-12)
    assert len(visit) == len(of(run))


# What a loop may do


def test_micro_batches_and_owners_and_nobody():
    """Two micro-batches a step, packed rows, padding that is nobody's: all of it adds up."""
    model = model_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    run = inrun.watch(
        model, optimizer, validation=VALIDATION, loss=loss_of, estimator="carry", window=ALL
    )
    for t, ids in enumerate(batches()):
        with run.batch([4 * t, 4 * t + 1], owner=torch.tensor([0, 1, 1, -1])):
            loss_of(model, (X[ids], Y[ids])).backward()
        with run.batch([4 * t + 2, 4 * t + 3, 4 * t + 2, 4 * t + 3]):
            (0.5 * loss_of(model, (X[ids], Y[ids]))).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    whole = carry_summary(run.steps("carry"))
    assert whole["nobody"] != 0
    assert whole["older"] == pytest.approx(0, abs=1e-12)
    assert len(run.values("carry")) == 4 * STEPS


def test_tokens():
    model = model_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run = inrun.watch(
        model, optimizer, validation=VALIDATION, loss=loss_of, estimator="carry", window=ALL
    )
    for t in range(4):
        with run.batch([2 * t, 2 * t + 1], tokens=True):
            x = X[:6].reshape(2, 3, 5)
            F.cross_entropy(model(x).flatten(0, 1), Y[:6]).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    by_token = run.tokens(estimator="carry").groupby("id")["value"].sum()
    values = run.values("carry").set_index("id")["value"]
    np.testing.assert_allclose(by_token, values, rtol=1e-5, atol=1e-9)


def test_parameter_groups_and_several_optimizers_and_targets():
    """Muon for a matrix, AdamW with two groups of other betas for the rest, three targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    groups = [
        {"params": model[2].parameters(), "betas": (0.5, 0.9)},
        {"params": model[3].parameters(), "betas": (0.8, 0.9), "lr": 0.03},
    ]
    muon = torch.optim.Muon(model[0].parameters(), lr=0.02, weight_decay=0.0)
    adamw = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    x, y = VALIDATION[0]
    targets = {"a": [(x[:3], y[:3])], "b": [(x[3:6], y[3:6])], "c": [(x[6:], y[6:])]}
    run = inrun.watch(
        model, [muon, adamw], targets=targets, loss=loss_of, estimator="carry", window=ALL
    )
    for t, ids in enumerate(batches()):
        with run.batch(list(range(t * B, (t + 1) * B))):
            loss_of(model, (X[ids], Y[ids])).backward()
        muon.step()
        adamw.step()
        model.zero_grad()
    run.close()
    whole = carry_summary(run.steps("carry"))
    rounding = 0.03 * run.steps("carry")["drop"].abs().sum()  # of Muon's bfloat16
    assert abs(whole["older"]) < rounding
    assert set(run.values("carry").columns) >= {"a", "b", "c"}


def test_parameters_without_a_gradient_now_and_then():
    """A head that takes part in every other step: its momentum waits."""
    torch.manual_seed(0)
    body, one, two = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)
    model = nn.ModuleList([body, one, two])

    def forward(heads, x):
        return sum(h(torch.tanh(body(x))) for h in heads)

    def loss(m, batch):
        return F.cross_entropy(forward((one, two), batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = inrun.watch(
        model, optimizer, validation=VALIDATION, loss=loss, estimator="carry", window=ALL
    )
    for t, ids in enumerate(batches()):
        with run.batch(list(range(t * B, (t + 1) * B))):
            heads = (one, two) if t % 2 == 0 else (one,)
            F.cross_entropy(forward(heads, X[ids]), Y[ids]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.close()
    whole = carry_summary(run.steps("carry"))
    assert whole["older"] == pytest.approx(0, abs=1e-12)
    assert whole["credited"] == pytest.approx(whole["drop"], rel=1e-9)


def test_weights_made_of_parameters():
    """Weight norm: per-example gradients depend on the weights of their own step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = inrun.watch(
        model, optimizer, validation=VALIDATION, loss=loss_of, estimator="carry", window=ALL
    )
    for t, ids in enumerate(batches()):
        with run.batch(list(range(t * B, (t + 1) * B))):
            loss_of(model, (X[ids], Y[ids])).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    whole = carry_summary(run.steps("carry"))
    assert whole["credited"] == pytest.approx(whole["drop"], rel=1e-9)


# Checkpoints and files


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    """In the same process nothing is lost; after a kill, what the window had captured."""
    make, share = CASES["adamw"]
    kept = {}

    def save(t, run, model, optimizer):
        if t == 5:
            kept.update(copy.deepcopy({
                "run": run.state_dict(), "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }))  # fmt: skip

    whole, _ = obvious(make, share)
    run = watched(make, between=save, out=tmp_path / "a")
    np.testing.assert_allclose(of(run), whole, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(of(inrun.open(tmp_path / "a")), whole, rtol=1e-9, atol=1e-12)
    assert inrun.open(tmp_path / "a").steps("carry").equals(run.steps("carry"))

    model = model_()
    optimizer = make(model.parameters())
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    run = inrun.watch(
        model, optimizer, validation=VALIDATION, loss=loss_of, estimator="carry", window=ALL,
        audit_every=5, out=tmp_path / "a",
    )  # fmt: skip
    run.load_state_dict(kept["run"])
    for t, ids in list(enumerate(batches()))[6:]:
        with run.batch(list(range(t * B, (t + 1) * B))):
            loss_of(model, (X[ids], Y[ids])).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    visit = torch.arange(B * STEPS) // B
    expected, _ = obvious(make, share, window=lambda t: (visit > 5) | torch.tensor(t <= 5))
    np.testing.assert_allclose(of(run), expected, rtol=1e-9, atol=1e-12)
    assert list(run.steps("carry")["step"]) == list(range(STEPS))
    assert carry_summary(run.steps("carry"))["older"] != 0


def test_tables_while_the_run_goes_on():
    """A step is in the tables when its window is over."""
    seen = []
    watched(CASES["adamw"][0], window=4, between=lambda t, run, *_: seen.append(len(run.steps())))
    assert seen == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7]


# Refusals


def refused(error, match, make=None, **options):
    model = model_()
    optimizer = (make or (lambda p: torch.optim.AdamW(p)))(model.parameters())
    with pytest.raises(error, match=match):
        inrun.watch(
            model, optimizer, validation=VALIDATION, loss=loss_of,
            **{"estimator": "carry"} | options,
        )  # fmt: skip


def test_what_is_refused():
    refused(ValueError, "every=3 leaves steps out", every=3)
    refused(ValueError, "window=0 must be", window=0)
    refused(ValueError, "for estimator='carry' only", estimator="secant", window=3)
    refused(ValueError, "halfway between", estimator="carry+midpoint")
    refused(ValueError, "halfway between", estimator="secant+halfway")
    refused(TypeError, "cannot follow RMSprop.*AdamW.*secant", torch.optim.RMSprop)
    nadam = lambda p: torch.optim.NAdam(p, differentiable=True)  # noqa: E731
    refused(TypeError, "NAdam.*capturable", nadam)


def test_two_optimizers_that_step_apart_are_refused():
    model = model_()
    optimizers = [
        torch.optim.SGD(model[0].parameters(), 0.1),
        torch.optim.SGD(model[2].parameters(), 0.1),
    ]
    with pytest.raises(ValueError, match="step_together=False"):
        inrun.watch(
            model, optimizers, validation=VALIDATION, loss=loss_of, estimator="carry",
            step_together=False,
        )  # fmt: skip


def test_check_is_of_one_step():
    model = model_()
    run = inrun.watch(
        model, torch.optim.AdamW(model.parameters()), validation=VALIDATION, loss=loss_of,
        estimator="carry",
    )  # fmt: skip
    with pytest.raises(ValueError, match="estimator of one step first"):
        run.check()
    run.close()


def test_memory_is_said_and_refused(caplog):
    with caplog.at_level("INFO", logger="inrun"):
        watched(CASES["adamw"][0], window=4)
    assert "carry keeps what was captured in 5 steps, about" in caplog.text
    with pytest.raises(MemoryError, match=r"in 55 steps .*LoRA.*ignore=.*smaller window="):
        watched(CASES["adamw"][0], window=None, memory_limit=50_000)


def test_the_report_says_whether_everything_adds_up(tmp_path):
    watched(CASES["adamw"][0], out=tmp_path / "a", audit_every=3, estimator=["secant", "carry"])
    saved = inrun.open(tmp_path / "a")
    text = describe(facts_of(saved, "carry"))
    assert text["credited"].endswith("%)") and text["explained"].endswith("measured in 4 steps")
    assert {"loss drop", "decay", "older", "residual"} <= text.keys()
    assert "batch share" not in text and "batch share" in describe(facts_of(saved, "secant"))
    page = payload(saved, estimator="carry")
    assert [c["name"] for c in page["cards"]][2:6] == ["Credited", "Decay", "Older", "Explained"]
    drop = saved.steps("carry")["drop"][::3].sum()
    assert page["audit"]["drop"][-1] == pytest.approx(drop, rel=1e-4)
    assert page["audit"]["whole"][-1] == pytest.approx(drop, rel=0.05)
    assert "sum" not in page["audit"] and "whole" not in payload(saved)["audit"]


def test_clipping_by_value():
    """Each coordinate has its own factor, that of its own step."""
    model = model_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    run = inrun.watch(
        model, optimizer, validation=VALIDATION, loss=loss_of, estimator="carry", window=ALL
    )
    for t, ids in enumerate(batches()):
        with run.batch(list(range(t * B, (t + 1) * B))):
            loss_of(model, (X[ids], Y[ids])).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    assert run.steps()["void"].isna().all()
    whole = carry_summary(run.steps("carry"))
    assert whole["credited"] == pytest.approx(whole["drop"], rel=1e-9)

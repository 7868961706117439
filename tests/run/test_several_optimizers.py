"""Several optimizers on one model: together as one step, each by itself, and what is refused."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import inrun
from helpers.loops import next_token
from helpers.zoo import GPT
from helpers.zoo import V as VOCABULARY
from inrun.exact import reference
from inrun.optimizers import rule_for

B, LENGTH = 4, 5
DATA = torch.randint(0, VOCABULARY, (40, LENGTH), generator=torch.Generator().manual_seed(1))
VALIDATION = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))


class Woven(nn.Module):
    """Parameters of two optimizers meet before the examples do (a product of both), and in an
    operation that is run again to score it."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 6)
        self.a, self.b = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))
        self.slope = nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, ids):
        x = self.token(ids) @ (self.a * torch.tanh(self.b))
        return self.head(F.prelu(x.transpose(1, 2), self.slope).transpose(1, 2))


MODELS = {"gpt": GPT, "woven": Woven}


def muon_and_adamw(model):
    matrices = [p for k, p in model.named_parameters() if p.ndim == 2 and "token" not in k]
    own = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in own]
    return [optim.Muon(matrices, lr=2e-3), optim.AdamW(rest, lr=1e-3)]


def halves(model, kinds=(optim.AdamW, optim.AdamW), rates=(1e-2, 3e-3)):
    params = list(model.parameters())
    return [kinds[0](params[::2], lr=rates[0]), kinds[1](params[1::2], lr=rates[1])]


def sgd_and_adamw(model):
    return halves(model, (optim.SGD, optim.AdamW), (0.1, 1e-2))


KINDS = {"muon": muon_and_adamw, "two adamw": halves, "sgd": sgd_and_adamw}


def rows_for(step, k=0):
    g = torch.Generator().manual_seed(100 + 10 * step + k)
    return torch.randint(0, len(DATA), (B,), generator=g)


def watch(model, optimizers, **options):
    options = {"audit_every": 1, "validation": [VALIDATION], "loss": next_token} | options
    options = {"estimator": "secant"} | options
    return inrun.watch(model, optimizers, **options)


def train(model, optimizers, run, steps, start=0, between=lambda model: None):
    for step in range(start, start + steps):
        rows = rows_for(step)
        for o in optimizers:
            o.zero_grad()
        with run.batch(rows) if run else warnings.catch_warnings():
            next_token(model, DATA[rows]).backward()
        between(model)
        for o in optimizers:
            o.step()


def reference_rows(model, rows):
    twin = copy.deepcopy(model)
    return reference.per_example_gradients(
        twin, DATA[rows], B, lambda m, ids: m(ids),
        lambda out, ids: F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
    )  # fmt: skip


def in_order(model, optimizers, rows):
    names = {id(p): k for k, p in model.named_parameters()}
    groups = reference.groups_of(optimizers)
    return [rows[names[id(p)]] for group in groups for p in group["params"]]


def expected(model, optimizers, rows, **options):
    rows = in_order(model, optimizers, rows)
    loss = lambda m: next_token(m, VALIDATION)  # noqa: E731
    return reference.values(model, optimizers, rows, loss, **options).numpy()


def trained(name, kind, **options):
    """A watched model of this name after two steps."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizers = KINDS[kind](model)
    run = watch(model, optimizers, **options)
    train(model, optimizers, run, 2)
    return model, optimizers, run


def close(a, b, tolerance=1e-9):
    return np.abs(np.asarray(a) - b).max() <= tolerance * np.abs(b).max()


# Together


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["two adamw", "sgd"])
def test_values_of_a_joint_step_are_those_of_the_reference(name, kind):
    model, optimizers, run = trained(name, kind, estimator=["secant", "tangent", "sgd"])
    rows = rows_for(2)
    per_example = reference_rows(model, rows)
    truth = {
        "secant": expected(model, optimizers, per_example),
        "tangent": expected(model, optimizers, per_example, kind="tangent", points=[None]),
        "sgd": expected(model, optimizers, per_example, kind="sgd", points=[None]),
    }
    train(model, optimizers, run, 1, start=2)
    assert run.steps()["void"].isna().all() and run.step == 3
    for estimator, values in truth.items():
        found = run.history(estimator).query("step == 2")["value"]
        assert close(found, values, 1e-5 if estimator == "tangent" else 1e-9), estimator


def test_one_optimizer_with_groups_and_several_give_the_same_values():
    found = []
    for several in (False, True):
        torch.manual_seed(0)
        model = GPT()
        params = list(model.parameters())
        groups = [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "lr": 3e-3}]
        one = [optim.AdamW(groups, lr=1.0)]
        optimizers = halves(model) if several else one
        run = watch(model, optimizers)
        train(model, optimizers, run, 4)
        found.append((run.history(), run.steps(), [p.detach().clone() for p in params]))
    (a, steps_a, w_a), (b, steps_b, w_b) = found
    assert close(a["value"], b["value"].to_numpy())
    assert steps_a["lr"].eq(1e-2).all() and steps_b["lr"].eq(1e-2).all()  # the first one's
    assert np.allclose(steps_a["batch_share"], steps_b["batch_share"], rtol=1e-12)
    assert all(torch.equal(x, y) for x, y in zip(w_a, w_b, strict=True))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_left_alone(kind, together):
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = GPT()
        optimizers = KINDS[kind](model)
        run = watch(model, optimizers, step_together=together) if watched else None
        train(model, optimizers, run, 4)
        if run is not None:
            run.close()
            assert run.steps()["void"].isna().all()
        state = [t for o in optimizers for s in o.state.values() for t in s.values()]
        hooks = [len(o._optimizer_step_pre_hooks) for o in optimizers]
        assert hooks == [0, 0]
        found.append([*model.parameters(), *map(torch.as_tensor, state)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_muon_and_adamw(capsys):
    """The reference's divided difference does not hold for Muon: its path integral stands in."""
    torch.manual_seed(0)
    model = GPT()
    muon, _ = optimizers = muon_and_adamw(model)
    run = watch(model, optimizers)
    train(model, optimizers, run, 6)
    rows = rows_for(6)
    per_example = in_order(model, optimizers, reference_rows(model, rows))
    G = [r.sum(0) for r in per_example]
    ends = [reference.stepped(optimizers, [x * g for g in G]) for x in (0, 1)]
    loss = lambda m: next_token(m, VALIDATION)  # noqa: E731
    v = reference._validation_gradient(model, optimizers, loss, *ends, points=[0.5])
    truth = torch.zeros(B)
    params = [(o, p) for o in optimizers for p in o.param_groups[0]["params"]]
    for (o, p), g, r, x, a, b in zip(params, G, per_example, v, *ends, strict=True):
        if o is muon:
            u = rule_for(o).secant(g, p.detach(), o.state[p], o.param_groups[0])(x)
        else:
            u = (a - b) / torch.where(g == 0, 1.0, g) * x * (g.abs() > 1e-10 * r.abs().sum(0))
        truth += (u * r).flatten(1).sum(1)
    check = run.check()
    train(model, optimizers, run, 1, start=6)
    assert close(run.history().query("step == 6")["value"], truth.numpy())
    assert check.unverified is None and check.credit_error < 1e-9 and check.pearson > 0.9
    assert set(run.coverage()["status"]) == {"scored"}
    assert run.steps()["void"].isna().all() and len(run.steps()) == 7


def test_a_sparse_table_beside_dense_layers():
    """Each optimizer has its own schedule; clipping comes in between."""
    torch.manual_seed(0)
    model = GPT()
    tables = [model.token.weight]
    rest = [p for p in model.parameters() if p is not tables[0]]
    optimizers = [optim.Adagrad(tables, lr=0.05), optim.AdamW(rest, lr=1e-2)]
    run = watch(model, optimizers, max_norm=0.1)
    schedules = [optim.lr_scheduler.StepLR(o, 1, 0.9 - 0.1 * i) for i, o in enumerate(optimizers)]
    for step in range(5):
        train(
            model, optimizers, run, 1, step, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        )
        for schedule in schedules:
            schedule.step()
    assert run.steps()["void"].isna().all()
    assert run.steps()["explained"].iloc[2:].between(0.95, 1.05).all()
    assert np.allclose(run.steps()["lr"], 0.05 * 0.9 ** np.arange(5))


def test_accumulated_batches_and_order_of_steps():
    found = []
    for order in (1, -1):
        torch.manual_seed(0)
        model = GPT()
        optimizers = halves(model)
        run = watch(model, optimizers)
        for step in range(3):
            for k in range(2):
                rows = rows_for(step, k)
                with run.batch(rows):
                    (next_token(model, DATA[rows]) / 2).backward()
            for o in optimizers[::order]:
                o.step()
                o.zero_grad()
        found.append(run.history()["value"].to_numpy())
        assert run.steps()["void"].isna().all()
    assert close(*found, 1e-12)


def test_resumed_from_a_checkpoint(tmp_path):
    def begin():
        torch.manual_seed(0)
        model = GPT()
        return model, muon_and_adamw(model)

    model, optimizers = begin()
    whole = watch(model, optimizers, audit_every=2)
    train(model, optimizers, whole, 6)
    model, optimizers = begin()
    run = watch(model, optimizers, audit_every=2, out=tmp_path / "run")
    train(model, optimizers, run, 3)
    kept = copy.deepcopy([model.state_dict(), *(o.state_dict() for o in optimizers)])
    state = run.state_dict()
    train(model, optimizers, run, 1, start=3)
    run.close()
    model, optimizers = begin()
    model.load_state_dict(kept[0])
    for o, s in zip(optimizers, kept[1:], strict=True):
        o.load_state_dict(s)
    run = watch(model, optimizers, audit_every=2, out=tmp_path / "run")
    run.load_state_dict(state)
    train(model, optimizers, run, 3, start=3)
    assert close(run.history()["value"], whole.history()["value"].to_numpy(), 1e-12)
    assert run.steps()["loss"].notna().tolist() == [True, False, True, False, True, False]
    run.close()
    info = inrun.open(tmp_path / "run").info
    assert info["optimizer"]["class"] == "Muon + AdamW"
    assert [g["optimizer"] for g in info["optimizer"]["groups"]] == ["Muon", "AdamW"]


# What happens between the steps


def test_a_gradient_that_changes_after_the_first_step_makes_the_step_void():
    torch.manual_seed(0)
    model = GPT()
    optimizers = halves(model)
    run = watch(model, optimizers, audit_every=0)
    train(model, optimizers, run, 5)
    with pytest.warns(UserWarning, match="another step than its rule"):
        for step in (5, 6):
            rows = rows_for(step)
            optimizers[0].zero_grad()
            optimizers[1].zero_grad()
            with run.batch(rows):
                next_token(model, DATA[rows]).backward()
            optimizers[0].step()
            if step == 6:
                for p in optimizers[1].param_groups[0]["params"]:
                    p.grad.data.mul_(-1.0)
            optimizers[1].step()
        run.steps()
    assert run.steps()["void"].notna().tolist() == [False] * 6 + [True]


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_grad_scaler(unscaled):
    """Unscaled before the first step, the gradients are what all optimizers receive; otherwise
    the scaler changes the second optimizer's between the steps."""
    torch.manual_seed(0)
    model = GPT()
    optimizers = halves(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = watch(model, optimizers, scaler=scaler)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(4):
            rows = rows_for(step)
            for o in optimizers:
                o.zero_grad()
            with run.batch(rows):
                scaler.scale(next_token(model, DATA[rows])).backward()
            for o in optimizers if unscaled else ():
                scaler.unscale_(o)
            for o in optimizers:
                scaler.step(o)
            scaler.update()
    if unscaled:
        assert run.steps()["void"].isna().all()
        assert run.steps()["explained"].iloc[2:].between(0.95, 1.05).all()
    else:
        assert run.steps()["void"].notna().all()
        assert "unscale_ for all before the first" in str(said[0].message)


def test_one_optimizer_is_skipped_by_the_scaler():
    torch.manual_seed(0)
    model = GPT()
    optimizers = halves(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    run = watch(model, optimizers, scaler=scaler)
    for step in range(4):
        rows = rows_for(step)
        for o in optimizers:
            o.zero_grad()
        with run.batch(rows):
            scaler.scale(next_token(model, DATA[rows])).backward()
        if step == 0:  # also before any step of both was seen
            optimizers[0].param_groups[0]["params"][0].grad.view(-1)[0] = torch.inf
        if step == 2:
            optimizers[1].param_groups[0]["params"][0].grad.view(-1)[0] = torch.inf
        for o in optimizers:
            scaler.unscale_(o)
        for o in optimizers:
            scaler.step(o)
        scaler.update()
    run.close()
    table = run.steps()
    assert table["void"].notna().tolist() == [True, False, True, False]
    assert "not finite" in table["void"][0] and "not finite" in table["void"][2]


# What does not step together


def test_taking_turns_is_refused_by_name():
    torch.manual_seed(0)
    model = GPT()
    optimizers = halves(model, (optim.AdamW, optim.SGD))
    run = watch(model, optimizers)
    with run.batch(rows := rows_for(0)):
        next_token(model, DATA[rows]).backward()
    optimizers[0].step()
    message = r"step 0: SGD \(optimizer 2 of 2\).*as in a GAN.*step_together=False"
    with pytest.raises(inrun.BatchError, match=message), run.batch(rows):
        pass
    run.close()


def test_a_second_step_while_the_other_waits_is_refused():
    torch.manual_seed(0)
    model = GPT()
    optimizers = halves(model)
    run = watch(model, optimizers)
    with run.batch(rows := rows_for(0)):
        next_token(model, DATA[rows]).backward()
    optimizers[1].step()
    with pytest.raises(inrun.BatchError, match=r"AdamW \(optimizer 1 of 2\) has gradients"):
        optimizers[1].step()
    run.close()
    assert run.steps()["void"].notna().all()


def test_later_a_step_that_is_not_complete_is_void():
    torch.manual_seed(0)
    model = GPT()
    optimizers = halves(model)
    run = watch(model, optimizers)
    train(model, optimizers, run, 2)
    optimizers[1].zero_grad()
    train(model, optimizers[:1], run, 1, start=2)
    train(model, optimizers, run, 1, start=3)
    assert run.steps()["void"].notna().tolist() == [False, False, True, False]
    assert "did not step" in run.steps()["void"][2]


class Pair(nn.Module):
    """Two halves that a batch can reach one at a time."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, detached=False):
        h = torch.tanh(self.one(x))
        return self.two(h.detach() if detached else h)


X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def square(model, x):
    return (model(x) - 1).square().mean()


def pair():
    torch.manual_seed(0)
    model = Pair()
    optimizers = [optim.AdamW(m.parameters(), lr=1e-2) for m in (model.one, model.two)]
    return model, optimizers


def test_batches_that_reach_one_optimizer_are_refused_by_name():
    model, optimizers = pair()
    run = watch(model, optimizers, validation=[X[16:]], loss=square)
    with run.batch(range(4)):
        (model(X[:4], detached=True) - 1).square().mean().backward()
    message = r"reach no parameter of AdamW \(optimizer 1 of 2\).*step_together=False"
    with pytest.raises(inrun.BatchError, match=message):
        optimizers[1].step()


def test_an_optimizer_whose_parameters_are_frozen_has_no_part_in_the_step():
    model, optimizers = pair()
    model.one.requires_grad_(False)
    run = watch(model, optimizers, validation=[X[16:]], loss=square)
    for step in range(3):
        for o in optimizers:
            o.zero_grad()
        with run.batch(range(4)):
            square(model, X[:4]).backward()
        for o in optimizers[:: 1 if step % 2 else -1]:
            o.step()
    assert run.step == 3 and run.unwatched == 0 and run.steps()["void"].isna().all()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: [], TypeError, "empty list"),
        (lambda m: dict(zip("ab", halves(m), strict=True)), TypeError, "list.optimizers.values"),
        (lambda m: [optim.SGD(m.parameters()), optim.SGD([m.two.bias])], ValueError,
         "two.bias is in two of the optimizers .1 and 2."),
        (lambda m: [halves(m)[0], optim.LBFGS(m.two.parameters())], TypeError, "watch LBFGS"),
    ],
)  # fmt: skip
def test_lists_that_do_not_fit_are_refused(make, error, message):
    model, _ = pair()
    with pytest.raises(error, match=message):
        watch(model, make(model), validation=[X[16:]], loss=square)


def test_a_list_of_one_is_that_optimizer():
    model, _ = pair()
    optimizer = optim.SGD(model.parameters())
    run = watch(model, [optimizer], validation=[X[16:]], loss=square)
    assert run.optimizer is optimizer


def test_optimizers_that_step_in_the_backward_pass_are_refused():
    model, _ = pair()
    optimizers = {p: optim.SGD([p], lr=0.1) for p in model.parameters()}
    run = watch(model, list(optimizers.values()), validation=[X[16:]], loss=square)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(inrun.BatchError, match=r"steps during backward\(\)"), run.batch(range(4)):
        square(model, X[:4]).backward()
    run.close()
    model, _ = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own import
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(optim.SGD, model.two.parameters(), {"lr": 0.1})
    with pytest.raises(TypeError, match=r"two.weight has an optimizer that steps during backward"):
        watch(model, optim.SGD(model.one.parameters()), validation=[X[16:]], loss=square)


# Each by itself


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["two adamw", "sgd"])
def test_apart_each_step_is_that_of_the_reference(name, kind):
    """The second optimizer's values are taken where the first one's step has led."""
    model, optimizers, run = trained(name, kind, step_together=False)
    rows = rows_for(2)
    for o in optimizers:
        o.zero_grad()
    with run.batch(rows):
        next_token(model, DATA[rows]).backward()
    per_example = reference_rows(model, rows)  # at the weights of the forward pass
    for k, o in enumerate(optimizers):
        truth = expected(model, [o], per_example)
        o.step()
        found = run.history().query(f"step == {4 + k}")
        assert close(found["value"], truth)
        assert found["id"].tolist() == rows.tolist()
    table = run.steps()
    assert table["void"].isna().all() and table["loss"].notna().all() and run.step == 6
    assert np.allclose(table["sum"].iloc[-2:], table["batch_share"].iloc[-2:], rtol=0.05)
    assert table["lr"].tolist() == [o.param_groups[0]["lr"] for o in optimizers] * 3


def test_apart_an_optimizer_may_step_less_often():
    """One steps after every batch, the other after two: its gradients are from both, formed at
    weights that have moved in between."""
    torch.manual_seed(0)
    model = Woven()
    often, seldom = optimizers = halves(model)
    run = watch(model, optimizers, step_together=False)
    held, sums, scored = [], [], []
    for step in range(4):
        rows = rows_for(step)
        with run.batch(rows):
            next_token(model, DATA[rows]).backward()
        held.append(reference_rows(model, rows))
        often.step()
        often.zero_grad()
        if step % 2:
            joined = {k: torch.cat([h[k] for h in held[-2:]]) for k in held[0]}
            sums.append(expected(model, [seldom], joined))
            seldom.step()
            seldom.zero_grad()
            scored.append(run.step - 1)
    for step, truth in zip(scored, sums, strict=True):
        assert close(run.history().query(f"step == {step}")["value"], truth)
    assert run.steps()["void"].isna().all() and run.step == 6


def test_apart_players_take_turns(capsys):
    """The batches of one reach the other as well, whose gradients are then cleared."""
    model, (one, two) = pair()
    run = watch(model, [one, two], validation=[X[16:]], loss=square, step_together=False)
    check = None
    for turn in range(6):
        rows = torch.arange(4) + 2 * turn
        two.zero_grad()
        with run.batch(rows):
            (model(X[rows], detached=True) - 1).square().mean().backward()
        two.step()
        one.zero_grad()
        if turn == 5:
            check = run.check()
        with run.batch(rows):
            square(model, X[rows]).backward()
        one.step()
    table = run.steps()
    assert table["void"].isna().all() and len(table) == 12 and run.unwatched == 0
    assert check.credit_error < 1e-9 and check.sum_error < 0.01, str(check)
    assert table["explained"].iloc[4:].between(0.9, 1.1).all()


def test_apart_clipping_and_tables_and_resuming(tmp_path):
    torch.manual_seed(0)
    model = GPT()
    optimizers = halves(model)
    run = watch(model, optimizers, step_together=False, out=tmp_path / "run", audit_every=3)
    clip = lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)  # noqa: E731
    train(model, optimizers, run, 4, between=clip)
    state = run.state_dict()
    assert run.steps()["void"].isna().iloc[2:].all() and len(run.steps()) == 8
    run.load_state_dict(state)
    train(model, optimizers, run, 1, start=4, between=clip)
    assert len(run.steps()) == 10
    audited = run.steps().query("loss == loss")["step"].tolist()
    assert {s % 2 for s in audited} == {0, 1}  # of both optimizers
    run.close()
    with pytest.raises(inrun.LedgerError, match="step_together is False"):
        watch(model, optimizers, out=tmp_path / "run", audit_every=3)


def test_apart_every_is_refused():
    model, optimizers = pair()
    with pytest.raises(ValueError, match="every=2 draws steps by chance"):
        watch(model, optimizers, validation=[X[16:]], loss=square, step_together=False, every=2)


def test_together_every_step_is_drawn_as_for_one():
    torch.manual_seed(0)
    model = GPT()
    optimizers = halves(model)
    run = watch(model, optimizers, every=3, audit_every=0)
    train(model, optimizers, run, 12)
    scored = run.steps()["sum"].notna()
    assert 0 < scored.sum() < 12 and run.steps()["void"].isna().all()

"""While the update map bends, values come from sampled orders of the examples."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from helpers.optimizer_zoo import OPTIONS
from inrun.optimizers import rule_for
from inrun.scoring import coalitions, deals, joining, sampling
from inrun.scoring.clipping import Clipping
from inrun.scoring.joining import Orders
from inrun.scoring.moved import ParamStep

X = torch.randn(400, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X[:, :3].argmax(1) + (X[:, 3] > 0)) % 3


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def watched(optimizer=torch.optim.AdamW, estimator="shapley", lr=3e-3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    made = optimizer(model.parameters(), lr=lr)
    run = inrun.watch(model, made, validation=[(X[300:], Y[300:])], loss=loss,
                      estimator=estimator, audit_every=0, **options)  # fmt: skip
    return run, model, made


def step(run, model, optimizer, n, B=6, clip=None, pieces=1, penalty=0.0):
    rows = torch.arange(n * B, (n + 1) * B) % 300
    for own in rows.chunk(pieces):
        with run.batch(own.tolist()):
            part = loss(model, (X[own], Y[own])) / pieces
            if penalty:
                part = part + penalty * sum(p.square().sum() for p in model.parameters())
            part.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


ELEMENTWISE = [c for c in OPTIONS if rule_for(c.cls([torch.zeros(2)], **c.options)).elementwise]


@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
def test_an_elementwise_update_of_many_gradients_at_once_is_that_of_each(case):
    for optimizer, at in case.moments():
        rule = rule_for(optimizer)
        if at.g.ndim != 1:
            continue
        many = torch.stack([at.g, -at.g, 0.1 * at.g, torch.zeros_like(at.g)])
        found = rule.update(many, at.w, at.s, at.o)
        for g, own in zip(many, found, strict=True):
            torch.testing.assert_close(own, rule.update(g, at.w, at.s, at.o), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"clip": 0.05}),
        (torch.optim.AdamW, {"pieces": 3}),
        (torch.optim.AdamW, {"penalty": 0.05}),
        (torch.optim.RMSprop, {}),
        (torch.optim.NAdam, {}),
    ],
    ids=str,
)
def test_first_steps_match_exact_shapley_values(optimizer, how, capsys):
    found = {"shapley": {}, "secant": {}}
    for estimator, checks in found.items():
        run, model, made = watched(optimizer, estimator)
        for n in range(6):
            if n in (0, 2, 5):
                checks[n] = run.check()
            step(run, model, made, n, B=5, **how)
    for n, check in found["shapley"].items():
        assert check.pearson > 0.99
        assert check.relative_error < (0.15 if n < 3 else 0.05)
        assert check.sum_error < 0.04
    assert how or max(c.relative_error for c in found["secant"].values()) > 0.3  # not easy


@pytest.mark.parametrize("every", [True, False])
def test_all_orders_are_the_shapley_value_of_the_update(every, monkeypatch):
    """By all coalitions of 4 examples, and by all their orders: compare with the definition."""
    if not every:
        orders = torch.tensor([*itertools.permutations(range(4))])  # [24, 4]

        class Every(joining.Orders):
            def __init__(self, players, pairs, generator):
                super().__init__(players, 24, generator)

            def draw(self, blocks, device):
                return orders[:, None].expand(-1, -(-blocks // 4), -1)

        monkeypatch.setattr(coalitions, "Orders", Every)
        monkeypatch.setattr(sampling, "ENOUGH", np.inf)
        monkeypatch.setattr(coalitions, "FEW", 0)
    run, model, optimizer = watched()
    rows = torch.arange(4)
    grads = []
    for i in rows:
        model.zero_grad()
        (loss(model, (X[i : i + 1], Y[i : i + 1])) / 4).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()

    def update(S):
        g = sum((grads[i] for i in S), torch.zeros_like(grads[0]))
        return 3e-3 * g / (g.abs() + 1e-8)

    w = torch.cat([p.detach().flatten() for p in model.parameters()])
    middle = w * (1 - 3e-3 * 0.01) - update(range(4)) / 2
    nn.utils.vector_to_parameters(middle, list(model.parameters()))
    v = torch.autograd.grad(loss(model, (X[300:], Y[300:])), list(model.parameters()))
    v = torch.cat([x.flatten() for x in v])
    nn.utils.vector_to_parameters(w, list(model.parameters()))
    exact = np.zeros(4)
    for order in itertools.permutations(range(4)):
        for k, i in enumerate(order):
            exact[i] += float(v @ (update(order[: k + 1]) - update(order[:k]))) / 24
    step(run, model, optimizer, 0, B=4)
    np.testing.assert_allclose(run.values()["value"], exact, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_sampled_orders_tend_to_the_mean_over_all_coalitions(blocks):
    """Of games with several targets, whose update depends on the norm of the whole, too."""
    rng = torch.Generator().manual_seed(3)
    n = joining.BLOCK["cpu"] * blocks
    rows = torch.randn(5, n, generator=rng, dtype=torch.float64)
    v = torch.randn(2, n, generator=rng, dtype=torch.float64)
    gram = rows @ rows.T
    found = {}
    for joined in (joining.All(5, rows.device), joining.Orders(5, 4000, rng)):
        drawn = joined.draw(blocks, rows.device)
        g, sizes = joined.coalitions(rows, gram, drawn, 0)
        assert len(g) == joined.rows
        M = len(g)
        of_all = g.view(M, blocks, -1) if isinstance(joined, joining.Orders) else g[:, None]
        if blocks == 1:  # a norm over the only block
            torch.testing.assert_close(sizes, of_all.square().sum(2))
        gained = (g.view(M, sizes.shape[1], -1).tanh() * sizes[..., None].sqrt()).view(M, n)
        samples = joined.values(v, gained, drawn, 0)
        whole = v @ (rows.sum(0).tanh() * gram.sum().sqrt())
        torch.testing.assert_close(samples.sum(2), whole.expand(len(samples), 2))
        torch.testing.assert_close(joined.whole(g)[-1], rows.sum(0))
        found[type(joined)] = samples
    orders = found[joining.Orders]
    off = orders.mean(0) - found[joining.All][0]
    assert (off.abs() < 4 * orders.std(0) / 4000**0.5 + 1e-12).all()


def test_every_example_stands_once_in_every_place_of_neighbouring_blocks():
    orders = joining.Orders(5, 3, torch.Generator().manual_seed(0))
    drawn = orders.draw(10, torch.device("cpu"))
    found = orders.orders(drawn, 5, 5)  # the second group of blocks
    assert found.shape == (6, 5, 5)
    assert (found.sort(1).values == torch.arange(5)[:, None]).all()  # each is an order
    assert (found.sort(2).values == torch.arange(5)).all()
    assert (found[::2] == found[1::2].flip(1)).all()


def test_values_add_up_to_what_the_secant_adds_up_to():
    sums = {}
    for estimator in ("shapley", "secant"):
        run, model, optimizer = watched(estimator=estimator)
        for n in range(3):
            step(run, model, optimizer, n)
        sums[estimator] = run.steps()["sum"].to_numpy()
    np.testing.assert_allclose(sums["shapley"], sums["secant"], rtol=1e-9)


def test_sampling_ends_when_the_map_is_nearly_linear_and_is_looked_at_again(monkeypatch):
    asked = []
    sample = coalitions.Game.values
    monkeypatch.setattr(coalitions.Game, "values", lambda *a: asked.append(1) or sample(*a))
    run, model, optimizer = watched(lr=1e-4, halves_every=0)
    run_length = 0
    while True:
        before = len(asked)
        step(run, model, optimizer, run_length)
        run_length += 1
        if len(asked) == before:
            break
        assert run_length < 300
    assert run_length > 5
    for n in range(3):
        step(run, model, optimizer, n)
    assert len(asked) == run_length - 1
    model[0].weight.requires_grad_(False)  # another set of parameters: its update may bend
    step(run, model, optimizer, 0)
    assert len(asked) == run_length


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor])
def test_without_an_elementwise_update_that_bends_it_is_the_secant(optimizer):
    found = []
    for estimator in ("shapley", "secant"):
        run, model, made = watched(optimizer, estimator)
        for n in range(2):
            step(run, model, made, n)
        found.append(run.values())
    assert found[0].equals(found[1])


def test_wrong_gradients_are_still_seen():
    """What is sampled always adds up; the sum check is that of the linear map."""
    run, model, optimizer = watched()
    step(run, model, optimizer, 0)
    with run.batch(range(6)):
        loss(model, (X[:6], Y[:6])).backward()
    model[0].bias.grad[0] += 1.0
    with pytest.warns(UserWarning):
        optimizer.step()
    assert run.steps()["void"].iloc[-1]


def lm(B=4, T=5):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(11, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 11)
    ).double()
    ids = torch.randint(0, 11, (2, B, T), generator=torch.Generator().manual_seed(2))

    def lm_loss(model, ids):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return model, ids, lm_loss


def lm_run(steps=2, tokens=False, pieces=1, optimizer=None, before=None, **options):
    """Values of a small language model by all coalitions."""
    model, ids, lm_loss = lm()
    optimizer = optimizer or (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    made = optimizer(model)
    options = {"validation": [ids[1]], "audit_every": 0, "loss": lm_loss} | options
    run = inrun.watch(model, made, **options)
    found = []
    for _ in range(steps):
        found.append(run.check() if before else None)
        for own in torch.arange(4).chunk(pieces):
            with run.batch(own.tolist(), tokens=tokens):
                (lm_loss(model, ids[0][own]) / pieces).backward()
        for o in made if isinstance(made, list) else [made]:
            o.step()
        model.zero_grad()
    return run, found


def close(a, b):
    np.testing.assert_allclose(a["value"], b["value"], rtol=1e-9, atol=1e-14)


def test_it_is_the_default():
    run, _ = lm_run()
    assert run.steps()["bend"].notna().all() and run.steps()["bend"].iloc[0] > 0.1
    close(run.values(), lm_run(estimator="shapley")[0].values())
    plain, _ = lm_run(estimator="secant")
    assert plain.steps()["bend"].isna().all()
    assert (plain.values()["value"] - run.values()["value"]).abs().max() > 0.01


@pytest.mark.parametrize("how", [
    {"training": "fast"}, {"form": "ghost"}, {"form": "materialise"}, {"offload": True},
    {"pieces": 2}, {"tokens": True}, {"estimator": ["secant", "shapley"]},
    {"estimator": ["shapley", "carry"]},
], ids=str)  # fmt: skip
def test_however_gradients_are_kept_values_are_the_same(how):
    run, _ = lm_run(**how)
    run.close()
    close(run.history(estimator="shapley"), lm_run()[0].history())


@pytest.mark.parametrize("tokens", [False, True])
def test_of_a_large_parameter_some_rows_at_a_time(tokens, monkeypatch):
    expected = lm_run()[0].history()
    monkeypatch.setattr(deals, "SLAB", {"cpu": 4 * 6 * 2})
    close(lm_run(tokens=tokens)[0].history(), expected)


def test_rows_of_a_table_that_nothing_moves_are_passed_over(monkeypatch):
    monkeypatch.setattr(coalitions, "PIECE", {"cpu": 1})  # a block at a time
    still, seen = coalitions._still, []
    monkeypatch.setattr(coalitions, "_still", lambda *x: seen.append(still(*x)) or seen[-1])
    run, _ = lm_run()
    assert any(seen) and not all(seen)
    monkeypatch.setattr(coalitions, "_still", lambda *x: False)
    assert run.history().equals(lm_run()[0].history())  # bit for bit


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_is_passed_over_moves_nothing(zero):
    g, rows, v = torch.ones(3), torch.ones(2, 3), torch.ones(1, 3)
    assert not coalitions._still(g, rows, v)
    (g, rows, v)[zero].zero_()
    assert coalitions._still(g, rows, v) == (zero == 2)  # the batch's own gradient may differ
    g.zero_(), rows.zero_()
    assert coalitions._still(g, rows, v)


def test_a_slow_step_says_once_what_it_waits_for(monkeypatch, caplog):
    lm_run()
    assert not caplog.records
    monkeypatch.setattr(sampling, "SLOW", 0.0)
    lm_run()
    assert len(caplog.records) == 1 and "estimator='secant'" in caplog.text


def test_values_of_positions_add_up_to_those_of_their_examples():
    run, _ = lm_run(tokens=True)
    tokens = run.tokens().groupby(["step", "id"])["value"].sum()
    values = run.history().set_index(["step", "id"])["value"]
    np.testing.assert_allclose(tokens.sort_index(), values.sort_index(), rtol=1e-4, atol=1e-6)


def test_several_targets_are_valued_as_each_alone():
    _, ids, _ = lm()
    targets = {"a": [ids[1][:1]], "b": [ids[1][1:3]], "c": [ids[1][3:]]}
    run, _ = lm_run(validation=None, targets=targets)
    # a run of its own for each target trains the same
    for name, data in targets.items():
        alone, _ = lm_run(validation=data)
        found = run.history()
        np.testing.assert_allclose(found[name], alone.history()["value"], rtol=1e-8, atol=1e-13)


def test_parameters_that_are_left_out_get_no_credit():
    """A vector that shares its pack with others."""
    whole, _ = lm_run(steps=1)
    parts = []
    for ignore in (["1.bias", "0.weight"], ["1.weight", "3.*"]):
        parts.append(lm_run(steps=1, ignore=ignore)[0].values()["value"])
    np.testing.assert_allclose(sum(parts), whole.values()["value"], rtol=1e-9, atol=1e-13)


def two_optimizers(model):
    matrices = [model[1].weight]
    rest = [p for p in model.parameters() if p is not matrices[0]]
    return [torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(rest, lr=1e-2)]


def test_beside_an_update_that_is_not_elementwise():
    """Muon's part keeps its linear map; the rest is nearly all of this step."""
    for estimator, low, high in (("shapley", 0.0, 0.1), ("secant", 0.2, np.inf)):
        _, (check, _) = lm_run(optimizer=two_optimizers, before=True, estimator=estimator)
        assert low <= check.relative_error < high


def test_a_learning_rate_of_zero_does_not_end_it():
    run, model, optimizer = watched(lr=0.0)
    for n in range(6):
        optimizer.param_groups[0]["lr"] = 0.0 if n < 4 else 1e-6
        step(run, model, optimizer, n)
    assert run.steps()["bend"].notna().tolist() == [False] * 4 + [True] * 2
    assert (run.values()["value"] != 0).any()


def test_an_update_that_goes_on_bending_is_sampled_for_so_many_steps():
    run, model, optimizer = watched(optimizer=lambda p, lr: torch.optim.AdamW(p, lr, (0.9, 0.5)),
                                    estimator="shapley:7")  # fmt: skip
    for n in range(12):
        step(run, model, optimizer, n)
    assert run.steps("shapley:7")["bend"].notna().tolist() == [True] * 7 + [False] * 5


def test_at_audits_it_is_measured_again_ever_more_rarely(monkeypatch):
    monkeypatch.setattr("inrun.scoring.sampling.NEAR", np.inf)
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(model, optimizer, validation=[(X[300:], Y[300:])], loss=loss, audit_every=2)
    for n in range(25):
        step(run, model, optimizer, n, B=4)
    measured = np.flatnonzero(run.steps()["bend"].notna())
    audits = np.flatnonzero(run.steps()["loss"].notna())
    later = audits[audits > 2]
    assert measured.tolist() == [0, 1, 2, *later[[0, 1, 3, 7]]]


def test_a_resumed_run_knows_where_it_stood():
    run, model, optimizer = watched(estimator="shapley:3")
    for n in range(2):
        step(run, model, optimizer, n)
    state = run.state_dict()
    again, model, optimizer = watched(estimator="shapley:3")
    again.load_state_dict(state)
    for n in range(2):
        step(again, model, optimizer, n)
    assert again.steps()["bend"].notna().tolist() == [True, True, True, False]


@pytest.mark.parametrize("text", ["shapley:0", "shapley:", "shapley:1.5", "secant:3", "shapley:-1"])
def test_a_number_that_means_nothing_is_refused(text):
    with pytest.raises(ValueError, match="not known"):
        watched(estimator=text)


def _raises(*args):
    raise RuntimeError("this compiler is another")


@pytest.mark.parametrize("kernel", ["right", "wrong", "raises"])
def test_a_kernel_is_used_once_it_has_given_what_torch_gives(kernel, monkeypatch):
    """On a device whose compiler makes something else of it, values come without it."""
    calls = []

    def by_kernel(self, *given):
        calls.append(1)
        return 1.0 * self._by_torch(*given) if kernel == "right" else 1.01 * self._by_torch(*given)

    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(40))
    optimizer = torch.optim.AdamW([p], lr=1e-2)
    rows, v = torch.randn(5, 40), torch.randn(1, 40)
    game = coalitions.Game(None, [], {}, Clipping(1.0), [])
    step = ParamStep.of(p.detach(), rows.sum(0), rule_for(optimizer), {}, optimizer.param_groups[0])
    orders = Orders(5, 2, torch.Generator().manual_seed(0))
    drawn = orders.draw(5, rows.device)
    given = step, rows, v, orders, None, drawn, 0
    expected = game._by_torch(*given)
    monkeypatch.setattr(coalitions._KERNEL, "works", {})
    monkeypatch.setattr(coalitions.Game, "_by_kernel", _raises if kernel == "raises" else by_kernel)
    if kernel == "right":
        assert torch.equal(game._of_rows(*given), expected)
    else:
        with pytest.warns(UserWarning, match=r"kernel for sampled orders does not work on cpu"):
            assert torch.equal(game._of_rows(*given), expected)
    assert torch.equal(game._of_rows(*given), expected)
    assert len(calls) == {"right": 2, "wrong": 1, "raises": 0}[kernel]

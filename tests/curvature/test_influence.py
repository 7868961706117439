"""estimator="influence" against its definition with whole matrices (exact/influence.py)."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import inrun
from inrun.curvature.curvature import Sampling
from inrun.curvature.layer import FLOOR, LATER
from inrun.exact.influence import WholeFisher, scale_of
from inrun.exact.reference import _validation_gradient, groups_of, stepped
from inrun.scoring import maps

B, STEPS = 20, 13  # eigenbases at 8 and at each step after it
USUAL = Sampling.of(100, "cpu")


def mse(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


class Shift(nn.Module):
    """A vector that is no layer's bias."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.by


def problem(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), Shift()).double()
    data = [(torch.randn(B, 3).double(), torch.randn(B, 3).double()) for _ in range(STEPS)]
    val = (torch.randn(5, 3).double(), torch.randn(5, 3).double())
    return model, data, val


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, betas=(0.8, 0.95)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.7),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "plain": lambda p: torch.optim.SGD(p, lr=1e-2),
}
KEPT = {"adamw": 0.8, "sgd": 0.7, "rmsprop": 0.0, "plain": 0.0}


def watched(
    model, optimizer, data, val, estimator, micro=1, clip=None, bound=None, scale=1.0, **options
):
    """Values [steps, B] of each estimator."""
    run = inrun.watch(model, optimizer, validation=[val], loss=mse, estimator=estimator, **options)
    for x, y in data:
        n = B // micro
        for k in range(micro):
            ids = range(k * n, (k + 1) * n)
            with run.batch(ids):
                (
                    scale * mse(model, (x[k * n : (k + 1) * n], y[k * n : (k + 1) * n])) / micro
                ).backward()
        if scale != 1:
            for p in model.parameters():
                p.grad /= scale
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if bound is not None:
            nn.utils.clip_grad_value_(model.parameters(), bound)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return {
        e: torch.tensor(run.history(e)["value"].to_numpy()).view(len(data), B)
        for e in ([estimator] if isinstance(estimator, str) else estimator)
    }


def expected(
    model, optimizer, data, val, kept, a=0.1, point=0.5, clip=None, bound=torch.inf, micro=1,
    sampling=USUAL,
):  # fmt: skip
    """The definition, step by step, with a real optimizer."""
    params = [p for group in groups_of(optimizer) for p in group["params"]]
    assert [p.ndim for p in params] == [2, 1, 2, 1, 1]  # two layers, and a vector
    fishers = [WholeFisher(LATER, set(range(8, STEPS + 1))) for _ in range(3)]
    found, last, seen, directions = [], -1, 0, None
    for t, (x, y) in enumerate(data):
        observed = t - last >= sampling.gap(last)
        rows = [[] for _ in params]
        for i in range(B):
            grads = torch.autograd.grad(mse(model, (x[i : i + 1], y[i : i + 1])) / B, params)
            for own, g in zip(rows, grads, strict=True):
                own.append(g)
        rows = [torch.stack(own) for own in rows]
        G = [r.sum(0) for r in rows]
        c = 1.0
        if clip is not None:
            c = min(1.0, clip / (float(torch.stack([g.norm() for g in G]).norm()) + 1e-6))
        without = stepped(optimizer, [torch.zeros_like(g) for g in G])
        received = [(c * g).clamp(-bound, bound) for g in G]
        after = stepped(optimizer, received)
        v = _validation_gradient(model, optimizer, lambda m: mse(m, val), without, after, [point])
        moved = [w0 - w1 for w0, w1 in zip(without, after, strict=True)]
        squares = [mean_square(optimizer, p, g, t) for p, g in zip(params, received, strict=True)]
        size = B // micro  # the micro-batches take turns
        n = min(size, sampling.examples)
        first = seen % micro * size + seen * n % (size - n + 1)
        if observed:
            directions = []
            for f, *each in zip(
                fishers, *(in_layers(z) for z in (rows, G, moved, v, squares)), strict=True
            ):
                r, g, step, own, square = each
                kappa = scale_of(square, FLOOR)
                rate = float((step * g).sum() / (kappa * g).square().sum())
                corrected = 1 - kept ** (t + 1) if isinstance(optimizer, torch.optim.AdamW) else 1.0
                f.tau += rate * (t - last) * corrected / (1 - kept)
                f.see(B * kappa * r[first : first + n])
                directions.append(kappa * f.direction(kappa * own, a))
            last, seen = t, seen + 1
        each = zip(directions, in_layers(rows), strict=True)
        found.append(sum((u * r).reshape(B, -1).sum(1) for u, r in each))
        for p, g in zip(params, received, strict=True):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found)


def in_layers(each):
    """Of a weight and its bias one matrix, the bias its last column; the vector alone."""
    W1, b1, W2, b2, c = each
    return [torch.cat([W, b[..., None]], dim=-1) for W, b in ((W1, b1), (W2, b2))] + [c]


def mean_square(optimizer, p, g, t):
    """Of Adam and RMSprop, after the step that g will make; 1 for the others."""
    options, state = optimizer.param_groups[0], optimizer.state[p]
    if isinstance(optimizer, torch.optim.AdamW):
        beta = options["betas"][1]
        old = state["exp_avg_sq"] if state else torch.zeros_like(g)
        return (beta * old + (1 - beta) * g**2) / (1 - beta ** (t + 1))
    if isinstance(optimizer, torch.optim.RMSprop):
        alpha = options["alpha"]
        old = state["square_avg"] if state else torch.zeros_like(g)
        return alpha * old + (1 - alpha) * g**2
    return torch.ones_like(g)


def close(found, wanted):
    assert found.shape == wanted.shape and float(wanted.abs().min(dim=0).values.max()) > 0
    return float((found - wanted).norm() / wanted.norm()) < 1e-9


@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_values_are_those_of_the_definition(which, form):
    model, data, val = problem()
    twin = copy.deepcopy(model)
    found = watched(
        model, OPTIMIZERS[which](model.parameters()), data, val, ["secant", "influence"], form=form
    )
    wanted = expected(twin, OPTIMIZERS[which](twin.parameters()), data, val, KEPT[which])
    assert close(found["influence"], wanted)


def test_training_is_untouched_bit_for_bit():
    trained = []
    for estimator in (None, ["secant", "influence"]):
        model, data, val = problem()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        if estimator is not None:
            watched(model, optimizer, data, val, estimator)
        else:
            for batch in data:
                mse(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *trained))


def test_secant_beside_it_is_the_same_as_alone():
    found = []
    for estimator in ("secant", ["influence", "secant"]):
        model, data, val = problem()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        found.append(watched(model, optimizer, data, val, estimator)["secant"])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-15)  # two directions: another form


def test_damping_and_point():
    for name, a, point in (("influence:2", 2.0, 0.5), ("influence+current", 0.1, None)):
        model, data, val = problem()
        twin = copy.deepcopy(model)
        found = watched(model, OPTIMIZERS["adamw"](model.parameters()), data, val, name)[name]
        optimizer = OPTIMIZERS["adamw"](twin.parameters())
        assert close(found, expected(twin, optimizer, data, val, 0.8, a, point))


def test_several_dampings_share_one_curvature():
    """The step is observed once, however many estimators ask for the curvature."""
    names = {"influence:2": 2.0, "influence": 0.1, "influence:0.5": 0.5}
    model, data, val = problem()
    twins = [copy.deepcopy(model) for _ in names]
    found = watched(model, OPTIMIZERS["adamw"](model.parameters()), data, val, list(names))
    for twin, (name, a) in zip(twins, names.items(), strict=True):
        optimizer = OPTIMIZERS["adamw"](twin.parameters())
        assert close(found[name], expected(twin, optimizer, data, val, 0.8, a))


@pytest.mark.parametrize(
    ("optimizer", "keep", "loop", "options"),
    [
        ("sgd", 0.7, {"clip": 0.05}, {"max_norm": 0.05}),  # slower, and no smaller influence
        ("sgd", 0.7, {"bound": 0.05}, {}),
        ("adamw", 0.8, {"micro": 2}, {}),
    ],
    ids=["clipped by norm", "clipped by value", "micro-batches"],
)
def test_what_a_loop_does_with_gradients(optimizer, keep, loop, options):
    model, data, val = problem()
    twin = copy.deepcopy(model)
    make = OPTIMIZERS[optimizer]
    found = watched(model, make(model.parameters()), data, val, "influence", **loop, **options)
    assert close(
        found["influence"], expected(twin, make(twin.parameters()), data, val, keep, **loop)
    )


def test_time_passes_in_steps_that_are_not_scored():
    model, data, val = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = inrun.watch(model, optimizer, validation=[val], loss=mse, estimator="influence", every=3)
    for batch in data:
        with run.batch(range(B)):
            mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    scored = [t for t in range(STEPS) if run.config.scores(t)]
    assert 1 < len(scored) < STEPS
    for layer in run.curvature.layers.values():
        assert layer.seen == len(scored)
        assert abs(float(layer.tau) - 0.01 * (scored[-1] + 1)) < 1e-12


def test_a_scaled_loss_counts_as_the_loss():
    model, data, val = problem()
    twin = copy.deepcopy(model)
    found = watched(
        model, OPTIMIZERS["plain"](model.parameters()), data, val, "influence", scale=64.0
    )
    wanted = expected(twin, OPTIMIZERS["plain"](twin.parameters()), data, val, 0.0)
    assert close(found["influence"], wanted)


FEW = Sampling(3, 2, 4)  # observed: 0, 1, 2, 3, 4, 6, 9, 13, 17, 21, 25


@pytest.mark.parametrize(
    ("optimizer", "keep", "loop", "options"),
    [
        ("adamw", 0.8, {}, {}),
        ("sgd", 0.7, {"clip": 0.05}, {"max_norm": 0.05}),
        ("sgd", 0.7, {"bound": 0.05}, {}),
        ("adamw", 0.8, {"micro": 2}, {}),
    ],
    ids=["as it is", "clipped by norm", "clipped by value", "micro-batches"],
)
def test_directions_stay_until_the_next_observation(monkeypatch, optimizer, keep, loop, options):
    monkeypatch.setattr(Sampling, "of", staticmethod(lambda *_: FEW))
    model, data, val = problem()
    data = [*data, *((x.flip(0), y) for x, y in data)]
    twin = copy.deepcopy(model)
    make = OPTIMIZERS[optimizer]
    names = ["secant", "influence"]
    options = options | {"halves_every": 0}  # such a step has directions of its own
    found = watched(model, make(model.parameters()), data, val, names, **loop, **options)
    wanted = expected(twin, make(twin.parameters()), data, val, keep, sampling=FEW, **loop)
    assert close(found["influence"], wanted)


@pytest.mark.parametrize("largest", [100, 10], ids=["kept", "too large to be kept"])
def test_nothing_runs_where_directions_stay(monkeypatch, largest):
    """Two targets of different sizes, whose values are those of the definition."""
    monkeypatch.setattr(maps, "LARGEST", largest)
    monkeypatch.setattr(Sampling, "of", staticmethod(lambda *_: FEW))
    model, data, val = problem()
    half = tuple(x[:2] for x in val)
    passes, own = [], [copy.deepcopy(model) for _ in range(2)]

    def counted(model, batch):
        passes.append(len(batch[0]))
        return mse(model, batch)

    optimizer = OPTIMIZERS["adamw"](model.parameters())
    run = inrun.watch(
        model, optimizer, targets={"whole": [val], "half": [half]}, loss=counted,
        estimator="influence", audit_every=0, halves_every=0,
    )  # fmt: skip
    before = []
    for batch in data:
        with run.batch(range(B)):
            mse(model, batch).backward()
        passes.clear()
        optimizer.step()
        before.append(len(passes))
        optimizer.zero_grad()
    run.close()
    skipped = [5, 7, 8, 10, 11, 12] if largest == 100 else []
    assert [t for t, n in enumerate(before) if not n] == skipped
    if not skipped:
        return
    for twin, name, batch in zip(own, ("whole", "half"), (val, half), strict=True):
        optimizer = OPTIMIZERS["adamw"](twin.parameters())
        wanted = expected(twin, optimizer, data, batch, 0.8, sampling=FEW)
        assert close(torch.tensor(run.history()[name].to_numpy()).view(STEPS, B), wanted)


def test_both_halves_of_a_step_have_directions_of_their_own(monkeypatch):
    """Their mean is the value, also where directions would have stayed."""
    monkeypatch.setattr(Sampling, "of", staticmethod(lambda *_: Sampling(3, 1, 100)))
    model, data, val = problem()
    run = inrun.watch(
        model, OPTIMIZERS["adamw"](model.parameters()), validation=[tuple(x[:4] for x in val)],
        loss=mse, estimator="influence", audit_every=0, halves_every=3,
    )  # fmt: skip
    for batch in data:
        with run.batch(range(B)):
            mse(model, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.close()
    halves = run._ledger.by_halves(0).set_index(["step", "id"])
    assert len({step for step, _ in halves.index} - {0, 1, 2, 4, 8}) > 1
    values = run.history().set_index(["step", "id"])["value"].loc[halves.index]
    mean = halves[["a", "b"]].mean(axis=1)
    torch.testing.assert_close(torch.tensor(mean.to_numpy()), torch.tensor(values.to_numpy()))


@pytest.mark.parametrize("why", ["void", "checkpoint", "frozen"])
def test_directions_do_not_stay_over_what_ends_them(monkeypatch, why):
    """A step that was void, a checkpoint, other parameters: the next step has its own."""
    monkeypatch.setattr(Sampling, "of", staticmethod(lambda *_: Sampling(3, 1, 100)))
    model, data, val = problem()
    passes = []

    def counted(model, batch):
        passes.append(1)
        return mse(model, batch)

    optimizer = OPTIMIZERS["adamw"](model.parameters())
    run = inrun.watch(
        model, optimizer, validation=[val], loss=counted, estimator="influence", audit_every=0,
        halves_every=0,
    )  # fmt: skip
    seen = []
    for t, batch in enumerate(data):
        model[0].weight.requires_grad_(t != 5 or why != "frozen")
        with run.batch(range(B)):
            mse(model, batch).backward()
        if t == 5 and why == "void":
            model[0].weight.grad[0, 0] += 1.0
        passes.clear()
        changed = t == 5 and why == "void"
        with pytest.warns(UserWarning, match="void") if changed else nullcontext():
            optimizer.step()
        seen.append(bool(passes))
        optimizer.zero_grad()
        if t == 5 and why == "checkpoint":
            run.state_dict()
    run.close()
    assert list(run.steps()["void"].notna()) == [why == "void" and t == 5 for t in range(STEPS)]
    renewed = {0, 1, 2, 4, 8}  # observed
    renewed |= {5, 6} if why == "frozen" else {6}
    assert {t for t, x in enumerate(seen) if x} == renewed


def test_influence_is_linear_in_the_number_of_targets():
    """Two targets that are one: each has its values."""
    model, data, val = problem()
    run = inrun.watch(
        model, OPTIMIZERS["adamw"](model.parameters()), targets={"a": [val], "b": [val]},
        loss=mse, estimator="influence",
    )  # fmt: skip
    optimizer = run.optimizer
    for batch in data:
        with run.batch(range(B)):
            mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    h = run.history()
    torch.testing.assert_close(torch.tensor(h["a"].to_numpy()), torch.tensor(h["b"].to_numpy()))

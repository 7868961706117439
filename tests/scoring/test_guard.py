"""What the optimizer received and did is what was scored: a step is right, or void with a cause."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.exact import reference
from inrun.optimizers import rule_for
from inrun.scoring import received, taken
from inrun.scoring.clipping import AMBIGUOUS, Clipping, ClippingWatch

X = torch.randn(80, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (80,), generator=torch.Generator().manual_seed(2))
V = (X[64:], Y[64:])
LATE = 6  # after the steps in which everything is compared


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def train(change=None, steps=3, make=adamw, start=0, factor=1.0, after=None, model=None, **options):
    """``change(model, step)`` before each step from ``start`` on; ``after(optimizer)`` once the run
    watches."""
    model = model or small()
    optimizer = make(model.parameters())
    options = {"audit_every": 0, "validation": [V], "loss": loss} | options
    run = inrun.watch(model, optimizer, **options)
    if after is not None:
        after(optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(steps):
            rows = torch.arange(8) + 8 * (step % 8)
            with run.batch(rows):
                (factor * loss(model, (X[rows], Y[rows]))).backward()
            if change is not None and step >= start:
                change(model, step)
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return run, [str(w.message) for w in said if "jit" not in str(w.message)]


def void(run):
    table = run.steps()
    return table.loc[table["void"].notna(), "step"].tolist()


# What arrives at the optimizer


def second_loss(model, step):
    loss(model, (X[40:48], Y[40:48])).backward()


def noise(model, step):
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p) * p.grad.std())


def hidden_noise(model, step):
    for p in model.parameters():
        p.grad.data.add_(torch.randn_like(p) * p.grad.std())


def all_reduce(model, step):
    """The mean with another rank's gradient."""
    for p in model.parameters():
        p.grad.data.copy_((p.grad + torch.randn_like(p)) / 2)


def centralised(model, step):
    for p in model.parameters():
        if p.ndim > 1:
            p.grad.sub_(p.grad.mean(1, keepdim=True))


def zeroed_row(model, step):
    model[2].weight.grad[3] = 0


def one_number(model, step):
    model[2].weight.grad[3, 5] += model[2].weight.grad[3, 5].abs() + 1e-3


def each_its_own(model, step):
    for i, p in enumerate(model.parameters()):
        p.grad.mul_(0.5 / (1 + i))


def signs(model, step):
    for p in model.parameters():
        p.grad.sign_()


def cleared(model, step):
    for p in model.parameters():
        p.grad.zero_()


CAUSES = {
    second_loss: "second loss", noise: "added noise", hidden_noise: "added noise",
    all_reduce: "all_reduce", centralised: "centralisation", zeroed_row: "set to zero",
    one_number: "something unknown", each_its_own: "different factors", signs: "something unknown",
    cleared: "set to zero",
}  # fmt: skip


@pytest.mark.parametrize("change", CAUSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("audit", [0, 1])
@pytest.mark.parametrize("start", [0, LATE])
def test_a_change_that_is_no_scale_or_clip_is_void(change, audit, start):
    run, said = train(change, start + 3, start=start, audit_every=audit)
    assert void(run) == list(range(start, start + 3))
    assert np.isnan(run.steps()["sum"].iloc[start:]).all()
    assert any(CAUSES[change] in text for text in said), said
    assert len(said) == len({text.split(":", 1)[1] for text in said}), "each cause is said once"


def test_a_void_step_has_no_value_by_any_estimator():
    run, _ = train(second_loss, 2, estimator=["sgd", "tangent", "secant"])
    for name in ("sgd", "tangent", "secant"):
        assert run.values(name)["value"].isna().all()


def divided_by(k):
    def change(model, step):
        for p in model.parameters():
            p.grad.div_(k)

    return change


@pytest.mark.parametrize("make", [adamw, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("k", [3, 7.0, 2, -1, 1 / 0.3, 1000])
def test_a_constant_factor_is_one_of_the_loss(k, make):
    """Dividing gradients by k is dividing the loss by k: the values are the same."""
    run, said = train(divided_by(k), 5, make=make)
    truth, _ = train(None, 5, make=make, factor=1 / k)
    assert not said and void(run) == []
    value, expected = run.history()["value"], truth.history()["value"]
    np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4 * expected.abs().max())


def test_a_constant_factor_is_not_taken_for_clipping_where_the_norm_stays():
    """The same batch at a tiny learning rate: the norm stays, and so it looks like clipping."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    found = []
    for factor in (1.0, 1 / 3):
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
        with inrun.watch(model, optimizer, validation=[V], loss=loss, audit_every=0) as run:
            for _ in range(4):
                with run.batch(range(8)):
                    (factor * loss(model, (X[:8], Y[:8]))).backward()
                if factor == 1.0:
                    divided_by(3)(model, 0)
                optimizer.step()
                optimizer.zero_grad()
        found.append(run.history()["value"].to_numpy())
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-4 * np.abs(found[1]).max())


@pytest.mark.parametrize("k", [2, 3])
def test_a_constant_factor_that_begins_late_voids_one_step(k):
    run, said = train(divided_by(k), LATE + 4, start=LATE)
    assert void(run) == [LATE] and len(said) == 1 and "for the first time" in said[0]
    model = small()
    optimizer = adamw(model.parameters())
    with inrun.watch(model, optimizer, validation=[V], loss=loss, audit_every=0) as truth:
        for step in range(LATE + 4):
            rows = torch.arange(8) + 8 * (step % 8)
            with truth.batch(rows):
                (loss(model, (X[rows], Y[rows])) / (k if step >= LATE else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    value = run.history().query("step > @LATE")["value"]
    expected = truth.history().query("step > @LATE")["value"]
    np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4 * expected.abs().max())


def by_norm(size, parameters=lambda model: model.parameters()):
    return lambda model, step: nn.utils.clip_grad_norm_(parameters(model), size)


@pytest.mark.parametrize("size", [0.05, 0.1, 0.01])
def test_clipping_by_norm_is_told_from_a_constant(size):
    """The values are those of a run that is told; a constant would give others."""
    run, said = train(by_norm(size), 5)
    told, _ = train(by_norm(size), 5, max_norm=size)
    assert not said and void(run) == []
    np.testing.assert_array_equal(run.history()["value"], told.history()["value"])
    unclipped, _ = train(None, 5)
    assert not np.allclose(run.history()["value"], unclipped.history()["value"])  # it did clip


def test_clipping_to_an_odd_norm_is_found_out_or_told():
    run, said = train(by_norm(0.031415), 5)
    told, quiet = train(by_norm(0.031415), 5, max_norm=0.031415)
    assert void(run) == [0] and len(said) == 1 and "max_norm=" in said[0]
    assert void(told) == [] and not quiet
    expected = told.history().query("step > 0")["value"]
    np.testing.assert_array_equal(run.history()["value"], expected)


def test_clipping_is_recognised_in_half_precision():
    """Optimizer rules compute in float32; what is compared has been rounded to bfloat16."""
    half = {
        "validation": [(V[0].bfloat16(), V[1])],
        "loss": lambda m, b: loss(m, (b[0].bfloat16(), b[1])),
    }

    def run_of(**options):
        model = small().bfloat16()
        optimizer = adamw(model.parameters())
        run = inrun.watch(model, optimizer, audit_every=0, **half, **options)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            for step in range(4):
                rows = torch.arange(8) + 8 * step
                with run.batch(rows):
                    half["loss"](model, (X[rows], Y[rows])).backward()
                by_norm(0.05)(model, step)
                optimizer.step()
                optimizer.zero_grad()
        return run

    assert void(run_of()) == [0]  # a factor is not simple or not in so few digits
    assert void(run_of(max_norm=0.05)) == []


def test_a_factor_of_its_own_in_every_step_is_void():
    """Neither the factor nor the norm stays: nobody knows what the others would have got."""

    def adaptive(model, step):
        for p in model.parameters():
            p.grad.mul_(0.123456 + 0.0617283 * step)

    run, said = train(adaptive, 6)
    assert void(run) == list(range(6)) and len(said) == 1


def test_clipping_together_with_unscored_parameters_is_recognised():
    kept = {"ignore": ["0.weight"]}
    run, said = train(by_norm(0.05), 4, **kept)
    told, _ = train(by_norm(0.05), 4, max_norm=0.05, **kept)
    assert void(run) == [] and not said
    np.testing.assert_array_equal(run.history()["value"], told.history()["value"])
    some, said = train(by_norm(0.05, lambda m: list(m.parameters())[1:]), 4, **kept)
    assert void(some) == [] and not said  # those that are scored were clipped on their own


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_clipping_by_value_behind_a_loss_scale_is_recognised(scale):
    def clip(model, step):
        divided_by(scale)(model, step)
        nn.utils.clip_grad_value_(model.parameters(), 0.004)

    run, said = train(clip, 4, factor=scale)
    plain, _ = train(lambda m, s: nn.utils.clip_grad_value_(m.parameters(), 0.004), 4)
    assert void(run) == [] and not said
    np.testing.assert_allclose(run.history()["value"], plain.history()["value"], rtol=1e-4)


def test_a_hidden_loss_scale_under_a_clip_is_not_guessed():
    def unscale_and_clip(model, step):
        divided_by(2.0**16)(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    run, said = train(unscale_and_clip, 3, factor=2.0**16)
    assert void(run) == [0, 1, 2] and "scaler=" in said[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_constant_factors_are_recognised_in_every_precision(dtype):
    torch.manual_seed(0)
    grads = [torch.randn(n, dtype=torch.float64) for n in (1, 7, 300)]
    for c in (0.25, 1 / 3, 0.77):
        watch, found = ClippingWatch(None), []
        for size in (1.0, 1.7, 2.9):
            G = [(g * size).to(dtype) for g in grads]
            found.append(watch.recognise(G, [(g.double() * c).to(dtype) for g in G]))
        later = found[1:] if dtype in (torch.bfloat16, torch.float16) else found
        for x in later:
            assert isinstance(x, Clipping) and x.norm is None
            assert x.ratio == pytest.approx(c, rel=4 * torch.finfo(dtype).eps)
        assert later is found or found[0] is AMBIGUOUS


# Before and between batches


@pytest.mark.parametrize("good", [0, LATE])
def test_a_loss_between_two_batches_of_a_step_makes_it_void(good):
    model = small()
    optimizer = adamw(model.parameters())
    with inrun.watch(model, optimizer, validation=[V], loss=loss, audit_every=0) as run:
        for step in range(good + 2):
            for at in (0, 4):
                with run.batch(range(at, at + 4)):
                    loss(model, (X[at : at + 4], Y[at : at + 4])).backward()
                if step == good and at == 0:
                    (1e-6 * loss(model, (X[9:12], Y[9:12]))).backward()
            if step == good:
                with pytest.warns(UserWarning, match=r"outside run\.batch"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
    assert void(run) == [good]


def silent():
    """A model whose gradient is exactly zero for rows of zeros and a zero weight."""
    model = nn.Linear(5, 3, bias=False)
    return model, lambda m, x: m(x).square().sum()


@pytest.mark.parametrize("every", [1, 3])
def test_a_first_batch_with_a_gradient_of_zero_keeps_its_ids(every):
    model, square = silent()
    optimizer = adamw(model.parameters())
    run = inrun.watch(model, optimizer, validation=[X[:4]], loss=square, every=every, audit_every=0)
    with run:
        for step in range(6):
            for at in (0, 4):
                x = torch.zeros(4, 5) if at == 0 else X[4:8]
                with run.batch(range(10 * step + at, 10 * step + at + 4)):
                    square(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.steps()["examples"].tolist() == [8] * 6
    assert sorted(run.values()["id"]) == [10 * s + i for s in range(6) for i in range(8)]
    assert void(run) == []


def to_none(optimizer):
    optimizer.zero_grad()


def to_zero(optimizer):
    optimizer.zero_grad(set_to_none=False)


def through_data(optimizer):
    for p in optimizer.param_groups[0]["params"]:
        p.grad.data.zero_()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("zero", [to_none, to_zero, through_data])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_never_came_leaves_no_ids(zero, every, first):
    """As where a GradScaler skips it: gradients are cleared, step() is not called."""
    model, square = silent()
    optimizer = adamw(model.parameters())
    with inrun.watch(
        model, optimizer, validation=[X[:4]], loss=square, every=every, audit_every=0
    ) as run:
        for step in range(8):
            with run.batch(range(10 * step, 10 * step + 4)):
                square(model, X[4:8]).backward()
            if step != (0 if first else 6):
                optimizer.step()
            if every > 1 and zero is through_data:
                pytest.skip("unscored steps follow version counters alone")
            zero(optimizer)
    assert len(run.steps()) == 7 and void(run) == []
    assert (0 if first else 60) not in run.values()["id"].tolist()


# What the optimizer does


class Halved(torch.optim.AdamW):
    """Half the learning rate of its base class."""

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.clone() for g in self.param_groups for p in g["params"]]
        out = super().step(closure)
        for p, w in zip((p for g in self.param_groups for p in g["params"]), before, strict=True):
            p.lerp_(w, 0.5)
        return out


def late_hook(optimizer):
    def scale(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5).add_(0.01)

    optimizer.register_step_pre_hook(scale)


def projecting_hook(optimizer):
    def project(optimizer, args, kwargs):
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)

    optimizer.register_step_pre_hook(project)


@pytest.mark.parametrize("audit", [0, 1])
@pytest.mark.parametrize(
    ("make", "hook", "cause"),
    [
        (lambda p: Halved(p, lr=1e-2), None, "test_guard.Halved uses the rule of its base class"),
        (adamw, late_hook, "registered after inrun.watch"),
        (adamw, projecting_hook, "changes weights"),
    ],
    ids=["subclass", "late hook", "weights"],
)
def test_a_step_that_is_not_the_one_of_the_rule_is_void(make, hook, cause, audit):
    run, said = train(None, LATE, make=make, after=hook, audit_every=audit)
    assert void(run) == list(range(LATE))
    assert len(said) == 1 and cause in said[0]


def test_an_optimizer_that_leaves_its_rule_late_is_noticed():
    """Seen on the sample of coordinates; all are compared again afterwards."""

    class Sometimes(torch.optim.AdamW):
        count = 0

        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            self.count += 1
            if self.count > LATE:
                for p in self.param_groups[0]["params"]:
                    p.mul_(0.999)

    run, said = train(None, LATE + 3, make=lambda p: Sometimes(p, lr=1e-2))
    assert void(run) == list(range(LATE, LATE + 3)) and len(said) == 1


def test_one_coordinate_of_one_parameter_is_seen_where_all_are_compared():
    class Pruning(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["params"][2][7, 11] = 0

    run, _ = train(None, 3, make=lambda p: Pruning(p, lr=0.1))
    assert void(run) == [0, 1, 2]


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "asgd": (torch.optim.ASGD, {}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adamw maximize": (torch.optim.AdamW, {"maximize": True}),
    "adamw tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_real_step_of_every_torch_optimizer_matches_its_rule(name, dtype, monkeypatch):
    """Compared completely in the first steps and on a sample in the others."""
    cls, options = OPTIMIZERS[name]
    monkeypatch.setitem(globals(), "X", X.to(dtype))
    monkeypatch.setitem(globals(), "V", (V[0].to(dtype), V[1]))
    run, said = train(
        None, 8, make=lambda p: cls(p, **{"lr": 1e-2, **options}), model=small().to(dtype)
    )
    assert void(run) == [] and not said


@pytest.mark.parametrize("lr", [1e-6, 1e-3, 0.1])
def test_the_real_step_of_muon_matches_its_rule(lr):
    model = nn.Sequential(nn.Linear(5, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
    run, said = train(None, 6, make=lambda p: torch.optim.Muon(p, lr=lr), model=model)
    assert void(run) == [] and not said


def test_a_step_with_a_closure_is_compared_with_the_rule_too():
    for make, expected in ((adamw, []), (lambda p: Halved(p, lr=1e-2), [0, 1])):
        model = small()
        optimizer = make(model.parameters())
        with inrun.watch(model, optimizer, validation=[V], loss=loss) as run:

            def closure(model=model, optimizer=optimizer, run=run):
                optimizer.zero_grad()
                with run.batch(range(8)):
                    value = loss(model, (X[:8], Y[:8]))
                    value.backward()
                return value

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(2):
                    optimizer.step(closure)
        assert void(run) == expected


class HalvedSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        before = [p.clone() for p in self.param_groups[0]["params"]]
        super().step(closure)
        for p, w in zip(self.param_groups[0]["params"], before, strict=True):
            p.lerp_(w, 0.5)


def test_the_audit_measures_the_real_step(monkeypatch):
    """With the comparison off, half a step is half of what the values say."""
    monkeypatch.setattr(taken, "TOLERANCE", {torch.float32: 1e9})
    run, _ = train(None, 4, make=lambda p: HalvedSGD(p, lr=1e-2), audit_every=1)
    assert void(run) == []
    assert run.steps()["explained"].between(1.9, 2.1).all()
    right, _ = train(None, 4, make=lambda p: torch.optim.SGD(p, lr=1e-2), audit_every=1)
    assert right.steps()["explained"].between(0.97, 1.03).all()


def test_the_audit_is_the_loss_after_the_step():
    model = small()
    optimizer = adamw(model.parameters())
    run = inrun.watch(model, optimizer, validation=[V], loss=loss, audit_every=1)
    with run.batch(range(8)):
        loss(model, (X[:8], Y[:8])).backward()
    optimizer.step()
    (audited,) = run.steps().itertuples()
    after = audited.loss - audited.momentum_share - audited.batch_share
    assert after == pytest.approx(float(loss(model, V).detach()), abs=1e-12)
    run.close()


def test_a_step_that_raises_is_void_and_the_run_goes_on():
    class Failing(torch.optim.AdamW):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("no memory")
            return super().step(closure)

    model = small()
    optimizer = Failing(model.parameters(), lr=1e-2)
    with inrun.watch(model, optimizer, validation=[V], loss=loss) as run:
        for step in range(3):
            with run.batch(range(8)):
                loss(model, (X[:8], Y[:8])).backward()
            Failing.fails = step == 1
            if step == 1:
                with pytest.raises(RuntimeError, match="no memory"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
    assert void(run) == [1] and "did not finish" in run.steps()["void"][1]


def test_a_compiled_optimizer_step_gives_the_same_values():
    """``torch.compile`` of the optimizer's step: the same values as without."""
    found = []
    for compiled in (False, True):
        model = small()
        optimizer = adamw(model.parameters())
        with (
            warnings.catch_warnings(),
            inrun.watch(model, optimizer, validation=[V], loss=loss, audit_every=2) as run,
        ):
            warnings.simplefilter("ignore")
            step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            for i in range(5):
                rows = torch.arange(8 * i, 8 * i + 8)
                with run.batch(rows):
                    loss(model, (X[rows], Y[rows])).backward()
                step()
                optimizer.zero_grad()
        assert void(run) == [] and run.unwatched == 0
        found.append(run.history()["value"])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5 * found[0].abs().max())


# What is trained and not scored


class ArcFace(nn.Module):
    def __init__(self, classes=7):
        super().__init__()
        self.weight, self.scale = (
            nn.Parameter(torch.randn(classes, 3)),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, features, labels):
        cosine = F.linear(F.normalize(features), F.normalize(self.weight))
        return F.cross_entropy(self.scale * cosine, labels)


@pytest.mark.parametrize("classes", [7, 8])  # 8: as many as examples
@pytest.mark.parametrize("together", [True, False])
def test_parameters_of_a_criterion_outside_the_model_are_reported(together, classes, tmp_path):
    model, criterion = small(), ArcFace(classes)
    params = [*model.parameters(), *criterion.parameters()]
    optimizer = adamw(params if together else model.parameters())
    second = torch.optim.SGD(criterion.parameters(), lr=0.1)
    run = inrun.watch(
        model, optimizer, validation=[V], loss=lambda m, b: criterion(m(b[0]), b[1]),
        out=tmp_path / "run", audit_every=0,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said, run:
        warnings.simplefilter("always")
        for step in range(3):
            rows = torch.arange(8 * step, 8 * step + 8)
            with run.batch(rows):
                criterion(model(X[rows]), Y[rows]).backward()
            optimizer.step()
            second.step()
            optimizer.zero_grad()
            second.zero_grad()
    texts = [str(w.message) for w in said]
    assert [t for t in texts if "not scored" in t and f"[{classes}, 3]" in t], texts
    table = run.coverage()
    outside = table[table["status"] == "outside the watched model"]
    assert sorted(outside["size"]) == [1, 3 * classes]
    own = sum(p.numel() for p in model.parameters())
    share = inrun.open(tmp_path / "run").info["coverage"]["share"]
    assert share == pytest.approx(own / (own + 1 + 3 * classes))


def test_parameters_of_a_second_optimizer_are_reported_as_unscored():
    model = small()
    optimizer = adamw(model[:3].parameters())
    second = torch.optim.SGD(model[4].parameters(), lr=0.1)
    with inrun.watch(model, optimizer, validation=[V], loss=loss, audit_every=0) as run:
        for step in range(3):
            warned = pytest.warns(UserWarning, match=r"4\.weight \[3, 16\] is not in the optimizer")
            with warned if step == 0 else warnings.catch_warnings(), run.batch(range(8)):
                loss(model, (X[:8], Y[:8])).backward()
            optimizer.step()
            second.step()
            optimizer.zero_grad()
            second.zero_grad()
    table = run.coverage().set_index("parameter")["status"]
    assert table["4.weight"] == "not in the optimizer" and table["0.weight"] == "scored"


def test_frozen_parameters_are_not_reported():
    model = small()
    model[4].requires_grad_(False)
    run, said = train(None, 2, model=model)
    assert not said and void(run) == []


# The obvious definition


def test_values_behind_a_division_agree_with_the_reference():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = adamw(model.parameters())
    x, v = X.double(), (V[0].double(), V[1])
    with inrun.watch(model, optimizer, validation=[v], loss=loss, audit_every=0,
                     estimator="secant") as run:  # fmt: skip
        for step in range(3):
            rows = torch.arange(6) + 6 * step
            rest = reference.per_example_gradients(
                model, (x[rows], Y[rows]), 6, lambda m, b: m(b[0]),
                lambda out, b: F.cross_entropy(out, b[1]),
            )  # fmt: skip
            with run.batch(rows):
                loss(model, (x[rows], Y[rows])).backward()
            divided_by(3)(model, step)
            scaled = [g / 3 for g in rest.values()]
            expected = reference.values(model, optimizer, scaled, lambda m: loss(m, v))
            optimizer.step()
            optimizer.zero_grad()
            got = run.history().query("step == @step")["value"].to_numpy()
            np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-6, atol=1e-12)


def test_first_steps_are_compared_completely():
    assert received.FIRST >= 3


@pytest.mark.parametrize(
    "cls",
    [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
     torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adagrad],
)  # fmt: skip
def test_counts_kept_on_a_device_may_differ_between_parameters(cls):
    """On a GPU the numbers of the state are tensors: the sample has one for each coordinate."""
    params = [nn.Parameter(torch.randn(12)) for _ in range(3)]
    optimizer = cls(params, lr=1e-2)
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = None if step < i else torch.randn_like(p)
        optimizer.step()
    rule = rule_for(optimizer)
    options = optimizer.param_groups[0] | {"capturable": True}  # computes with tensors
    owner = torch.arange(3).repeat_interleave(12)
    states = [optimizer.state[p] for p in params]
    joined = {
        k: torch.stack([torch.as_tensor(s[k]) for s in states])[owner]
        if torch.as_tensor(x).dim() == 0
        else torch.cat([s[k] for s in states])
        for k, x in states[0].items()
    }
    g, w = torch.cat([p.grad for p in params]), torch.cat([p.detach() for p in params])
    each = [
        rule.update(p.grad, p.detach(), s, options) for p, s in zip(params, states, strict=True)
    ]
    torch.testing.assert_close(
        rule.update(g, w, joined, options), torch.cat(each), rtol=1e-5, atol=1e-9
    )

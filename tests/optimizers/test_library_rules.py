"""Rules of other libraries' optimizers, against plain versions of them and, where they are
installed, against the published ones."""

import copy
import importlib
import importlib.util
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from helpers.library_optimizers import PLAIN
from inrun.exact import reference
from inrun.optimizers import rule_for

SHAPES = [(3, 4), (5,), (6, 2)]
NOT_DECOUPLED = {"weight_decay": 0.1, "weight_decouple": False}
CASES = [
    ("lion_pytorch.Lion", {}),
    ("lion_pytorch.Lion", {"weight_decay": 0.1}),
    ("pytorch_optimizer.Lion", {"weight_decay": 0.1}),
    ("pytorch_optimizer.Lion", {"weight_decay": 0.1, "fixed_decay": True}),
    ("pytorch_optimizer.Lion", NOT_DECOUPLED),
    ("pytorch_optimizer.AdEMAMix", {"weight_decay": 0.1, "weight_decouple": True}),
    ("pytorch_optimizer.AdEMAMix", {"weight_decouple": True, "t_alpha_beta3": 5, "alpha": 2.0}),
    ("pytorch_optimizer.AdEMAMix", NOT_DECOUPLED),
    ("pytorch_optimizer.Lamb", {}),
    ("pytorch_optimizer.Lamb", {"weight_decay": 0.1, "grad_averaging": False}),
    ("pytorch_optimizer.Lamb", NOT_DECOUPLED),
    ("pytorch_optimizer.Lamb", {"adam": True}),
    ("pytorch_optimizer.SOAP", {"precondition_frequency": 3}),
    ("pytorch_optimizer.SOAP", {"correct_bias": False, "weight_decay": 0.1, "betas": (0.9, 0.8)}),
    ("prodigyopt.Prodigy", {"d0": 1e-2}),
    ("prodigyopt.Prodigy", {"d0": 1e-2, "weight_decay": 0.1, "use_bias_correction": True}),
    ("prodigyopt.Prodigy", {"d0": 1e-2, "weight_decay": 0.1, "decouple": False}),
    ("schedulefree.AdamWScheduleFree", {}),
    ("schedulefree.AdamWScheduleFree", {"weight_decay": 0.1, "warmup_steps": 4, "r": 0.5}),
    ("torchao.AdamW8bit", {"weight_decay": 0.1}),
    ("torchao.Adam8bit", {"weight_decay": 0.1}),
    ("bitsandbytes.AdamW8bit", {"weight_decay": 0.1}),
]  # fmt: skip
IDS = [f"{name}-{options}" for name, options in CASES]


def published(name, options):
    """The class of the published package, and the options without those that are its defaults."""
    package, _, cls = name.rpartition(".")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module({"torchao": "torchao.optim"}.get(package, package))
        module = getattr(module, "optim", module) if package == "bitsandbytes" else module
    return getattr(module, cls)


def kept(state):
    """A copy of the state; torchao's tensors cannot be copied, but their parts can."""
    parts = {
        k: type(x)(x.codes.clone(), x.scale.clone(), x.qmap, x.signed, x.dtype)
        for k, x in state.items()
        if hasattr(x, "qmap")
    }
    return copy.deepcopy({k: x for k, x in state.items() if k not in parts}) | parts


def moments(cls, options, dtype=torch.float64, at=(0, 1, 6), shapes=SHAPES):
    """(optimizer, g, w, state, options, weights after) of real steps; some coordinates get 0."""
    rng = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]
    optimizer = cls(params, **copy.deepcopy(options))
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(max(at) + 1):
        for p in params:
            p.grad = torch.randn(p.shape, generator=rng, dtype=torch.float64).to(dtype)
            p.grad.view(-1)[0] = 0
            p.grad.view(-1)[1 + step % 2] = 0
        group = optimizer.param_groups[0]
        given = copy.deepcopy({k: v for k, v in group.items() if k != "params"})
        before = [(p.grad.clone(), p.clone(), kept(optimizer.state.get(p, {}))) for p in params]
        with torch.no_grad():
            optimizer.step()
        for (g, w, s), p in zip(before, params, strict=True) if step in at else ():
            yield optimizer, g, w, s, given, p.detach().clone()


def largest_error(found):
    worst = 0.0
    for optimizer, g, w, s, o, after in found:
        rule = rule_for(optimizer)
        predicted = rule.decay(o) * w - rule.update(g, w, s, o)
        change = float((after - w).abs().max())
        off = float((predicted - after).abs().max())
        worst = max(worst, off / change if change else off)
    return worst


# Prodigy's ε stands beside the new d, which the rule does not know: off by about ε/|g|
EXACT = {"prodigyopt.Prodigy": 1e-5}


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_the_rule_follows_the_plain_version(name, options):
    options = {**options, **({"d": 1e-2, "d_max": 1e-2} if "Prodigy" in name else {})}
    assert largest_error(moments(PLAIN[name], options)) < EXACT.get(name, 1e-11)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_the_rule_follows_the_published_version(name, options, capsys):
    """torchao and bitsandbytes compute in float32; small tensors are not quantised, so some are
    large here. SOAP has its bases from a QR decomposition in float32."""
    cls = published(name, options)
    low = name.startswith(("torchao", "bitsandbytes"))
    shapes = [(64, 80), (5,)] if low else SHAPES
    dtype = torch.float32 if low else torch.float64
    torch.set_default_dtype(dtype)
    found = moments(cls, options, dtype, shapes=shapes)
    tolerance = 1e-3 if low else EXACT.get(name, 1e-11)
    assert largest_error(found) < tolerance


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_the_secant_adds_up_and_the_tangent_is_the_vjp(name, options):
    for optimizer, g, w, s, o, _ in moments(PLAIN[name], options):
        rule = rule_for(optimizer)
        kept = copy.deepcopy((g, w, s, o))
        v = torch.randn_like(g)
        change = rule.update(g, w, s, o) - rule.update(torch.zeros_like(g), w, s, o)
        u = rule.secant(g, w, s, o)(v)
        assert u.isfinite().all() and u.dtype == g.dtype and u.shape == g.shape
        size = float((v * change).abs().sum()) + 1e-300
        assert abs(float((u * g).sum() - (v * change).sum())) <= 1e-10 * size
        if rule.coordinatewise:  # and by coordinate
            assert (u * g - v * change).abs().max() <= 1e-11 * size
        apart = g != 0  # a derivative of √ there is not defined at the first step
        x = g.clone().requires_grad_()
        out = rule.update(x, w, s, o)
        tangent = rule.tangent(g, w, s, o)(v)
        if out.requires_grad:
            (expected,) = torch.autograd.grad(out, x, v)
            expected = torch.where(expected.isfinite(), expected, 0.0)
            size = max(float(expected.abs().max()), 1e-6)
            assert (tangent - expected)[apart].abs().max() <= 1e-8 * size
        assert rule.completeness(g, w, s, o) == 0
        for a, b in zip((g, w), kept, strict=False):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["pytorch_optimizer.Lamb", "pytorch_optimizer.SOAP"])
def test_the_secant_that_mixes_coordinates_is_near_the_path_integral(name):
    """After a few steps, where the path is smooth, both ways to split the change agree."""
    found = list(moments(PLAIN[name], {"betas": (0.9, 0.95)}, at=(12,)))
    for optimizer, g, w, s, o, _ in found:
        rule, v = rule_for(optimizer), torch.randn_like(g)
        nodes, weights = np.polynomial.legendre.leggauss(40)
        path = sum(
            b / 2 * rule.tangent((a + 1) / 2 * g, w, s, o)(v)
            for a, b in zip(nodes.tolist(), weights.tolist(), strict=True)
        )
        u = rule.secant(g, w, s, o)(v)
        own = g != 0
        assert (u - path)[own].norm() <= 0.15 * path[own].norm()


@pytest.mark.parametrize("name", PLAIN)
def test_untouched_coordinates_carry_nothing(name):
    params = [torch.zeros(shape) for shape in SHAPES]
    optimizer = PLAIN[name](params)
    rule = rule_for(optimizer)
    for _ in range(3):
        for p in params:
            args = torch.zeros_like(p), p, optimizer.state.get(p, {}), optimizer.param_groups[0]
            assert rule.update(*args).isfinite().all()
            assert rule.tangent(*args)(torch.ones_like(p)).isfinite().all()
            assert (rule.secant(*args)(torch.ones_like(p)) == 0).all()
            p.grad = torch.zeros_like(p)
        optimizer.step()


X = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(2))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("name", PLAIN)
def test_a_watched_run(name):
    """Values of a run are those of the reference, which steps with the optimizer itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    options = {"precondition_frequency": 10} if "SOAP" in name else {}
    lr = 1.0 if "Prodigy" in name else 1e-3
    optimizer = PLAIN[name](model.parameters(), lr=lr, **options)
    run = inrun.watch(model, optimizer, validation=[(X[32:], Y[32:])], loss=loss, audit_every=1,
                      estimator="secant")  # fmt: skip
    for step in range(8):
        rows = torch.arange(4) + 4 * (step % 8)
        per_example = reference.per_example_gradients(
            copy.deepcopy(model), (X[rows], Y[rows]), 4,
            lambda m, b: m(b[0]), lambda out, b: F.cross_entropy(out, b[1]),
        )  # fmt: skip
        truth = reference.values(
            model, optimizer, list(per_example.values()), lambda m: loss(m, (X[32:], Y[32:]))
        ).numpy()
        optimizer.zero_grad()
        with run.batch(rows):
            loss(model, (X[rows], Y[rows])).backward()
        optimizer.step()
    table = run.steps()
    assert table["void"].isna().iloc[3:].all(), table["void"].tolist()
    assert np.allclose(table["sum"].iloc[5:], table["batch_share"].iloc[5:], rtol=0.1, atol=1e-7)
    if rule_for(optimizer).coordinatewise:
        values = run.history().query("step == 7")["value"].to_numpy()
        assert (
            np.abs(values - truth).max()
            <= (1e-5 if "Prodigy" in name else 1e-9) * np.abs(truth).max()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_a_watched_run_of_the_published_version(name, dtype, capsys):
    """With a parameter that is large enough for its state to be quantised."""
    cls = published(name, {})
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 3))
    model = model.to(dtype)
    options = {"d0": 1e-3} if "Prodigy" in name else {"lr": 1e-3}
    optimizer = cls(model.parameters(), **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    x = X.to(dtype)
    if "SOAP" in name and dtype is torch.bfloat16:
        with pytest.raises(TypeError, match="in half precision"):
            rule_for(optimizer)
        return
    run = inrun.watch(model, optimizer, validation=[(x[32:], Y[32:])], loss=loss, audit_every=1)
    for step in range(6):
        rows = torch.arange(4) + 4 * step
        optimizer.zero_grad()
        with run.batch(rows):
            loss(model, (x[rows], Y[rows])).backward()
        optimizer.step()
    assert run.steps()["void"].isna().iloc[1:].all(), run.steps()["void"].tolist()
    assert run.history()["value"].abs().sum() > 0


def test_options_without_a_rule_are_refused_by_name():
    p = [nn.Parameter(torch.zeros(3))]
    for name, option in [
        ("pytorch_optimizer.Lamb", "rectify"), ("pytorch_optimizer.SOAP", "merge_dims"),
        ("pytorch_optimizer.Lion", "cautious"), ("prodigyopt.Prodigy", "fsdp_in_use"),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=rf"this {name}: .*{option}=True"):
            rule_for(PLAIN[name](p, **{option: True}))
    optimizer = PLAIN["pytorch_optimizer.Lamb"](p)
    optimizer.maximize = True
    with pytest.raises(TypeError, match="maximize=True"):
        rule_for(optimizer)


def test_optimizers_that_step_in_the_backward_pass_are_refused_by_name():
    kind = {"__module__": "transformers.trainer_pt_utils"}
    cls = type("LayerWiseDummyOptimizer", (torch.optim.Optimizer,), kind)
    with pytest.raises(TypeError, match=r"LayerWiseDummyOptimizer: it steps during backward\(\)"):
        rule_for(cls([nn.Parameter(torch.zeros(3))], {}))


@pytest.mark.parametrize("name", ["torchao.AdamW8bit", "bitsandbytes.AdamW8bit"])
def test_a_check_steps_a_copy_of_a_low_bit_optimizer(name):
    """By the published one: the copy takes the step that the optimizer then takes, bit for bit, and
    a training that is checked goes on as if it were not."""
    cls = published(name, {})
    torch.set_default_dtype(torch.float32)
    x, y = torch.randn(6, 64), torch.arange(6) % 3

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def train(check):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 3))
        optimizer = cls(model.parameters(), lr=1e-2)
        run = inrun.watch(model, optimizer, validation=[(x, y)], loss=loss)
        for step in range(4):
            found = run.check() if check and step == 2 else None
            with run.batch(range(6)):
                loss(model, (x, y)).backward()
            if found is not None:
                ahead = reference.stepped(optimizer, [p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            if found is not None:
                assert all(map(torch.equal, ahead, model.parameters()))
                assert found.done and found.exact and found.pearson > 0.9
        run.close()
        return list(model.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        assert all(map(torch.equal, train(False), train(True)))

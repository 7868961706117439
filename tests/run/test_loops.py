"""Training loops of all kinds: is the training untouched, and are the values right?"""

import copy
import random
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import inrun
from helpers.loops import MODELS, Dropped, next_token
from helpers.zoo import GPT, ZOO, V
from inrun.exact import reference
from inrun.scoring.clipping import ClippingWatch

B, LENGTH = 6, 5


DATA = torch.randint(0, V, (40, LENGTH), generator=torch.Generator().manual_seed(1))
VALIDATION = torch.randint(0, V, (3, LENGTH), generator=torch.Generator().manual_seed(2))


class Silent:
    """Stands in for a run: the loop without inrun."""

    def batch(self, ids):
        return warnings.catch_warnings()


def everything(model, optimizer):
    """All that training leaves behind."""
    state = {f"weight {k}": v.clone() for k, v in model.state_dict().items()}
    state |= {
        f"grad {k}": p.grad.clone() for k, p in model.named_parameters() if p.grad is not None
    }
    for i, s in optimizer.state_dict()["state"].items():
        state |= {f"state {i} {k}": torch.as_tensor(v).clone() for k, v in s.items()}
    state["torch rng"] = torch.get_rng_state()
    state["numpy rng"] = torch.tensor(np.random.get_state()[1].astype(np.int64))
    state["python rng"] = torch.tensor(random.getstate()[1])
    state["modes"] = torch.tensor([m.training for m in model.modules()])
    return state


def train(loop, model, watched, steps=4, optimizer=None, **options):
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = Silent()
    if watched:
        run = inrun.watch(
            model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=2, **options
        )
    for step in range(steps):
        loop(model, optimizer, run, step)
    state = everything(model, optimizer)
    attributes = {k: set(vars(m)) for k, m in model.named_modules()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return run, state, (attributes, hooks)


def rows_for(step, k=0):
    g = torch.Generator().manual_seed(100 + 10 * step + k)
    return torch.randint(0, len(DATA), (B,), generator=g)


def plain(model, optimizer, run, step):
    optimizer.zero_grad()
    with run.batch(rows := rows_for(step)):
        next_token(model, DATA[rows]).backward()
    optimizer.step()


def accumulated(model, optimizer, run, step):
    optimizer.zero_grad()
    for k in range(3):
        rows = rows_for(step, k)[: B - k]  # the last ones are smaller
        with run.batch(rows):
            (next_token(model, DATA[rows]) / 3).backward()
    optimizer.step()


def autocast(model, optimizer, run, step):
    optimizer.zero_grad()
    rows = rows_for(step)
    with run.batch(rows):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token(model, DATA[rows])
        loss.backward()
    optimizer.step()


def several_backwards(model, optimizer, run, step):
    optimizer.zero_grad()
    rows = rows_for(step)
    with run.batch(rows):
        logits = model(DATA[rows])
        F.cross_entropy(logits[:, 0], DATA[rows][:, 1]).backward(retain_graph=True)
        (0.5 * logits.square().mean()).backward()
    optimizer.step()


def closure(model, optimizer, run, step):
    def again():
        optimizer.zero_grad()
        with run.batch(rows := rows_for(step)):
            loss = next_token(model, DATA[rows])
            loss.backward()
        return loss

    assert float(optimizer.step(again).detach()) > 0


def clipped_by_norm(model, optimizer, run, step):
    clipped(model, optimizer, run, step, torch.nn.utils.clip_grad_norm_, 0.1)


def clipped_by_value(model, optimizer, run, step):
    clipped(model, optimizer, run, step, torch.nn.utils.clip_grad_value_, 0.01)


def clipped(model, optimizer, run, step, clip, size):
    optimizer.zero_grad()
    with run.batch(rows := rows_for(step)):
        next_token(model, DATA[rows]).backward()
    clip(model.parameters(), size)
    optimizer.step()


def interrupted(model, optimizer, run, step):
    try:
        with run.batch(rows_for(step)):
            next_token(model, DATA[rows_for(step)])
            raise KeyError("a mistake in the user's loop")
    except KeyError:
        pass
    plain(model, optimizer, run, step)


LOOPS = {
    f.__name__: f
    for f in (plain, accumulated, autocast, several_backwards, closure, clipped_by_norm,
              clipped_by_value, interrupted)
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", MODELS)
def test_training_is_bitwise_the_same(kind, loop):
    if loop == "autocast":
        torch.set_default_dtype(torch.float32)
    if loop == "several_backwards" and kind == "checkpointed":
        pytest.skip("torch: a checkpoint cannot be run backward twice")
    first = MODELS[kind]()
    _, expected, before = train(LOOPS[loop], copy.deepcopy(first), watched=False)
    run, got, after = train(LOOPS[loop], copy.deepcopy(first), watched=True)
    assert got.keys() == expected.keys()
    for k, v in expected.items():
        assert torch.equal(v, got[k]), k
    assert before == after, "no attribute or hook is left on a module"
    assert len(run.steps()) == 4 and run.steps()["void"].isna().all()
    audited = run.steps().dropna(subset="explained")
    assert len(audited) == 2
    if loop != "autocast":  # the first steps' paths are long: the sum is right to a few per cent
        assert audited["explained"].between(0.9, 1.1).all()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_fast_training_is_the_same_up_to_rounding(kind, loop, dtype):
    if loop == "several_backwards" and kind == "checkpointed":
        pytest.skip("torch: a checkpoint cannot be run backward twice")
    if loop == "autocast" and dtype == torch.float64:
        pytest.skip("autocast is for float32 models")
    first = MODELS[kind]().to(dtype)
    _, expected, _ = train(LOOPS[loop], copy.deepcopy(first), watched=False, steps=1)
    _, got, _ = train(
        LOOPS[loop], copy.deepcopy(first), True, steps=1, training="fast", form="materialise"
    )
    tolerance = 2e-2 if loop == "autocast" else 1e-12 if dtype == torch.float64 else 1e-5
    size = sum(float(v.square().sum()) for k, v in expected.items() if k.startswith("grad")) ** 0.5
    for k, v in expected.items():
        if k.startswith("grad"):
            assert float((v - got[k]).norm()) <= tolerance * size, k
        elif "rng" in k or k == "modes" or "running" in k:
            assert torch.equal(v, got[k]), k


def test_the_run_leaves_no_trace_after_closing():
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {k: dict(vars(m)) for k, m in model.named_modules()}
    hooks = dict(optimizer._optimizer_step_pre_hooks)
    with inrun.watch(model, optimizer, validation=[VALIDATION], loss=next_token) as run:
        plain(model, optimizer, run, 0)
    for k, m in model.named_modules():
        assert vars(m).keys() == before[k].keys()
        assert not m._forward_hooks and not m._forward_pre_hooks
    assert dict(optimizer._optimizer_step_pre_hooks) == hooks
    assert len(run.values()) > 0, "tables stay readable"


@pytest.mark.parametrize("kind", ["checkpointed", "reentrant"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_checkpointed_values_are_those_of_the_plain_model(kind, form):
    first = GPT()
    runs = []
    for cls in (GPT, MODELS[kind]):
        model = cls()
        model.load_state_dict(first.state_dict())
        runs.append(train(plain, model, True, form=form)[0])
    a, b = (r.history() for r in runs)
    assert np.allclose(a["value"], b["value"], rtol=1e-9, atol=0)


def test_accumulation_gives_the_values_of_one_large_batch():
    first = GPT()
    ids = torch.arange(12)

    def whole(model, optimizer, run, step):
        optimizer.zero_grad()
        with run.batch(ids):
            next_token(model, DATA[ids]).backward()
        optimizer.step()

    def parts(model, optimizer, run, step):
        optimizer.zero_grad()
        for part in ids.split(5):  # 5, 5 and 2
            with run.batch(part):
                (next_token(model, DATA[part]) * len(part) / len(ids)).backward()
        optimizer.step()

    a = train(whole, copy.deepcopy(first), True)[0].history()
    b = train(parts, copy.deepcopy(first), True)[0].history()
    assert a["id"].tolist() == b["id"].tolist()
    assert np.allclose(a["value"], b["value"], rtol=1e-8, atol=1e-14)


def test_dropout_rows_add_up_to_the_gradient():
    run, _, _ = train(plain, Dropped(), True, steps=3)
    assert run._steppers[0].scorer.conclusion.verified and run.steps()["void"].isna().all()


@pytest.mark.parametrize("loop", ["clipped_by_norm", "clipped_by_value"])
def test_clipped_values_add_up_and_agree_with_the_clipped_utility(loop, capsys):
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=1)
    checks = {}
    for step in range(26):
        if step in (20, 25):
            checks[step] = run.check()
        LOOPS[loop](model, optimizer, run, step)
    for check in checks.values():
        assert check.pearson >= (0.99 if loop == "clipped_by_norm" else 0.95), str(check)
        assert check.sum_error <= 0.01, str(check)
    assert run.steps()["explained"].iloc[2:].between(0.98, 1.02).all()


@pytest.mark.parametrize("max_norm", [0.05, 0.5])
def test_the_part_across_the_gradient_counts_more_than_a_fixed_coefficient(max_norm, monkeypatch):
    """Clipping by norm: the factor for the part across G against one factor for everything."""
    errors, recognise = {}, ClippingWatch.recognise
    for spread in (True, False):
        torch.manual_seed(0)
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = inrun.watch(
            model, optimizer, validation=[VALIDATION], loss=next_token, max_norm=max_norm,
            estimator="secant" if spread else "secant+midpoint",
            form="ghost",  # where the energy of the examples is an estimate
        )  # fmt: skip
        if not spread:
            monkeypatch.setattr(
                ClippingWatch, "recognise", lambda *a: replace(recognise(*a), norm=None)
            )
        errors[spread] = []
        for step in range(40):
            rows = rows_for(step)
            if step in (20, 30, 39):
                truth, estimate = _clipped_step(model, optimizer, run, rows, max_norm)
                errors[spread].append(np.linalg.norm(estimate - truth) / np.linalg.norm(truth))
            else:
                _one_clipped(model, optimizer, run, rows, max_norm)
    assert np.mean(errors[True]) < 0.9 * np.mean(errors[False]), errors


def _one_clipped(model, optimizer, run, rows, max_norm):
    optimizer.zero_grad()
    with run.batch(rows):
        next_token(model, DATA[rows]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


def _clipped_step(model, optimizer, run, rows, max_norm):
    """Exact Shapley values of the clipped utility, from the reference alone, and the estimate."""
    gradients = reference.per_example_gradients(
        model, DATA[rows], B, lambda m, b: m(b),
        lambda out, b: F.cross_entropy(out[:, :-1].flatten(0, 1), b[:, 1:].flatten()),
    )  # fmt: skip

    def clip(total):
        size = torch.cat([g.flatten() for g in total]).norm()
        return [g * min(1.0, max_norm / (float(size) + 1e-6)) for g in total]

    utility = reference.coalition_utility(
        model, optimizer, list(gradients.values()),
        lambda: float(next_token(model, VALIDATION).detach()), clip,
    )  # fmt: skip
    truth = -reference.exact_shapley(B, utility)
    _one_clipped(model, optimizer, run, rows, max_norm)
    last = run.history()
    return truth, last[last["step"] == run.step - 1]["value"].to_numpy()


def test_steps_that_grad_scaler_skips_leave_no_trace():
    """float16 training on the CPU: an overflowing batch is skipped and credited nothing."""
    torch.set_default_dtype(torch.float32)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run = inrun.watch(model, optimizer, validation=[VALIDATION], loss=next_token, scaler=scaler)
    for step in range(5):
        optimizer.zero_grad()
        rows = rows_for(step)
        with run.batch(rows if step != 2 else rows + 1000):
            loss = next_token(model, DATA[rows])
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert len(run.steps()) == 4, "the skipped step is not there"
    assert (run.values()["id"] < 1000).all()
    # in validation-loss units: unscaled
    assert run.steps()["explained"].iloc[0] == pytest.approx(1.0, abs=0.1)
    assert run.history()["value"].abs().max() < 1.0


class FusedLike(torch.optim.SGD):
    """Receives scaled gradients and the news of an overflow, as fused optimizers do."""

    def step(self, closure=None):
        scale, found_inf = self.__dict__.pop("grad_scale"), self.__dict__.pop("found_inf")
        if bool(found_inf):
            return None
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= scale
        return super().step(closure)


def test_fused_optimizers_receive_scaled_gradients():
    values = {}
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = GPT()
        torch.optim.SGD(model.parameters())  # torch hooks a class's step() when it is first made
        optimizer = FusedLike(model.parameters(), lr=1e-2, momentum=0.9)
        run = inrun.watch(model, optimizer, validation=[VALIDATION], loss=next_token)
        for step in range(4):
            optimizer.zero_grad()
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.found_inf = torch.tensor(1.0 if step == 1 else 0.0)
            with run.batch(rows := rows_for(step)):
                (next_token(model, DATA[rows]) * scale).backward()
            optimizer.step()
        assert len(run.steps()) == 3
        values[scale] = run.values()["value"].to_numpy()
    assert np.allclose(values[1.0], values[1024.0], rtol=1e-9)


def test_the_default_device_does_not_matter():
    """Users set it to "cuda". Here "meta", where whatever is made by default has no numbers."""
    first, second = GPT(), GPT()
    second.load_state_dict(first.state_dict())
    runs = []
    for model, device in ((first, "cpu"), (second, "meta")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = inrun.watch(model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=2)
        for step in range(3):
            rows = rows_for(step)
            ids = DATA[rows]
            with torch.device(device):
                with run.batch(rows):
                    next_token(model, ids).backward()
                optimizer.step()
                optimizer.zero_grad()
        runs.append(run)
    assert runs[1].steps()["void"].isna().all()
    assert runs[0].history().equals(runs[1].history())
    assert runs[0].steps().equals(runs[1].steps())


def test_a_model_compiled_after_watching_has_the_same_values():
    first = GPT()
    eager, _, _ = train(plain, copy.deepcopy(first), True)
    model = copy.deepcopy(first)
    compiled = torch.compile(model, backend="eager")

    def loop(watched, optimizer, run, step):
        plain(compiled, optimizer, run, step)

    run, _, _ = train(loop, model, True)
    assert np.allclose(eager.history()["value"], run.history()["value"], rtol=1e-9)


def test_compiled_models_give_the_values_of_eager_ones():
    first = GPT()
    eager, state, _ = train(plain, copy.deepcopy(first), True)
    compiled, same, _ = train(plain, torch.compile(copy.deepcopy(first), backend="eager"), True)
    assert np.allclose(eager.history()["value"], compiled.history()["value"], rtol=1e-9)
    assert (compiled.coverage()["status"] == "scored").all()
    assert not compiled.coverage()["parameter"].str.contains("_orig_mod").any()
    for k, v in state.items():
        if k.startswith("grad"):
            assert torch.allclose(v, same[k.replace("grad ", "grad _orig_mod.")], rtol=1e-9)


def test_models_whose_forward_returns_the_loss_are_watched():
    problem = ZOO["gpt2"]()
    model, optimizer = problem.model, torch.optim.AdamW(problem.model.parameters(), lr=1e-3)
    run = inrun.watch(model, optimizer, validation=[problem.batch], audit_every=1)
    for _ in range(3):
        with run.batch([f"row {i}" for i in range(problem.B)]):
            model(**problem.batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run.steps()["explained"].iloc[-1] == pytest.approx(1.0, abs=0.02)
    assert run.values()["id"].iloc[0] == "row 0"


@pytest.mark.filterwarnings("ignore:the loss inside run.batch also trains")
def test_values_add_up_with_parameter_groups_schedulers_and_frozen_parameters():
    model = GPT()
    model.norm.requires_grad_(False)
    inside = [p for k, p in model.named_parameters() if p.requires_grad and "position" not in k]
    optimizer = torch.optim.AdamW(
        [{"params": inside[:3], "lr": 1e-2}, {"params": inside[3:], "weight_decay": 0.5}], lr=1e-3
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
    run = inrun.watch(model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=1)
    for step in range(5):
        plain(model, optimizer, run, step)
        scheduler.step()
    status = run.coverage().set_index("parameter")["status"]
    assert status["norm.weight"] == "frozen" and status["position.weight"] == "not in the optimizer"
    assert run.steps()["lr"].is_monotonic_increasing
    assert run.steps()["explained"].iloc[1:].between(0.95, 1.05).all()


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True, "weight_decay": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "radam": (torch.optim.RAdam, {"lr": 1e-3}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "maximize": (torch.optim.AdamW, {"lr": 1e-3, "maximize": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    "tensor-lr": (torch.optim.Adam, {"lr": torch.tensor(1e-3), "foreach": False}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_add_up_for_every_optimizer(name):
    cls, options = OPTIMIZERS[name]
    model = GPT()
    optimizer = cls(model.parameters(), **options)
    run = inrun.watch(
        model, optimizer, validation=[VALIDATION], loss=next_token, point="gauss2", audit_every=1
    )
    for step in range(12):
        plain(model, optimizer, run, step)
    steps = run.steps()
    scale = run.history()["value"].abs().groupby(run.history()["step"]).sum()
    assert (steps["residual"].abs() <= 0.02 * scale).iloc[5:].all(), steps


@pytest.mark.filterwarnings("ignore:the loss inside run.batch also trains")
def test_muon_says_what_its_secant_missed():
    """The first step ignores the gradient's size; later the path integral is complete."""
    model = GPT()
    matrices = [p for k, p in model.named_parameters() if p.ndim == 2 and "blocks" in k]
    optimizer = torch.optim.Muon(matrices, lr=1e-3)
    run = inrun.watch(model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=1)
    for step in range(8):
        plain(model, optimizer, run, step)
    steps = run.steps()
    assert steps["missed"].iloc[0] > 0.9 and abs(steps["sum"].iloc[0]) < 1e-6
    scale = run.history()["value"].abs().groupby(run.history()["step"]).sum()
    good = steps["missed"] < 0.05
    assert good.sum() >= 2
    # torch's Muon rounds its update to bfloat16, the path integral does not
    assert (steps["residual"].abs() <= 0.1 * scale)[good].all(), steps


def test_values_add_up_for_an_optimizer_of_ones_own():
    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-4, betas=(0.9, 0.99)):
            super().__init__(params, {"lr": lr, "betas": betas})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                b1, b2 = group["betas"]
                for p in group["params"]:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p -= group["lr"] * (b1 * m + (1 - b1) * p.grad).sign()
                    m.mul_(b2).add_(p.grad, alpha=1 - b2)

    @inrun.register_optimizer(Lion)
    def lion(g, w, state, options):
        b1, _ = options["betas"]
        return options["lr"] * torch.sign(b1 * state.get("m", 0.0) + (1 - b1) * g)

    model = GPT()
    optimizer = Lion(model.parameters(), lr=1e-4)
    run = inrun.watch(model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=1)
    for step in range(8):
        check = run.check() if step == 7 else None
        plain(model, optimizer, run, step)
    assert check.pearson > 0.8
    assert run.steps()["explained"].iloc[-1] == pytest.approx(1.0, abs=0.02)


def test_finite_differences_of_a_real_step_agree_with_the_reference_secant():
    """The oracle itself: its secant values add up to the real loss change."""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(3):
        plain(model, optimizer, Silent(), step)
    rows = reference.per_example_gradients(
        model, DATA[:B], B, lambda m, b: m(b), lambda out, b: F.cross_entropy(
            out[:, :-1].flatten(0, 1), b[:, 1:].flatten())
    )  # fmt: skip
    rows = list(rows.values())
    values = reference.values(model, optimizer, rows, lambda m: next_token(m, VALIDATION))
    utility = reference.coalition_utility(
        model, optimizer, rows, lambda: float(next_token(model, VALIDATION).detach())
    )
    share = utility(frozenset()) - utility(frozenset(range(B)))
    assert float(values.sum()) == pytest.approx(share, rel=1e-4)
